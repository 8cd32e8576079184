#pragma once
// config.h -- every setting of the engine, as structs: default, unit and meaning on one line each. Parsed once
// in main, validated once, passed by value.

#include <cstddef>
#include <string>

#include "elastickv/base.h"
#include "elastickv/kv_layout.h"

namespace ekv {

enum class SchedulingPolicy : uint8_t { fcfs, priority };

struct SchedulerConfig {
  int max_step_tokens = 2048;                        // tokens computed in one step
  int max_step_seqs = 256;                           // sequences in one step
  int max_chunk_tokens = 0;                          // longest prefill chunk of one sequence; 0: no limit
  bool reserve_full_prompt = true;                   // admit only what fits with its whole prompt
  double watermark = 0.0;                            // share of the pool kept free when admitting, unless idle
  SchedulingPolicy policy = SchedulingPolicy::fcfs;  // order of the waiting queue and of preemption
};

struct KvConfig {
  size_t pool_bytes = size_t(1) << 30;          // memory of the KV pool
  int num_pages = 0;                            // exact pool size; 0: what fits in pool_bytes
  bool prefix_cache = true;                     // reuse whole pairs of equal token prefixes
  BaseFormat base_format = BaseFormat::fixed8;  // how KV values are put on the grid when they are written
};

struct EngineConfig {
  SchedulerConfig scheduler;
  KvConfig kv;
  int max_model_len = 2048;  // prompt + output tokens of one sequence
};

// The first setting that makes no sense, with its name; nullopt when all do.
Status validate(const EngineConfig& config);

}  // namespace ekv
