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

struct LaunchExtras {
  unsigned shared_bytes = 0;  // dynamic shared memory of a CTA
  unsigned cluster = 1;       // CTAs of a cluster; more than 1 needs is_hopper_code()
};

// Every kernel asks for the same division of a multiprocessor's memory, whatever it needs itself: one that
// waits on a multiprocessor with another division keeps every CTA off it that needs more shared memory than
// that.
template <class Args>
void launch_programmatic(void (*kernel)(Args), unsigned blocks, unsigned threads, const Args& args,
                         cudaStream_t stream, const LaunchExtras& extras = {}) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {extras.cluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = extras.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  // Code for older devices does not wait, and has no clusters.
  config.numAttrs = !is_hopper_code(kernel) ? 0 : extras.cluster > 1 ? 2 : 1;
  cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared));
  cuda_check(cudaLaunchKernelEx(&config, kernel, args));
}

}  // namespace ekv
