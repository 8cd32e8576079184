#pragma once
// cpu_gemm.h -- weight matrices in panels, and y = x W^T for any number of rows with the same bits per row.
//
// Why not oneDNN (2.6.3 in Debian 12), measured with 2 threads of an EPYC with AVX-512 and bf16 instructions:
//   rows    its bf16 and fp32 kernels for AVX-512 gave a row the same bits for 1..70, 128, 256, 512 and 1,024
//           rows; on machines below that (gemm:jit) one row differs from the same row among others
//   types   it has no fp16 matrix product on CPUs, and the default model's fp16 weights do not fit bf16 (71 %
//   of
//           them would be rounded): they would have to be widened to fp32, and decode, which is bound by
//           reading weights, would take twice as long
//   speed   its fp32 kernels reach 200 to 220 GFLOP/s on these shapes; bf16 reaches 430, but activations split
//   in
//           two bf16 halves to keep their precision need it twice
// So: weights stay in their type and are widened in registers, sums are fp32 in one order on every machine.
// bench/cpu_bench.cpp measures this against oneDNN's fp32 product in the same run.

#include <memory>
#include <span>

#include "backend/cpu/cpu_kernels.h"
#include "backend/cpu/cpu_threads.h"

namespace ekv {

// One or more matrices [outputs, inputs] stacked by outputs, copied as [panel][input][kPanelCols]. Matrices of
// different types are widened to float.
class PackedMatrix {
 public:
  PackedMatrix() = default;
  // Every matrix has `inputs` columns.
  PackedMatrix(std::span<const Tensor* const> matrices, int inputs, CpuThreads& threads);

  int inputs() const { return inputs_; }
  int outputs() const { return outputs_; }
  int padded_outputs() const { return panels_ * kPanelCols; }  // row length of y; the padding is written with 0
  size_t bytes() const { return size_t(panels_) * panel_bytes(); }
  DType type() const { return type_; }
  int panels() const { return panels_; }
  const std::byte* panel(int index) const { return data_.get() + size_t(index) * panel_bytes(); }

 private:
  struct Free {
    void operator()(std::byte* data) const;
  };
  size_t panel_bytes() const { return size_t(inputs_) * kPanelCols * dtype_bytes(type_); }
  void pack_panel(std::span<const Tensor* const> matrices, int panel);

  DType type_ = DType::f32;
  int inputs_ = 0, outputs_ = 0, panels_ = 0;
  std::unique_ptr<std::byte[], Free> data_;
};

// y[r][j] = sum over i of x[r][i] * w[j][i], i ascending, fp32. x is [rows][ldx], y is [rows][ldy] with ldy >=
// w.padded_outputs().
void multiply(const CpuKernels& kernels, CpuThreads& threads, const PackedMatrix& w, const float* x,
              int64_t ldx, int rows, float* y, int64_t ldy);

}  // namespace ekv
