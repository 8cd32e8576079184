#pragma once
// kv_flags.h -- the flags of elastic KV: what there is no vLLM name for.

#include <CLI/CLI.hpp>
#include <string>

#include "elastickv/backend.h"
#include "elastickv/config.h"

namespace ekv {

// Texts that become settings when all flags are known.
struct KvFlags {
  std::string host_bytes = "4G";
  std::string preset;  // paper015, modern; empty: none
};

// `config`, `fill` and `raw` outlive the parsing.
void add_kv_flags(CLI::App& app, EngineConfig& config, BaseFill& fill, KvFlags& raw);
// Applies the preset under the flags that were given, and the sizes; warns of flags without effect. Throws
// CLI::ValidationError.
void finish_kv_flags(const CLI::App& app, const KvFlags& raw, EngineConfig& config);

}  // namespace ekv
