#pragma once
// host_cuda.h -- streams of the host's stand-in for the CUDA runtime (host_cuda.cpp).

#include <functional>

#include "kernels/element.h"

namespace ekv::test {

// What a launcher of the stand-in does: `work` runs on the stream, after what was enqueued there before.
void enqueue(cudaStream_t stream, std::function<void()> work);

}  // namespace ekv::test
