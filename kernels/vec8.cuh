#pragma once
// vec8.cuh -- 8 values of a 16-bit type as one 16-byte access, and as 8 floats.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/device.cuh"

namespace ekv {

// fp16 or bf16 as the template argument of a kernel.
template <class T>
struct Pair16;
template <>
struct Pair16<__half> {
  static __device__ __forceinline__ float2 unpack(uint32_t bits) {
    return __half22float2(*reinterpret_cast<const __half2*>(&bits));
  }
  static __device__ __forceinline__ uint32_t pack(float low, float high) { return pack_half2(low, high); }
  static __device__ __forceinline__ __half round(float x) { return __float2half(x); }
  static __device__ __forceinline__ float value(__half x) { return __half2float(x); }
};
template <>
struct Pair16<__nv_bfloat16> {
  static __device__ __forceinline__ float2 unpack(uint32_t bits) {
    return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
  }
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    const __nv_bfloat162 b = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&b);
  }
  static __device__ __forceinline__ __nv_bfloat16 round(float x) { return __float2bfloat16(x); }
  static __device__ __forceinline__ float value(__nv_bfloat16 x) { return __bfloat162float(x); }
};

template <class T>
__device__ __forceinline__ void unpack8(uint4 v, float (&x)[8]) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 f = Pair16<T>::unpack(words[i]);
    x[2 * i] = f.x, x[2 * i + 1] = f.y;
  }
}

template <class T>
__device__ __forceinline__ uint4 pack8(const float (&x)[8]) {
  return make_uint4(Pair16<T>::pack(x[0], x[1]), Pair16<T>::pack(x[2], x[3]), Pair16<T>::pack(x[4], x[5]),
                    Pair16<T>::pack(x[6], x[7]));
}

// 8 values of T at element `index` of a tensor.
template <class T>
__device__ __forceinline__ void load8(const void* tensor, size_t index, float (&x)[8]) {
  unpack8<T>(load16(static_cast<const uint16_t*>(tensor) + index), x);
}

__device__ __forceinline__ void load8f(const float* p, float (&x)[8]) {
  const float4 a = *reinterpret_cast<const float4*>(p), b = *reinterpret_cast<const float4*>(p + 4);
  x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}

}  // namespace ekv
