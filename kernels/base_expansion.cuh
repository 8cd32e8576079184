#pragma once
// base_expansion.cuh -- from the bytes of a BASE slot to fp16 operands; the two formats differ here alone.
//
// A register holds 4 bytes as a matrix load of the slot leaves them (KvShape::in_chunk). Keys: dims 2i, 2i + 1,
// 2i + 8, 2i + 9 of one token, `low` and `high` are its first and second pair. Values: dims i and i + 8 of two
// tokens, `low` is dim i and `high` dim i + 8 of both.

#include <cuda_fp16.h>

#include "elastickv/kv_layout.h"
#include "kernels/device.cuh"

namespace ekv {

struct HalfPairs {
  uint32_t low, high;
};

constexpr uint32_t kKeyLow = 0x4140, kKeyHigh = 0x4342;      // bytes 0, 1 and bytes 2, 3 under a magic byte
constexpr uint32_t kValueLow = 0x4240, kValueHigh = 0x4341;  // bytes 0, 2 and bytes 1, 3

__device__ __forceinline__ uint32_t fma_half2(uint32_t x, __half2 scale, __half2 bias) {
  const __half2 y = __hfma2(*reinterpret_cast<const __half2*>(&x), scale, bias);
  return *reinterpret_cast<const uint32_t*>(&y);
}

// Under the byte 0x64 the byte base + 128 reads as the fp16 number 1152 + base. The fused multiply-add then
// gives base / 128 of a key, and base * 2^(k - 10) of a value: every product of the format, the smallest
// included, is exact in fp16, and 1152 * 2^(k - 10) is still finite at k = 15. The missing 2^k of a key goes to
// its score, the missing 2^3 of the values to the probabilities.
class Fixed8 {
 public:
  static constexpr bool kTail = true;
  static constexpr float kValueGain = 8.0f;

  __device__ static HalfPairs key(uint32_t x) {
    const __half2 scale = __float2half2_rn(1.0f / 128), bias = __float2half2_rn(-9.0f);
    x ^= 0x80808080u;
    return {fma_half2(__byte_perm(x, 0x64646464u, kKeyLow), scale, bias),
            fma_half2(__byte_perm(x, 0x64646464u, kKeyHigh), scale, bias)};
  }
  // `tail`: the slot's exponents; the scale that the score of `token` misses.
  __device__ static float key_scale(const int8_t* tail, int token) { return power(tail[token]); }

  // Scales of the tokens 2i, 2i + 1 of each 8, which a lane of quad place i multiplies.
  __device__ void load_value_scales(const int8_t* tail, int quad_lane) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const char2 k = *reinterpret_cast<const char2*>(tail + kPairTokens + 8 * j + 2 * quad_lane);
      const float first = power(k.x - 10), second = power(k.y - 10);
      scale_[j] = __floats2half2_rn(first, second);
      bias_[j] = __floats2half2_rn(-1152.0f * first, -1152.0f * second);
    }
  }
  // `j`: which 8 of the 32 tokens.
  __device__ HalfPairs value(uint32_t x, int j) const {
    x ^= 0x80808080u;
    return {fma_half2(__byte_perm(x, 0x64646464u, kValueLow), scale_[j], bias_[j]),
            fma_half2(__byte_perm(x, 0x64646464u, kValueHigh), scale_[j], bias_[j])};
  }

 private:
  __device__ static float power(int k) { return __int_as_float((k + 127) << 23); }
  __half2 scale_[4], bias_[4];
};

// The byte is the upper half of an fp16 number, kFill its lower half.
class E5m2 {
 public:
  static constexpr bool kTail = false;
  static constexpr float kValueGain = 1.0f;

  __device__ static HalfPairs key(uint32_t x) {
    return {__byte_perm(x, kMagic, 0x1404), __byte_perm(x, kMagic, 0x3424)};
  }
  __device__ static float key_scale(const int8_t*, int) { return 1.0f; }
  __device__ void load_value_scales(const int8_t*, int) {}
  __device__ HalfPairs value(uint32_t x, int) const {
    return {__byte_perm(x, kMagic, 0x2404), __byte_perm(x, kMagic, 0x3414)};
  }

 private:
  static constexpr uint32_t kMagic = e5m2::kFill * 0x01010101u;
};

}  // namespace ekv
