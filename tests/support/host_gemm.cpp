// host_gemm.cpp -- CudaGemm with the matrix product of the CPU backend: fp16 in, fp32 sums, one rounding at the
// end.

#include <algorithm>
#include <map>
#include <string>
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
  // Notes them and computes nothing.
  void load(std::span<const GemmOperands> operands, cudaStream_t) override {
    EKV_CHECK(operands.size() == shapes_.size(), "operands of another model");
    for (size_t shape = 0; shape < shapes_.size(); ++shape)
      for (int rows = 1; rows <= row_bucket(shapes_[shape].max_rows); rows = row_bucket(rows + 1))
        note(int(shape), rows);
  }
  void multiply(int shape, const void* w, const void* x, void* y, int rows, cudaStream_t stream) override {
    const GemmShape& s = shapes_.at(size_t(shape));
    EKV_CHECK(rows >= 1 && rows <= row_bucket(s.max_rows), "more rows than the product was set up for");
    note(shape, rows);
    test::enqueue(stream, [=, this] { multiply_now(s, w, x, y, rows); });
  }

 private:
  static void note(int shape, int rows) {
    test::note_code("product " + std::to_string(shape) + " of " + std::to_string(row_bucket(rows)) + " rows");
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
