#pragma once
// random.h -- seeded random draws that are the same on every machine and with every standard library; those of
// <random> are not. Used for arrivals, sampled lengths and prompt tokens, so that a run can be repeated
// exactly.

#include <cmath>
#include <cstdint>

namespace ekv {

// The output function of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators").
constexpr uint64_t splitmix64(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// One value for three coordinates; each passes the mixer, so that neighbours have nothing in common.
constexpr uint64_t splitmix64(uint64_t a, uint64_t b, uint64_t c) {
  return splitmix64(splitmix64(splitmix64(a) ^ b) ^ c);
}

class Random {
 public:
  explicit Random(uint64_t seed) : state_(splitmix64(seed)) {}

  uint64_t next() {
    state_ += 0x9e3779b97f4a7c15u;
    return splitmix64(state_);
  }
  // In (0, 1): never 0, so that its logarithm is finite.
  double uniform() { return (double(next() >> 12) + 0.5) * 0x1p-52; }
  // In [0, n), n > 0. The bias is below n / 2^64.
  uint64_t below(uint64_t n) { return next() % n; }
  // Standard normal, by Box and Muller; one of the two values is dropped.
  double normal() {
    const double radius = std::sqrt(-2 * std::log(uniform()));
    return radius * std::cos(6.283185307179586 * uniform());
  }
  // Gamma with the given shape > 0 and scale 1 (Marsaglia and Tsang, 2000; shapes below 1 by their boost).
  double gamma(double shape);
  // Weibull with the given shape > 0 and scale 1, by inversion.
  double weibull(double shape) { return std::pow(-std::log(uniform()), 1 / shape); }

 private:
  uint64_t state_;
};

inline double Random::gamma(double shape) {
  if (shape < 1) {
    const double boost = std::pow(uniform(), 1 / shape);
    return gamma(shape + 1) * boost;
  }
  const double d = shape - 1.0 / 3, c = 1 / std::sqrt(9 * d);
  while (true) {
    const double x = normal(), t = 1 + c * x, v = t * t * t;
    if (t > 0 && std::log(uniform()) < 0.5 * x * x + d - d * v + d * std::log(v)) return d * v;
  }
}

}  // namespace ekv
