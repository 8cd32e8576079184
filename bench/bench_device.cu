// bench_device.cu -- fills, ceilings.

#include <cuda_fp16.h>

#include "bench/bench_device.h"
#include "kernels/cuda_check.h"
#include "kernels/device.cuh"

namespace ekv::bench {
namespace {

constexpr int kThreads = 256;
constexpr int kMultiprocessors = 132;  // of the H200; others only lose a little of the ceiling

__device__ uint32_t mix(uint64_t x) {  // the finaliser of splitmix64
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return uint32_t(x ^ (x >> 31));
}

// The sum of four uniform numbers is normal enough for a benchmark.
__device__ float noise(uint64_t seed) {
  const uint32_t a = mix(seed * 2 + 1), b = mix(seed * 2 + 0x9e3779b97f4a7c15ull);
  const float sum = float(a & 0xffff) + float(a >> 16) + float(b & 0xffff) + float(b >> 16);
  return (sum / 65536.0f - 2.0f) * 1.7320508f;
}

__global__ void fill_pool_kernel(uint8_t* pool, KvShape s, const uint8_t* is_base) {
  const size_t slots = size_t(s.layers) * s.pages * s.kv_heads, words = s.slot_bytes() / 2;
  const size_t values = 2 * kBlockTokens * s.head_dim;
  for (size_t slot = blockIdx.x; slot < slots; slot += gridDim.x) {
    uint16_t* out = reinterpret_cast<uint16_t*>(pool + slot * s.slot_bytes());
    const bool base = is_base[slot / s.kv_heads % s.pages];
    for (size_t i = threadIdx.x; i < words; i += blockDim.x) {
      const float x = noise(slot * words + i);
      const int byte = max(-127, min(127, int(x * 32)));
      const uint16_t two_bytes = uint16_t((byte & 255) | ((byte * 3 + 1) & 255) << 8);
      out[i] = i >= values ? 0x0202 : base ? two_bytes : __half_as_ushort(__float2half(x));
    }
  }
}

__global__ void fill_half_kernel(uint16_t* values, size_t count) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x)
    values[i] = __half_as_ushort(__float2half(noise(i + 77)));
}

__global__ void __launch_bounds__(512) read_kernel(const uint4* from, size_t count, uint32_t* sink) {
  constexpr int kInFlight = 8;
  uint32_t sum = 0;
  const size_t stride = size_t(gridDim.x) * blockDim.x;
  size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
  for (; i < count; i += kInFlight * stride) {
    uint4 v[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) v[j] = i + j * stride < count ? __ldcs(from + i + j * stride) : uint4{};
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) sum += v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (sum == 0x12345678) *sink = sum;
}

__global__ void __launch_bounds__(512) copy_kernel(uint4* to, const uint4* from, size_t count) {
  constexpr int kInFlight = 4;
  const size_t i = blockIdx.x * size_t(blockDim.x) * kInFlight + threadIdx.x;
  uint4 v[kInFlight];
#pragma unroll
  for (int j = 0; j < kInFlight; ++j)
    if (i + j * blockDim.x < count) v[j] = __ldcs(from + i + j * blockDim.x);
#pragma unroll
  for (int j = 0; j < kInFlight; ++j)
    if (i + j * blockDim.x < count) __stcs(to + i + j * blockDim.x, v[j]);
}

__global__ void empty_kernel() {}

}  // namespace

void launch_fill_pool(uint8_t* pool, const KvShape& shape, const uint8_t* is_base, cudaStream_t stream) {
  fill_pool_kernel<<<16 * kMultiprocessors, kThreads, 0, stream>>>(pool, shape, is_base);
  cuda_check(cudaGetLastError());
}

void launch_fill_half(uint16_t* values, size_t count, cudaStream_t stream) {
  fill_half_kernel<<<4 * kMultiprocessors, kThreads, 0, stream>>>(values, count);
  cuda_check(cudaGetLastError());
}

void launch_read(const uint8_t* from, size_t bytes, uint32_t* sink, cudaStream_t stream) {
  read_kernel<<<4 * kMultiprocessors, 512, 0, stream>>>(reinterpret_cast<const uint4*>(from), bytes / 16, sink);
  cuda_check(cudaGetLastError());
}

void launch_copy(uint8_t* to, const uint8_t* from, size_t bytes, cudaStream_t stream) {
  constexpr size_t kPerBlock = 512 * 4;
  const size_t count = bytes / 16;
  copy_kernel<<<unsigned((count + kPerBlock - 1) / kPerBlock), 512, 0, stream>>>(
      reinterpret_cast<uint4*>(to), reinterpret_cast<const uint4*>(from), count);
  cuda_check(cudaGetLastError());
}

void launch_empty(cudaStream_t stream) {
  empty_kernel<<<1, 32, 0, stream>>>();
  cuda_check(cudaGetLastError());
}

}  // namespace ekv::bench
