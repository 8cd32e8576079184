#include "backend/cuda/cuda_gemm.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "backend/cuda/cublas_handles.h"
#include "backend/cuda/cuda_raii.h"
#include "backend/cuda/cuda_sizes.h"
#include "backend/cuda/gemm_cache.h"
#include "backend/cuda/gemm_tuner.h"
#include "backend/cuda/launch_timing.h"
#include "kernels/skinny_gemm.h"
#include "kernels/tile_gemm.h"

namespace ekv {
namespace {

// One matrix with one bucket of rows.
struct Form {
  GemmShape shape;
  int rows = 0;
  Layout w, x, y;
  GemmChoice chosen;
  bool timed = false;  // now, or when the file was written: `chosen` is the fastest

  GemmKey key() const {
    return {.outputs = shape.outputs,
            .inputs = shape.inputs,
            .rows = rows,
            .out_stride = shape.out_stride,
            .out_bits = shape.fp32_out ? 32 : 16,
            .after = int(shape.after),
            .element = shape.element};
  }
};

// Where one product reads and writes.
struct Places {
  const void *w = nullptr, *x = nullptr;
  void* y = nullptr;
  int rows = 0;  // without padding
  void* activated = nullptr;
  RmsNormArgs norm{};
};

cublasLtMatmulAlgo_t algorithm_of(const GemmChoice& choice) {
  cublasLtMatmulAlgo_t algorithm{};
  static_assert(sizeof algorithm.data == sizeof choice.algorithm);
  std::memcpy(algorithm.data, choice.algorithm.data(), sizeof algorithm.data);
  return algorithm;
}

GemmChoice choice_of(const cublasLtMatmulAlgo_t& algorithm) {
  GemmChoice choice;
  std::memcpy(choice.algorithm.data(), algorithm.data, sizeof algorithm.data);
  return choice;
}

// Whether the kernel for few rows has a gated form with its activation.
bool skinny_activates(const Form& form) {
  return form.shape.after == After::activation && find_skinny_gated(form.rows);
}
std::vector<int> skinny_splits(const Form& form) {
  const GemmShape& s = form.shape;
  return skinny_activates(form) ? find_skinny(form.rows, s.outputs / 2, s.inputs, true)
                                : find_skinny(form.rows, s.outputs, s.inputs);
}

// Below, a block of 256 rows would be more padding than product.
constexpr int kLeastTileRows = 128;

// Columns of what the kernel for many rows writes.
int tile_outputs(const GemmShape& s) { return s.after == After::activation ? s.outputs / 2 : s.outputs; }
bool has_tile(const Form& form) {
  const GemmShape& s = form.shape;
  return form.rows >= kLeastTileRows && !s.fp32_out && s.out_stride == s.outputs &&
         has_tile_gemm(tile_outputs(s), s.inputs);
}

// Of the n-th launch, which takes the matrices in turn.
Places places(const GemmOperands& o, int n, int rows) {
  return {o.weights.at(size_t(n) % o.weights.size()), o.x, o.y, rows, o.activated, o.norm};
}

int turn_of(const Form& form) { return tuning_turn(form.rows, form.shape.max_rows); }

// What a choice is valid for.
std::string device_name() {
  int device = 0, driver = 0;
  cudaDeviceProp properties{};
  cuda_check(cudaGetDevice(&device));
  cuda_check(cudaGetDeviceProperties(&properties, device));
  cuda_check(cudaDriverGetVersion(&driver));
  return fmt::format("{}, driver {}, cuBLASLt {}", properties.name, driver, cublasLtGetVersion());
}

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
      Form& form = forms.emplace_back(make_form(shape, rows));
      const std::vector<GemmChoice> first = algorithms(form, 1);
      if (first.empty())
        return Error{Error::unsupported,
                     fmt::format("cuBLASLt has no product of {} rows with a matrix of {} x {} on this device",
                                 rows, shape.outputs, shape.inputs),
                     "device"};
      form.chosen = first[0];
      if (rows >= shape.max_rows) return std::nullopt;
    }
  }

  void multiply(int shape, const void* w, const void* x, void* y, int rows, cudaStream_t stream) override {
    run(shape, After::nothing, {.w = w, .x = x, .y = y, .rows = rows}, stream);
  }
  void multiply_gated(int shape, const void* w, const void* x, void* y, void* activated, int rows,
                      cudaStream_t stream) override {
    run(shape, After::activation, {.w = w, .x = x, .y = y, .rows = rows, .activated = activated}, stream);
  }
  void multiply_normed(int shape, const void* w, const void* x, void* y, const RmsNormArgs& norm, int rows,
                       cudaStream_t stream) override {
    run(shape, After::norm, {.w = w, .x = x, .y = y, .rows = rows, .norm = norm}, stream);
  }

  void tune(std::span<const GemmOperands> operands, const GemmTuning& tuning, cudaStream_t stream) override;

  void load(std::span<const GemmOperands> operands, cudaStream_t stream) override {
    EKV_CHECK(operands.size() == forms_.size(), "operands of another model");
    for (size_t shape = 0; shape < forms_.size(); ++shape) {
      for (const Form& form : forms_[shape])
        blas_check(launch(form, form.chosen, places(operands[shape], 0, form.rows), stream));
    }
  }

 private:
  // Enough to find another kind of kernel and other split-Ks; more are variants of the same.
  static constexpr int kCandidates = 24;
  static constexpr int kLaunches = 16;  // that a timing has at most; 0.5 GB of the smallest matrices of an 8B

  static Preference make_preference() {
    cublasLtMatmulPreference_t raw = nullptr;
    blas_check(cublasLtMatmulPreferenceCreate(&raw));
    Preference preference(raw);
    const size_t bytes = kGemmWorkspaceBytes;
    // Sums of a split K in fp32, in a fixed order: the others round them, or add in the order of arrival.
    const uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    blas_check(cublasLtMatmulPreferenceSetAttribute(raw, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes,
                                                    sizeof bytes));
    blas_check(cublasLtMatmulPreferenceSetAttribute(raw, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes,
                                                    sizeof schemes));
    return preference;
  }

  static Form make_form(const GemmShape& s, int rows) {
    const cudaDataType_t type = s.element == Element::bf16 ? CUDA_R_16BF : CUDA_R_16F;
    return {.shape = s,
            .rows = rows,
            .w = make_layout(type, s.inputs, s.outputs, s.inputs),
            .x = make_layout(type, s.inputs, rows, s.inputs),
            .y = make_layout(s.fp32_out ? CUDA_R_32F : type, s.outputs, rows, s.out_stride),
            .chosen = {}};
  }

  // Those that cuBLASLt proposes, its first choice first.
  std::vector<GemmChoice> algorithms(const Form& form, int at_most) {
    std::vector<cublasLtMatmulHeuristicResult_t> found(static_cast<size_t>(at_most));
    int count = 0;
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(handle_.get(), desc_.get(), form.w.get(), form.x.get(), form.y.get(),
                                       form.y.get(), preference_.get(), at_most, found.data(), &count);
    if (status != CUBLAS_STATUS_NOT_SUPPORTED) blas_check(status);
    std::vector<GemmChoice> choices;
    for (const auto& result : std::span(found).first(size_t(count)))
      if (result.state == CUBLAS_STATUS_SUCCESS) choices.push_back(choice_of(result.algo));
    return choices;
  }

  void run(int shape, After after, const Places& p, cudaStream_t stream) {
    const Form& form = find(forms_.at(size_t(shape)), row_bucket(p.rows));
    EKV_CHECK(form.shape.after == after, "something else is made of this product");
    blas_check(launch(form, form.chosen, p, stream));
  }

  // The product and what is made of it.
  cublasStatus_t launch(const Form& form, const GemmChoice& choice, const Places& p, cudaStream_t stream) {
    const bool activates = form.shape.after == After::activation &&
                           (choice.tile || (choice.skinny_split > 0 && skinny_activates(form)));
    const cublasStatus_t status = choice.tile               ? launch_tile(form, p, stream)
                                  : choice.skinny_split > 0 ? launch_skinny(form, choice, activates, p, stream)
                                                            : launch_library(form, choice, p, stream);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    if (form.shape.after == After::activation && !activates)
      launch_silu_mul({.gate_up = p.y,
                       .out = p.activated,
                       .num_rows = p.rows,
                       .width = form.shape.outputs / 2,
                       .element = form.shape.element},
                      stream);
    if (form.shape.after == After::norm) launch_norm(choice.skinny_split == 0, p, stream);
    return status;
  }

  static void launch_norm(bool added, const Places& p, cudaStream_t stream) {
    RmsNormArgs norm = p.norm;
    norm.num_rows = p.rows, norm.x = p.y;
    if (added) norm.x = std::exchange(norm.residual, nullptr);
    launch_rms_norm(norm, stream);
  }

  // Where one is added to the residual stream, that is C and D: the norm has half of its bytes to move then.
  cublasStatus_t launch_library(const Form& form, const GemmChoice& choice, const Places& p,
                                cudaStream_t stream) {
    const bool adds = form.shape.after == After::norm;
    const float one = 1, beta = adds ? 1 : 0;
    void* const y = adds ? p.norm.residual : p.y;
    const cublasLtMatmulAlgo_t algorithm = algorithm_of(choice);
    return cublasLtMatmul(handle_.get(), desc_.get(), &one, p.w, form.w.get(), p.x, form.x.get(), &beta, y,
                          form.y.get(), y, form.y.get(), &algorithm, workspace_.data(), workspace_.bytes(),
                          stream);
  }

  static cublasStatus_t launch_tile(const Form& form, const Places& p, cudaStream_t stream) {
    const After after = form.shape.after;
    launch_tile_gemm({.x = p.x,
                      .w = p.w,
                      .out = after == After::activation ? p.activated
                             : after == After::norm     ? p.norm.residual
                                                        : p.y,
                      .rows = p.rows,
                      .outputs = tile_outputs(form.shape),
                      .inputs = form.shape.inputs,
                      .gated = after == After::activation,
                      .add = after == After::norm,
                      .element = form.shape.element},
                     stream);
    return CUBLAS_STATUS_SUCCESS;
  }

  static cublasStatus_t launch_skinny(const Form& form, const GemmChoice& choice, bool activates,
                                      const Places& p, cudaStream_t stream) {
    launch_skinny_gemm({.w = p.w,
                        .x = p.x,
                        .y = activates ? p.activated : p.y,
                        .rows = form.rows,
                        .outputs = activates ? form.shape.outputs / 2 : form.shape.outputs,
                        .inputs = form.shape.inputs,
                        .out_stride = activates ? form.shape.outputs / 2 : form.shape.out_stride,
                        .fp32_out = form.shape.fp32_out,
                        .gated = activates,
                        .element = form.shape.element,
                        .split = choice.skinny_split},
                       stream);
    return CUBLAS_STATUS_SUCCESS;
  }

  // Whether a choice from a file runs the form.
  bool runs(const Form& form, const GemmChoice& choice) {
    if (choice.tile) return has_tile(form);
    if (choice.skinny_split > 0) return std::ranges::count(skinny_splits(form), choice.skinny_split) > 0;
    const cublasLtMatmulAlgo_t algorithm = algorithm_of(choice);
    cublasLtMatmulHeuristicResult_t result{};
    return cublasLtMatmulAlgoCheck(handle_.get(), desc_.get(), form.w.get(), form.x.get(), form.y.get(),
                                   form.y.get(), &algorithm, &result) == CUBLAS_STATUS_SUCCESS &&
           result.workspaceSize <= kGemmWorkspaceBytes;
  }

  // cuBLASLt's first choice first.
  std::vector<GemmChoice> candidates(const Form& form) {
    std::vector<GemmChoice> all = algorithms(form, kCandidates);
    for (const int split : skinny_splits(form)) all.push_back({.skinny_split = split});
    if (has_tile(form)) all.push_back({.tile = true});
    return all;
  }

  GemmChoice fastest(const Form& form, const GemmOperands& operands, cudaStream_t stream) {
    const std::vector<GemmChoice> choices = candidates(form);
    const TuningEffort& effort = tuning_effort(form.rows);
    const bool few = form.rows <= kFewTuningRows;
    const int launches = few ? std::min(kLaunches, std::max(2, int(operands.weights.size()))) : 2;
    double fastest_us = std::numeric_limits<double>::infinity();
    const auto time_us = [&](size_t i, bool exact) {
      const auto one = [&](int n) {
        const Places p = places(operands, n, form.rows);
        if (operands.ahead) operands.ahead(p.w, form.rows, stream);
        return launch(form, choices[i], p, stream) == CUBLAS_STATUS_SUCCESS;
      };
      const int replays = exact ? effort.replays(launches * fastest_us) : 2;
      const double us = time_launches(one, launches, replays, stream);
      fastest_us = std::min(fastest_us, us);
      return with_power_credit(us, form.rows, choices[i].tile && form.shape.after == After::activation);
    };
    if (choices.empty()) return form.chosen;
    return choices[choose_candidate(choices.size(), effort, time_us)];
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

void follow_neighbours(std::vector<Form>& forms) {
  std::vector<TileForm> known;
  for (const Form& form : forms) known.push_back({form.timed, has_tile(form), form.chosen.tile});
  for (const size_t i : tile_like_neighbours(known)) forms[i].chosen = {.tile = true};
}

struct ToTune {
  int turn = 0;
  size_t shape = 0;
  Form* form = nullptr;
};

void CublasGemm::tune(std::span<const GemmOperands> operands, const GemmTuning& tuning, cudaStream_t stream) {
  const auto start = std::chrono::steady_clock::now();
  const auto seconds = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  GemmCache cache = load_gemm_cache(tuning.cache_file);
  std::map<GemmKey, GemmChoice>& known = cache.devices[device_name()];
  std::vector<ToTune> left;
  size_t from_file = 0, tuned = 0;
  for (size_t shape = 0; shape < forms_.size(); ++shape)
    for (Form& form : forms_[shape]) {
      const auto at = known.find(form.key());
      const bool usable = at != known.end() && runs(form, at->second);
      if (usable) form.chosen = at->second, form.timed = true, ++from_file;
      if (!usable && turn_of(form) >= 0) left.push_back({turn_of(form), shape, &form});
    }
  std::ranges::stable_sort(left, {}, &ToTune::turn);
  const auto save = [&] {
    if (tuning.cache_file.empty()) return;
    if (Status unsaved = save_gemm_cache(tuning.cache_file, cache)) log_warn(unsaved->message);
  };
  double next_report_s = 2;
  for (const ToTune& next : left) {
    if (seconds() > tuning.limit_s) break;
    known[next.form->key()] = next.form->chosen = fastest(*next.form, operands[next.shape], stream);
    next.form->timed = true;
    if (++tuned; seconds() < next_report_s) continue;
    save();  // a start that is stopped here leaves what it has found to the next one
    log_info(fmt::format("matrix products: {} of {} forms tuned", tuned, left.size()));
    next_report_s = seconds() + 2;
  }
  for (std::vector<Form>& forms : forms_) follow_neighbours(forms);
  log_info(fmt::format("matrix products: {} forms tuned in {:.1f} s, {} from {}", tuned, seconds(), from_file,
                       tuning.cache_file.empty() ? "no file" : tuning.cache_file));
  if (tuned < left.size())
    log_warn(fmt::format(
        "matrix products: {} of {} forms were not reached in {:.0f} s and stay as cuBLASLt chose them; the "
        "next start goes on with them if --gemm-cache names a file",
        left.size() - tuned, left.size(), tuning.limit_s));
  if (tuned > 0) save();
}

}  // namespace

Result<std::unique_ptr<CudaGemm>> CudaGemm::make(std::span<const GemmShape> shapes) {
  auto gemm = std::make_unique<CublasGemm>();
  for (const GemmShape& shape : shapes)
    if (Status missing = gemm->add(shape)) return *std::move(missing);
  return std::unique_ptr<CudaGemm>(std::move(gemm));
}

}  // namespace ekv
