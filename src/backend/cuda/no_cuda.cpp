// The CUDA backend of a build without CUDA: it says so.

#include "elastickv/backend.h"
#include "elastickv/model.h"

namespace ekv {
namespace {

Error absent() {
  return {Error::not_found,
          "this build has no CUDA: build it where nvcc is found (cmake --preset cuda), or use --device cpu",
          "device"};
}

}  // namespace

Result<std::unique_ptr<Backend>> make_cuda_backend(const Model&, const EngineConfig&, const CudaOptions&) {
  return absent();
}
Status cuda_fault() { return absent(); }
Status check_cuda(const ModelConfig&, const EngineConfig&) { return absent(); }
Result<size_t> cuda_pool_bytes(const ModelConfig&, const EngineConfig&, double) { return absent(); }

}  // namespace ekv
