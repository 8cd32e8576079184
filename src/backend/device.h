#pragma once
// device.h -- from --device to a backend, for every command that runs a model in its process; start.h is the
// way there.

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

// "cpu", "cuda", or "auto": cuda where this build and this machine have it, with a warning where there is a GPU
// that cannot be used. Errors: cuda is not there, with the reason.
Result<Device> choose_device(std::string_view asked);

struct BackendOptions {
  Device device = Device::cpu;
  int threads = 0;  // of the CPU backend; 0: all cores
  BaseFill base_fill = BaseFill::mid;
  CudaLaunch cuda_launch;
};
// What the device does not have of these settings, or cannot do of this model.
Status check_device(const ModelConfig& model, const EngineConfig& config, const BackendOptions& options);

// As many host slots as the policy uses and FidelityConfig::host_bytes holds. config.kv.num_pages is decided.
int host_slots(const ModelConfig& model, const EngineConfig& config);

// With host_slots(). `model` may go afterwards. Errors: see make_cpu_backend, make_cuda_backend.
Result<std::unique_ptr<Backend>> make_backend(const Model& model, const EngineConfig& config,
                                              const BackendOptions& options);

}  // namespace ekv
