#include "backend/cuda/gemm_cache.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <fstream>
#include <optional>
#include <random>
#include <vector>

#include "util/files.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace ekv {
namespace {

constexpr std::string_view kFirstLine = "elastickv gemm cache 5", kDevice = "device ";
constexpr std::string_view kFp16 = "fp16", kBf16 = "bf16";
constexpr const char* kBeside = ".new-";  // after it eight digits that were drawn
constexpr size_t kMostBytes = size_t(16) << 20;
constexpr size_t kKeyWords = 7;

uint64_t checksum(std::string_view text) { return XXH3_64bits(text.data(), text.size()); }

std::vector<std::string_view> split(std::string_view text, char at) {
  std::vector<std::string_view> parts;
  while (!text.empty()) {
    const size_t end = std::min(text.find(at), text.size());
    parts.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return parts;
}

template <class Number>
bool read_number(std::string_view text, Number& number, int base = 10) {
  const auto [end, fault] = std::from_chars(text.data(), text.data() + text.size(), number, base);
  return fault == std::errc() && end == text.data() + text.size();
}

std::optional<GemmKey> read_key(const std::vector<std::string_view>& words) {
  GemmKey key;
  int* const fields[] = {&key.outputs, &key.inputs, &key.rows, &key.out_stride, &key.out_bits};
  for (size_t i = 0; i < std::size(fields); ++i)
    if (!read_number(words[i], *fields[i]) || *fields[i] <= 0) return std::nullopt;
  const std::string_view element = words[kKeyWords - 1];
  key.element = element == kBf16 ? Element::bf16 : Element::fp16;
  const bool known =
      read_number(words[kKeyWords - 2], key.after) && key.after >= 0 && (element == kBf16 || element == kFp16);
  return known ? std::optional(key) : std::nullopt;
}

std::optional<GemmChoice> read_choice(const std::vector<std::string_view>& words) {
  GemmChoice choice;
  const std::string_view kind = words[kKeyWords];
  const size_t values = words.size() - kKeyWords - 1;
  if (kind == "tile" && values == 0) return choice.tile = true, choice;
  if (kind == "skinny" && values == 1 && read_number(words.back(), choice.skinny_split) &&
      choice.skinny_split > 0)
    return choice;
  if (kind != "cublas" || values != choice.algorithm.size()) return std::nullopt;
  for (size_t i = 0; i < values; ++i)
    if (!read_number(words[kKeyWords + 1 + i], choice.algorithm[i], 16)) return std::nullopt;
  return choice;
}

Error broken(std::string why) { return {Error::invalid_argument, std::move(why), "gemm-cache"}; }

// Whether the last line says what is before it.
bool ends_well(std::string_view text, std::string_view last, size_t lines) {
  const std::vector<std::string_view> words = split(last, ' ');
  size_t count = 0;
  uint64_t sum = 0;
  return words.size() == 3 && words[0] == "end" && read_number(words[1], count) &&
         read_number(words[2], sum, 16) && count == lines &&
         sum == checksum(text.substr(0, size_t(last.data() - text.data())));
}

// Files of processes that ended while they wrote, which takes no minute.
void remove_left_over(const std::filesystem::path& path) {
  const std::string name = path.filename().string() + kBeside;
  const auto old = std::filesystem::file_time_type::clock::now() - std::chrono::minutes(1);
  std::error_code fault;
  const std::filesystem::path folder = path.has_parent_path() ? path.parent_path() : ".";
  for (std::filesystem::directory_iterator at(folder, fault), end; !fault && at != end; at.increment(fault)) {
    std::error_code gone;
    if (at->path().filename().string().starts_with(name) && at->last_write_time(gone) < old && !gone)
      std::filesystem::remove(at->path(), gone);
  }
}

}  // namespace

std::string to_text(const GemmCache& cache) {
  std::string text = fmt::format("{}\n", kFirstLine);
  for (const auto& [device, choices] : cache.devices) {
    text += fmt::format("{}{}\n", kDevice, device);
    for (const auto& [key, choice] : choices) {
      text += fmt::format("{} {} {} {} {} {} {}", key.outputs, key.inputs, key.rows, key.out_stride,
                          key.out_bits, key.after, key.element == Element::bf16 ? kBf16 : kFp16);
      text += choice.tile               ? " tile\n"
              : choice.skinny_split > 0 ? fmt::format(" skinny {}\n", choice.skinny_split)
                                        : fmt::format(" cublas {:x}\n", fmt::join(choice.algorithm, " "));
    }
  }
  return text + fmt::format("end {} {:x}\n", std::ranges::count(text, '\n'), checksum(text));
}

Result<GemmCache> parse_gemm_cache(const std::string& text) {
  const std::vector<std::string_view> lines = split(text, '\n');
  if (lines.empty() || lines[0] != kFirstLine)
    return broken(fmt::format("it does not begin with '{}': another version or program wrote it", kFirstLine));
  if (!ends_well(text, lines.back(), lines.size() - 1)) return broken("it was cut off or changed");
  GemmCache cache;
  std::map<GemmKey, GemmChoice>* choices = nullptr;
  for (size_t i = 1; i + 1 < lines.size(); ++i) {
    if (lines[i].starts_with(kDevice)) {
      choices = &cache.devices[std::string(lines[i].substr(kDevice.size()))];
      continue;
    }
    const std::vector<std::string_view> words = split(lines[i], ' ');
    const bool whole = choices && words.size() > kKeyWords;
    const std::optional<GemmKey> key = whole ? read_key(words) : std::nullopt;
    const std::optional<GemmChoice> choice = whole ? read_choice(words) : std::nullopt;
    if (!key || !choice) return broken(fmt::format("line {} is not understood", i + 1));
    (*choices)[*key] = *choice;
  }
  return cache;
}

GemmCache load_gemm_cache(const std::filesystem::path& path) {
  std::error_code fault;
  if (path.empty() || !std::filesystem::exists(path, fault)) return {};
  const Result<std::string> text = read_file(path, kMostBytes);
  Result<GemmCache> cache = text ? parse_gemm_cache(*text) : Result<GemmCache>(text.error());
  if (cache) return *std::move(cache);
  log_warn(fmt::format("--gemm-cache {} is not used and will be replaced: {}", path.string(),
                       cache.error().message));
  return {};
}

Status save_gemm_cache(const std::filesystem::path& path, const GemmCache& cache) {
  std::error_code fault;
  if (path.has_parent_path()) std::filesystem::create_directories(path.parent_path(), fault);
  remove_left_over(path);
  // Not the process's number: containers that share a folder have processes of the same.
  const std::string beside = fmt::format("{}{}{:08x}", path.string(), kBeside, std::random_device()());
  std::ofstream file(beside, std::ios::binary);
  file << to_text(cache);
  file.close();
  if (file) std::filesystem::rename(beside, path, fault);
  if (file && !fault) return std::nullopt;
  std::filesystem::remove(beside, fault);
  return Error{
      Error::unavailable,
      fmt::format("--gemm-cache {} cannot be written; name a file in a folder that can", path.string()),
      "gemm-cache"};
}

}  // namespace ekv
