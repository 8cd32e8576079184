#pragma once
// safetensors.h -- the file format: u64 little-endian header length, JSON header, data. Files come from
// strangers: nothing in them is believed before it is checked, and no number in them sizes an allocation.

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "elastickv/base.h"

namespace ekv {

constexpr uint64_t kMaxSafetensorsHeader = 100'000'000;  // bytes; the limit of the reference reader

// One entry of a header. `data` points into the bytes that were parsed and need not be aligned.
struct StoredTensor {
  std::string dtype;  // as written, one of those the format knows: "BF16", "I64", ...
  std::vector<int64_t> shape;
  std::span<const std::byte> data;  // exactly as long as dtype and shape say
};

using StoredTensors = std::map<std::string, StoredTensor, std::less<>>;

// `file` is the name for messages. Refused, with the tensor's name: unknown dtypes, sizes that do not match,
// tensors that overlap or leave gaps, names given twice; a damaged or oversized header; data that is cut off or
// too long.
Result<StoredTensors> parse_safetensors(std::span<const std::byte> bytes, std::string_view file);

}  // namespace ekv
