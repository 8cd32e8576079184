#include "elastickv/kv_manager.h"

#include <algorithm>

namespace ekv {
namespace {

bool offloads(const FidelityConfig& fidelity) { return fidelity.policy == KvPolicy::exact_offload; }

}  // namespace

std::span<const TokenId> pair_tokens(const Sequence& sequence, int pair) {
  return std::span(sequence.tokens).subspan(size_t(pair) * kPairTokens, size_t(kPairTokens));
}

KvManager::KvManager(const KvConfig& config, int num_pages, const FidelityConfig& fidelity, int num_host_slots)
    : config_(config),
      fidelity_(fidelity),
      pairs_(num_pages, offloads(fidelity) ? 0 : num_host_slots),
      cache_(pairs_, hash_pair, fidelity.recent_pairs),
      host_(offloads(fidelity) ? num_host_slots : 0) {}

KvBudget KvManager::budget() const {
  return {.free_pages = pairs_.num_free_pages() + cache_.num_idle_pages(),
          .total_pages = pairs_.num_pages(),
          .locked_pages = pairs_.num_locked_pages(),
          .total_host_slots = pairs_.num_host_slots() - pairs_.num_locked_host_slots()};
}

// The clean chain first: whoever may read tainted KV still gains from clean KV.
CachedPair* KvManager::find_child(const CachedPair* parent, const Sequence& sequence, int pair) const {
  const std::span<const TokenId> tokens = pair_tokens(sequence, pair);
  const std::string& salt = sequence.request.cache_salt;
  if (!parent || !parent->tainted)
    if (CachedPair* clean = cache_.find(parent, tokens, salt, false)) return clean;
  return sequence.request.tier == KvTier::exact ? nullptr : cache_.find(parent, tokens, salt, true);
}

PrefixHit KvManager::lookup(const Sequence& sequence) const {
  // Who is preempted may have a pending token. It is looked up for a later step at the earliest, because a step
  // that preempts admits nobody, and then the step that yields the token has been delivered.
  EKV_CHECK(!is_pending(sequence.tokens.back()), "the tokens of a sequence that waits are known");
  PrefixHit hit;
  for_each_hit(sequence, [&](const CachedPair& entry) {
    hit.num_tokens += kPairTokens;
    hit.num_free_pages += entry.idle_pages;
    hit.num_free_host_slots += entry.idle_host_slot;
  });
  if (host_.num_used() > 0 && sequence.may_use_prefix_cache()) find_loadable(sequence, hit);
  return hit;
}

// Users never grow from parent to child (prefix_cache.h), so the pairs a sequence shares are its first ones.
int KvManager::num_shared(const BlockTable& blocks) const {
  const auto cached = std::span(blocks.pairs).first(size_t(blocks.num_cached));
  const auto own =
      std::ranges::partition_point(cached, [this](PairId pair) { return pairs_[pair].num_users() > 1; });
  return int(own - cached.begin());
}

// Pages that become free or evictable when the sequence alone gives them up. Pairs whose low bytes have arrived
// are promoted before anybody gives up anything.
int KvManager::freeable_pages(const BlockTable& blocks) const {
  const int shared = num_shared(blocks);
  if (num_live_base() == 0 && pairs_.num_transfers() == 0) return blocks.num_blocks - 2 * shared;
  const bool any_restored = pairs_.num_restoring() > 0;
  int pages = 0;
  for (PairId pair : std::span(blocks.pairs).subspan(size_t(shared))) {
    const bool restored = any_restored && pairs_[pair].transition == Transition::restored;
    pages += restored ? 2 : pairs_.num_releasable_pages(pair);
  }
  return pages;
}

int KvManager::num_base(const BlockTable& blocks) const {
  if (num_live_base() == 0) return 0;
  return int(std::ranges::count_if(blocks.pairs, [this](PairId pair) { return pairs_.is_base(pair); }));
}

SeqView KvManager::view(const Sequence& sequence) const {
  SeqView view = view_briefly(sequence);
  if (sequence.state != SeqState::running) return view;
  view.num_freeable = freeable_pages(sequence.blocks);
  view.num_base = num_base(sequence.blocks);
  return view;
}

SeqView KvManager::view_briefly(const Sequence& sequence) const {
  SeqView view{.id = sequence.id,
               .num_tokens = sequence.num_tokens(),
               .num_computed = sequence.num_computed,
               .num_blocks = sequence.blocks.num_blocks,
               .num_loading = sequence.blocks.num_loading};
  if (sequence.state == SeqState::running) return view;
  const PrefixHit hit = lookup(sequence);
  view.num_cached = hit.num_tokens;
  view.num_cached_free = hit.num_free_pages;
  view.num_cached_host_slots = hit.num_free_host_slots;
  view.num_loadable = hit.num_loadable;
  view.load_later = hit.load_later;
  return view;
}

void KvManager::commit(const StepPlan& plan, SequenceTable& sequences) {
  jobs_.demotes.clear(), jobs_.promotes.clear(), jobs_.transfers.clear();
  jobs_.transfers.swap(stores_);
  EKV_CHECK(plan.promotes.size() == restored_.size(), "whatever was restored is promoted in the next step");
  restored_.clear();
  for (PairId pair : plan.promotes) {
    CachedPair* entry = pairs_[pair].cached;
    jobs_.promotes.push_back(pairs_.promote(pair, fidelity_.writes_through()));
    if (entry) cache_.refresh(*entry);
  }
  keep_waiting_stored(sequences);
  for (SeqId id : plan.preempted) {
    const StoredRef stored = sequences[id].blocks.stored;
    release(sequences[id]);
    sequences[id].blocks.stored = stored;
  }

  EKV_CHECK(plan.chunks.size() >= plan.admitted.size(), "each admitted sequence has a chunk");
  const auto chunks_of_admitted = std::span(plan.chunks).last(plan.admitted.size());
  for (size_t i = 0; i < plan.admitted.size(); ++i) {
    EKV_CHECK(chunks_of_admitted[i].seq == plan.admitted[i], "the last chunks are those of the admitted");
    attach_prefix(sequences[plan.admitted[i]], chunks_of_admitted[i].first_pos);
  }
  for (const LoadPlan& l : plan.loads) attach_prefix(sequences[l.seq], l.first_pos);
  for (PairId pair : plan.demotes) demote(pair);

  reclaim(num_missing(plan, sequences) + int(plan.restores.size()) - pairs_.num_free_pages());
  for (const ChunkPlan& chunk : plan.chunks) {
    Sequence& sequence = sequences[chunk.seq];
    EKV_CHECK(chunk.first_pos == sequence.num_computed, "a chunk starts where valid KV ends");
    extend(sequence.blocks, chunk.first_pos + chunk.num_tokens);
  }
  for (const LoadPlan& l : plan.loads) load(sequences[l.seq], l.first_pos + l.num_tokens);
  transition(plan);
  if (fidelity_.writes_through())
    for (Sequence* sequence : sequences.running()) pass_backed(sequence->blocks);
}

// What goes on beside the step.
void KvManager::transition(const StepPlan& plan) {
  pairs_.free_promoted_slots();
  for (PairId pair : plan.restores) {
    const PageId odd = take_page();
    jobs_.transfers.push_back(pairs_.restore(pair, odd));
    if (CachedPair* entry = pairs_[pair].cached) cache_.refresh(*entry);
  }
  for (PairId pair : plan.backups) {
    make_slot();
    jobs_.transfers.push_back(pairs_.back_up(pair));
    if (CachedPair* entry = pairs_[pair].cached) cache_.refresh(*entry);
  }
}

// Planning looks for pairs without backing from here on.
void KvManager::pass_backed(BlockTable& blocks) const {
  int& next = blocks.num_backed;
  const auto is_backed = [&](PairId pair) {
    return next < fidelity_.sink_pairs || pairs_[pair].slot != kNoHostSlot;
  };
  while (next < int(blocks.pairs.size()) && is_backed(blocks.pairs[size_t(next)])) ++next;
}

void KvManager::attach_prefix(Sequence& sequence, int num_tokens) {
  EKV_CHECK(sequence.blocks.pairs.empty(), "a waiting sequence holds no pages");
  BlockTable& blocks = sequence.blocks;
  blocks.stored = {};
  for_each_hit(sequence, [&](const CachedPair& found) {
    if (int(blocks.pairs.size()) * kPairTokens == num_tokens) return;
    CachedPair& entry = *found.self;
    cache_.pin(entry);
    pairs_.retain(entry.pair);
    if (entry.tainted && sequence.tainted_from == kClean)
      sequence.tainted_from = int(blocks.pairs.size()) * kPairTokens;
    blocks.pairs.push_back(entry.pair);
  });
  EKV_CHECK(int(blocks.pairs.size()) * kPairTokens == num_tokens, "the planned prefix is in the cache");
  blocks.num_cached = int(blocks.pairs.size());
  blocks.num_blocks = 2 * blocks.num_cached;
  sequence.num_computed = num_tokens;
}

int KvManager::num_missing(const StepPlan& plan, SequenceTable& sequences) const {
  int pages = 0;
  for (const ChunkPlan& chunk : plan.chunks)
    pages += std::max(
        0, ceil_div(chunk.first_pos + chunk.num_tokens, kBlockTokens) - sequences[chunk.seq].blocks.num_blocks);
  for (const LoadPlan& l : plan.loads) pages += l.num_tokens / kBlockTokens;
  return pages;
}

void KvManager::extend(BlockTable& blocks, int num_tokens) {
  const int needed = ceil_div(num_tokens, kBlockTokens);
  for (; blocks.num_blocks < needed; ++blocks.num_blocks) {
    const PageId page = take_page();
    if (blocks.num_blocks % 2 == 0)
      blocks.pairs.push_back(pairs_.create(page));
    else
      pairs_.set_odd(blocks.pairs.back(), page);
  }
}

// Demoted cached pairs stay findable: half the pages for all of the content. But demoting what is evicted next
// would be work for nothing.
void KvManager::reclaim(int num_pages) {
  while (num_pages > 0) {
    const int before = pairs_.num_free_pages();
    CachedPair* entry = num_pages <= cache_.num_idle_whole() ? cache_.next_to_shrink() : nullptr;
    if (entry && may_shrink(*entry))
      demote(entry->pair);
    else if (!entry)
      EKV_CHECK(cache_.evict_one(), "a committed plan fits the budget");
    num_pages -= pairs_.num_free_pages() - before;
  }
}

bool KvManager::may_shrink(const CachedPair& entry) const {
  if (!fidelity_.makes_base()) return false;
  // The device demotes before it promotes: what this step promotes is not TARGET yet.
  const int even = pairs_.entry(entry.pair).even;
  if (std::ranges::find(jobs_.promotes, even, &PromoteJob::even) != jobs_.promotes.end()) return false;
  const CachedPair* ancestor = &entry;
  for (int i = 0; i < fidelity_.sink_pairs; ++i)
    if (!(ancestor = ancestor->parent)) return false;
  if (pairs_.num_base() + 1 > int(fidelity_.max_base_fraction * pairs_.num_pairs())) return false;
  return pairs_.may_demote(entry.pair, fidelity_.writes_through()) &&
         (!keeps_low() || pairs_[entry.pair].slot != kNoHostSlot || pairs_.num_free_host_slots() > 0);
}

void KvManager::demote(PairId pair) {
  if (keeps_low() && pairs_[pair].slot == kNoHostSlot) make_slot();
  jobs_.demotes.push_back(pairs_.demote(pair, keeps_low()));
  if (CachedPair* entry = pairs_[pair].cached) cache_.refresh(*entry);
}

void KvManager::make_slot() {
  while (pairs_.num_free_host_slots() == 0)
    EKV_CHECK(cache_.evict_one(), "a committed plan demotes and backs up no more than the host has room for");
}

PageId KvManager::take_page() {
  std::optional<PageId> page = pairs_.acquire_page();
  while (!page && cache_.evict_one()) page = pairs_.acquire_page();
  EKV_CHECK(page.has_value(), "a committed plan fits the budget");
  return *page;
}

void KvManager::transfer_done(uint32_t ticket) {
  const PairTable::Done done = pairs_.transfer_done(ticket);
  if (done.kind == TransferKind::store_pair) host_.store_done(done.slot);
  if (done.kind == TransferKind::load_pair) host_.load_done(done.slot), load_ended_ = true;
  if (done.pair == kNoPair) return;
  if (done.kind == TransferKind::restore_low) restored_.push_back(done.pair);
  if (CachedPair* entry = pairs_[done.pair].cached) cache_.refresh(*entry);
}

void KvManager::publish(Sequence& sequence, int num_tokens) {
  if (config_.prefix_cache) publish_cached(sequence, num_tokens);
  if (host_.num_slots() > 0) store(sequence, num_tokens);
}

void KvManager::publish_cached(Sequence& sequence, int num_tokens) {
  BlockTable& blocks = sequence.blocks;
  CachedPair* parent = blocks.num_cached ? pairs_[blocks.pairs[size_t(blocks.num_cached) - 1]].cached : nullptr;
  while ((blocks.num_cached + 1) * kPairTokens <= num_tokens) {
    PairId& pair = blocks.pairs[size_t(blocks.num_cached)];
    const std::span<const TokenId> tokens = pair_tokens(sequence, blocks.num_cached);
    const std::string& salt = sequence.request.cache_salt;
    const bool tainted = (blocks.num_cached + 1) * kPairTokens > sequence.tainted_from;
    if (CachedPair* same = cache_.find(parent, tokens, salt, tainted)) {
      if (pairs_.is_base(same->pair)) return;
      cache_.pin(*same);
      pairs_.retain(same->pair);
      pairs_.release(std::exchange(pair, same->pair));
      blocks.num_backed = std::min(blocks.num_backed, blocks.num_cached);
      parent = same;
    } else {
      if (tainted) pairs_.set_tainted(pair);
      parent = &cache_.insert(parent, tokens, salt, pair);
      cache_.pin(*parent);
    }
    ++blocks.num_cached;
  }
}

void KvManager::release(Sequence& sequence) {
  BlockTable& blocks = sequence.blocks;
  for (size_t i = blocks.pairs.size(); i-- > 0;) {
    CachedPair* entry = int(i) < blocks.num_cached ? pairs_[blocks.pairs[i]].cached : nullptr;
    pairs_.release(blocks.pairs[i]);
    if (entry) cache_.unpin(*entry);
  }
  blocks.pairs.clear();
  blocks.num_blocks = blocks.num_cached = blocks.num_backed = blocks.num_loading = blocks.num_stored = 0;
  blocks.stored = {};
  sequence.num_computed = 0;
  sequence.tainted_from = kClean;
}

}  // namespace ekv
