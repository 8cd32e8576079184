#pragma once
// programmatic.cuh -- launches that begin while the kernel ahead of them on the stream ends (sm_90 and up).
//
// A kernel launched so calls wait_for_kernels_ahead() before it reads or writes what any other kernel touches,
// and may call let_next_kernel_begin() as early as it likes: the next one is then launched when all of its CTAs
// are on the device, so kernels that wait can never keep out the one that they wait for. Because every kernel
// waits, the end of one implies the end of all before it, and a wait for the kernel directly ahead is a wait
// for all.

#include "kernels/cuda_check.h"
#include "kernels/device.cuh"
#include "kernels/hopper_code.h"

namespace ekv {

template <class Args>
void launch_programmatic(void (*kernel)(Args), unsigned blocks, unsigned threads, const Args& args,
                         cudaStream_t stream) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = is_hopper_code(kernel) ? 1 : 0;  // code for older devices does not wait
  cuda_check(cudaLaunchKernelEx(&config, kernel, args));
}

}  // namespace ekv
