#pragma once
// hopper_code.h -- what a launch may ask for.

#include "kernels/cuda_check.h"

namespace ekv {

// Whether the code that the current device takes of a kernel was built for sm_90 or later. Only then it has
// clusters, and waits inside for the kernels ahead: a programmatic launch of older code would run beside them.
template <class Kernel>
bool is_hopper_code(Kernel kernel) {
  cudaFuncAttributes code;
  cuda_check(cudaFuncGetAttributes(&code, kernel));
  return code.ptxVersion >= 90;
}

// Whether it is code of sm_90, made neither for an older device nor from older PTX: only that has wgmma in it.
template <class Kernel>
bool is_wgmma_code(Kernel kernel) {
  cudaFuncAttributes code;
  cuda_check(cudaFuncGetAttributes(&code, kernel));
  return code.ptxVersion >= 90 && code.binaryVersion >= 90;
}

}  // namespace ekv
