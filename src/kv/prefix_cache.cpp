#include "elastickv/prefix_cache.h"

#include <algorithm>
#include <unordered_map>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace ekv {
namespace {

constexpr int kPagesPerPair = 2;

}  // namespace

uint64_t hash_pair(uint64_t seed, std::span<const TokenId> tokens) {
  return XXH3_64bits_withSeed(tokens.data(), tokens.size_bytes(), seed);
}

PrefixCache::PrefixCache(PagePool& pool, PairHash hash)
    : pool_(pool), hash_(hash), used_(&memory_), idle_(&memory_), index_(&memory_) {}

PrefixCache::~PrefixCache() {
  for (const auto* list : {&used_, &idle_})
    for (const CachedPair& entry : *list) pool_.release(entry.odd), pool_.release(entry.even);
}

bool PrefixCache::Equal::operator()(const Key& key, const CachedPair* entry) const {
  return key.parent == entry->parent && std::ranges::equal(key.tokens, entry->tokens) &&
         (key.parent != nullptr || key.salt == entry->salt);
}

PrefixCache::Key PrefixCache::key_of(const CachedPair* parent, std::span<const TokenId> tokens,
                                     std::string_view salt) const {
  EKV_CHECK(tokens.size() == size_t(kPairTokens), "the cache holds whole pairs");
  const uint64_t seed = parent ? parent->hash : XXH3_64bits(salt.data(), salt.size());
  return {parent, tokens, salt, hash_(seed, tokens)};
}

CachedPair* PrefixCache::find(const CachedPair* parent, std::span<const TokenId> tokens,
                              std::string_view salt) const {
  const auto it = index_.find(key_of(parent, tokens, salt));
  return it == index_.end() ? nullptr : *it;
}

CachedPair& PrefixCache::insert(CachedPair* parent, std::span<const TokenId> tokens, std::string_view salt,
                                PageId even, PageId odd) {
  EKV_CHECK(!parent || parent->users > 0, "who adds a child uses the parent");
  CachedPair& entry = idle_.emplace_back();
  entry.self = std::prev(idle_.end());
  entry.parent = parent;
  std::ranges::copy(tokens, entry.tokens.begin());
  if (!parent) entry.salt = salt;
  entry.even = even, entry.odd = odd;
  entry.hash = key_of(parent, tokens, salt).hash;
  pool_.retain(even), pool_.retain(odd);
  if (parent) ++parent->children;
  index_.insert(&entry);
  return entry;
}

void PrefixCache::pin(CachedPair& entry) {
  EKV_CHECK(!entry.parent || entry.parent->users > entry.users, "who uses an entry uses its parent");
  if (entry.users++ == 0) used_.splice(used_.end(), idle_, entry.self);
}

void PrefixCache::unpin(CachedPair& entry) {
  EKV_CHECK(entry.users > 0, "an entry is unpinned once per pin");
  if (--entry.users == 0) idle_.splice(idle_.end(), used_, entry.self);
}

int PrefixCache::num_idle_pages() const { return kPagesPerPair * int(idle_.size()); }

bool PrefixCache::evict_one() {
  if (idle_.empty()) return false;
  CachedPair& entry = idle_.front();
  EKV_CHECK(entry.users == 0 && entry.children == 0, "the least recently used idle entry is a leaf");
  index_.erase(&entry);
  pool_.release(entry.odd), pool_.release(entry.even);
  if (entry.parent) --entry.parent->children;
  idle_.pop_front();
  return true;
}

void PrefixCache::clear() {
  while (evict_one()) {
  }
}

void PrefixCache::check_integrity() const {
  EKV_CHECK(index_.size() == used_.size() + idle_.size(), "every entry is findable, and nothing else is");
  std::unordered_map<const CachedPair*, int> children, users_below;
  for (const auto* list : {&used_, &idle_})
    for (const CachedPair& entry : *list) {
      EKV_CHECK((entry.users > 0) == (list == &used_), "an entry is idle exactly when it has no users");
      check_entry(entry);
      ++children[entry.parent];
      users_below[entry.parent] += entry.users;
    }
  for (const auto* list : {&used_, &idle_})
    for (const CachedPair& entry : *list) {
      EKV_CHECK(entry.children == children[&entry], "an entry knows how many children it has");
      EKV_CHECK(entry.users >= users_below[&entry], "who uses a child uses the parent");
    }
}

void PrefixCache::check_entry(const CachedPair& entry) const {
  EKV_CHECK(&*entry.self == &entry, "an entry knows its place");
  EKV_CHECK(find(entry.parent, entry.tokens, entry.salt) == &entry, "an entry is found by its content");
  EKV_CHECK(!entry.parent || index_.contains(entry.parent), "the parent of an entry is in the cache");
  EKV_CHECK(!entry.parent || entry.salt.empty(), "only first pairs carry a salt");
  EKV_CHECK(pool_.references(entry.even) == 1 + entry.users && pool_.references(entry.odd) == 1 + entry.users,
            "the pages of an entry are held by it and by its users");
}

}  // namespace ekv
