// run_cpu_gemm.cpp -- skinny_gemm.h as its contract reads, in plain C++.

#include <algorithm>
#include <vector>

#include "elastickv/base.h"
#include "kernels/skinny_split.h"
#include "tests/support/number_formats.h"

namespace ekv {
namespace {

std::vector<float> half_row(const void* matrix, size_t row, size_t columns) {
  const uint16_t* from = static_cast<const uint16_t*>(matrix) + row * columns;
  std::vector<float> values(columns);
  for (size_t i = 0; i < columns; ++i) values[i] = float(test::half_value(from[i]));
  return values;
}

}  // namespace

std::vector<int> find_skinny(int rows, int outputs, int inputs) {
  return skinny_splits(rows, outputs, inputs, kMaxSkinnySplit, 256);
}

void launch_skinny_gemm(const SkinnyGemmArgs& a, cudaStream_t) {
  const std::vector<int> splits = find_skinny(a.rows, a.outputs, a.inputs);
  EKV_CHECK(std::find(splits.begin(), splits.end(), a.split) != splits.end(), "not a split of find_skinny");
  EKV_CHECK(a.out_stride >= a.outputs, "rows of y overlap");
  std::vector<std::vector<float>> x;
  for (int r = 0; r < a.rows; ++r) x.push_back(half_row(a.x, r, a.inputs));
  for (int o = 0; o < a.outputs; ++o) {
    const std::vector<float> w = half_row(a.w, o, a.inputs);
    for (int r = 0; r < a.rows; ++r) {
      float sum = 0;
      for (int i = 0; i < a.inputs; ++i) sum += x[r][i] * w[i];
      const size_t at = size_t(r) * a.out_stride + o;
      if (a.fp32_out) static_cast<float*>(a.y)[at] = sum;
      if (!a.fp32_out) static_cast<uint16_t*>(a.y)[at] = test::half_bits(sum);
    }
  }
}

}  // namespace ekv
