#pragma once
// step.h -- everything one step does, as data. The scheduler writes it, the KV manager commits it, a backend
// executes it, a simulator can price it, a test compares it with ==.

#include <vector>

#include "elastickv/base.h"

namespace ekv {

// What a plan may spend. A copy: the KV manager has the truth.
struct KvBudget {
  int free_pages = 0;  // free now, or freed by evicting cached pairs that nobody uses
  int total_pages = 0;
};

// What the scheduler sees of a sequence: counts only.
struct SeqView {
  SeqId id{};
  int num_tokens = 0;
  int num_computed = 0;     // of a waiting sequence: 0
  int num_blocks = 0;       // covered by pages now: positions below num_blocks * kBlockTokens need no new page
  int num_freeable = 0;     // running: pages that its preemption alone makes free or evictable
  int num_cached = 0;       // waiting: leading tokens found in the prefix cache, whole pairs
  int num_cached_free = 0;  // waiting: pages of that hit which nobody uses, so taking them spends free pages
};

struct ChunkPlan {
  SeqId seq{};
  int first_pos = 0;    // first position computed in this step == KV entries already valid
  int num_tokens = 0;   // 1 for a decode; a prefill chunk may be as short
  bool sample = false;  // the chunk reaches the last known token: sample from its logits
  bool operator==(const ChunkPlan&) const = default;
};

struct StepPlan {
  // The order in the batch: decodes, running prefills, then one chunk per admitted sequence in that order.
  std::vector<ChunkPlan> chunks;
  std::vector<SeqId> admitted;   // leave the waiting queue; their chunks start after their cached prefixes
  std::vector<SeqId> preempted;  // give up their pages before the step and wait again
  bool empty() const { return chunks.empty() && preempted.empty(); }
  void clear() { chunks.clear(), admitted.clear(), preempted.clear(); }
  bool operator==(const StepPlan&) const = default;
};

}  // namespace ekv
