#pragma once
// step.h -- everything one step does, as data. The scheduler writes it, the KV manager commits it, a backend
// executes it, a simulator can price it, a test compares it with ==.

#include <vector>

#include "elastickv/base.h"

namespace ekv {

struct ChunkPlan {
  SeqId seq{};
  int first_pos = 0;    // first position computed in this step == KV entries already valid
  int num_tokens = 0;   // 1 = decode, more = a prefill chunk
  bool sample = false;  // the chunk reaches the last known token: sample from its logits
  bool operator==(const ChunkPlan&) const = default;
};

struct StepPlan {
  std::vector<ChunkPlan> chunks;  // decodes first, then prefill chunks: the order in the batch
  std::vector<SeqId> admitted;  // leave the waiting queue; each has a chunk that starts after its cached prefix
  std::vector<SeqId> preempted;  // give up their pages before the step and wait again
  bool empty() const { return chunks.empty() && preempted.empty(); }
  void clear() { chunks.clear(), admitted.clear(), preempted.clear(); }
  bool operator==(const StepPlan&) const = default;
};

}  // namespace ekv
