#pragma once
// kv_definition.h -- `fixed8` of kv_layout.h and the rotation of K, by definition and in double. Not an
// implementation.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "tests/support/half.h"

namespace ekv::test {

// ---- the number format, by definition

inline int exponent_of(double max_abs) {
  for (int k = -9; k < 15; ++k)
    if (max_abs * std::ldexp(1.0, 15 - k) < 32632) return k;
  return 15;
}

// The stored value of x on the grid of exponent k.
inline double on_grid(double x, int k) {
  const double t = std::clamp(std::nearbyint(std::ldexp(x, 15 - k)), -32624.0, 32624.0);
  return std::ldexp(round_to_half(t), k - 15);
}

inline double largest(const std::vector<double>& x) {
  double m = 0;
  for (double v : x) m = std::max(m, std::fabs(v));
  return m;
}

inline uint16_t stored_bits(double x, int k) {
  const double value = on_grid(x, k);
  return half_bits(value == 0 ? 0.0 : value);
}

// ---- the vector that is stored, by definition: dense rotation, no fast transform

inline std::vector<double> rotated(const std::vector<double>& x) {
  const size_t block = x.size() == 80 ? 16 : x.size() == 96 ? 32 : x.size();
  std::vector<double> y(x.size());
  for (size_t i = 0; i < x.size(); ++i)
    for (size_t j = 0; j < block; ++j) {
      const double sign = std::popcount(i % block & j) % 2 ? -1 : 1;
      y[i] += sign * x[i / block * block + j] / std::sqrt(double(block));
    }
  return y;
}

}  // namespace ekv::test
