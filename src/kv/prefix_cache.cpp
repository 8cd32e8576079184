#include "elastickv/prefix_cache.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

namespace ekv {

PrefixCache::PrefixCache(PairTable& pairs, PairHash hash, int num_recent)
    : pairs_(pairs),
      used_(&memory_),
      idle_(&memory_),
      places_(&memory_),
      to_shrink_(&memory_),
      num_recent_(num_recent),
      index_(hash, &memory_) {}

PrefixCache::~PrefixCache() {
  for (const auto* list : {&used_, &idle_})
    for (const CachedPair& entry : *list) {
      pairs_.set_cached(entry.pair, nullptr);
      pairs_.release(entry.pair);
    }
}

CachedPair& PrefixCache::insert(CachedPair* parent, std::span<const TokenId> tokens, std::string_view salt,
                                PairId pair) {
  EKV_CHECK(!parent || parent->users > 0, "who adds a child uses the parent");
  EKV_CHECK(!parent || !parent->tainted || pairs_[pair].tainted, "what follows tainted KV is tainted");
  if (places_.empty()) places_.emplace_back();
  idle_.splice(idle_.end(), places_, places_.begin());
  CachedPair& entry = idle_.back();
  entry.self = std::prev(idle_.end());
  entry.pair = pair;
  index_.insert(entry, parent, tokens, salt, pairs_[pair].tainted);
  joins_idle(entry);
  pairs_.retain(pair);
  pairs_.set_cached(pair, &entry);
  refresh(entry);
  if (parent) ++parent->children;
  return entry;
}

void PrefixCache::pin(CachedPair& entry) {
  EKV_CHECK(!entry.parent || entry.parent->users > entry.users, "who uses an entry uses its parent");
  if (entry.users++ == 0) {
    leaves_idle(entry);
    used_.splice(used_.end(), idle_, entry.self);
  }
  refresh(entry);
}

void PrefixCache::unpin(CachedPair& entry) {
  EKV_CHECK(entry.users > 0, "an entry is unpinned once per pin");
  if (--entry.users == 0) {
    idle_.splice(idle_.end(), used_, entry.self);
    joins_idle(entry);
  }
  refresh(entry);
}

// A sequence lets go of its pairs from the last to the first: whose child has just become idle belongs before
// it.
void PrefixCache::joins_idle(CachedPair& entry) {
  const bool continues = last_idle_ && last_idle_->parent == &entry;
  entry.num_below = continues ? last_idle_->num_below + 1 : 0;
  if (entry.num_below >= num_recent_) {
    const bool before = continues && last_idle_->may_shrink;
    entry.to_shrink = to_shrink_.insert(before ? last_idle_->to_shrink : to_shrink_.end(), &entry);
    entry.may_shrink = true;
  }
  last_idle_ = &entry;
}

void PrefixCache::leaves_idle(CachedPair& entry) {
  if (std::exchange(entry.may_shrink, false)) to_shrink_.erase(entry.to_shrink);
  if (last_idle_ == &entry) last_idle_ = nullptr;
}

void PrefixCache::refresh(CachedPair& entry) {
  const int pages = entry.users == 0 ? pairs_.num_releasable_pages(entry.pair) : 0;
  num_idle_pages_ += pages - entry.idle_pages;
  num_idle_whole_ += (pages == 2) - (entry.idle_pages == 2);
  entry.idle_pages = pages;
  const bool slot = entry.users == 0 && pairs_.has_releasable_host_slot(entry.pair);
  num_idle_host_slots_ += slot - entry.idle_host_slot;
  entry.idle_host_slot = slot;
  const bool base = entry.users == 0 && pairs_.is_base(entry.pair);
  num_idle_base_ += base - entry.idle_base;
  entry.idle_base = base;
}

bool PrefixCache::evict_one() {
  if (idle_.empty()) return false;
  CachedPair& entry = idle_.front();
  EKV_CHECK(entry.users == 0 && entry.children == 0, "the least recently used idle entry is a leaf");
  index_.erase(entry);
  leaves_idle(entry);
  num_idle_whole_ -= entry.idle_pages == 2;
  num_idle_pages_ -= std::exchange(entry.idle_pages, 0);
  num_idle_host_slots_ -= std::exchange(entry.idle_host_slot, false);
  num_idle_base_ -= std::exchange(entry.idle_base, false);
  pairs_.set_cached(entry.pair, nullptr);
  pairs_.release(entry.pair);
  if (entry.parent) --entry.parent->children;
  places_.splice(places_.begin(), idle_, idle_.begin());
  return true;
}

CachedPair* PrefixCache::next_to_shrink() {
  if (to_shrink_.empty()) return nullptr;
  CachedPair* entry = to_shrink_.front();
  entry->may_shrink = false;
  to_shrink_.pop_front();
  return entry;
}

void PrefixCache::clear() {
  while (evict_one()) {
  }
}

void PrefixCache::check_integrity() const {
  EKV_CHECK(index_.size() == used_.size() + idle_.size(), "every entry is findable, and nothing else is");
  std::unordered_map<const CachedPair*, int> children, users_below;
  int idle_pages = 0, idle_slots = 0;
  for (const auto* list : {&used_, &idle_})
    for (const CachedPair& entry : *list) {
      EKV_CHECK((entry.users > 0) == (list == &used_), "an entry is idle exactly when it has no users");
      check_entry(entry);
      idle_pages += entry.idle_pages, idle_slots += entry.idle_host_slot;
      ++children[entry.parent];
      users_below[entry.parent] += entry.users;
    }
  for (const auto* list : {&used_, &idle_})
    for (const CachedPair& entry : *list) {
      EKV_CHECK(entry.children == children[&entry], "an entry knows how many children it has");
      EKV_CHECK(entry.users >= users_below[&entry], "who uses a child uses the parent");
    }
  EKV_CHECK(idle_pages == num_idle_pages_ && idle_slots == num_idle_host_slots_,
            "the idle pages are those of the idle entries");
}

void PrefixCache::check_entry(const CachedPair& entry) const {
  EKV_CHECK(&*entry.self == &entry, "an entry knows its place");
  EKV_CHECK(find(entry.parent, entry.tokens, entry.salt, entry.tainted) == &entry,
            "an entry is found by its content");
  EKV_CHECK(!entry.parent || index_.contains(entry.parent), "the parent of an entry is in the cache");
  EKV_CHECK(!entry.parent || entry.salt.empty(), "only first pairs carry a salt");
  EKV_CHECK(!entry.parent || !entry.parent->tainted || entry.tainted, "what follows tainted KV is tainted");
  const Pair& pair = pairs_[entry.pair];
  EKV_CHECK(pair.cached == &entry && pair.tainted == entry.tainted, "a cached pair knows its entry");
  EKV_CHECK(pair.refs == 1 + entry.users, "the pair of an entry is held by it and by its users");
  EKV_CHECK(entry.idle_pages == (entry.users ? 0 : pairs_.num_releasable_pages(entry.pair)),
            "an idle entry counts what its eviction frees");
  EKV_CHECK(entry.idle_base == (entry.users == 0 && pairs_.is_base(entry.pair)),
            "an idle entry knows its fidelity");
  EKV_CHECK(entry.idle_host_slot == (entry.users == 0 && pairs_.has_releasable_host_slot(entry.pair)),
            "an idle entry counts the slot that its eviction frees");
}

}  // namespace ekv
