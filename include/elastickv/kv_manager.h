#pragma once
// kv_manager.h -- makes a plan a fact: pages, block tables, prefix cache. Mechanism only; never decides.

#include <span>
#include <vector>

#include "elastickv/page_pool.h"
#include "elastickv/prefix_cache.h"
#include "elastickv/sequence.h"
#include "elastickv/step.h"

namespace ekv {

// What the scheduler may spend. A copy: the manager has the truth.
struct KvBudget {
  int free_pages = 0;  // free now, or freed by evicting cached pairs that nobody uses
  int total_pages = 0;
};

struct PrefixHit {
  int num_tokens = 0;      // whole pairs, and at least one token of the sequence is left to compute
  int num_free_pages = 0;  // pages of the hit that no sequence uses: taking them spends the budget
};

class KvManager {
 public:
  KvManager(const KvConfig& config, int num_pages);

  KvBudget budget() const;
  PrefixHit lookup(const Sequence& sequence) const;  // no side effects

  // Preempted sequences give up their pages; admitted ones take their cached prefix, all of them before any
  // page is allocated, because allocation may evict; then every chunk gets the pages it writes. num_computed of
  // an admitted sequence becomes its chunk's first_pos. The plan must fit the budget it was made with.
  void commit(const StepPlan& plan, SequenceTable& sequences);

  // After the step ran: whole pairs below num_computed become findable.
  void publish(Sequence& sequence);
  void release(Sequence& sequence);  // gives back everything; num_computed becomes 0

  // Forgets all cached pairs that no sequence uses.
  void reset_prefix_cache();

  int num_pages() const { return pool_.num_pages(); }
  int num_free_pages() const { return pool_.num_free(); }
  int num_cached_pages() const { return cache_.num_idle_pages(); }  // cached and unused
  // Page conservation and reference counts, recomputed from the tables; aborts with what is wrong.
  void check_integrity(std::span<Sequence* const> running) const;

 private:
  PageId take_page();
  void attach_prefix(Sequence& sequence, int num_tokens);
  void extend(Sequence& sequence, int num_tokens);

  KvConfig config_;
  PagePool pool_;
  PrefixCache cache_;
};

}  // namespace ekv
