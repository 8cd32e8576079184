// What must hold between block tables, pairs and the prefix cache.

#include <algorithm>
#include <unordered_map>

#include "elastickv/kv_manager.h"

namespace ekv {

void KvManager::check_integrity(std::span<const Sequence* const> running) const {
  pairs_.check_integrity();
  cache_.check_integrity();
  for (const Sequence* sequence : running) check_table(*sequence);
  check_sharing(running);
  check_host();
}

void KvManager::check_host() const {
  host_.check_integrity();
  EKV_CHECK(pairs_.num_open(TransferKind::store_pair) == host_.num_arriving(), "a store fills one slot");
  EKV_CHECK(pairs_.num_open(TransferKind::load_pair) == host_.num_loads(), "a load reads one slot");
}

void KvManager::check_table(const Sequence& sequence) const {
  const BlockTable& blocks = sequence.blocks;
  EKV_CHECK(ceil_div(blocks.num_blocks, 2) == int(blocks.pairs.size()), "a pair covers two blocks");
  EKV_CHECK(sequence.num_computed <= blocks.num_blocks * kBlockTokens, "valid KV lies in pages");
  for (size_t i = 0; i < blocks.pairs.size(); ++i) {
    const Pair& pair = pairs_[blocks.pairs[i]];
    const PairEntry& entry = pairs_.entry(blocks.pairs[i]);
    const bool half = int(i) == blocks.num_blocks / 2;
    EKV_CHECK(entry.is_base() ? !half : (entry.odd == -1) == half, "only the last pair may lack its odd page");
    EKV_CHECK((pair.cached != nullptr) == (int(i) < blocks.num_cached), "cached pairs come first");
    EKV_CHECK(sequence.base_cap() > 0 || !entry.is_base(), "who asked for exact KV has no BASE pair");
    EKV_CHECK(int(i) >= blocks.num_backed || int(i) < fidelity_.sink_pairs || pair.slot != kNoHostSlot,
              "planning passes over the pairs that are on the host");
    EKV_CHECK(pair.transition != Transition::loading || i + size_t(blocks.num_loading) >= blocks.pairs.size(),
              "what is on its way to a sequence are its last pairs");
    if (!pair.cached) continue;
    EKV_CHECK(pair.tainted == (int(i + 1) * kPairTokens > sequence.tainted_from), "taint begins in one place");
    EKV_CHECK(sequence.request.tier != KvTier::exact || !pair.tainted, "an exact sequence reads no tainted KV");
    EKV_CHECK(std::equal(pair.cached->tokens.begin(), pair.cached->tokens.end(),
                         sequence.tokens.begin() + long(i) * kPairTokens),
              "a hit has the content");
  }
}

void KvManager::check_sharing(std::span<const Sequence* const> running) const {
  std::unordered_map<PairId, int> users;
  for (const Sequence* sequence : running)
    for (PairId pair : sequence->blocks.pairs) ++users[pair];
  int in_use = 0;
  for (const auto& [id, count] : users) {
    const Pair& pair = pairs_[id];
    EKV_CHECK(pair.num_users() == count, "a pair has one reference per holder");
    EKV_CHECK(!pair.cached || pair.cached->users == count, "an entry counts its users");
    in_use += pair.cached != nullptr;
  }
  EKV_CHECK(in_use + cache_.num_idle_entries() == cache_.num_entries(),
            "an entry in use is in somebody's table");
  EKV_CHECK(int(users.size()) + cache_.num_idle_entries() == pairs_.num_pairs(),
            "a pair is in a table or in the cache");
}

}  // namespace ekv
