#include "kernels/sampling.h"
#include "tests/support/backend_target.h"

namespace ekv::test {

// bf16 has 8 significant bits where fp16 has 11: what activations add to the bounds of the CPU backend, 4 of
// the 5 that fp16 is allowed, is 8 times as much. Measured on the host's stand-in: 7 (0.21, tiny-mistral) and
// 19 (0.19, SmolLM2-135M, 98.7 % of the best tokens).
BackendTarget backend_target() { return {"cuda, bfloat16", kMaxTopLogprobs, 1 + 8 * 4}; }

Result<std::unique_ptr<Backend>> make_target(const Model& model, const EngineConfig& config, int slots,
                                             HostContent content) {
  return make_cuda_backend(
      model, config,
      {.num_host_slots = slots, .host_content = content, .launch = {.dtype = CudaDtype::bfloat16}});
}

}  // namespace ekv::test
