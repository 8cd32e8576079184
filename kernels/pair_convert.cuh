#pragma once
// pair_convert.cuh -- what demote and promote share: how a block of threads covers one pair of one KV head.
//
// A unit is 16 values of one token: two 16-byte chunks of a TARGET row, or one chunk of the BASE row and one of
// the low plane. The kLanes lanes that cover a row are neighbours, so a row's maximum takes log2(kLanes)
// shuffles. A block of threads converts K or V of one pair: TARGET of the even block and BASE use the same
// bytes of the slot for it. All of it is in registers before the first byte is overwritten, which is why
// conversion in place needs neither a second buffer nor an order among threads.

#include "elastickv/kv_layout.h"
#include "kernels/cuda_check.h"
#include "kernels/fixed8.cuh"
#include "kernels/kv_cache.h"

namespace ekv {

template <int kDim>
struct PairTiling {
  static constexpr int kGroups = kDim / 16;  // lanes of a row that hold a unit
  static constexpr int kLanes = kGroups <= 4 ? 4 : kGroups <= 8 ? 8 : 16;
  static constexpr int kThreads = 128;                            // 4 % faster than 256 on an H200
  static constexpr int kUnits = kPairTokens * kLanes / kThreads;  // per thread

  int token, group;

  // The `unit`-th unit of this thread.
  static __device__ __forceinline__ PairTiling at(int unit) {
    const int index = unit * kThreads + threadIdx.x;
    return {index / kLanes, index % kLanes};
  }
  __device__ bool used() const { return group < kGroups; }
};

template <int kDim>
__device__ __forceinline__ KvShape fixed_shape(const KvShape& s) {
  KvShape fixed = s;
  fixed.head_dim = kDim;  // a constant, so that the layout functions fold
  return fixed;
}

// Block (part and kv head, job, layer): consecutive blocks touch neighbouring bytes.
struct PairPlace {
  int part;
  size_t even, odd, low;  // byte offsets of the TARGET slots in the pool, and of the low plane's slot
};
__device__ __forceinline__ PairPlace this_pair(const PairArgs& a, const KvShape& s) {
  const int part = blockIdx.x % 2, head = blockIdx.x / 2, job = blockIdx.y, layer = blockIdx.z;
  const PairJob pages = a.jobs[job];
  const size_t place = a.low_place ? a.low_place[job] : job;
  return {part, s.slot_at(layer, pages.even, head), s.slot_at(layer, pages.odd, head),
          place * s.low_pair_bytes() + s.low_at(layer, head, 0, 0, 0)};
}

inline dim3 pair_grid(const PairArgs& a) {
  EKV_CHECK(a.num_jobs <= 65535 && a.shape.layers <= 65535, "a grid dimension holds at most 65535");
  return dim3(2 * a.shape.kv_heads, a.num_jobs, a.shape.layers);
}

}  // namespace ekv
