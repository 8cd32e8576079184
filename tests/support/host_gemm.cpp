// host_gemm.cpp -- CudaGemm with the matrix product of the CPU backend: fp16 in, fp32 sums, one rounding at the
// end. A gated product leaves poison where the device may or may not leave gate and up.

#include <algorithm>
#include <cmath>
#include <map>
#include <vector>

#include "backend/cpu/cpu_gemm.h"
#include "backend/cuda/cuda_gemm.h"
#include "tests/support/host_cuda.h"

namespace ekv {
namespace {

class HostGemm : public CudaGemm {
 public:
  explicit HostGemm(std::span<const GemmShape> shapes) : shapes_(shapes.begin(), shapes.end()) {}

  void tune(std::span<const GemmOperands> operands, const GemmTuning&, cudaStream_t) override {
    EKV_CHECK(operands.size() == shapes_.size(), "operands of another model");
  }
  void multiply(int shape, const void* w, const void* x, void* y, int rows, cudaStream_t stream) override {
    const GemmShape& s = shapes_.at(size_t(shape));
    EKV_CHECK(rows >= 1 && rows <= s.max_rows && !s.gated, "rows or shape of another product");
    test::enqueue(stream, [=, this] { multiply_now(s, w, x, y, rows); });
  }
  void multiply_gated(int shape, const void* w, const void* x, void* y, void* activated, int rows,
                      cudaStream_t stream) override {
    const GemmShape& s = shapes_.at(size_t(shape));
    EKV_CHECK(rows >= 1 && rows <= s.max_rows && s.gated, "rows or shape of another product");
    test::enqueue(stream, [=, this] {
      multiply_now(s, w, x, y, rows);
      activate(s, static_cast<uint16_t*>(y), static_cast<uint16_t*>(activated), rows);
    });
  }

 private:
  static constexpr uint16_t kPoison = 0xffff;  // NaN

  void activate(const GemmShape& s, uint16_t* y, uint16_t* activated, int rows) {
    const int width = s.outputs / 2;
    std::vector<float> both(size_t(s.outputs)), out(static_cast<size_t>(width));
    for (int row = 0; row < rows; ++row) {
      uint16_t* from = y + size_t(row) * size_t(s.out_stride);
      kernels_.half_to_float(from, both.data(), s.outputs);
      for (size_t i = 0; i < out.size(); ++i)
        out[i] = both[i] / (1 + std::exp(-both[i])) * both[size_t(width) + i];
      kernels_.float_to_half(out.data(), activated + size_t(row) * size_t(width), width);
      std::fill_n(from, s.outputs, kPoison);
    }
  }

  void multiply_now(const GemmShape& s, const void* w, const void* x, void* y, int rows) {
    const PackedMatrix& matrix = packed(s, w);
    const int64_t ld = matrix.padded_outputs();
    std::vector<float> in(size_t(rows) * size_t(s.inputs)), out(size_t(rows) * size_t(ld));
    kernels_.half_to_float(static_cast<const uint16_t*>(x), in.data(), int(in.size()));
    ekv::multiply(kernels_, threads_, matrix, in.data(), s.inputs, rows, out.data(), ld);
    for (int row = 0; row < rows; ++row) {
      const float* from = out.data() + row * ld;
      const size_t at = size_t(row) * size_t(s.out_stride);
      if (s.fp32_out) std::copy_n(from, s.outputs, static_cast<float*>(y) + at);
      if (!s.fp32_out) kernels_.float_to_half(from, static_cast<uint16_t*>(y) + at, s.outputs);
    }
  }

  // The same weights come in every step.
  const PackedMatrix& packed(const GemmShape& s, const void* w) {
    const auto known = matrices_.find(w);
    if (known != matrices_.end()) return known->second;
    const Tensor tensor{.dtype = DType::f16,
                        .shape = {s.outputs, s.inputs},
                        .data = {static_cast<const std::byte*>(w), size_t(s.outputs) * size_t(s.inputs) * 2}};
    return matrices_.emplace(w, PackedMatrix(std::vector{&tensor}, s.inputs, threads_)).first->second;
  }

  std::vector<GemmShape> shapes_;
  const CpuKernels& kernels_ = best_cpu_kernels();
  CpuThreads threads_{2};
  std::map<const void*, PackedMatrix> matrices_;
};

}  // namespace

Result<std::unique_ptr<CudaGemm>> CudaGemm::make(std::span<const GemmShape> shapes) {
  return std::unique_ptr<CudaGemm>(std::make_unique<HostGemm>(shapes));
}

}  // namespace ekv
