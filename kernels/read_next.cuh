#pragma once
// read_next.cuh -- the device's side of read_next.h.

#include "kernels/device.cuh"
#include "kernels/read_next.h"

namespace ekv {

// One thread of each CTA calls it; the grid has one dimension.
__device__ __forceinline__ void ask_for(const ReadNext& next) {
  constexpr uint32_t kPiece = 16384;  // of one request; other requests of the copy engine come in between
  if (next.bytes == 0) return;
  const ReadSlice slice = read_slice(next, blockIdx.x, gridDim.x);
#pragma unroll 1
  for (uint32_t at = slice.begin; at < slice.end; at += kPiece)
    prefetch_l2(static_cast<const uint8_t*>(next.data) + at, min(kPiece, slice.end - at));
}

}  // namespace ekv
