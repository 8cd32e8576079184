#pragma once
// cuda_check.h -- the third kind of failure: a lost device. Thrown here, caught once, by the engine's loop.

#include <cuda_runtime_api.h>

#include <source_location>
#include <string>

#include "elastickv/base.h"

namespace ekv {

// The context is lost: every later call of this process returns the same code.
constexpr bool loses_context(cudaError_t code) {
  switch (code) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
      return true;
    default:
      return false;
  }
}

// A failed CUDA call. `sticky()`: the context is lost -- exit, restart.
struct CudaError : DeviceError {
  CudaError(cudaError_t code, std::source_location at)
      : DeviceError(std::string(at.file_name()) + ":" + std::to_string(at.line()) + ": " +
                    cudaGetErrorName(code) + ": " + cudaGetErrorString(code)),
        code(code) {}
  bool sticky() const { return loses_context(code); }
  cudaError_t code;
};

// cuda_check(cudaMemcpyAsync(...)): a function, so the caller's file and line come by themselves.
inline void cuda_check(cudaError_t code, std::source_location at = std::source_location::current()) {
  if (code == cudaSuccess) [[likely]]
    return;
  cudaGetLastError();  // clear it, so that the next check reports its own error and not this one
  throw CudaError(code, at);
}

// For destructors, which must not throw. Not worth a line: the driver may already be unloading at exit, and a
// lost context has been reported where a check met it and comes again from each of a hundred destructors.
inline void cuda_warn(cudaError_t code) noexcept {
  if (code != cudaSuccess && code != cudaErrorCudartUnloading && !loses_context(code))
    log_error(std::string("cuda: ") + cudaGetErrorString(code));
}

}  // namespace ekv
