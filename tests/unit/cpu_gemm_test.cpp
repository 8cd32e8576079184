// Matrix products against the definition in double, and the promise that a row's bits do not depend on the
// other rows.

#include "backend/cpu/cpu_gemm.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>

#include "support/compare.h"

namespace ekv::test {
namespace {

// A matrix [outputs][inputs] of any type, with its values.
struct Matrix {
  Matrix(std::mt19937& rng, DType type, int outputs, int inputs) {
    std::normal_distribution<float> draw(0, 0.05f);
    bytes.resize(size_t(outputs) * inputs * dtype_bytes(type));
    for (int64_t i = 0; i < int64_t(outputs) * inputs; ++i) {
      const float x = draw(rng);
      if (type == DType::f32) {
        std::memcpy(bytes.data() + 4 * i, &x, 4);
      } else {
        const uint16_t half =
            type == DType::f16 ? half_bits(double(x)) : uint16_t(std::bit_cast<uint32_t>(x) >> 16);
        std::memcpy(bytes.data() + 2 * i, &half, 2);
      }
    }
    tensor = {type, {outputs, inputs}, bytes};
    values = to_float(tensor);
  }
  std::vector<std::byte> bytes;
  Tensor tensor;
  std::vector<float> values;
};

std::vector<float> activations(std::mt19937& rng, int rows, int inputs) {
  std::normal_distribution<float> draw;
  std::vector<float> x(size_t(rows) * inputs);
  for (float& v : x) v = draw(rng);
  return x;
}

void expect_product(const std::vector<float>& y, int64_t ldy, const std::vector<float>& x, int rows, int inputs,
                    const std::vector<float>& w, int outputs) {
  for (int r = 0; r < rows; ++r) {
    for (int j = 0; j < outputs; ++j) {
      double want = 0, size = 0;
      for (int i = 0; i < inputs; ++i) {
        const double product = double(x[size_t(r) * inputs + i]) * double(w[size_t(j) * inputs + i]);
        want += product;
        size += std::fabs(product);
      }
      // One rounding of a partial sum per input; partial sums stay below `size`.
      ASSERT_NEAR(double(y[size_t(r) * ldy + j]), want, 2 * inputs * 0x1p-24 * size)
          << "row " << r << ", output " << j;
    }
  }
}

class CpuGemm : public testing::TestWithParam<CpuIsa> {
 protected:
  void SetUp() override {
    kernels_ = find_cpu_kernels(GetParam());
    if (kernels_ == nullptr) GTEST_SKIP() << "this machine lacks the instruction set";
  }
  const CpuKernels* kernels_ = nullptr;
  CpuThreads threads_{2};
  std::mt19937 rng_{11};
};

TEST_P(CpuGemm, ProductOfEveryTypeAndOddShape) {
  for (DType type : {DType::f16, DType::bf16, DType::f32}) {
    for (auto [rows, inputs, outputs] : {std::array{1, 1, 1},
                                         {2, 3, 31},
                                         {5, 48, 32},
                                         {7, 64, 33},
                                         {13, 130, 288},
                                         {25, 17, 70},
                                         {100, 64, 96}}) {
      const Matrix w(rng_, type, outputs, inputs);
      const PackedMatrix packed(std::array{&w.tensor}, inputs, threads_);
      EXPECT_EQ(packed.type(), type);
      const std::vector<float> x = activations(rng_, rows, inputs);
      const int64_t ldy = packed.padded_outputs() + 32;  // what lies between the rows stays as it was
      std::vector<float> y(size_t(rows) * ldy, -7.0f);
      multiply(*kernels_, threads_, packed, x.data(), inputs, rows, y.data(), ldy);
      expect_product(y, ldy, x, rows, inputs, w.values, outputs);
      for (int r = 0; r < rows; ++r) {
        for (int64_t j = outputs; j < ldy; ++j) {
          ASSERT_EQ(y[size_t(r * ldy + j)], j < packed.padded_outputs() ? 0.0f : -7.0f);
        }
      }
    }
  }
}

TEST_P(CpuGemm, StackedMatricesOfDifferentTypes) {
  const Matrix a(rng_, DType::f16, 40, 24), b(rng_, DType::f32, 9, 24), c(rng_, DType::bf16, 70, 24);
  const PackedMatrix packed(std::array{&a.tensor, &b.tensor, &c.tensor}, 24, threads_);
  EXPECT_EQ(packed.type(), DType::f32);
  ASSERT_EQ(packed.outputs(), 119);
  std::vector<float> values = a.values;
  values.insert(values.end(), b.values.begin(), b.values.end());
  values.insert(values.end(), c.values.begin(), c.values.end());
  const std::vector<float> x = activations(rng_, 6, 24);
  std::vector<float> y(size_t(6) * packed.padded_outputs());
  multiply(*kernels_, threads_, packed, x.data(), 24, 6, y.data(), packed.padded_outputs());
  expect_product(y, packed.padded_outputs(), x, 6, 24, values, 119);
}

// Every position in every batch: the same row alone, first, last, in a full tile and in the rest of one.
TEST_P(CpuGemm, RowsHaveTheSameBitsInEveryBatch) {
  constexpr int kRows = 512, kInputs = 100, kOutputs = 130;
  for (DType type : {DType::f16, DType::bf16, DType::f32}) {
    const Matrix w(rng_, type, kOutputs, kInputs);
    const PackedMatrix packed(std::array{&w.tensor}, kInputs, threads_);
    const int64_t ld = packed.padded_outputs();
    const std::vector<float> x = activations(rng_, kRows, kInputs);
    std::vector<float> all(size_t(kRows) * ld), some(all.size());
    multiply(*kernels_, threads_, packed, x.data(), kInputs, kRows, all.data(), ld);
    for (int rows = 1; rows <= 512; rows = rows < 70 ? rows + 1 : rows < 128 ? 128 : rows * 2) {
      const int first = int(rng_() % unsigned(kRows - rows + 1));
      multiply(*kernels_, threads_, packed, x.data() + size_t(first) * kInputs, kInputs, rows, some.data(), ld);
      ASSERT_EQ(std::memcmp(some.data(), all.data() + first * ld, size_t(rows) * ld * sizeof(float)), 0)
          << rows << " rows";
    }
  }
}

TEST_P(CpuGemm, AccumulationContinuesTheSameChain) {
  constexpr int kRows = 14, kInputs = 96;
  const std::vector<float> x = activations(rng_, kRows, kInputs),
                           panels = activations(rng_, kInputs, kPanelCols);
  std::vector<float> whole(kRows * kPanelCols), parts(whole.size());
  const TileArgs once{.x = x.data(),
                      .w = panels.data(),
                      .y = whole.data(),
                      .ldx = kInputs,
                      .ldy = kPanelCols,
                      .rows = kRows,
                      .k = kInputs,
                      .panels = 1};
  kernels_->tile(once);
  for (int begin = 0; begin < kInputs; begin += 32) {
    TileArgs part = once;
    part.x = x.data() + begin;
    part.w = panels.data() + size_t(begin) * kPanelCols;
    part.y = parts.data();
    part.k = 32;
    part.accumulate = begin > 0;
    kernels_->tile(part);
  }
  EXPECT_EQ(whole, parts);
}

std::string isa_name(const testing::TestParamInfo<CpuIsa>& info) {
  return std::array{"generic", "avx2", "avx512"}[size_t(info.param)];
}
INSTANTIATE_TEST_SUITE_P(Isa, CpuGemm, testing::Values(CpuIsa::generic, CpuIsa::avx2, CpuIsa::avx512),
                         isa_name);

}  // namespace
}  // namespace ekv::test
