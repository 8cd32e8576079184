#include "backend/device.h"

#include <fmt/format.h>

#include <algorithm>

#include "backend/host_slots.h"

namespace ekv {

std::string_view name_of(Device device) { return device == Device::cuda ? "cuda" : "cpu"; }

Result<Device> choose_device(std::string_view asked) {
  if (asked == "cpu") return Device::cpu;
  if (cuda_available()) return Device::cuda;
  if (asked == "auto") return Device::cpu;
  return Error{
      Error::unavailable,
      "--device cuda: this build has no CUDA, or this machine shows it no GPU (see nvidia-smi); use --device "
      "cpu",
      "device"};
}

Status size_pool(Device device, const ModelConfig& model, EngineConfig& config) {
  KvConfig& kv = config.kv;
  if (kv.num_pages > 0) return std::nullopt;
  if (device == Device::cuda && kv.gpu_memory_utilization > 0) {
    const Result<size_t> bytes = cuda_pool_bytes(model, config, kv.gpu_memory_utilization);
    if (!bytes) return bytes.error();
    kv.pool_bytes = *bytes;
  }
  kv.num_pages = int(std::min<size_t>(kv.pool_bytes / model.kv_shape().page_bytes(), 1 << 24));
  return std::nullopt;
}

Result<std::unique_ptr<Backend>> make_backend(const Model& model, const EngineConfig& config,
                                              const BackendOptions& options) {
  const HostContent content = host_content(config.fidelity.policy);
  const KvShape shape = model.config().kv_shape();
  const int slots = host_slots(config.fidelity, config.kv.num_pages, double(shape.low_pair_bytes()),
                               2.0 * double(shape.page_bytes()));
  if (options.device == Device::cpu && options.cuda_launch.dtype != CudaDtype::automatic)
    return Error{Error::unsupported,
                 "--dtype float16 and bfloat16 are for a GPU, and --device auto found none: the CPU reads "
                 "weights as they are stored; leave it at auto",
                 "dtype"};
  if (options.device == Device::cpu)
    return make_cpu_backend(model, config,
                            {.threads = options.threads,
                             .base_fill = options.base_fill,
                             .num_host_slots = slots,
                             .host_content = content});
  if (options.base_fill != BaseFill::mid)
    return Error{Error::unsupported, "--kv-base-fill zero is for --device cpu: CUDA kernels read mid",
                 "kv-base-fill"};
  return make_cuda_backend(model, config,
                           {.num_host_slots = slots, .host_content = content, .launch = options.cuda_launch});
}

}  // namespace ekv
