// host_gemm.cpp -- CudaGemm with the matrix product of the CPU backend: fp16 or bf16 in, fp32 sums, one
// rounding at the end. A product of which something is made is poison afterwards, where the device may or may
// not leave it, and so is the padding of a residual stream.

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "backend/cpu/cpu_gemm.h"
#include "backend/cuda/cuda_gemm.h"
#include "tests/support/host_cuda.h"
#include "tests/support/number_formats.h"

namespace ekv {
namespace {

class HostGemm : public CudaGemm {
 public:
  explicit HostGemm(std::span<const GemmShape> shapes) : shapes_(shapes.begin(), shapes.end()) {}

  void tune(std::span<const GemmOperands> operands, const GemmTuning&, cudaStream_t) override {
    check(operands);
  }
  // Notes them and computes nothing.
  void load(std::span<const GemmOperands> operands, cudaStream_t) override {
    check(operands);
    for (size_t shape = 0; shape < shapes_.size(); ++shape)
      for (int rows = 1; rows <= row_bucket(shapes_[shape].max_rows); rows = row_bucket(rows + 1))
        note(int(shape), rows);
  }
  void multiply(int shape, const void* w, const void* x, void* y, int rows, cudaStream_t stream) override {
    start(shape, After::nothing, w, x, y, rows, stream);
  }
  void multiply_gated(int shape, const void* w, const void* x, void* y, void* activated, int rows,
                      cudaStream_t stream) override {
    const GemmShape& s = start(shape, After::activation, w, x, y, rows, stream);
    launch_silu_mul({y, activated, rows, s.outputs / 2, s.element}, stream);
    poison(s, y, rows, stream);
  }
  void multiply_normed(int shape, const void* w, const void* x, void* y, const RmsNormArgs& norm, int rows,
                       cudaStream_t stream) override {
    const GemmShape& s = start(shape, After::norm, w, x, y, rows, stream);
    RmsNormArgs args = norm;
    EKV_CHECK(norm.element == s.element, "a norm of another type than the product");
    args.x = y, args.num_rows = rows, asked_ = norm.next.data;
    launch_rms_norm(args, stream);
    poison(s, y, rows, stream);
    uint16_t* const padding = static_cast<uint16_t*>(norm.residual) + size_t(rows) * size_t(s.outputs);
    poison(s, padding, row_bucket(rows) - rows, stream);
  }

 private:
  void check(std::span<const GemmOperands> operands) const {
    EKV_CHECK(operands.size() == shapes_.size(), "operands of another model");
    for (size_t i = 0; i < shapes_.size(); ++i) {
      const GemmOperands& o = operands[i];
      EKV_CHECK(!o.weights.empty() && o.x && o.y, "a product without operands");
      EKV_CHECK((shapes_[i].after == After::activation) == (o.activated != nullptr), "gated, or not");
      EKV_CHECK((shapes_[i].after == After::norm) == (o.norm.residual && o.norm.out), "normed, or not");
    }
  }

  const GemmShape& start(int shape, After after, const void* w, const void* x, void* y, int rows,
                         cudaStream_t stream) {
    const GemmShape& s = shapes_.at(size_t(shape));
    EKV_CHECK(rows >= 1 && rows <= row_bucket(s.max_rows), "more rows than the product was set up for");
    EKV_CHECK(s.after == after, "something else is made of this product");
    if (const void* asked = std::exchange(asked_, nullptr))
      EKV_CHECK(asked == w, "the norm ahead asked for another matrix");
    note(shape, rows);
    test::enqueue(stream, [=, this, &s] { multiply_now(s, w, x, y, rows); });
    return s;
  }
  static void note(int shape, int rows) {
    test::note_code("product " + std::to_string(shape) + " of " + std::to_string(row_bucket(rows)) + " rows");
  }
  static void poison(const GemmShape& s, void* y, int rows, cudaStream_t stream) {
    constexpr int kNan = 0xff;
    const size_t bytes = size_t(rows) * size_t(s.out_stride) * sizeof(uint16_t);
    test::enqueue(stream, [=] { std::memset(y, kNan, bytes); });
  }

  void multiply_now(const GemmShape& s, const void* w, const void* x, void* y, int rows) {
    const PackedMatrix& matrix = packed(s, w);
    const int64_t ld = matrix.padded_outputs();
    std::vector<float> in(size_t(rows) * size_t(s.inputs)), out(size_t(rows) * size_t(ld));
    to_float(s.element, static_cast<const uint16_t*>(x), in);
    ekv::multiply(kernels_, threads_, matrix, in.data(), s.inputs, rows, out.data(), ld);
    for (int row = 0; row < rows; ++row) {
      const float* from = out.data() + row * ld;
      const size_t at = size_t(row) * size_t(s.out_stride);
      if (s.fp32_out) std::copy_n(from, s.outputs, static_cast<float*>(y) + at);
      if (!s.fp32_out) round_to(s.element, {from, size_t(s.outputs)}, static_cast<uint16_t*>(y) + at);
    }
  }

  void to_float(Element element, const uint16_t* x, std::span<float> out) const {
    if (element == Element::fp16) return kernels_.half_to_float(x, out.data(), int(out.size()));
    for (size_t i = 0; i < out.size(); ++i) out[i] = float(test::bf16_value(x[i]));
  }
  void round_to(Element element, std::span<const float> x, uint16_t* out) const {
    if (element == Element::fp16) return kernels_.float_to_half(x.data(), out, int(x.size()));
    for (size_t i = 0; i < x.size(); ++i) out[i] = test::bf16_bits(x[i]);
  }

  // The same weights come in every step.
  const PackedMatrix& packed(const GemmShape& s, const void* w) {
    const auto known = matrices_.find(w);
    if (known != matrices_.end()) return known->second;
    const Tensor tensor{.dtype = s.element == Element::bf16 ? DType::bf16 : DType::f16,
                        .shape = {s.outputs, s.inputs},
                        .data = {static_cast<const std::byte*>(w), size_t(s.outputs) * size_t(s.inputs) * 2}};
    return matrices_.emplace(w, PackedMatrix(std::vector{&tensor}, s.inputs, threads_)).first->second;
  }

  std::vector<GemmShape> shapes_;
  const void* asked_ = nullptr;  // by the norm after the product before
  const CpuKernels& kernels_ = best_cpu_kernels();
  CpuThreads threads_{2};
  std::map<const void*, PackedMatrix> matrices_;
};

}  // namespace

Result<std::unique_ptr<CudaGemm>> CudaGemm::make(std::span<const GemmShape> shapes) {
  return std::unique_ptr<CudaGemm>(std::make_unique<HostGemm>(shapes));
}

}  // namespace ekv
