#include "kernels/cuda_check.h"
#include "tests/support/host_cuda.h"
#include "tests/support/lose_device.h"

namespace ekv::test {

const char* const kLostDevice = "cuda";
void lose_device() { lose_context(); }
std::string fault_of(const DeviceError& e) {
  const auto* error = dynamic_cast<const CudaError*>(&e);
  return error && error->sticky() && error->code == cudaErrorIllegalAddress ? "" : e.what();
}

}  // namespace ekv::test
