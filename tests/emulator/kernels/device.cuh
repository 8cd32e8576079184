#pragma once
// device.cuh, emulated -- the names of kernels/device.cuh that products of few and many rows use, on the
// threads of emulator/cluster.h. Found before the real one where a kernel is compiled as plain C++.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "tests/emulator/cluster.h"

#undef __device__
#undef __forceinline__
#define __device__
#define __forceinline__ inline
#define threadIdx (::ekv::emulator::thread_index())
#define blockIdx (::ekv::emulator::block_index())
#define gridDim (::ekv::emulator::grid_size())

namespace ekv {

using std::min;
constexpr int kWarpSize = 32;

template <class To, class From>
To same_bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(static_cast<void*>(&to), &from, sizeof to);
  return to;
}
inline float __uint_as_float(uint32_t bits) { return same_bits<float>(bits); }
inline uint4 load16(const void* p) { return *static_cast<const uint4*>(p); }
inline uint32_t pack_half2(float low, float high) { return same_bits<uint32_t>(__floats2half2_rn(low, high)); }
inline float silu_mul(float gate, float up) { return gate / (1.0f + std::exp(-gate)) * up; }

template <int kStages>
struct Place {
  int stage = 0;
  uint32_t phase = 0;
  void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

inline void let_next_kernel_begin() {}
inline void wait_for_kernels_ahead() { emulator::wait_kernels_ahead(); }
inline void mbarrier_init_fence() {}
inline void __syncthreads() { emulator::named_barrier(0, int(emulator::block_size()), true); }
inline void __syncwarp() { emulator::warp_barrier(); }
inline void named_sync(int barrier, int threads) { emulator::named_barrier(barrier, threads, true); }
inline void named_arrive(int barrier, int threads) { emulator::named_barrier(barrier, threads, false); }
inline void cluster_arrive_relaxed() { emulator::cluster_arrive(); }
inline void cluster_wait() { emulator::cluster_wait(); }
inline void cluster_barrier() { emulator::cluster_barrier(); }

inline uint32_t shared_address(const void* p) { return emulator::address_of(p); }
inline uint32_t cluster_address(uint32_t shared, uint32_t rank) { return emulator::address_in(shared, rank); }
inline void mbarrier_init(uint32_t barrier, int arrivals) { emulator::init_barrier(barrier, arrivals); }
inline void mbarrier_arrive(uint32_t barrier) { emulator::arrive(barrier, 0); }
inline void mbarrier_arrive_cluster(uint32_t barrier) { emulator::arrive(barrier, 0); }
inline void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) { emulator::arrive(barrier, int(bytes)); }
inline void mbarrier_wait(uint32_t barrier, uint32_t phase) { emulator::wait(barrier, phase); }

inline void send16(uint32_t to, float4 v, uint32_t barrier) { emulator::send(to, v, barrier); }
inline void stmatrix_x4(uint32_t address, const uint32_t (&r)[4]) { emulator::store_matrices(address, r); }
inline void fence_proxy_async() { emulator::fence_writes(); }
inline void tensor_load(uint32_t to, const void* map, uint32_t barrier, int c0, int c1) {
  emulator::load_box(to, map, barrier, {c0, c1, 0}, 0);
}
inline void tensor_load_once(uint32_t to, const void* map, uint32_t barrier, int c0, int c1) {
  emulator::load_box(to, map, barrier, {c0, c1, 0}, 0);
}
inline void prefetch_tensor_map(const void*) {}
inline void tensor_load_multicast(uint32_t to, const void* map, uint32_t barrier, int c0, int c1, int c2,
                                  uint16_t ctas) {
  emulator::load_box(to, map, barrier, {c0, c1, c2}, ctas);
}
inline void tensor_store(const void* map, uint32_t from, int c0, int c1) {
  emulator::store_box(map, from, {c0, c1, 0}, false);
}
inline void tensor_add(const void* map, uint32_t from, int c0, int c1) {
  emulator::store_box(map, from, {c0, c1, 0}, true);
}
inline void tensor_store_commit() { emulator::commit_stores(); }
inline void tensor_store_wait_read() { emulator::wait_stores(); }
inline void tensor_store_wait() { emulator::wait_stores(); }

}  // namespace ekv
