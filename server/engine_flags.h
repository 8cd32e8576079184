#pragma once
// engine_flags.h -- the flags of scheduler and KV pool that every command with an engine has, under vLLM's
// names.

#include <CLI/CLI.hpp>
#include <optional>
#include <string>

#include "elastickv/backend.h"
#include "elastickv/config.h"

namespace ekv {

// Texts that become settings when all flags are known.
struct EngineFlags {
  std::string kv_cache_memory = "auto";
  double gpu_memory_utilization = 0.9;
  std::string max_step_tokens = "2048";
  std::string scheduling_policy = "fcfs";
  double target_step_ms = 0;
};

// `config` and `raw` outlive the parsing.
void add_engine_flags(CLI::App& app, EngineConfig& config, EngineFlags& raw);
// Throws CLI::ValidationError.
void finish_engine_flags(const EngineFlags& raw, EngineConfig& config);

// Unset: as the device has it, see default_async_scheduling(), or as the command says: `on_by_default` ends the
// sentence of its help.
void add_async_flag(CLI::App& app, std::optional<bool>& async_scheduling,
                    const std::string& on_by_default = "on a GPU");

// Of a flag that names a model.
std::string model_help();

// "--dtype", "--enforce-eager", "--gemm-tuning", "--gemm-cache". `launch` outlives the parsing.
void add_cuda_flags(CLI::App& app, CudaLaunch& launch);
// Throws CLI::ValidationError for a type that `device`, as --device names it, does not have. What "auto" means
// is not known yet: prepare_start() says it then.
void finish_cuda_flags(std::string_view device, const CudaLaunch& launch);

// Checks for options whose messages show bounds as people write them.
CLI::Validator between(double least, double most);  // of numbers, NaN is none; CLI::Range takes it
CLI::Validator seed();                              // any unsigned integer of 64 bits

// The size that `text` is. Throws CLI::ValidationError, which names the flag.
int64_t size_or_throw(const char* flag, const std::string& text, int64_t least, int64_t most);

}  // namespace ekv
