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
  int max_demotions = 0;     // pairs that this step may demote at most, whoever has them: a page each
  int locked_pages = 0;      // neither free nor anybody's until a transfer ends
  int total_host_slots = 0;  // host slots; guaranteed admission shares them out
};

// What the scheduler sees of a sequence: counts only.
struct SeqView {
  SeqId id{};
  int num_tokens = 0;
  int num_computed = 0;     // of a waiting sequence: 0; num_tokens: a step in flight yields the last token
  int num_blocks = 0;       // covered by pages now: positions below num_blocks * kBlockTokens need no new page
  int num_freeable = 0;     // running: pages that its preemption alone makes free or evictable
  int num_cached = 0;       // waiting: leading tokens found in the prefix cache, whole pairs
  int num_cached_free = 0;  // waiting: pages of that hit which nobody uses, so taking them spends free pages
  int num_cached_host_slots = 0;  // waiting: host slots of that hit which nobody uses
  int num_loadable = 0;           // waiting: tokens after the cached ones that the host holds, whole pairs
  bool load_later = false;  // waiting: a copy under way brings more of it; it waits, and so do all after it
  int num_loading = 0;      // running: pairs on their way from the host; it has no chunk until they are here
  int num_base = 0;         // running: BASE pairs; each covers two blocks with one page
  int num_demotable = 0;    // running: pairs that may become BASE now and that no sequence before it counts
  int peak_pages = 0;       // with guaranteed admission: the most pages it can need to its last token, and the
  int peak_host_slots = 0;  // host slots with which it needs no more
};

struct ChunkPlan {
  SeqId seq{};
  int first_pos = 0;    // first position computed in this step == KV entries already valid
  int num_tokens = 0;   // 1 for a decode; a prefill chunk may be as short
  bool sample = false;  // the chunk reaches the last known token: sample from its logits
  bool operator==(const ChunkPlan&) const = default;
};

// A sequence that takes its cached tokens, and the pages of those that the host holds, and waits for the
// copies.
struct LoadPlan {
  SeqId seq{};
  int first_pos = 0;   // what is cached
  int num_tokens = 0;  // to be loaded, whole pairs
  bool operator==(const LoadPlan&) const = default;
};

struct StepPlan {
  // The order in the batch: decodes, running prefills, then one chunk per admitted sequence in that order.
  std::vector<ChunkPlan> chunks;
  std::vector<SeqId> admitted;   // leave the waiting queue; their chunks start after their cached prefixes
  std::vector<SeqId> preempted;  // give up their pages before the step and wait again
  // Changes of fidelity, none of a pair that a preempted sequence alone has.
  std::vector<PairId> promotes{};  // their low bytes have arrived: TARGET in this step
  std::vector<PairId> demotes{};   // BASE in this step
  std::vector<PairId> restores{};  // their low bytes come back; BASE until a later step promotes them
  std::vector<PairId> backups{};   // their low bytes are copied to the host
  std::vector<LoadPlan> loads{};   // leave the waiting queue too, in its order, and have no chunk
  bool changes_kv() const {
    return !promotes.empty() || !demotes.empty() || !restores.empty() || !backups.empty();
  }
  bool empty() const { return chunks.empty() && preempted.empty() && loads.empty() && !changes_kv(); }
  void clear() {
    chunks.clear(), admitted.clear(), preempted.clear();
    promotes.clear(), demotes.clear(), restores.clear(), backups.clear(), loads.clear();
  }
  bool operator==(const StepPlan&) const = default;
};

// What a plan takes from the budget it was made with.
struct PageDemand {
  int pages = 0;            // net of what its victims give up
  bool page_bound = false;  // with more pages the plan would do more: somebody waits or was preempted for them
};

}  // namespace ekv
