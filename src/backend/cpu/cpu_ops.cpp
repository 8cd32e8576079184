#include "backend/cpu/cpu_ops.h"

#include <cmath>

namespace ekv {

void embed(const CpuContext& cpu, const Tensor& embedding, std::span<const TokenId> tokens, int hidden,
           float* x) {
  for_each_row(cpu, int(tokens.size()), [&](int row) {
    to_float(embedding, int64_t(tokens[row]) * hidden, {x + int64_t(row) * hidden, size_t(hidden)});
  });
}

void rms_norm_rows(const CpuContext& cpu, const float* x, std::span<const float> weight, float eps, int rows,
                   float* y) {
  const int n = int(weight.size());
  for_each_row(cpu, rows, [&](int row) {
    cpu.kernels.rms_norm(x + int64_t(row) * n, weight.data(), y + int64_t(row) * n, n, eps);
  });
}

void add_rms_norm_rows(const CpuContext& cpu, const float* delta, int64_t ld_delta,
                       std::span<const float> weight, float eps, int rows, float* x, float* y) {
  const int n = int(weight.size());
  for_each_row(cpu, rows, [&](int row) {
    float* sum = x + int64_t(row) * n;
    cpu.kernels.add(delta + row * ld_delta, sum, n);
    cpu.kernels.rms_norm(sum, weight.data(), y + int64_t(row) * n, n, eps);
  });
}

void silu_mul_rows(const CpuContext& cpu, const float* gate_up, int64_t ld, int rows, int n, float* y) {
  for_each_row(cpu, rows, [&](int row) {
    const float* gate = gate_up + row * ld;
    cpu.kernels.silu_mul(gate, gate + n, y + int64_t(row) * n, n);
  });
}

void RopeTable::set_positions(const CpuContext& cpu, std::span<const int32_t> positions) {
  cosine_.resize(positions.size() * inverse_.size());
  sine_.resize(cosine_.size());
  for_each_row(cpu, int(positions.size()), [&](int row) {
    for (int i = 0; i < half(); ++i) {
      const double angle = double(positions[row]) * double(inverse_[i]);
      cosine_[size_t(row) * half() + i] = float(std::cos(angle));
      sine_[size_t(row) * half() + i] = float(std::sin(angle));
    }
  });
}

}  // namespace ekv
