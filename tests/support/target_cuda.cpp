#include "kernels/sampling.h"
#include "tests/support/backend_target.h"

namespace ekv::test {

BackendTarget backend_target() { return {"cuda", kMaxTopLogprobs, 5}; }

Result<std::unique_ptr<Backend>> make_target(const Model& model, const EngineConfig& config, int slots,
                                             HostContent content) {
  return make_cuda_backend(model, config, {.num_host_slots = slots, .host_content = content});
}

}  // namespace ekv::test
