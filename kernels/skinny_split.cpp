// skinny_split.cpp -- into how many parts skinny_gemm.h cuts a product. Plain C++, shared by every link target.

#include "kernels/skinny_split.h"

#include <algorithm>
#include <cstdlib>

namespace ekv {

std::vector<int> skinny_splits(int rows, int outputs, int inputs, int most, int num_ctas) {
  if (rows < 1 || rows > kMaxSkinnyRows || outputs < 1 || inputs < 8 || inputs % 8 != 0) return {};
  std::vector<int> splits;
  for (int split = 1; split <= most && (split == 1 || inputs >= split * kSkinnyStride); split *= 2)
    splits.push_back(split);
  const int groups = (outputs + kSkinnyOutputs - 1) / kSkinnyOutputs;
  const auto missing = [&](int split) { return std::abs(groups * split - num_ctas); };
  std::ranges::stable_sort(splits, [&](int a, int b) { return missing(a) < missing(b); });
  return splits;
}

}  // namespace ekv
