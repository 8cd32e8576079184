#pragma once
// fixed8.cuh -- the number format `fixed8` of kv_layout.h in a few instructions.

#include "elastickv/kv_layout.h"
#include "kernels/device.cuh"

namespace ekv::fixed8 {

// fixed8::exponent without its loop. k is the place above max_abs's leading bit, one more if its mantissa
// reaches that of kBound = 1.9916992 * 2^14: adding what is missing to a whole mantissa carries exactly then.
__device__ __forceinline__ int fast_exponent(float max_abs) {
  constexpr int kMissing = 0x800000 - 0x7ef000;  // 2^23 - mantissa of kBound
  const int k = ((__float_as_int(max_abs) + kMissing) >> 23) - 126;
  return min(max(k, kMinExponent), kMaxExponent);
}

// 2^e for -126 <= e <= 127.
__device__ __forceinline__ float exp2_int(int e) { return __int_as_float((127 + e) << 23); }

}  // namespace ekv::fixed8
