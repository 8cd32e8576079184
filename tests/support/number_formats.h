#pragma once
// number_formats.h -- the 16-bit types of kernels/element.h on the host: one rounding from double, to nearest,
// ties to even.

#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/element.h"
#include "tests/support/half.h"

namespace ekv::test {

// The nearest number with `bits` significant bits and no exponent below `min_exponent`.
inline double rounded(double x, int bits, int min_exponent) {
  if (x == 0 || !std::isfinite(x)) return x;
  const int e = std::max(std::ilogb(x), min_exponent);
  return std::ldexp(std::nearbyint(std::ldexp(x, bits - 1 - e)), e - (bits - 1));
}

inline uint16_t bf16_bits(double x) {
  if (std::isnan(x)) return 0x7fc0;
  return uint16_t(std::bit_cast<uint32_t>(float(rounded(x, 8, -126))) >> 16);
}
inline double bf16_value(uint16_t bits) { return std::bit_cast<float>(uint32_t(bits) << 16); }

inline uint16_t encode(Element e, double x) { return e == Element::bf16 ? bf16_bits(x) : half_bits(x); }
inline double decode(Element e, uint16_t bits) {
  return e == Element::bf16 ? bf16_value(bits) : half_value(bits);
}

// Half a step of the type at x: the error of one rounding.
inline double half_step(Element e, double x) {
  const int bits = e == Element::bf16 ? 8 : 11, least = e == Element::bf16 ? -126 : -14;
  return std::ldexp(1.0, (x == 0 ? least : std::max(std::ilogb(x), least)) - bits);
}

inline std::vector<uint16_t> encode_all(Element e, const std::vector<double>& values) {
  std::vector<uint16_t> bits(values.size());
  for (size_t i = 0; i < values.size(); ++i) bits[i] = encode(e, values[i]);
  return bits;
}
inline std::vector<double> decode_all(Element e, const std::vector<uint16_t>& bits) {
  std::vector<double> values(bits.size());
  for (size_t i = 0; i < bits.size(); ++i) values[i] = decode(e, bits[i]);
  return values;
}

}  // namespace ekv::test
