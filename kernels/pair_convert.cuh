#pragma once
// pair_convert.cuh -- what demote and promote share: how a block of threads covers one pair of one KV head.
//
// A unit is 16 values of one token: two 16-byte chunks of a TARGET row, or one chunk of the BASE row and one of
// the low plane. The kLanes lanes that cover a row are neighbours, so a row's maximum takes log2(kLanes)
// shuffles. A pair has 2 x 32 rows; all of its units are in registers before the first byte is overwritten,
// which is why conversion in place needs neither a second buffer nor an order among threads.

#include "elastickv/kv_layout.h"
#include "kernels/cuda_check.h"
#include "kernels/fixed8.cuh"
#include "kernels/kv_cache.h"

namespace ekv {

constexpr int kPairThreads = 256;
constexpr int kPairRows = 2 * kPairTokens;  // [K, V][token]

template <int kDim>
struct PairTiling {
  static constexpr int kGroups = kDim / 16;  // lanes of a row that hold a unit
  static constexpr int kLanes = kGroups <= 4 ? 4 : kGroups <= 8 ? 8 : 16;
  static constexpr int kUnits = kPairRows * kLanes / kPairThreads;  // per thread

  int part, token, group;
  bool used;

  // The `unit`-th unit of this thread.
  static __device__ __forceinline__ PairTiling at(int unit) {
    const int index = unit * kPairThreads + threadIdx.x, row = index / kLanes;
    return {row / kPairTokens, row % kPairTokens, index % kLanes, index % kLanes < kGroups};
  }
};

template <int kDim>
__device__ __forceinline__ KvShape fixed_shape(const KvShape& s) {
  KvShape fixed = s;
  fixed.head_dim = kDim;  // a constant, so that the layout functions fold
  return fixed;
}

// Block (kv head, job, layer): consecutive blocks touch neighbouring slots.
struct PairPlace {
  size_t even, odd, low;  // byte offsets of the TARGET slots in the pool, and of the low plane's slot
};
__device__ __forceinline__ PairPlace this_pair(const PairArgs& a, const KvShape& s) {
  const int head = blockIdx.x, job = blockIdx.y, layer = blockIdx.z;
  const PairJob pages = a.jobs[job];
  const size_t place = a.low_place ? a.low_place[job] : job;
  return {s.slot_at(layer, pages.even, head), s.slot_at(layer, pages.odd, head),
          place * s.low_pair_bytes() + s.low_at(layer, head, 0, 0, 0)};
}

inline dim3 pair_grid(const PairArgs& a) {
  EKV_CHECK(a.num_jobs <= 65535 && a.shape.layers <= 65535, "a grid dimension holds at most 65535");
  return dim3(a.shape.kv_heads, a.num_jobs, a.shape.layers);
}

}  // namespace ekv
