#pragma once
// cuda_gemm.h -- y = x W^T for the few matrices of a model: fp16 or bf16 in, fp32 sums, the same or fp32 out.
//
// A form is a product with a number of rows; a candidate computes a form: an algorithm of cuBLASLt, the kernel
// for few rows with some split, or the one for many rows. What is made of the product belongs to the form: the
// kernels for few and many rows activate a gated product themselves, that for many and cuBLASLt add one to the
// residual stream; what a kernel does not do is left to one after it. What is timed is always all of it. The
// number of rows is rounded up to a bucket, so that a product has few forms. All forms are set up at the start,
// each with an algorithm; a call looks its form up and allocates nothing. The rows of the padding are computed
// from whatever the buffer holds and mean nothing; rows do not mix.

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "backend/cuda/row_buckets.h"
#include "elastickv/base.h"
#include "kernels/layer_ops.h"

namespace ekv {

// What is made of a product.
enum class After : uint8_t {
  nothing,     // y: multiply()
  activation,  // the activation of y, W is [gate, up][outputs / 2][inputs]: multiply_gated()
  norm,        // y added to the residual stream, and the norm of that: multiply_normed()
};

// A matrix [outputs][inputs], row-major, and the widest batch that it is used with.
struct GemmShape {
  int outputs = 0, inputs = 0;
  int max_rows = 0;       // x and y have room for row_bucket(max_rows) rows, which a padded batch may have
  bool fp32_out = false;  // y is fp32, else of `element`
  int out_stride = 0;     // elements between rows of y, at least `outputs`
  After after = After::nothing;     // else out_stride is `outputs`, and y of `element`
  Element element = Element::fp16;  // or bf16: of W and x, and of what is made of the product
};

// What a shape is timed with: matrices that together exceed the L2, taken in turn as the layers of a step do,
// and x, y and what is made of y, with room for row_bucket(max_rows) rows. All but x is overwritten.
struct GemmOperands {
  std::vector<const void*> weights{};
  const void* x = nullptr;
  void* y = nullptr;
  void* activated = nullptr;  // After::activation
  RmsNormArgs norm{};         // After::norm, as for multiply_normed()
  // Enqueues the kernel that a step has ahead of the product with `w`, which makes x; empty where there is
  // none, or none of this length. It is timed with the product, so that this is a link of a chain: what a
  // candidate reads while the kernel ahead still runs, and how soon the one after it can begin, is part of what
  // the step gets.
  std::function<void(const void* w, int rows, cudaStream_t stream)> ahead{};
};
struct GemmTuning {
  std::string cache_file;  // empty: none
  double limit_s = 20;     // what is not reached by then keeps cuBLASLt's first choice
};

class CudaGemm {
 public:
  // Sets up every form of every shape. Errors: cuBLASLt has no algorithm for one.
  static Result<std::unique_ptr<CudaGemm>> make(std::span<const GemmShape> shapes);
  virtual ~CudaGemm() = default;

  // Takes the fastest candidate of every form of a step of decodes, and of some larger ones, as
  // gemm_tuner.h counts their times: from the cache file, else by timing them, which the file then gets.
  // `operands` in the order of the shapes. Once, before the first step; `stream` has nothing to do. Numbers of
  // rows that have no turn take the kernel for many rows where both neighbours did.
  virtual void tune(std::span<const GemmOperands> operands, const GemmTuning& tuning, cudaStream_t stream) = 0;

  // Computes every form once, and what is made of it: the code of a kernel is loaded at its first launch, which
  // waits for all work under way. `operands` as in tune(), after it. Enqueues on `stream`.
  virtual void load(std::span<const GemmOperands> operands, cudaStream_t stream) = 0;

  // y[r][o] = sum_i x[r][i] w[o][i] for the first `rows` rows; `shape` is an index into the shapes of make().
  // Enqueues on `stream`. Alias: none. Pointers are aligned to 256 bytes.
  virtual void multiply(int shape, const void* w, const void* x, void* y, int rows, cudaStream_t stream) = 0;

  // activated[r][o] = g / (1 + exp(-g)) * u with g = y[r][o] and u = y[r][outputs / 2 + o], both rounded to
  // GemmShape::element. `activated` has [row_bucket(rows)][outputs / 2] elements. y is room for the product,
  // which may or may not be written.
  virtual void multiply_gated(int shape, const void* w, const void* x, void* y, void* activated, int rows,
                              cudaStream_t stream) = 0;

  // norm.residual += the product, which may or may not be rounded before, and norm.out = the norm of that, as
  // launch_rms_norm() has it; norm.x and num_rows are not looked at. norm.residual has
  // [row_bucket(rows)][outputs] elements, and those behind `rows` rows mean nothing afterwards. y is room for
  // the product, which may or may not be written.
  virtual void multiply_normed(int shape, const void* w, const void* x, void* y, const RmsNormArgs& norm,
                               int rows, cudaStream_t stream) = 0;
};

// Device memory that a CudaGemm takes for itself.
constexpr size_t kGemmWorkspaceBytes = size_t(64) << 20;

}  // namespace ekv
