// run_cpu_gemm.cpp -- skinny_gemm.h and tile_gemm.h as their contracts read, in plain C++.

#include <algorithm>
#include <cmath>
#include <vector>

#include "elastickv/base.h"
#include "kernels/skinny_split.h"
#include "kernels/tile_gemm.h"
#include "tests/support/number_formats.h"

namespace ekv {
namespace {

std::vector<float> row_of(const void* matrix, Element e, size_t row, size_t columns) {
  std::vector<float> values(columns);
  for (size_t i = 0; i < columns; ++i)
    values[i] = float(test::decode(e, static_cast<const uint16_t*>(matrix)[row * columns + i]));
  return values;
}

}  // namespace

SkinnyDevice skinny_device() {
  return {.mma_rows = kMaxMmaRows,
          .wgmma_rows = kMaxSkinnyRows,
          .cluster = kMaxSkinnySplit,
          .multiprocessors = 132};
}

void launch_skinny_way(const SkinnyGemmArgs& a, const SkinnyWay& way, cudaStream_t) {
  check_skinny(a, way, skinny_device());
  std::vector<std::vector<float>> x;
  for (int r = 0; r < a.rows; ++r) x.push_back(row_of(a.x, a.element, size_t(r), size_t(a.inputs)));
  const auto sum_of = [&](int r, const std::vector<float>& w) {
    float sum = 0;
    for (int i = 0; i < a.inputs; ++i) sum += x[r][i] * w[i];
    return sum;
  };
  const auto rounded = [&](float sum) { return float(test::decode(a.element, test::encode(a.element, sum))); };
  for (int o = 0; o < a.outputs; ++o) {
    const std::vector<float> w = row_of(a.w, a.element, size_t(o), size_t(a.inputs));
    const std::vector<float> up = a.gated ? row_of(a.w, a.element, size_t(a.outputs + o), size_t(a.inputs)) : w;
    for (int r = 0; r < a.rows; ++r) {
      float sum = sum_of(r, w);
      if (a.gated) sum = rounded(sum) / (1 + std::exp(-rounded(sum))) * rounded(sum_of(r, up));
      const size_t at = size_t(r) * a.out_stride + o;
      if (a.fp32_out) static_cast<float*>(a.y)[at] = sum;
      if (!a.fp32_out) static_cast<uint16_t*>(a.y)[at] = test::encode(a.element, sum);
    }
  }
}

namespace {

uint16_t rounded_product(Element e, const std::vector<float>& x, const std::vector<float>& w) {
  float sum = 0;
  for (size_t i = 0; i < x.size(); ++i) sum += x[i] * w[i];
  return test::encode(e, sum);
}

}  // namespace

bool has_tile_gemm(int outputs, int inputs) {
  return outputs > 0 && outputs % 8 == 0 && inputs > 0 && inputs % 8 == 0;
}

void launch_tile_gemm(const TileGemmArgs& a, cudaStream_t) {
  EKV_CHECK(a.rows >= 1 && has_tile_gemm(a.outputs, a.inputs) && !(a.gated && a.add),
            "not a product of the kernel");
  const size_t inputs = size_t(a.inputs), outputs = size_t(a.outputs);
  std::vector<std::vector<float>> x;
  for (int r = 0; r < a.rows; ++r) x.push_back(row_of(a.x, a.element, size_t(r), inputs));
  for (size_t o = 0; o < outputs; ++o) {
    const std::vector<float> first = row_of(a.w, a.element, o, inputs);
    const std::vector<float> up = a.gated ? row_of(a.w, a.element, outputs + o, inputs) : std::vector<float>{};
    for (size_t r = 0; r < size_t(a.rows); ++r) {
      uint16_t result = rounded_product(a.element, x[r], first);
      if (a.gated) {
        const float gate = float(test::decode(a.element, result));
        const float u = float(test::decode(a.element, rounded_product(a.element, x[r], up)));
        result = test::encode(a.element, gate / (1 + std::exp(-gate)) * u);
      }
      uint16_t& out = static_cast<uint16_t*>(a.out)[r * outputs + o];
      if (a.add)
        result = test::encode(a.element, test::decode(a.element, out) + test::decode(a.element, result));
      out = result;
    }
  }
}

}  // namespace ekv
