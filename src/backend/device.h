#pragma once
// device.h -- from --device to a backend, for every command that runs a model in its process.

#include <memory>
#include <string>

#include "elastickv/backend.h"
#include "elastickv/model.h"

namespace ekv {

enum class Device : uint8_t { cpu, cuda };
std::string_view name_of(Device device);
// What --async-scheduling is unless given: on where the device works beside the host. On the CPU a second step
// in flight gains nothing and makes tokens wait.
constexpr bool default_async_scheduling(Device device) { return device == Device::cuda; }

// "cpu", "cuda", or "auto": cuda where this build and this machine have it. Errors: cuda is not there.
Result<Device> choose_device(std::string_view asked);

// Decides kv.num_pages where it is 0: what fits in kv.pool_bytes, or on a GPU with kv.gpu_memory_utilization
// what that leaves. config.max_model_len is the longest sequence that buffers must have room for.
Status size_pool(Device device, const ModelConfig& model, EngineConfig& config);

struct BackendOptions {
  Device device = Device::cpu;
  int threads = 0;  // of the CPU backend; 0: all cores
  BaseFill base_fill = BaseFill::mid;
  CudaLaunch cuda_launch;
};
// With as many host slots as the policy uses and FidelityConfig::host_bytes holds. `model` outlives the
// backend. config.kv.num_pages is decided. Errors: see make_cpu_backend, make_cuda_backend; a setting that the
// device does not have.
Result<std::unique_ptr<Backend>> make_backend(const Model& model, const EngineConfig& config,
                                              const BackendOptions& options);

}  // namespace ekv
