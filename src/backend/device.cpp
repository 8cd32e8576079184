#include "backend/device.h"

#include <fmt/format.h>

#include "backend/host_slots.h"

namespace ekv {

std::string_view name_of(Device device) { return device == Device::cuda ? "cuda" : "cpu"; }

Result<Device> choose_device(std::string_view asked) {
  if (asked == "cpu") return Device::cpu;
  Status fault = cuda_fault();
  if (!fault) return Device::cuda;
  if (asked == "cuda") return *std::move(fault);
  if (fault->code != Error::not_found) log_warn("--device auto takes the CPU: " + fault->message);
  return Device::cpu;
}

Status check_device(const ModelConfig& model, const EngineConfig& config, const BackendOptions& options) {
  if (options.device == Device::cuda) {
    if (options.base_fill != BaseFill::mid)
      return Error{Error::unsupported, "--kv-base-fill zero is for --device cpu: CUDA kernels read mid",
                   "kv-base-fill"};
    return check_cuda(model, config);
  }
  if (options.cuda_launch.dtype != CudaDtype::automatic)
    return Error{Error::unsupported,
                 "--dtype float16 and bfloat16 are for a GPU, and --device auto found none: the CPU reads "
                 "weights as they are stored; leave it at auto",
                 "dtype"};
  return check_cpu(model);
}

int host_slots(const ModelConfig& model, const EngineConfig& config) {
  const KvShape shape = model.kv_shape();
  return host_slots(config.fidelity, config.kv.num_pages, double(shape.low_pair_bytes()),
                    2.0 * double(shape.page_bytes()));
}

Result<std::unique_ptr<Backend>> make_backend(const Model& model, const EngineConfig& config,
                                              const BackendOptions& options) {
  const HostContent content = host_content(config.fidelity.policy);
  const int slots = host_slots(model.config(), config);
  if (options.device == Device::cpu)
    return make_cpu_backend(model, config,
                            {.threads = options.threads,
                             .base_fill = options.base_fill,
                             .num_host_slots = slots,
                             .host_content = content});
  return make_cuda_backend(model, config,
                           {.num_host_slots = slots, .host_content = content, .launch = options.cuda_launch});
}

}  // namespace ekv
