// A whole safetensors file from a stranger: parsed, and every byte that a tensor claims is read.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "model/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  // Most random length fields end the parse at once: half of the inputs get one that ends at their first
  // newline.
  std::vector<uint8_t> file(bytes, bytes + size);
  if (size > 9 && bytes[0] % 2 == 0) {
    const auto* brace = static_cast<const uint8_t*>(std::memchr(bytes + 8, '\n', size - 8));
    const uint64_t length = uint64_t((brace ? brace : bytes + size) - (bytes + 8));
    std::memcpy(file.data(), &length, sizeof length);
  }
  const auto tensors = ekv::parse_safetensors(std::as_bytes(std::span(file)), "fuzz");
  if (!tensors) {
    if (tensors.error().message.empty()) std::abort();
    return 0;
  }
  volatile unsigned sum = 0;  // keeps the reads
  size_t total = 0;
  for (const auto& [name, tensor] : *tensors) {
    for (const std::byte b : tensor.data) sum = sum + unsigned(b);
    total += tensor.data.size();
  }
  if (total > size) std::abort();
  return 0;
}
