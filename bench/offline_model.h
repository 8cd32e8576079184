#pragma once
// offline_model.h -- a model and the engine's settings for it, for commands that run both in this process.

#include <string>

#include "elastickv/backend.h"
#include "elastickv/config.h"
#include "elastickv/model.h"

namespace ekv {

struct OfflineModelFlags {
  std::string model;                 // folder or built-in name
  std::string load_format = "auto";  // auto, dummy
  std::string device = "cpu";        // cpu, cuda; with replay also sim
  int threads = 0;
  BaseFill base_fill = BaseFill::mid;
  uint64_t seed = 0;
  EngineConfig engine;  // max_model_len is decided by the requests, async_scheduling by the next line
  CudaLaunch cuda_launch;
  std::optional<bool> async_scheduling;  // absent: as the device or the cost model has it
};

Result<Model> load_model(const OfflineModelFlags& flags);

// Room for sequences of `longest` tokens, and a pool whose number of pages is known. Errors: more tokens than
// the model has positions, settings that make no sense.
Result<EngineConfig> fit_engine(EngineConfig engine, const ModelConfig& model, int longest);

}  // namespace ekv
