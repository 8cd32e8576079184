#pragma once
// gemm_library.h -- what the benchmarks of products share: the products of Llama-3.1-8B, their weights, and
// cuBLASLt's products.

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "tests/support/device_array.h"

namespace ekv::bench {

constexpr size_t kPoolBytes = size_t(1536) << 20, kWorkspaceBytes = size_t(32) << 20;

struct Shape {
  const char* name;
  int outputs, inputs;
  bool fp32_out = false;
  size_t weight_bytes() const { return size_t(outputs) * inputs * 2; }
  double bytes(int rows) const {
    return double(weight_bytes()) + rows * (2.0 * inputs + (fp32_out ? 4.0 : 2.0) * outputs);
  }
};
constexpr int kHidden = 4096, kWidth = 14336;  // of Llama-3.1-8B: of a hidden state, of gate or up
constexpr Shape kLlamaLayer[] = {
    {"qkv", 6144, kHidden}, {"o", kHidden, 4096}, {"gate_up", 2 * kWidth, kHidden}, {"down", kHidden, kWidth}};
inline bool is_gated(const Shape& s) { return s.outputs == 2 * kWidth; }

// The i-th weights of a rotation through a pool of kPoolBytes.
inline const uint16_t* weights(const test::DeviceArray<uint16_t>& pool, const Shape& s, int i) {
  return pool.data() + size_t(i) * s.weight_bytes() % (kPoolBytes - s.weight_bytes()) / 256 * 128;
}

inline void blas_check(cublasStatus_t status) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  std::fprintf(stderr, "cuBLASLt: %s\n", cublasLtGetStatusString(status));
  std::exit(1);
}

// y = x W^T by one of the library's algorithms. Counts by columns, so W is transposed and y^T = W x^T.
class Library {
 public:
  Library(const Shape& s, int rows, void* workspace) : workspace_(workspace) {
    const cublasOperation_t transposed = CUBLAS_OP_T;
    blas_check(cublasLtCreate(&handle_));
    blas_check(cublasLtMatmulDescCreate(&desc_, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    blas_check(
        cublasLtMatmulDescSetAttribute(desc_, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed));
    blas_check(cublasLtMatrixLayoutCreate(&w_, CUDA_R_16F, s.inputs, s.outputs, s.inputs));
    blas_check(cublasLtMatrixLayoutCreate(&x_, CUDA_R_16F, s.inputs, rows, s.inputs));
    blas_check(
        cublasLtMatrixLayoutCreate(&y_, s.fp32_out ? CUDA_R_32F : CUDA_R_16F, s.outputs, rows, s.outputs));
    cublasLtMatmulPreference_t preference;
    blas_check(cublasLtMatmulPreferenceCreate(&preference));
    blas_check(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                    &kWorkspaceBytes, sizeof kWorkspaceBytes));
    algorithms_.resize(16);
    int count = 0;
    blas_check(cublasLtMatmulAlgoGetHeuristic(handle_, desc_, w_, x_, y_, y_, preference,
                                              int(algorithms_.size()), algorithms_.data(), &count));
    algorithms_.resize(count);
    blas_check(cublasLtMatmulPreferenceDestroy(preference));
  }
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;
  ~Library() {
    cublasLtMatrixLayoutDestroy(w_), cublasLtMatrixLayoutDestroy(x_), cublasLtMatrixLayoutDestroy(y_);
    cublasLtMatmulDescDestroy(desc_);
    cublasLtDestroy(handle_);
  }

  int algorithms() const { return int(algorithms_.size()); }
  // `add`: to y.
  void multiply(int algorithm, const void* w, const void* x, void* y, cudaStream_t stream,
                bool add = false) const {
    const float one = 1, beta = add ? 1 : 0;
    blas_check(cublasLtMatmul(handle_, desc_, &one, w, w_, x, x_, &beta, y, y_, y, y_,
                              &algorithms_[algorithm].algo, workspace_, kWorkspaceBytes, stream));
  }

 private:
  cublasLtHandle_t handle_;
  cublasLtMatmulDesc_t desc_;
  cublasLtMatrixLayout_t w_, x_, y_;
  std::vector<cublasLtMatmulHeuristicResult_t> algorithms_;
  void* workspace_;
};

}  // namespace ekv::bench
