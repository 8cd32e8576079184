#include "backend/cuda/cuda_gemm.h"

#include <cublasLt.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <vector>

#include "backend/cuda/cuda_raii.h"

namespace ekv {
namespace {

// A failed call of cuBLASLt is a lost device: what can be expected is asked for at the start.
void blas_check(cublasStatus_t status, std::source_location at = std::source_location::current()) {
  if (status == CUBLAS_STATUS_SUCCESS) [[likely]]
    return;
  log_error(fmt::format("cuBLASLt: {}", cublasLtGetStatusString(status)));
  cuda_check(cudaGetLastError(), at);
  throw CudaError(status == CUBLAS_STATUS_ALLOC_FAILED ? cudaErrorMemoryAllocation : cudaErrorUnknown, at);
}

cudaError_t as_cuda(cublasStatus_t status) {
  return status == CUBLAS_STATUS_SUCCESS ? cudaSuccess : cudaErrorUnknown;
}
cudaError_t destroy(cublasLtHandle_t h) { return as_cuda(cublasLtDestroy(h)); }
cudaError_t destroy_desc(cublasLtMatmulDesc_t d) { return as_cuda(cublasLtMatmulDescDestroy(d)); }
cudaError_t destroy_layout(cublasLtMatrixLayout_t l) { return as_cuda(cublasLtMatrixLayoutDestroy(l)); }
cudaError_t destroy_preference(cublasLtMatmulPreference_t p) {
  return as_cuda(cublasLtMatmulPreferenceDestroy(p));
}
using BlasHandle = Handle<cublasLtHandle_t, destroy>;
using MatmulDesc = Handle<cublasLtMatmulDesc_t, destroy_desc>;
using Layout = Handle<cublasLtMatrixLayout_t, destroy_layout>;
using Preference = Handle<cublasLtMatmulPreference_t, destroy_preference>;

Layout make_layout(cudaDataType_t type, int rows, int columns, int stride) {
  cublasLtMatrixLayout_t raw = nullptr;
  blas_check(cublasLtMatrixLayoutCreate(&raw, type, uint64_t(rows), uint64_t(columns), stride));
  return Layout(raw);
}

// cuBLASLt counts by columns: a row-major [r][c] is its c x r. So y^T = W x^T, with W transposed once more.
MatmulDesc make_desc() {
  cublasLtMatmulDesc_t raw = nullptr;
  blas_check(cublasLtMatmulDescCreate(&raw, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  MatmulDesc desc(raw);
  const cublasOperation_t transposed = CUBLAS_OP_T;
  blas_check(cublasLtMatmulDescSetAttribute(raw, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed));
  return desc;
}

// One matrix with one bucket of rows.
struct Form {
  int rows = 0;
  Layout w, x, y;
  // The algorithms that cuBLASLt proposes, its first choice first. Tuning will time them and move `chosen`.
  std::vector<cublasLtMatmulHeuristicResult_t> candidates;
  size_t chosen = 0;
};

class CublasGemm : public CudaGemm {
 public:
  CublasGemm() : workspace_(kGemmWorkspaceBytes), desc_(make_desc()), preference_(make_preference()) {
    cublasLtHandle_t raw = nullptr;
    blas_check(cublasLtCreate(&raw));
    handle_ = BlasHandle(raw);
  }

  Status add(const GemmShape& shape) {
    std::vector<Form>& forms = forms_.emplace_back();
    for (int rows = 1;; rows = row_bucket(rows + 1)) {
      forms.push_back(make_form(shape, rows));
      if (forms.back().candidates.empty())
        return Error{Error::unsupported,
                     fmt::format("cuBLASLt has no product of {} rows with a matrix of {} x {} on this device",
                                 rows, shape.outputs, shape.inputs),
                     "device"};
      if (rows >= shape.max_rows) return std::nullopt;
    }
  }

  void multiply(int shape, const void* w, const void* x, void* y, int rows, cudaStream_t stream) override {
    const Form& form = find(forms_.at(size_t(shape)), row_bucket(rows));
    const float one = 1, zero = 0;
    blas_check(cublasLtMatmul(handle_.get(), desc_.get(), &one, w, form.w.get(), x, form.x.get(), &zero, y,
                              form.y.get(), y, form.y.get(), &form.candidates[form.chosen].algo,
                              workspace_.data(), workspace_.bytes(), stream));
  }

 private:
  static constexpr int kCandidates = 8;

  static Preference make_preference() {
    cublasLtMatmulPreference_t raw = nullptr;
    blas_check(cublasLtMatmulPreferenceCreate(&raw));
    Preference preference(raw);
    const size_t bytes = kGemmWorkspaceBytes;
    blas_check(cublasLtMatmulPreferenceSetAttribute(raw, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes,
                                                    sizeof bytes));
    return preference;
  }

  Form make_form(const GemmShape& s, int rows) {
    Form form{.rows = rows,
              .w = make_layout(CUDA_R_16F, s.inputs, s.outputs, s.inputs),
              .x = make_layout(CUDA_R_16F, s.inputs, rows, s.inputs),
              .y = make_layout(s.fp32_out ? CUDA_R_32F : CUDA_R_16F, s.outputs, rows, s.out_stride)};
    std::array<cublasLtMatmulHeuristicResult_t, kCandidates> found{};
    int count = 0;
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(handle_.get(), desc_.get(), form.w.get(), form.x.get(), form.y.get(),
                                       form.y.get(), preference_.get(), kCandidates, found.data(), &count);
    if (status != CUBLAS_STATUS_NOT_SUPPORTED) blas_check(status);
    for (const auto& result : std::span(found).first(size_t(count)))
      if (result.state == CUBLAS_STATUS_SUCCESS) form.candidates.push_back(result);
    return form;
  }

  static const Form& find(const std::vector<Form>& forms, int rows) {
    const auto at = std::ranges::lower_bound(forms, rows, {}, &Form::rows);
    EKV_CHECK(at != forms.end() && at->rows == rows, "more rows than the product was set up for");
    return *at;
  }

  DeviceBuffer<std::byte> workspace_;
  MatmulDesc desc_;
  Preference preference_;
  BlasHandle handle_;
  std::vector<std::vector<Form>> forms_;  // [shapes], ascending in rows
};

}  // namespace

Result<std::unique_ptr<CudaGemm>> CudaGemm::make(std::span<const GemmShape> shapes) {
  auto gemm = std::make_unique<CublasGemm>();
  for (const GemmShape& shape : shapes)
    if (Status missing = gemm->add(shape)) return *std::move(missing);
  return std::unique_ptr<CudaGemm>(std::move(gemm));
}

}  // namespace ekv
