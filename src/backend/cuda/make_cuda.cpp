// What the rest of the engine sees of CUDA; no_cuda.cpp is the same for a build without.

#include <fmt/format.h>

#include "backend/cuda/cuda_backend.h"

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

// Of what the libraries and the driver take besides what is counted.
constexpr size_t kDriverBytes = size_t(768) << 20;

}  // namespace

Result<std::unique_ptr<Backend>> make_cuda_backend(const Model& model, const EngineConfig& config,
                                                   const CudaOptions& options) {
  try {
    Result<std::unique_ptr<CudaBackend>> made = CudaBackend::make(model, config, options);
    if (!made) return made.error();
    return std::unique_ptr<Backend>(*std::move(made));
  } catch (const CudaError& e) {
    return out_of_memory(e);
  }
}

bool cuda_available() {
  int count = 0;
  const bool found = cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
  cudaGetLastError();  // no driver is no failure
  return found;
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
