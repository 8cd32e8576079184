// Matrix products in fp16 and bf16 on the GPU, before and after tuning, against sums in double; what the file
// keeps is what was chosen. Every candidate that tuning can choose is a candidate that this test can meet.

#include "backend/cuda/cuda_gemm.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <random>

#include "backend/cuda/cuda_raii.h"
#include "backend/cuda/gemm_cache.h"
#include "kernels/layer_ops.h"
#include "support/number_formats.h"
#include "support/seed.h"
#include "support/temp_dir.h"

namespace ekv::test {
namespace {

const GemmShape kShapes[] = {
    {.outputs = 384, .inputs = 256, .max_rows = 70, .out_stride = 384},
    {.outputs = 1000, .inputs = 512, .max_rows = 33, .fp32_out = true, .out_stride = 1008},
    {.outputs = 4096, .inputs = 4096, .max_rows = 17, .out_stride = 4096},
    {.outputs = 768, .inputs = 512, .max_rows = 300, .out_stride = 768},
    {.outputs = 1040, .inputs = 264, .max_rows = 300, .out_stride = 1040, .after = After::activation},
    {.outputs = 520, .inputs = 328, .max_rows = 300, .out_stride = 520, .after = After::norm},
    {.outputs = 528, .inputs = 264, .max_rows = 1100, .out_stride = 528, .after = After::activation},
    {.outputs = 264, .inputs = 328, .max_rows = 1100, .out_stride = 264, .after = After::norm},
};

template <class T>
DeviceBuffer<T> on_device(const std::vector<T>& values) {
  DeviceBuffer<T> made(values.size());
  cuda_check(cudaMemcpy(made.data(), values.data(), made.bytes(), cudaMemcpyHostToDevice));
  return made;
}

class CudaGemmTest : public testing::TestWithParam<Element> {
 protected:
  void SetUp() override {
    for (GemmShape& s : shapes_) s.element = GetParam();
    const unsigned seed = drawn_seed();
    std::mt19937 rng(seed);
    std::normal_distribution<float> normal;
    for (const GemmShape& s : shapes_) {
      const auto random = [&](size_t count) {
        std::vector<uint16_t> bits(count);
        for (uint16_t& b : bits) b = encode(GetParam(), normal(rng));
        return bits;
      };
      const size_t rows = size_t(row_bucket(s.max_rows));
      const auto operand = [&](size_t count, std::vector<std::vector<double>>& values) {
        const std::vector<uint16_t> bits = random(count);
        values.emplace_back(count);
        std::ranges::transform(bits, values.back().begin(), [&](uint16_t b) { return value_of(b); });
        return on_device(bits);
      };
      d_w_.push_back(operand(size_t(s.outputs) * size_t(s.inputs), w_));
      d_x_.push_back(operand(rows * size_t(s.inputs), x_));
      d_y_.emplace_back(rows * size_t(s.out_stride)), d_made_.emplace_back(rows * size_t(s.outputs));
      residual_.push_back(s.after == After::norm ? random(rows * size_t(s.outputs)) : random(1));
      d_residual_.push_back(on_device(residual_.back()));
      d_weight_.push_back(on_device(std::vector<uint16_t>(size_t(s.outputs), encode(GetParam(), 1))));
      operands_.push_back({{d_w_.back().data()}, d_x_.back().data(), d_y_.back().data()});
      operands_.back().ahead = [this, own = d_w_.back().data()](const void* w, int rows, cudaStream_t) {
        EXPECT_GE(rows, 1);
        EXPECT_EQ(w, own);
        ++ahead_;
      };
      if (s.after == After::activation) operands_.back().activated = d_made_.back().data();
      if (s.after == After::norm) operands_.back().norm = norm_args(operands_.size() - 1);
    }
  }

  void expect_products(CudaGemm& gemm) {
    for (size_t i = 0; i < shapes_.size(); ++i)
      for (int rows = 1; rows <= shapes_[i].max_rows; rows += 1 + rows / 3) expect_product(gemm, i, rows);
  }

  void expect_product(CudaGemm& gemm, size_t i, int rows) {
    const GemmShape& s = shapes_[i];
    if (s.after == After::activation) return expect_gated(gemm, i, rows);
    if (s.after == After::norm) return expect_normed(gemm, i, rows);
    cuda_check(cudaMemset(d_y_[i].data(), 0x7f, d_y_[i].bytes()));
    gemm.multiply(int(i), d_w_[i].data(), d_x_[i].data(), d_y_[i].data(), rows, stream_.get());
    cuda_check(cudaStreamSynchronize(stream_.get()));
    std::vector<float> y(d_y_[i].size());
    cuda_check(cudaMemcpy(y.data(), d_y_[i].data(), d_y_[i].bytes(), cudaMemcpyDeviceToHost));
    for (int row = 0; row < rows; ++row)
      for (int o = 0; o < s.outputs; o += 1 + o % 7) {
        const auto [want, size] = exact_sum(i, row, o);
        const size_t at = size_t(row) * size_t(s.out_stride) + size_t(o);
        const double got = s.fp32_out ? double(y[at]) : value_of(reinterpret_cast<uint16_t*>(y.data())[at]);
        const double bound = size * s.inputs * 0x1p-24 + (s.fp32_out ? 0 : std::fabs(want) * step_);
        ASSERT_NEAR(got, want, bound) << "shape " << i << ", " << rows << " rows, row " << row << ", " << o;
      }
  }

  // The activation takes g and u as a product rounds them, each off by a step at most.
  void expect_gated(CudaGemm& gemm, size_t i, int rows) {
    const GemmShape& s = shapes_[i];
    const int width = s.outputs / 2;
    cuda_check(cudaMemset(d_made_[i].data(), 0x7f, d_made_[i].bytes()));
    gemm.multiply_gated(int(i), d_w_[i].data(), d_x_[i].data(), d_y_[i].data(), d_made_[i].data(), rows,
                        stream_.get());
    const std::vector<uint16_t> got = download(d_made_[i]);
    for (int row = 0; row < rows; ++row)
      for (int o = 0; o < width; o += 1 + o % 7) {
        const auto [gate, gate_size] = exact_sum(i, row, o);
        const auto [up, up_size] = exact_sum(i, row, width + o);
        const double silu = gate / (1 + std::exp(-gate)), want = silu * up;
        const double gate_bound = gate_size * s.inputs * 0x1p-24 + std::fabs(gate) * step_ + 0x1p-24;
        const double up_bound = up_size * s.inputs * 0x1p-24 + std::fabs(up) * step_ + 0x1p-24;
        const double bound = 1.1 * gate_bound * (std::fabs(up) + up_bound) + std::fabs(silu) * up_bound +
                             std::fabs(want) * step_ + 0x1p-24;
        ASSERT_NEAR(value_of(got[size_t(row) * size_t(width) + size_t(o)]), want, bound)
            << "shape " << i << ", " << rows << " rows, row " << row << ", " << o;
      }
  }

  RmsNormArgs norm_args(size_t i) const {
    RmsNormArgs norm;
    norm.residual = d_residual_[i].data(), norm.weight = d_weight_[i].data(), norm.out = d_made_[i].data();
    norm.hidden = shapes_[i].outputs, norm.epsilon = 1e-5f, norm.element = GetParam();
    return norm;
  }

  // The residual stream has the product, rounded once or twice, and the norm is that of the residual stream.
  void expect_normed(CudaGemm& gemm, size_t i, int rows) {
    const GemmShape& s = shapes_[i];
    cuda_check(
        cudaMemcpy(d_residual_[i].data(), residual_[i].data(), d_residual_[i].bytes(), cudaMemcpyHostToDevice));
    cuda_check(cudaMemset(d_made_[i].data(), 0x7f, d_made_[i].bytes()));
    gemm.multiply_normed(int(i), d_w_[i].data(), d_x_[i].data(), d_y_[i].data(), norm_args(i), rows,
                         stream_.get());
    const std::vector<uint16_t> residual = download(d_residual_[i]), out = download(d_made_[i]);
    for (int row = 0; row < rows; ++row) {
      const size_t first = size_t(row) * size_t(s.outputs);
      double squares = 0;
      for (int o = 0; o < s.outputs; ++o) squares += std::pow(value_of(residual[first + size_t(o)]), 2);
      const double scale = 1 / std::sqrt(squares / s.outputs + 1e-5);
      for (int o = 0; o < s.outputs; o += 1 + o % 7) {
        const size_t at = first + size_t(o);
        const auto [sum, size] = exact_sum(i, row, o);
        const double want = value_of(residual_[i][at]) + sum, got = value_of(residual[at]);
        const double bound = size * s.inputs * 0x1p-24 + (std::fabs(sum) + std::fabs(want)) * step_ + 0x1p-24;
        ASSERT_NEAR(got, want, bound) << "shape " << i << ", " << rows << " rows, row " << row << ", " << o;
        ASSERT_NEAR(value_of(out[at]), got * scale, std::fabs(got * scale) * step_ + 0x1p-24)
            << "norm, shape " << i << ", " << rows << " rows, row " << row << ", " << o;
      }
    }
  }

  std::vector<uint16_t> download(const DeviceBuffer<uint16_t>& from) {
    cuda_check(cudaStreamSynchronize(stream_.get()));
    std::vector<uint16_t> values(from.size());
    cuda_check(cudaMemcpy(values.data(), from.data(), from.bytes(), cudaMemcpyDeviceToHost));
    return values;
  }

  struct Sum {
    double value = 0, size = 0;
  };
  Sum exact_sum(size_t i, int row, int output) const {
    const size_t inputs = size_t(shapes_[i].inputs);
    Sum sum;
    for (size_t k = 0; k < inputs; ++k) {
      const double term = x_[i][size_t(row) * inputs + k] * w_[i][size_t(output) * inputs + k];
      sum.value += term, sum.size += std::fabs(term);
    }
    return sum;
  }

  double value_of(uint16_t bits) const { return decode(GetParam(), bits); }

  const double step_ = GetParam() == Element::bf16 ? 0x1p-7 : 0x1p-10;  // of the type, relative
  std::vector<GemmShape> shapes_{std::begin(kShapes), std::end(kShapes)};
  Stream stream_ = make_stream();
  std::vector<std::vector<double>> w_, x_;  // what the device has of them, decoded
  std::vector<std::vector<uint16_t>> residual_;
  std::vector<DeviceBuffer<uint16_t>> d_w_, d_x_, d_made_, d_residual_, d_weight_;
  std::vector<DeviceBuffer<float>> d_y_;
  std::vector<GemmOperands> operands_;
  int ahead_ = 0;  // launches of what a step has ahead of products
};

TEST_P(CudaGemmTest, TunedProductsAreRightAndKept) {
  const TempDir temp;
  const std::filesystem::path path = temp.path() / "cache.txt";
  Result<std::unique_ptr<CudaGemm>> gemm = CudaGemm::make(shapes_), again = CudaGemm::make(shapes_);
  ASSERT_TRUE(gemm && again);
  expect_products(**gemm);
  (*gemm)->tune(operands_, {.cache_file = path.string()}, stream_.get());
  (*gemm)->load(operands_, stream_.get());
  expect_products(**gemm);
  EXPECT_GT(ahead_, 100) << "products are timed as links of a chain";
  const GemmCache kept = load_gemm_cache(path);
  ASSERT_EQ(kept.devices.size(), 1u);
  EXPECT_GT(kept.devices.begin()->second.size(), 10u);
  (*again)->tune(operands_, {.cache_file = path.string(), .limit_s = 0}, stream_.get());
  expect_products(**again);
  EXPECT_EQ(load_gemm_cache(path), kept) << "nothing was left to tune";
}

INSTANTIATE_TEST_SUITE_P(Types, CudaGemmTest, testing::Values(Element::fp16, Element::bf16),
                         [](const auto& info) { return info.param == Element::bf16 ? "bf16" : "fp16"; });

}  // namespace
}  // namespace ekv::test
