#pragma once
// host_cuda.h -- streams of the host's stand-in for the CUDA runtime (host_cuda.cpp).

#include <cuda_runtime_api.h>

#include <functional>
#include <set>
#include <string>

#include "kernels/element.h"

namespace ekv::test {

// What a launcher of the stand-in does: `work` runs on the stream, after what was enqueued there before.
void enqueue(cudaStream_t stream, std::function<void()> work);

// What a GPU would have loaded by now: a launcher notes the kernel that it takes.
void note_code(const std::string& kernel);
const std::set<std::string>& loaded_code();
void forget_code();  // as in a new process

// Copies to the device that another stream enqueued behind an event after which its own stream still copied
// some: those may have waited for them.
int overtaken_uploads();

// Memory of the device and page-locked memory of the host that was taken and not given back.
size_t held_bytes();

// While true, cudaHostRegister has no memory to lock.
void refuse_to_lock(bool refuse);

// The machine as the runtime shows it. `driver`: newest CUDA that the driver is for, 0: there is none.
struct HostGpu {
  cudaError_t count = cudaSuccess;  // what asking for the number of devices returns
  cudaError_t code = cudaSuccess;   // and asking for a kernel
  int driver = CUDART_VERSION, major = 9, minor = 0;
};
void show_gpu(const HostGpu& gpu);

// As a kernel that reads where nothing is: work that was enqueued is lost, and every call from now on that a
// lost context fails returns cudaErrorIllegalAddress.
void lose_context();

}  // namespace ekv::test
