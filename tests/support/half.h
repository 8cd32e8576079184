#pragma once
// half.h -- fp16 on the host, by the definition of binary16: slow and obvious.

#include <cmath>
#include <cstdint>

namespace ekv::test {

inline double half_value(uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const double sign = bits >> 15 ? -1 : 1;
  if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
  return sign * (exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25));
}

// Round to nearest, ties to even.
inline uint16_t half_bits(double x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  if (std::isnan(x)) return 0x7e00;
  x = std::fabs(x);
  if (x >= 65520) return sign | 0x7c00;
  const int exponent = x == 0 ? -14 : std::max(-14, std::ilogb(x));
  const int mantissa = int(std::nearbyint(std::ldexp(x, 10 - exponent)));  // 2048 carries into the exponent
  return uint16_t(sign | (((exponent + 14) << 10) + mantissa));
}

inline double round_to_half(double x) { return half_value(half_bits(x)); }

}  // namespace ekv::test
