#pragma once
// cpu_ops.h -- the layer operations on rows of activations: shapes, threads, and nothing else. fp32 throughout.

#include <span>
#include <vector>

#include "backend/cpu/cpu_kernels.h"
#include "backend/cpu/cpu_threads.h"
#include "elastickv/model.h"

namespace ekv {

struct CpuContext {
  const CpuKernels& kernels;
  CpuThreads& threads;
};

// Calls body(row) for every row, on all threads; rows stay together in small runs.
template <class Body>
void for_each_row(const CpuContext& cpu, int rows, const Body& body) {
  constexpr int kRows = 4;
  cpu.threads.for_each(ceil_div(rows, kRows), [&](int item, int) {
    for (int row = item * kRows; row < rows && row < (item + 1) * kRows; ++row) body(row);
  });
}

// x[r] = embedding row of tokens[r]; x is [tokens][hidden].
void embed(const CpuContext& cpu, const Tensor& embedding, std::span<const TokenId> tokens, int hidden,
           float* x);

// y = x / sqrt(mean(x^2) + eps) * weight per row.
void rms_norm_rows(const CpuContext& cpu, const float* x, std::span<const float> weight, float eps, int rows,
                   float* y);

// x += delta, then y = rms_norm(x). delta has rows of `ld_delta` values, x and y are [rows][weight.size()].
void add_rms_norm_rows(const CpuContext& cpu, const float* delta, int64_t ld_delta,
                       std::span<const float> weight, float eps, int rows, float* x, float* y);

// y[r][i] = silu(gate_up[r][i]) * gate_up[r][n + i]; y is [rows][n].
void silu_mul_rows(const CpuContext& cpu, const float* gate_up, int64_t ld, int rows, int n, float* y);

// cos and sin of position * frequency, both [positions][frequencies]. The product is taken in double: at
// position 100,000 a float angle would be off by 0.004.
class RopeTable {
 public:
  explicit RopeTable(std::vector<float> inverse_frequencies) : inverse_(std::move(inverse_frequencies)) {}
  void set_positions(const CpuContext& cpu, std::span<const int32_t> positions);
  int half() const { return int(inverse_.size()); }
  const float* cosine(int row) const { return cosine_.data() + int64_t(row) * half(); }
  const float* sine(int row) const { return sine_.data() + int64_t(row) * half(); }

 private:
  std::vector<float> inverse_, cosine_, sine_;
};

}  // namespace ekv
