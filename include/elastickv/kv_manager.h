#pragma once
// kv_manager.h -- makes a plan a fact: pages, pairs, block tables, prefix cache, transitions. Mechanism
// only: it never decides who is admitted, preempted, demoted or promoted.

#include <span>

#include "elastickv/host_store.h"
#include "elastickv/prefix_cache.h"
#include "elastickv/sequence.h"
#include "elastickv/step.h"

namespace ekv {

struct PrefixHit {
  int num_tokens = 0;           // whole pairs, and at least one token of the sequence is left to compute
  int num_free_pages = 0;       // pages of the hit that no sequence uses: taking them spends the budget
  int num_free_host_slots = 0;  // likewise host slots
  int num_loadable = 0;         // tokens after these that the host holds, whole pairs, within the same limit
  // More will be loadable soon, and cheaper to wait for than to compute: some of it is on its way to the device
  // for somebody else, who will cache it; or, for a sequence that was preempted, on its way to the host.
  bool load_later = false;
};

// What the device must do in the step that was committed, besides its chunks.
struct KvJobs {
  std::vector<DemoteJob> demotes;
  std::vector<PromoteJob> promotes;
  std::vector<TransferJob> transfers;
  bool empty() const { return demotes.empty() && promotes.empty() && transfers.empty(); }
};

std::span<const TokenId> pair_tokens(const Sequence& sequence, int pair);  // the 32 of a whole pair

class KvManager {
 public:
  KvManager(const KvConfig& config, int num_pages, const FidelityConfig& fidelity = {}, int num_host_slots = 0);

  KvBudget budget() const;  // O(1)
  // All tokens of the sequence are known. No side effects. O(pairs of the hit and of the load), of which only
  // those are searched for that the lookup before did not find.
  PrefixHit lookup(const Sequence& sequence) const;
  // What plan_step() sees of a sequence, but for num_demotable and the peaks. A waiting one costs a lookup(),
  // so view only those that may be admitted; a running one costs O(log pairs) while all pairs are TARGET and no
  // transfer is under way, else O(pairs).
  SeqView view(const Sequence& sequence) const;
  // The same in O(1) for a running one, without num_freeable and num_base, which a plan that finds enough pages
  // never asks for.
  SeqView view_briefly(const Sequence& sequence) const;

  // In this order: promoted pairs become TARGET; preempted sequences give up their pages; admitted ones and
  // those that load take their cached prefix, all of them before any page is allocated, because allocation may
  // evict; demoted pairs become BASE; every chunk gets the pages it writes, loads and restores get theirs and
  // begin, as backups do. num_computed of an admitted sequence becomes its chunk's first_pos, that
  // of one that loads the end of what it loads. The plan must fit the budget it was made with, and views and
  // budget must be those of now. The queues stay as they are: see SequenceTable::follow.
  //
  // Where pages must come from cached pairs without users, those are demoted while that is enough, and
  // otherwise evicted, the least recently used first.
  void commit(const StepPlan& plan, SequenceTable& sequences);
  const KvJobs& jobs() const { return jobs_; }  // of the last commit

  // A transfer has ended. O(1). Until the tickets of all its jobs are reported, a pair's pages and host slots
  // are given to nobody else.
  void transfer_done(uint32_t ticket);
  // Loads that have ended since the last call: their sequences, some of `running`, have chunks again, and what
  // they loaded becomes findable.
  void finish_loads(std::span<Sequence* const> running);
  std::span<const PairId> restored() const { return restored_; }  // the next plan promotes them, all of them

  // Whole pairs of the first `num_tokens` become findable, clean and tainted ones on their own chains, and with
  // exact_offload they are written to the host: the copies begin with the next commit. Only after the
  // step that computed them is done and known to be good, so never what a step in flight computes; that step
  // may go on reading the pairs that are given up here, because their pages are written by later steps only.
  // What finds no slot on the host, because all are in use, is tried again; what the host has evicted since is
  // not, until the sequence is admitted anew. Where equal content is cached already as TARGET (two sequences
  // computed the same prompt side by side), the sequence goes over to the cached pair and frees its own.
  // Otherwise an entry could outlive everybody who reads it, held by a sequence that has a second copy: up to
  // twice the pages of its length, and a sequence that fits the pool alone could wait for ever. Where it is
  // cached as BASE the sequence keeps its own pair to itself.
  void publish(Sequence& sequence, int num_tokens);
  void publish(Sequence& sequence) { publish(sequence, sequence.num_computed); }
  // Gives back everything, the tail before the head, so that eviction shortens cached prefixes from behind.
  // num_computed becomes 0. Allowed at any time between submissions, and for waiting sequences: a step in
  // flight that uses the pages comes before every step that can get them.
  void release(Sequence& sequence);

  // Forgets all cached pairs that no sequence uses, and what the host holds but for copies under way.
  void reset_prefix_cache() { cache_.clear(), host_.clear(); }

  const PairTable& pairs() const { return pairs_; }
  const HostStore& host() const { return host_; }  // without slots unless the policy is exact_offload
  // So far; one that is tried twice counts twice.
  int num_skipped_stores() const { return num_skipped_stores_; }
  const FidelityConfig& fidelity() const { return fidelity_; }
  int num_pages() const { return pairs_.num_pages(); }
  int num_free_pages() const { return pairs_.num_free_pages(); }
  int num_cached_pages() const { return cache_.num_idle_pages(); }  // cached and unused
  // Free or evictable.
  int num_free_host_slots() const { return pairs_.num_free_host_slots() + cache_.num_idle_host_slots(); }

  int num_live_base() const { return pairs_.num_base() - cache_.num_idle_base(); }  // used by some sequence

  // Calls visit(pair) for each pair of lookup(), in order.
  template <class Visit>
  void for_each_hit(const Sequence& sequence, Visit visit) const;
  // Leading pairs of the table that other sequences use too. O(log pairs).
  int num_shared(const BlockTable& blocks) const;

  // Conservation of pages and slots, reference counts and taint, recomputed from the tables of all running
  // sequences; aborts with what is wrong.
  void check_integrity(std::span<const Sequence* const> running) const;

 private:
  PageId take_page();
  void reclaim(int num_pages);
  void make_slot();
  bool keeps_low() const { return fidelity_.policy != KvPolicy::static8; }
  bool may_shrink(const CachedPair& entry) const;
  void attach_prefix(Sequence& sequence, int num_tokens);
  void find_loadable(const Sequence& sequence, PrefixHit& hit) const;
  void load(Sequence& sequence, int num_tokens);
  void publish_cached(Sequence& sequence, int num_tokens);
  void store(Sequence& sequence, int num_tokens);
  void keep_waiting_stored(const SequenceTable& sequences);
  StoredPair* store_pair(StoredPair* parent, const Sequence& sequence, int pair);
  int num_missing(const StepPlan& plan, SequenceTable& sequences) const;
  void extend(BlockTable& blocks, int num_tokens);
  void demote(PairId pair);
  void transition(const StepPlan& plan);
  void pass_backed(BlockTable& blocks) const;
  int freeable_pages(const BlockTable& blocks) const;
  int num_base(const BlockTable& blocks) const;
  CachedPair* find_child(const CachedPair* parent, const Sequence& sequence, int pair) const;
  StoredPair* stored_child(const StoredPair* parent, const Sequence& sequence, int pair) const;
  void check_table(const Sequence& sequence) const;
  void check_host() const;
  void check_sharing(std::span<const Sequence* const> running) const;

  KvConfig config_;
  FidelityConfig fidelity_;
  PairTable pairs_;
  PrefixCache cache_;
  HostStore host_;
  KvJobs jobs_;
  std::vector<TransferJob> stores_;  // begun since the last commit, which the next one carries
  bool load_ended_ = false;          // since the last finish_loads()
  int num_skipped_stores_ = 0;
  std::vector<PairId> restored_;
};

template <class Visit>
void KvManager::for_each_hit(const Sequence& sequence, Visit visit) const {
  if (!config_.prefix_cache || !sequence.may_use_prefix_cache()) return;
  const int most = (sequence.num_tokens() - 1) / kPairTokens;  // the last token's logits must be computed
  const int recent = sequence.num_tokens() / kPairTokens - fidelity_.recent_pairs;  // from here on all TARGET
  const CachedPair* entry = nullptr;
  int num_base = 0;
  sequence.known_cached.drop_gone();
  for (int i = 0; i < most; ++i) {
    entry = sequence.known_cached.at(i, [&] { return find_child(entry, sequence, i); });
    if (!entry) return;
    // With the pair that the sequence computes next, no more than its share may be BASE.
    const bool is_base = pairs_.is_base(entry->pair);
    num_base += is_base;
    if ((is_base && i >= recent) || num_base > int(sequence.base_cap() * (i + 2))) return;
    visit(*entry);
  }
}

}  // namespace ekv
