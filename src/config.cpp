#include "elastickv/config.h"

#include <fmt/format.h>

namespace ekv {
namespace {

Error invalid(std::string param, std::string message) {
  return {Error::invalid_argument, std::move(message), std::move(param)};
}

}  // namespace

Status validate(const EngineConfig& config) {
  const SchedulerConfig& s = config.scheduler;
  if (s.max_step_seqs < 1)
    return invalid("max-num-seqs", fmt::format("max-num-seqs must be >= 1, got {}", s.max_step_seqs));
  if (s.max_step_tokens < s.max_step_seqs)
    return invalid(
        "max-num-batched-tokens",
        fmt::format("max-num-batched-tokens ({}) must be >= max-num-seqs ({}): every running sequence "
                    "decodes one token per step",
                    s.max_step_tokens, s.max_step_seqs));
  if (s.max_chunk_tokens < 0)
    return invalid("long-prefill-token-threshold",
                   fmt::format("long-prefill-token-threshold must be >= 0, got {}", s.max_chunk_tokens));
  if (!(s.watermark >= 0 && s.watermark < 1))
    return invalid("watermark", fmt::format("watermark must be in [0, 1), got {}", s.watermark));
  if (config.max_model_len < 1)
    return invalid("max-model-len", fmt::format("max-model-len must be >= 1, got {}", config.max_model_len));
  if (config.kv.num_pages < 0)
    return invalid("num-gpu-blocks-override",
                   fmt::format("the number of KV pages must be >= 0, got {}", config.kv.num_pages));
  return std::nullopt;
}

}  // namespace ekv
