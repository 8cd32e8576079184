#include "kernels/cuda_check.h"
#include "tests/support/lose_device.h"

namespace ekv::test {
namespace {

__global__ void write_where_nothing_is(int* p) { *p = 1; }

}  // namespace

const char* const kLostDevice = "cuda";
// Not waited for: whichever call comes next after the kernel has run finds the context lost.
void lose_device() {
  write_where_nothing_is<<<1, 1>>>(reinterpret_cast<int*>(64));
  cuda_check(cudaGetLastError());
}
std::string fault_of(const DeviceError& e) {
  const auto* error = dynamic_cast<const CudaError*>(&e);
  return error && error->sticky() && error->code == cudaErrorIllegalAddress ? "" : e.what();
}

}  // namespace ekv::test
