// run_cuda_ops.cpp -- links tests/kernels to the CUDA kernels: memory is the GPU's, launch_* come from
// ekv_kernels.

#include "kernels/cuda_check.h"
#include "tests/support/device_memory.h"

namespace ekv::test {

void* device_alloc(size_t bytes) {
  void* p = nullptr;
  cuda_check(cudaMalloc(&p, bytes + 256));  // never empty, and nothing of ours right behind it
  return p;
}
void device_free(void* p) { cuda_warn(cudaFree(p)); }
bool device_has(size_t bytes) {
  size_t available, total;
  cuda_check(cudaMemGetInfo(&available, &total));
  return available > bytes + bytes / 4;
}
int long_run(int rounds) { return rounds; }
void copy_to_device(void* to, const void* from, size_t bytes) {
  cuda_check(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice));
}
void copy_to_host(void* to, const void* from, size_t bytes) {
  cuda_check(cudaDeviceSynchronize());
  cuda_check(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost));
}

}  // namespace ekv::test
