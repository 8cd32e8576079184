#pragma once
// start.h -- how every command with a model in its process starts: prepare_start() says all that can be said
// without the weights, load_backend() takes the minutes.

#include <climits>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "backend/device.h"
#include "elastickv/backend.h"
#include "elastickv/config.h"
#include "elastickv/model.h"

namespace ekv {

// What the flags of such a command have in common.
struct ModelFlags {
  std::string model;                 // folder or built-in name
  std::string load_format = "auto";  // auto, dummy; serve also safetensors
  std::string device = "auto";       // auto, cpu, cuda
  int threads = 0;                   // of the CPU backend; 0: all cores
  BaseFill base_fill = BaseFill::mid;
  uint64_t seed = 0;    // of dummy weights, in benchmarks also of prompts
  EngineConfig engine;  // max_model_len and, without a flag, async_scheduling are decided at start
  CudaLaunch cuda_launch;
  std::optional<bool> async_scheduling;  // absent: as the device has it
};

// The longest sequence to come, in tokens.
struct LongestSequence {
  std::optional<int> asked;            // exactly; absent: what the model and the pool have room for
  int at_most = INT_MAX;               // nobody needs more
  const char* flag = "max-model-len";  // where `asked` comes from
};

struct Start {
  ModelConfig model;
  EngineConfig engine;  // valid; kv.num_pages and max_model_len are decided
  BackendOptions options;
  const char* pool_flag = "";  // where the size of the KV pool comes from
};

// Reads the model's config, chooses the device, sizes the KV pool. Every param of its errors is the name of a
// flag: of ModelFlags or of `longest`.
Result<Start> prepare_start(const ModelFlags& flags, const LongestSequence& longest);

// make_backend(), or what a test has in its place.
using MakeBackend =
    std::function<Result<std::unique_ptr<Backend>>(const Model&, const EngineConfig&, const BackendOptions&)>;

// Loads or makes the weights for a backend, which keeps of them what it reads. Throws bad_alloc.
Result<std::unique_ptr<Backend>> load_backend(const ModelFlags& flags, const Start& start,
                                              const MakeBackend& make = make_backend);

}  // namespace ekv
