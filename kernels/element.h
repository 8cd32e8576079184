#pragma once
// element.h -- the number types that tensors in device memory have, and the stream type without CUDA's headers,
// so that the contracts of the kernels can be included, and their plain counterparts built, without a toolkit.

#include <cstddef>
#include <cstdint>

typedef struct CUstream_st* cudaStream_t;  // as in driver_types.h

namespace ekv {

enum class Element : uint8_t { bf16, fp16, fp32 };

constexpr size_t element_bytes(Element e) { return e == Element::fp32 ? 4 : 2; }

}  // namespace ekv
