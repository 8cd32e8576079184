#pragma once
// cuda_check.h -- the third kind of failure: a lost device. Thrown here, caught once, by the engine's loop.

#include <cuda_runtime_api.h>

#include <source_location>
#include <stdexcept>
#include <string>

#include "elastickv/base.h"

namespace ekv {

// A failed CUDA call. `sticky()`: the context is lost, every later call fails too -- exit, restart.
struct CudaError : std::runtime_error {
  CudaError(cudaError_t code, std::source_location at)
      : std::runtime_error(std::string(at.file_name()) + ":" + std::to_string(at.line()) + ": " +
                           cudaGetErrorName(code) + ": " + cudaGetErrorString(code)),
        code(code) {}
  bool sticky() const { return code != cudaErrorMemoryAllocation; }
  cudaError_t code;
};

// cuda_check(cudaMemcpyAsync(...)): a function, so the caller's file and line come by themselves.
inline void cuda_check(cudaError_t code, std::source_location at = std::source_location::current()) {
  if (code == cudaSuccess) [[likely]]
    return;
  cudaGetLastError();  // clear it, so that the next check reports its own error and not this one
  throw CudaError(code, at);
}

// For destructors, which must not throw. The driver may already be unloading at exit: not an error.
inline void cuda_warn(cudaError_t code) noexcept {
  if (code != cudaSuccess && code != cudaErrorCudartUnloading)
    log_error(std::string("cuda: ") + cudaGetErrorString(code));
}

}  // namespace ekv
