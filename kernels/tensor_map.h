#pragma once
// tensor_map.h -- how the copy engine of sm_90 finds boxes of a tensor by coordinates. Boxes are 128 bytes wide
// and lie in shared memory as wgmma.cuh wants its tiles: the 16-byte chunks of a row XORed with the row's place
// in its group of 8.

#include <cuda.h>

#include <initializer_list>

#include "kernels/element.h"

namespace ekv {

// `sizes` and `box` in elements, two or three dimensions, the innermost first; the tensor is dense, `tensor`
// aligned to 16 bytes, and so is every row. What of a box lies outside the tensor is read as zeros.
CUtensorMap make_tensor_map(Element element, const void* tensor, std::initializer_list<uint64_t> sizes,
                            std::initializer_list<uint32_t> box);

}  // namespace ekv
