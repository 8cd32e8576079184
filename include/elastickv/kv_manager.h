#pragma once
// kv_manager.h -- makes a plan a fact: pages, block tables, prefix cache. Mechanism only; never decides.

#include <span>

#include "elastickv/page_pool.h"
#include "elastickv/prefix_cache.h"
#include "elastickv/sequence.h"
#include "elastickv/step.h"

namespace ekv {

struct PrefixHit {
  int num_tokens = 0;      // whole pairs, and at least one token of the sequence is left to compute
  int num_free_pages = 0;  // pages of the hit that no sequence uses: taking them spends the budget
};

class KvManager {
 public:
  KvManager(const KvConfig& config, int num_pages);

  KvBudget budget() const;                           // O(1)
  PrefixHit lookup(const Sequence& sequence) const;  // no side effects; O(tokens of the hit)
  // What plan_step() sees of a sequence. A waiting one costs a lookup(), so view only those that may be
  // admitted; a running one costs O(log pairs) at most.
  SeqView view(const Sequence& sequence) const;

  // Preempted sequences give up their pages; admitted ones take their cached prefix, all of them before any
  // page is allocated, because allocation may evict; then every chunk gets the pages it writes. num_computed of
  // an admitted sequence becomes its chunk's first_pos. The plan must fit the budget it was made with, and
  // views and budget must be those of now. The queues stay as they are: see SequenceTable::admit and preempt.
  void commit(const StepPlan& plan, SequenceTable& sequences);

  // Whole pairs below num_computed become findable. Only after the step that computed them is done and known
  // to be good. Where equal content is cached already (two sequences computed the same prompt side by side),
  // the sequence goes over to the cached pages and frees its own. Otherwise an entry could outlive everybody
  // who reads it, held by a sequence that has a second copy: up to twice the pages of its length, and a
  // sequence that fits the pool alone could wait for ever.
  void publish(Sequence& sequence);
  // Gives back everything, the tail before the head, so that eviction shortens cached prefixes from behind.
  // num_computed becomes 0. Allowed at any time between steps, and for waiting sequences.
  void release(Sequence& sequence);

  // Forgets all cached pairs that no sequence uses.
  void reset_prefix_cache() { cache_.clear(); }

  int num_pages() const { return pool_.num_pages(); }
  int num_free_pages() const { return pool_.num_free(); }
  int num_cached_pages() const { return cache_.num_idle_pages(); }  // cached and unused

  // Page conservation and reference counts, recomputed from the tables of all running sequences; aborts with
  // what is wrong.
  void check_integrity(std::span<Sequence* const> running) const;

 private:
  PageId take_page();
  void attach_prefix(Sequence& sequence, int num_tokens);
  void extend(BlockTable& blocks, int num_tokens);
  void use_cached(PairRef& pair, CachedPair& entry);

  KvConfig config_;
  PagePool pool_;
  PrefixCache cache_;
};

}  // namespace ekv
