#pragma once
// seed.h -- seeds of randomised tests. A drawn seed finds what the fixed ones do not; that a run has reached
// something ("preemptions > 0") is asserted of fixed seeds only, because of a drawn one chance decides it.

#include <gtest/gtest.h>

#include <cstdio>
#include <numeric>
#include <random>
#include <vector>

namespace ekv::test {

constexpr unsigned kFirstDrawn = 1000, kLastDrawn = 99999;  // the largest that gtest takes

inline bool is_fixed(unsigned seed) { return seed < kFirstDrawn; }

// Another one each time, and printed; --gtest_random_seed=N (or GTEST_RANDOM_SEED=N) makes it N.
inline unsigned drawn_seed() {
  const int asked = GTEST_FLAG_GET(random_seed);
  const unsigned seed =
      asked > 0 ? unsigned(asked) : kFirstDrawn + std::random_device()() % (kLastDrawn - kFirstDrawn + 1);
  std::printf("seed %u\n", seed);
  return seed;
}

// 1 to `fixed` and a drawn one.
inline std::vector<unsigned> seeds(unsigned fixed) {
  std::vector<unsigned> all(fixed);
  std::iota(all.begin(), all.end(), 1u);
  all.push_back(drawn_seed());
  return all;
}

}  // namespace ekv::test
