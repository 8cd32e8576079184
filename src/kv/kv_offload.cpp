// Policy exact_offload: every whole pair is written to the host, and what the host holds of a waiting sequence
// comes back as a copy instead of being computed again.

#include <algorithm>

#include "elastickv/kv_manager.h"

namespace ekv {

StoredPair* KvManager::stored_child(const StoredPair* parent, const Sequence& sequence, int pair) const {
  return sequence.known_stored.at(
      pair, [&] { return host_.find(parent, pair_tokens(sequence, pair), sequence.request.cache_salt); });
}

// The chain of the host is walked from its first pair, because a pair is known by those before it.
void KvManager::find_loadable(const Sequence& sequence, PrefixHit& hit) const {
  const int first = hit.num_tokens / kPairTokens;
  const int most = (sequence.num_tokens() - 1) / kPairTokens;  // the last token's logits must be computed
  if (first == most) return;
  const StoredPair* entry = nullptr;
  sequence.known_stored.drop_gone();
  for (int i = 0; i < most; ++i) {
    entry = stored_child(entry, sequence, i);
    if (!entry) return;
    if (i < first) continue;
    if (entry->arriving) {
      hit.load_later |= sequence.stats.num_preemptions > 0;
      return;
    }
    hit.num_loadable += kPairTokens;
    hit.load_later |= config_.prefix_cache && entry->loads > 0;
  }
}

void KvManager::load(Sequence& sequence, int num_tokens) {
  BlockTable& blocks = sequence.blocks;
  const int first = int(blocks.pairs.size()), end = num_tokens / kPairTokens;
  extend(blocks, num_tokens);
  StoredPair* entry = nullptr;
  sequence.known_stored.drop_gone();
  for (int i = 0; i < end; ++i) {
    entry = stored_child(entry, sequence, i);
    EKV_CHECK(entry != nullptr, "the host holds what is planned to be loaded");
    if (i < first) continue;
    host_.begin_load(*entry);
    jobs_.transfers.push_back(pairs_.load(blocks.pairs[size_t(i)], entry->slot));
  }
  blocks.num_loading = end - first;
  blocks.num_stored = end;
  blocks.stored = StoredRef(*entry);
  sequence.num_computed = num_tokens;
}

void KvManager::finish_loads(std::span<Sequence* const> running) {
  if (!std::exchange(load_ended_, false)) return;
  for (Sequence* sequence : running) {
    BlockTable& blocks = sequence->blocks;
    const auto loading = std::span(blocks.pairs).last(size_t(blocks.num_loading));
    const auto is_on_its_way = [this](PairId pair) { return pairs_[pair].transition == Transition::loading; };
    if (loading.empty() || std::ranges::any_of(loading, is_on_its_way)) continue;
    blocks.num_loading = 0;
    publish(*sequence);
  }
}

// What a preempted sequence will load counts as in use while it waits, or the host would forget it before what
// is stored now. Those sequences stand first in the queue, unless it is ordered by priority.
void KvManager::keep_waiting_stored(const SequenceTable& sequences) {
  for (const Sequence* sequence : sequences.waiting()) {
    const StoredRef& stored = sequence->blocks.stored;
    if (!stored.entry) return;
    if (stored.is_there()) host_.touch(*stored.entry);
  }
}

// A chain whose end the host has evicted is left as it is while its sequence runs. Where not all that runs has
// room there, storing it again would only push out the chains of others, and theirs it in turn. Simulated, 90
// conversations of 4,096 + 800 tokens, 20 GiB of KV and 4 GiB on the host: twenty times the bytes to the host,
// and what 32 preempted sequences now load would be computed again, all of it.
void KvManager::store(Sequence& sequence, int num_tokens) {
  BlockTable& blocks = sequence.blocks;
  const int whole = num_tokens / kPairTokens;
  if (blocks.num_stored >= whole || (blocks.num_stored > 0 && !blocks.stored.is_there())) return;
  while (blocks.num_stored < whole) {
    StoredPair* entry = store_pair(blocks.stored.entry, sequence, blocks.num_stored);
    if (!entry) return;
    blocks.stored = StoredRef(*entry);
    ++blocks.num_stored;
  }
}

// The entry that holds this pair now, or will when its copy has ended. Null: not yet.
StoredPair* KvManager::store_pair(StoredPair* parent, const Sequence& sequence, int pair) {
  const std::span<const TokenId> tokens = pair_tokens(sequence, pair);
  const std::string& salt = sequence.request.cache_salt;
  if (StoredPair* entry = host_.find(parent, tokens, salt)) {
    host_.touch(*entry);
    return entry;
  }
  const PairId id = sequence.blocks.pairs[size_t(pair)];
  if (pairs_[id].transition != Transition::none) return nullptr;
  StoredPair* entry = host_.begin_store(parent, tokens, salt);
  if (!entry) {
    ++num_skipped_stores_;
    return nullptr;
  }
  stores_.push_back(pairs_.store(id, entry->slot));
  return entry;
}

}  // namespace ekv
