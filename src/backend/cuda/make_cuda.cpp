// What the rest of the engine sees of CUDA; no_cuda.cpp is the same for a build without.

#include <fmt/format.h>

#include <algorithm>

#include "backend/cuda/cuda_backend.h"
#include "kernels/kv_cache.h"
#include "kernels/layer_ops.h"

namespace ekv {
namespace {

Error out_of_memory(const CudaError& e) {
  if (e.code != cudaErrorMemoryAllocation) return {Error::unavailable, e.what(), "device"};
  return {Error::unavailable,
          fmt::format("{}: the GPU or page-locked memory is full. Lower --gpu-memory-utilization, "
                      "--kv-cache-memory-bytes, --kv-host-bytes, --max-num-batched-tokens or --max-model-len",
                      e.what()),
          "kv-cache-memory-bytes"};
}

Error cannot_use(std::string why) { return {Error::unavailable, why + ", or use --device cpu", "device"}; }

std::string cuda_version(int number) { return fmt::format("{}.{}", number / 1000, number % 1000 / 10); }

// Code for sm_80 runs on all of 8.x. That of sm_90a is for 9.0 alone, and newer devices can translate what was
// made for 8.0.
Error no_code() {
  constexpr int kDevice = 0;
  cudaDeviceProp gpu{};
  cuda_check(cudaGetDeviceProperties(&gpu, kDevice));
  const std::string what =
      fmt::format("this build has no code for {}, compute capability {}.{}", gpu.name, gpu.major, gpu.minor);
  if (gpu.major < 8) return cannot_use(what + ", and none can have it: use a GPU with 8.0 or more");
  const char* architecture = gpu.major == 8 ? "80-real" : gpu.major == 9 ? "90a-real" : "80-virtual";
  return cannot_use(fmt::format("{}: build with -DCMAKE_CUDA_ARCHITECTURES={}", what, architecture));
}

// Without a kernel on one of the paths, or with rows that no kernel reads.
bool lacks_kernels(const ModelConfig& m, const EngineConfig& config) {
  if (!find_prefill(m.head_dim, MatrixUnit::mma)) return true;  // which every device has
  for (const KvPath path : {KvPath::native, KvPath::structured, KvPath::general})
    if ((path == KvPath::native || config.fidelity.makes_base()) &&
        !find_decode(path, config.kv.base_format, m.head_dim, m.heads / m.kv_heads))
      return true;
  return m.hidden % 8 != 0 || m.hidden > kMaxHidden || m.intermediate % 8 != 0 || m.vocab > kMaxVocab;
}

// Of what the libraries and the driver take besides what is counted.
constexpr size_t kDriverBytes = size_t(768) << 20;

}  // namespace

Result<std::unique_ptr<Backend>> make_cuda_backend(const Model& model, const EngineConfig& config,
                                                   const CudaOptions& options) {
  if (Status wrong = check_cuda(model.config(), config)) return *std::move(wrong);
  try {
    Result<std::unique_ptr<CudaBackend>> made = CudaBackend::make(model, config, options);
    if (!made) return made.error();
    return std::unique_ptr<Backend>(*std::move(made));
  } catch (const CudaError& e) {
    return out_of_memory(e);
  }
}

// The runtime has one code for a driver that is too old and for none at all, which is version 0.
Status cuda_fault() {
  int count = 0, driver = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  cudaDriverGetVersion(&driver);
  cudaGetLastError();  // no driver is no failure
  if (driver == 0 || code == cudaErrorNoDevice || (code == cudaSuccess && count == 0))
    return Error{Error::not_found,
                 "this machine shows no GPU, or has no driver for it (see nvidia-smi); use --device cpu",
                 "device"};
  if (code == cudaErrorInsufficientDriver)
    return cannot_use(
        fmt::format("the NVIDIA driver is for CUDA {}, and this build needs {}: install a newer one",
                    cuda_version(driver), cuda_version(CUDART_VERSION)));
  try {
    cuda_check(code);
    if (has_device_code()) return std::nullopt;
    return no_code();
  } catch (const CudaError& e) {
    return cannot_use(fmt::format("the GPU cannot be used: {}; see nvidia-smi", e.what()));
  }
}

Status check_cuda(const ModelConfig& m, const EngineConfig& config) {
  if (lacks_kernels(m, config))
    return Error{
        Error::unsupported,
        fmt::format("there are no kernels for head_dim {} with {} query heads per KV head, rows of {} and "
                    "{} values and {} tokens; serve this model with --device cpu",
                    m.head_dim, m.heads / m.kv_heads, m.hidden, m.intermediate, m.vocab),
        "model"};
  const SchedulerConfig& s = config.scheduler;
  constexpr int kMostSeqs = std::min(kMaxDecodeSeqs, kMaxPrefillSeqs);
  if (s.max_step_seqs > kMostSeqs)
    return Error{Error::invalid_argument, fmt::format("--max-num-seqs is at most {} on a GPU", kMostSeqs),
                 "max-num-seqs"};
  const int64_t heads = m.heads + 2 * m.kv_heads;
  if (row_bucket(s.max_step_tokens) * heads >= kMostKvRowHeads)
    return Error{Error::invalid_argument,
                 fmt::format("--max-num-batched-tokens {} is too many for the kernels with the {} heads of the "
                             "model: lower it to {} or less",
                             s.max_step_tokens, heads, kMostKvRowHeads / heads / 8 * 7),
                 "max-num-batched-tokens"};
  return std::nullopt;
}

Result<size_t> cuda_pool_bytes(const ModelConfig& model, const EngineConfig& config, double utilization) {
  try {
    size_t free = 0, total = 0;
    cuda_check(cudaMemGetInfo(&free, &total));
    int device = 0, num_ctas = 0;
    cuda_check(cudaGetDevice(&device));
    cuda_check(cudaDeviceGetAttribute(&num_ctas, cudaDevAttrMultiProcessorCount, device));
    const size_t fixed = cuda_sizes(model, config, num_ctas, 0).total_bytes() + kDriverBytes;
    const auto allowed = size_t(utilization * double(total));
    const size_t usable = std::min(free, allowed - std::min(allowed, total - free));
    if (usable > fixed) return usable - fixed;
    return Error{
        Error::unavailable,
        fmt::format("{} MiB of GPU memory may be used ({} MiB are free), but the model and its buffers need {} "
                    "MiB before any KV; raise --gpu-memory-utilization or lower --max-num-batched-tokens "
                    "or --max-model-len",
                    usable >> 20, free >> 20, fixed >> 20),
        "gpu-memory-utilization"};
  } catch (const CudaError& e) {
    return out_of_memory(e);
  }
}

}  // namespace ekv
