#pragma once
// demotable.h -- which pairs may change fidelity now. Read-only: one walk over the tables of running sequences.

#include <limits>
#include <span>
#include <vector>

#include "elastickv/kv_manager.h"
#include "sched/plan_fidelity.h"

namespace ekv {

// A pair may be demoted when it is TARGET, complete, without a transfer, backed where that is the rule, and not
// protected: beyond the sink and before the recent pairs of every sequence that uses it, none of which is exact
// or, for a shared pair, has a cap of its own. Each pair is listed once, with the first sequence that has it.
// A sequence's own pairs stand oldest first, so that BASE grows from the sink; shared ones newest first, so
// that it grows from there backwards and stays one run.
class DemotableScan {
 public:
  // `running` in the order of the queue, and their `views`; `kept` pairs are left out. Replaces what was found
  // before.
  void scan(const KvManager& kv, std::span<const Sequence* const> running, std::span<const SeqView> views,
            std::span<const PairId> kept);

  std::span<const FidelitySource> sources() const { return sources_; }
  std::span<const PairId> candidates(size_t source) const {
    return std::span(pairs_).subspan(starts_[source], size_t(sources_[source].num_candidates));
  }

 private:
  static constexpr int kNotNow = std::numeric_limits<int>::min();
  struct Mark {
    uint32_t scan = 0;
    int permits = 0;  // sequences that let the pair go; kNotNow: listed already, or kept
  };
  Mark& mark(PairId pair);
  void count_permits(const KvManager& kv, const Sequence& sequence);
  void list_own(const KvManager& kv, const Sequence& sequence, int num_base);
  void list_shared(const KvManager& kv, const Sequence& sequence, int num_base);
  void open_source(const KvManager& kv, const Sequence& sequence, int num_base, int num_sharers);
  void close_source();

  std::vector<FidelitySource> sources_;
  std::vector<size_t> starts_;  // [sources]
  std::vector<PairId> pairs_;
  std::vector<Mark> marks_;  // [PairId]
  uint32_t scan_ = 0;
};

// BASE pairs to bring back, `at_most`, in the order in which it is worth most: elastic before best effort,
// those with most tokens to go first, their newest BASE first, so that the run of BASE shrinks from the
// present. Sequences near their end get nothing. `running` may hold sequences that the plan preempts: pass
// those that stay.
class RestorableScan {
 public:
  void scan(const KvManager& kv, std::span<const Sequence* const> running, int at_most,
            std::vector<PairId>& restores);

 private:
  std::vector<const Sequence*> order_;
  std::vector<uint32_t> taken_;  // [PairId] the scan that took it
  uint32_t scan_ = 0;
};

// Adds the pairs of `sequence` that are old enough to be demoted and have no place on the host yet, oldest
// first; at most `at_most`, and none that is in `backups`.
void collect_backups(const KvManager& kv, const Sequence& sequence, int at_most, std::vector<PairId>& backups);

}  // namespace ekv
