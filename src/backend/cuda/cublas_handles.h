#pragma once
// cublas_handles.h -- owners of what cuBLASLt hands out, and the layouts of a product y = x W^T.

#include <cublasLt.h>
#include <fmt/format.h>

#include "backend/cuda/cuda_raii.h"

namespace ekv {

// A failed call of cuBLASLt is a lost device: what can be expected is asked for at the start.
inline void blas_check(cublasStatus_t status, std::source_location at = std::source_location::current()) {
  if (status == CUBLAS_STATUS_SUCCESS) [[likely]]
    return;
  log_error(fmt::format("cuBLASLt: {}", cublasLtGetStatusString(status)));
  cuda_check(cudaGetLastError(), at);
  throw CudaError(status == CUBLAS_STATUS_ALLOC_FAILED ? cudaErrorMemoryAllocation : cudaErrorUnknown, at);
}

inline cudaError_t as_cuda(cublasStatus_t status) {
  return status == CUBLAS_STATUS_SUCCESS ? cudaSuccess : cudaErrorUnknown;
}
inline cudaError_t destroy_handle(cublasLtHandle_t h) { return as_cuda(cublasLtDestroy(h)); }
inline cudaError_t destroy_desc(cublasLtMatmulDesc_t d) { return as_cuda(cublasLtMatmulDescDestroy(d)); }
inline cudaError_t destroy_layout(cublasLtMatrixLayout_t l) { return as_cuda(cublasLtMatrixLayoutDestroy(l)); }
inline cudaError_t destroy_preference(cublasLtMatmulPreference_t p) {
  return as_cuda(cublasLtMatmulPreferenceDestroy(p));
}
using BlasHandle = Handle<cublasLtHandle_t, destroy_handle>;
using MatmulDesc = Handle<cublasLtMatmulDesc_t, destroy_desc>;
using Layout = Handle<cublasLtMatrixLayout_t, destroy_layout>;
using Preference = Handle<cublasLtMatmulPreference_t, destroy_preference>;

inline Layout make_layout(cudaDataType_t type, int rows, int columns, int stride) {
  cublasLtMatrixLayout_t raw = nullptr;
  blas_check(cublasLtMatrixLayoutCreate(&raw, type, uint64_t(rows), uint64_t(columns), stride));
  return Layout(raw);
}

// cuBLASLt counts by columns: a row-major [r][c] is its c x r. So y^T = W x^T, with W transposed once more.
inline MatmulDesc make_desc() {
  cublasLtMatmulDesc_t raw = nullptr;
  blas_check(cublasLtMatmulDescCreate(&raw, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  MatmulDesc desc(raw);
  const cublasOperation_t transposed = CUBLAS_OP_T;
  blas_check(cublasLtMatmulDescSetAttribute(raw, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed));
  return desc;
}

}  // namespace ekv
