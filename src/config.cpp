#include "elastickv/config.h"

#include <fmt/format.h>

namespace ekv {
namespace {

Error invalid(std::string param, std::string message) {
  return {Error::invalid_argument, std::move(message), std::move(param)};
}

// Positions and row numbers are 32-bit; a limit far below leaves room for sums of a few of them.
constexpr int kMost = 1 << 28;

Status validate_scheduler(const SchedulerConfig& s) {
  if (s.max_step_seqs < 1 || s.max_step_seqs > kMost)
    return invalid("max-num-seqs",
                   fmt::format("max-num-seqs must be in [1, {}], got {}", kMost, s.max_step_seqs));
  if (s.max_step_tokens > kMost)
    return invalid("max-num-batched-tokens",
                   fmt::format("max-num-batched-tokens must be <= {}, got {}", kMost, s.max_step_tokens));
  if (s.max_step_tokens < s.max_step_seqs)
    return invalid("max-num-batched-tokens",
                   fmt::format("max-num-batched-tokens ({}) must be >= max-num-seqs ({}): every running "
                               "sequence decodes one token per step",
                               s.max_step_tokens, s.max_step_seqs));
  if (s.max_chunk_tokens < 0)
    return invalid("long-prefill-token-threshold",
                   fmt::format("long-prefill-token-threshold must be >= 0, got {}", s.max_chunk_tokens));
  if (!(s.watermark >= 0 && s.watermark < 1))
    return invalid("watermark", fmt::format("watermark must be in [0, 1), got {}", s.watermark));
  return std::nullopt;
}

Status validate_kv(const KvConfig& kv) {
  if (kv.num_pages < 0 || kv.num_pages > kMost)
    return invalid("num-gpu-blocks-override",
                   fmt::format("the number of KV pages must be in [0, {}], got {}", kMost, kv.num_pages));
  if (kv.num_pages == 0 && kv.pool_bytes == 0)
    return invalid("kv-cache-memory-bytes",
                   "the KV pool has no memory: set its size in bytes, or its number of pages");
  return std::nullopt;
}

}  // namespace

Status validate(const EngineConfig& config) {
  if (Status bad = validate_scheduler(config.scheduler)) return bad;
  if (Status bad = validate_kv(config.kv)) return bad;
  if (config.max_model_len < 1 || config.max_model_len > kMost)
    return invalid("max-model-len",
                   fmt::format("max-model-len must be in [1, {}], got {}", kMost, config.max_model_len));
  return std::nullopt;
}

}  // namespace ekv
