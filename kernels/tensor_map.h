#pragma once
// tensor_map.h -- how the copy engine of sm_90 finds boxes of a tensor by coordinates. Boxes are 128 bytes wide
// and lie in shared memory as wgmma.cuh wants its tiles: the 16-byte chunks of a row XORed with the row's place
// in its group of 8.

#include <cuda.h>

#include <cstdint>
#include <initializer_list>

#include "kernels/element.h"

namespace ekv {

// What the L2 reads where it misses: no more than was asked for, or the 256 bytes around. W streams that are
// cut among multiprocessors lose with the second up to 5 % (H200, 117 MB, boxes of 128 bytes by 128 rows).
enum class L2Fetch : uint8_t { exact, around };

// `sizes` and `box` in elements, two or three dimensions, the innermost first; the tensor is dense, `tensor`
// aligned to 16 bytes, and so is every row. What of a box lies outside the tensor is read as zeros.
CUtensorMap make_tensor_map(Element element, const void* tensor, std::initializer_list<uint64_t> sizes,
                            std::initializer_list<uint32_t> box, L2Fetch fetch = L2Fetch::around);

}  // namespace ekv
