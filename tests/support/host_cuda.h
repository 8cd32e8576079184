#pragma once
// host_cuda.h -- streams of the host's stand-in for the CUDA runtime (host_cuda.cpp).

#include "kernels/element.h"

namespace ekv::test {

// Runs whatever was enqueued on the stream. A launcher of the stand-in calls it and then works at once.
void run_stream(cudaStream_t stream);

}  // namespace ekv::test
