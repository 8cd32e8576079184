#include "model/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <set>

#include "util/json.h"

namespace ekv {
namespace {

Error bad_file(std::string_view file, std::string_view what) {
  return {Error::invalid_argument, fmt::format("{}: {}", file, what), {}};
}

// Names come from the file: shown clean, and cut, in messages.
std::string shown(std::string_view name) {
  return dump_json(Json(std::string(name.substr(0, 200)) + (name.size() > 200 ? "..." : "")));
}

std::optional<uint64_t> dtype_bits(std::string_view dtype) {
  static constexpr std::pair<std::string_view, uint64_t> kBits[] = {
      {"BF16", 16},   {"F16", 16}, {"F32", 32}, {"F64", 64},    {"I8", 8},      {"U8", 8},      {"I16", 16},
      {"U16", 16},    {"I32", 32}, {"U32", 32}, {"I64", 64},    {"U64", 64},    {"BOOL", 8},    {"F8_E4M3", 8},
      {"F8_E5M2", 8}, {"C64", 64}, {"F4", 4},   {"F8_E8M0", 8}, {"F6_E2M3", 6}, {"F6_E3M2", 6},
  };
  for (const auto& [name, bits] : kBits)
    if (name == dtype) return bits;
  return std::nullopt;
}

// Colons outside strings = members of all objects as written. The parsed value has fewer when a name came
// twice.
size_t count_written_members(std::string_view text) {
  size_t count = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    if (in_string && text[i] == '\\')
      ++i;
    else if (text[i] == '"')
      in_string = !in_string;
    else if (text[i] == ':' && !in_string)
      ++count;
  }
  return count;
}

size_t count_members(const SortedJson& value) {
  size_t count = value.is_object() ? value.size() : 0;
  if (value.is_structured())
    for (const SortedJson& child : value) count += count_members(child);
  return count;
}

// The first name that comes twice in the same object; only asked for when there is one.
std::string repeated_name(std::string_view text) {
  std::string found;
  std::vector<std::set<std::string>> seen;
  const auto watch = [&](int, SortedJson::parse_event_t event, SortedJson& value) {
    if (event == SortedJson::parse_event_t::object_start) seen.emplace_back();
    if (event == SortedJson::parse_event_t::object_end) seen.pop_back();
    if (event == SortedJson::parse_event_t::key && !seen.back().insert(value.get<std::string>()).second)
      found = value.get<std::string>();
    return true;
  };
  const SortedJson watched = SortedJson::parse(text, watch);
  return watched.is_object() ? found : std::string();
}

Result<SortedJson> parse_header(std::string_view text, std::string_view file) {
  if (text.empty() || text.front() != '{')
    return bad_file(file, "the safetensors header does not start with '{'");
  Result<SortedJson> header = parse_sorted_json(text, 8);
  if (!header) return bad_file(file, "safetensors header: " + header.error().message);
  if (count_written_members(text) != count_members(*header))
    return bad_file(file,
                    fmt::format("safetensors header: the name {} is given twice", shown(repeated_name(text))));
  return header;
}

// A list of non-negative integers, each below 2^63.
std::optional<std::vector<int64_t>> size_list(const SortedJson& value) {
  if (!value.is_array()) return std::nullopt;
  std::vector<int64_t> list;
  for (const SortedJson& element : value) {
    if (!element.is_number_unsigned() || element.get<uint64_t>() > uint64_t(INT64_MAX)) return std::nullopt;
    list.push_back(int64_t(element.get<uint64_t>()));
  }
  return list;
}

std::optional<uint64_t> bytes_of(const std::vector<int64_t>& shape, uint64_t bits_per_element) {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  uint64_t bits = bits_per_element;
  for (const int64_t extent : shape)
    if (__builtin_mul_overflow(bits, uint64_t(extent), &bits)) return std::nullopt;
  if (bits % 8 != 0) return std::nullopt;
  return bits / 8;
}

// What is wrong with one entry of the header, or the entry itself.
Result<StoredTensor> parse_entry(const SortedJson& entry, std::span<const std::byte> data) {
  const auto bad = [](std::string what) { return Error{Error::invalid_argument, std::move(what), {}}; };
  if (!entry.is_object()) return bad("is not an object");
  for (const char* key : {"dtype", "shape", "data_offsets"})
    if (!entry.contains(key)) return bad(fmt::format("lacks '{}'", key));
  if (entry.size() != 3) return bad("has members other than dtype, shape and data_offsets");

  const auto* dtype = entry["dtype"].get_ptr<const std::string*>();
  if (!dtype) return bad("has a dtype that is not a string");
  const std::optional<uint64_t> bits = dtype_bits(*dtype);
  if (!bits) return bad("has the unknown dtype " + shown(*dtype));
  std::optional<std::vector<int64_t>> shape = size_list(entry["shape"]);
  if (!shape) return bad("has a shape that is not a list of non-negative integers");
  const std::optional<std::vector<int64_t>> offsets = size_list(entry["data_offsets"]);
  if (!offsets || offsets->size() != 2) return bad("has data_offsets that are not two non-negative integers");

  const uint64_t begin = uint64_t((*offsets)[0]), end = uint64_t((*offsets)[1]);
  if (begin > end) return bad(fmt::format("has data_offsets in the wrong order: {}, {}", begin, end));
  if (end > data.size())
    return bad(
        fmt::format("ends at byte {} of the data, but the file holds {}; is it cut off?", end, data.size()));
  const std::optional<uint64_t> wanted = bytes_of(*shape, *bits);
  if (!wanted) return bad("has a shape whose size in bytes is not a 64-bit number");
  if (*wanted != end - begin)
    return bad(
        fmt::format("needs {} bytes by shape and dtype, but data_offsets span {}", *wanted, end - begin));
  return StoredTensor{*dtype, std::move(*shape), data.subspan(begin, end - begin)};
}

Status check_metadata(const SortedJson& metadata, std::string_view file) {
  if (!metadata.is_object()) return bad_file(file, "safetensors header: __metadata__ is not an object");
  for (const SortedJson& value : metadata)
    if (!value.is_string())
      return bad_file(file, "safetensors header: __metadata__ holds a value that is not a string");
  return {};
}

// The tensors must cover the data exactly once: bytes that no tensor or two tensors own are a damaged file.
Status check_coverage(const StoredTensors& tensors, std::span<const std::byte> data, std::string_view file) {
  std::vector<std::pair<const std::byte*, const StoredTensors::value_type*>> by_begin;
  for (const auto& entry : tensors) by_begin.emplace_back(entry.second.data.data(), &entry);
  std::sort(by_begin.begin(), by_begin.end(), [](const auto& a, const auto& b) {
    return std::pair(a.first, a.second->second.data.size()) < std::pair(b.first, b.second->second.data.size());
  });
  size_t covered = 0;
  for (const auto& [address, entry] : by_begin) {
    const size_t begin = size_t(address - data.data());
    if (begin != covered)
      return bad_file(file, fmt::format("tensor {} {} at byte {} of the data", shown(entry->first),
                                        begin < covered ? "overlaps another one" : "comes after a gap", begin));
    covered += entry->second.data.size();
  }
  if (covered != data.size())
    return bad_file(file, fmt::format("{} bytes after the last tensor", data.size() - covered));
  return {};
}

}  // namespace

Result<StoredTensors> parse_safetensors(std::span<const std::byte> bytes, std::string_view file) {
  uint64_t length = 0;
  if (bytes.size() < sizeof length) return bad_file(file, "too short for a safetensors file");
  std::memcpy(&length, bytes.data(), sizeof length);
  if (length > kMaxSafetensorsHeader || length > bytes.size() - sizeof length)
    return bad_file(file, fmt::format("a safetensors header of {} bytes does not fit into a file of {} bytes "
                                      "(at most {} are accepted)",
                                      length, bytes.size(), kMaxSafetensorsHeader));
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()) + sizeof length, length);
  const std::span<const std::byte> data = bytes.subspan(sizeof length + length);

  const Result<SortedJson> header = parse_header(text, file);
  if (!header) return header.error();
  StoredTensors tensors;
  for (const auto& [name, entry] : header->items()) {
    if (name == "__metadata__") {
      if (Status bad = check_metadata(entry, file)) return *bad;
      continue;
    }
    Result<StoredTensor> tensor = parse_entry(entry, data);
    if (!tensor) return bad_file(file, fmt::format("tensor {} {}", shown(name), tensor.error().message));
    tensors.emplace(name, std::move(*tensor));
  }
  if (Status bad = check_coverage(tensors, data, file)) return *bad;
  return tensors;
}

}  // namespace ekv
