#pragma once
// wgmma.cuh, emulated -- see emulator/kernels/device.cuh. The descriptors are the real ones' bits.

#include "kernels/device.cuh"

namespace ekv {

constexpr int kSwizzleGroup = 1024;

inline uint64_t wgmma_tile(uint32_t shared, uint32_t stride = 16) {
  constexpr uint64_t kSwizzle128 = uint64_t(1) << 62;
  return kSwizzle128 | uint64_t(kSwizzleGroup / 16) << 32 | uint64_t(stride / 16) << 16 |
         ((shared & 0x3ffff) / 16);
}
inline uint64_t wgmma_at(uint64_t tile, int bytes) { return tile + uint64_t(bytes / 16); }

inline void wgmma_fence() {}
inline void wgmma_commit() { emulator::commit_products(); }
template <int kPending>
void wgmma_wait() {
  emulator::wait_products(kPending);
}
template <int n>
void wgmma_pin(float (&)[n]) {}
template <int kRegisters>
void shrink_registers() {}
template <int kRegisters>
void grow_registers() {}

template <class T, int n>
void wgmma_shared(float (&d)[n], uint64_t a, uint64_t b, bool add) {
  emulator::add_product(d, a, b, add, [](uint16_t bits) { return float(same_bits<T>(bits)); });
}

}  // namespace ekv
