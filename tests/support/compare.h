#pragma once
// compare.h -- an output against the definition: the first bad element, both values, and how many are bad.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/support/half.h"

namespace ekv::test {

// `tolerance(i)`: the largest allowed |got - want| of element i. NaN in `got` is never allowed.
template <class Got, class Tolerance>
testing::AssertionResult all_near(const std::vector<Got>& got, const std::vector<double>& want,
                                  Tolerance tolerance) {
  if (got.size() != want.size())
    return testing::AssertionFailure() << got.size() << " elements, want " << want.size();
  size_t bad = 0, first = 0, nans = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double x = double(got[i]);
    nans += std::isnan(x);
    if (std::fabs(x - want[i]) <= tolerance(i)) continue;
    if (bad++ == 0) first = i;
  }
  if (bad == 0) return testing::AssertionSuccess();
  return testing::AssertionFailure() << bad << " of " << got.size() << " elements are off (" << nans
                                     << " NaN), first " << first << ": got " << double(got[first]) << ", want "
                                     << want[first] << " +- " << tolerance(first);
}

inline std::vector<double> half_values(const std::vector<uint16_t>& bits) {
  std::vector<double> values(bits.size());
  for (size_t i = 0; i < bits.size(); ++i) values[i] = half_value(bits[i]);
  return values;
}

}  // namespace ekv::test
