#include "elastickv/model.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <deque>
#include <map>
#include <set>

#include "model/safetensors.h"
#include "model/weight_table.h"
#include "util/files.h"
#include "util/json.h"

namespace ekv {
namespace {

constexpr char kSingleFile[] = "model.safetensors";
constexpr char kIndexFile[] = "model.safetensors.index.json";

Error bad_weights(const std::filesystem::path& where, std::string_view what) {
  return {Error::invalid_argument, fmt::format("{}: {}", where.string(), what), {}};
}

struct Located {
  StoredTensor tensor;
  std::filesystem::path file;
};

// Everything that a loaded Model points into.
struct Storage {
  std::deque<MappedFile> files;
  std::deque<std::vector<uint32_t>> copies;  // of tensors that are not aligned in their file
};

struct Checkpoint {
  std::map<std::string, Located, std::less<>> tensors;
  std::shared_ptr<Storage> storage = std::make_shared<Storage>();
};

Result<StoredTensors> map_file(const std::filesystem::path& path, Storage& storage) {
  Result<MappedFile> file = MappedFile::open(path);
  if (!file) return file.error();
  storage.files.push_back(*std::move(file));
  return parse_safetensors(storage.files.back().bytes(), path.string());
}

// The `weight_map` of an index: tensor -> file in the same folder.
Result<std::map<std::string, std::string>> read_index(const std::filesystem::path& path) {
  const Result<std::string> text = read_file(path);
  if (!text) return text.error();
  const Result<SortedJson> index = parse_sorted_json(*text);
  if (!index) return bad_weights(path, index.error().message);
  if (!index->is_object() || !index->contains("weight_map") || !(*index)["weight_map"].is_object())
    return bad_weights(path, "lacks the object 'weight_map'");
  std::map<std::string, std::string> files;
  for (const auto& [tensor, file] : (*index)["weight_map"].items()) {
    if (!file.is_string())
      return bad_weights(path, fmt::format("the file of tensor '{}' is not a string", tensor));
    const auto name = file.get<std::string>();
    if (name.empty() || std::filesystem::path(name).filename() != name || name == "." || name == "..")
      return bad_weights(path, fmt::format("'{}' is not the name of a file in the same folder", name));
    files[tensor] = name;
  }
  return files;
}

Result<Checkpoint> open_shards(const std::filesystem::path& folder) {
  const Result<std::map<std::string, std::string>> index = read_index(folder / kIndexFile);
  if (!index) return index.error();
  Checkpoint checkpoint;
  std::map<std::string, StoredTensors> shards;
  for (const auto& [tensor, file] : *index) {
    if (!shards.contains(file)) {
      Result<StoredTensors> shard = map_file(folder / file, *checkpoint.storage);
      if (!shard) return shard.error();
      shards[file] = *std::move(shard);
    }
    const auto found = shards[file].find(tensor);
    if (found == shards[file].end())
      return bad_weights(folder / file,
                         fmt::format("tensor '{}' is missing, but {} says it is here", tensor, kIndexFile));
    checkpoint.tensors[tensor] = {found->second, folder / file};
  }
  return checkpoint;
}

// Errors: it cannot be told, as of a link to itself.
Result<bool> is_there(const std::filesystem::path& file) {
  std::error_code fault;
  const bool there = std::filesystem::exists(file, fault);
  if (fault) return Error{Error::io, fmt::format("{}: {}", file.string(), fault.message()), "model"};
  return there;
}

Result<Checkpoint> open_checkpoint(const std::filesystem::path& folder) {
  const Result<bool> single = is_there(folder / kSingleFile), index = is_there(folder / kIndexFile);
  if (!single) return single.error();
  if (!*single) {
    if (!index) return index.error();
    if (*index) return open_shards(folder);
    std::error_code no_link;
    const std::filesystem::path target = std::filesystem::read_symlink(folder / kSingleFile, no_link);
    if (!no_link)
      return Error{Error::not_found,
                   fmt::format("{}: a link to {}, which does not exist; download the weights again",
                               (folder / kSingleFile).string(), target.string()),
                   "model"};
    return Error{Error::not_found,
                 fmt::format("{}: holds neither {} nor {}; other weight formats are not supported",
                             folder.string(), kSingleFile, kIndexFile),
                 "model"};
  }
  Checkpoint checkpoint;
  Result<StoredTensors> file = map_file(folder / kSingleFile, *checkpoint.storage);
  if (!file) return file.error();
  for (auto& [name, tensor] : *file) checkpoint.tensors[name] = {std::move(tensor), folder / kSingleFile};
  return checkpoint;
}

std::optional<DType> weight_dtype(std::string_view stored) {
  if (stored == "BF16") return DType::bf16;
  if (stored == "F16") return DType::f16;
  if (stored == "F32") return DType::f32;
  return std::nullopt;
}

Result<Tensor> make_tensor(const std::string& name, const Located& located, Storage& storage) {
  const StoredTensor& stored = located.tensor;
  const std::optional<DType> dtype = weight_dtype(stored.dtype);
  if (!dtype)
    return Error{Error::unsupported,
                 fmt::format("{}: tensor '{}' has dtype {}, which is not supported (BF16, F16, F32 are)",
                             located.file.string(), name, stored.dtype),
                 {}};
  std::span<const std::byte> data = stored.data;
  if (reinterpret_cast<uintptr_t>(data.data()) % dtype_bytes(*dtype) != 0) {
    std::vector<uint32_t>& copy = storage.copies.emplace_back((data.size() + 3) / 4);
    std::memcpy(copy.data(), data.data(), data.size());
    data = std::as_bytes(std::span(copy)).first(data.size());
  }
  return Tensor{*dtype, stored.shape, data};
}

// Moves one tensor from the checkpoint into its place.
Status take(Checkpoint& checkpoint, const std::filesystem::path& folder, const std::string& name,
            const std::vector<int64_t>& shape, Tensor& place) {
  const auto found = checkpoint.tensors.find(name);
  if (found == checkpoint.tensors.end())
    return bad_weights(folder, fmt::format("tensor '{}' is missing from the checkpoint", name));
  if (found->second.tensor.shape != shape)
    return bad_weights(found->second.file,
                       fmt::format("tensor '{}' has shape [{}], but config.json asks for [{}]", name,
                                   fmt::join(found->second.tensor.shape, ", "), fmt::join(shape, ", ")));
  Result<Tensor> tensor = make_tensor(name, found->second, *checkpoint.storage);
  if (!tensor) return tensor.error();
  place = *std::move(tensor);
  checkpoint.tensors.erase(found);
  return {};
}

bool same_values(const Tensor& a, const Tensor& b) {
  if (a.shape != b.shape) return false;
  if (a.dtype == b.dtype) return std::equal(a.data.begin(), a.data.end(), b.data.begin());
  constexpr int64_t kChunk = 4096;
  std::vector<float> left(kChunk), right(kChunk);
  for (int64_t first = 0; first < a.num_elements(); first += kChunk) {
    const size_t count = size_t(std::min(kChunk, a.num_elements() - first));
    to_float(a, first, std::span(left).first(count));
    to_float(b, first, std::span(right).first(count));
    if (!std::equal(left.begin(), left.begin() + ptrdiff_t(count), right.begin())) return false;
  }
  return true;
}

// A checkpoint may store lm_head although the config ties it to the embedding.
Status tie_embeddings(Checkpoint& checkpoint, ModelWeights& weights) {
  weights.lm_head = weights.embedding;
  const auto stored = checkpoint.tensors.find("lm_head.weight");
  if (stored == checkpoint.tensors.end()) return {};
  const Result<Tensor> head = make_tensor(stored->first, stored->second, *checkpoint.storage);
  if (!head) return head.error();
  if (!same_values(*head, weights.embedding))
    log_warn(fmt::format(
        "{}: stores an lm_head.weight that differs from the embedding; config.json ties the two, so the "
        "stored one is ignored",
        stored->second.file.string()));
  checkpoint.tensors.erase(stored);
  return {};
}

// Tensors that nobody asked for hint at a variant of which config.json says nothing. Rotary tables are known to
// be superfluous: they follow from the config.
void warn_unused(const Checkpoint& checkpoint) {
  std::vector<std::string> unused;
  for (const auto& [name, located] : checkpoint.tensors)
    if (!name.ends_with("rotary_emb.inv_freq")) unused.push_back(name);
  if (unused.empty()) return;
  log_warn(fmt::format("{} tensors of the checkpoint are not used by this architecture, the first is '{}'",
                       unused.size(), unused.front()));
}

// Reads one byte of every page, so that slow disks and read errors show here, with progress, and not in the
// first request.
void read_in(const ModelConfig& config, ModelWeights& weights, size_t total) {
  constexpr size_t kPage = 4096, kWorthReporting = size_t(1) << 30;
  std::atomic<unsigned> sink = 0;  // keeps the reads
  size_t done = 0, next_report = total / 10;
  for_each_weight(config, weights, [&](const std::string&, Tensor& tensor, const std::vector<int64_t>&) {
    // Asks the kernel for large reads; where it refuses, the loop below reads in small ones.
    const size_t into_page = reinterpret_cast<uintptr_t>(tensor.data.data()) % kPage;
    ::madvise(const_cast<std::byte*>(tensor.data.data()) - into_page, tensor.data.size() + into_page,
              MADV_WILLNEED);
    for (size_t at = 0; at < tensor.data.size(); at += kPage)
      sink.fetch_add(unsigned(tensor.data[at]), std::memory_order_relaxed);
    done += tensor.data.size();
    if (total >= kWorthReporting && done >= next_report) {
      log_info(fmt::format("loading weights: {} %", done * 100 / total));
      next_report = done + total / 10;
    }
  });
}

float from_bfloat(uint16_t bits) { return std::bit_cast<float>(uint32_t(bits) << 16); }

// Exponent and fraction move into place and the scaling by 2^112 corrects the exponent's bias, also of
// subnormals.
float from_half(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000) << 16, magnitude = uint32_t(bits & 0x7fff) << 13;
  const uint32_t scaled = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
  const bool finite = (bits & 0x7c00) != 0x7c00;
  return std::bit_cast<float>(sign | (finite ? scaled : 0x7f800000u | magnitude));
}

}  // namespace

std::vector<int64_t> weight_shape(const ModelConfig& config, Extent rows, Extent columns) {
  const auto length = [&](Extent extent) -> int64_t {
    switch (extent) {
      case Extent::none:
        break;
      case Extent::hidden:
        return config.hidden;
      case Extent::q_rows:
        return config.q_rows();
      case Extent::kv_rows:
        return config.kv_rows();
      case Extent::intermediate:
        return config.intermediate;
      case Extent::head_dim:
        return config.head_dim;
      case Extent::vocab:
        return config.vocab;
    }
    return 0;
  };
  if (columns == Extent::none) return {length(rows)};
  return {length(rows), length(columns)};
}

int64_t ModelConfig::num_parameters() const {
  ModelWeights shapes;
  int64_t total = 0;
  for_each_weight(*this, shapes, [&](const std::string&, Tensor&, const std::vector<int64_t>& shape) {
    total += shape.size() == 1 ? shape[0] : shape[0] * shape[1];
  });
  return total;
}

void to_float(const Tensor& tensor, int64_t first, std::span<float> out) {
  EKV_CHECK(first >= 0 && first + int64_t(out.size()) <= tensor.num_elements(),
            "elements outside of the tensor");
  const std::byte* from = tensor.data.data() + size_t(first) * dtype_bytes(tensor.dtype);
  if (tensor.dtype == DType::f32) {
    if (!out.empty()) std::memcpy(out.data(), from, out.size_bytes());
    return;
  }
  const auto* bits = reinterpret_cast<const uint16_t*>(from);
  const bool half = tensor.dtype == DType::f16;
  for (size_t i = 0; i < out.size(); ++i) out[i] = half ? from_half(bits[i]) : from_bfloat(bits[i]);
}

std::vector<float> to_float(const Tensor& tensor) {
  std::vector<float> values(size_t(tensor.num_elements()));
  to_float(tensor, 0, values);
  return values;
}

size_t Model::weight_bytes() const {
  size_t total = 0;
  ModelWeights weights = weights_;
  for_each_weight(config_, weights, [&](const std::string&, Tensor& tensor, const std::vector<int64_t>&) {
    total += tensor.data.size();
  });
  return total;
}

Result<Model> Model::load(const std::filesystem::path& folder, ModelConfig config) {
  Result<Checkpoint> checkpoint = open_checkpoint(folder);
  if (!checkpoint) return checkpoint.error();
  ModelWeights weights;
  Status error;
  for_each_weight(config, weights,
                  [&](const std::string& name, Tensor& place, const std::vector<int64_t>& shape) {
                    if (!error) error = take(*checkpoint, folder, name, shape, place);
                  });
  if (!error && config.tied_embeddings) error = tie_embeddings(*checkpoint, weights);
  if (error) return *error;
  warn_unused(*checkpoint);
  Model model(std::move(config), std::move(weights), checkpoint->storage);
  read_in(model.config_, model.weights_, model.weight_bytes());
  return model;
}

}  // namespace ekv
