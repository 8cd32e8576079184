#pragma once
// prefix_cache.h -- whole pairs findable by content, so that equal prompt prefixes are computed once.

#include <array>
#include <list>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "elastickv/base.h"
#include "elastickv/kv_layout.h"
#include "elastickv/page_pool.h"

namespace ekv {

// One cached pair. Its identity is exact: parent entry, the 32 token ids, and for a first pair the salt. A hash
// finds it, equality decides it, so no collision can hand over somebody else's KV.
struct CachedPair {
  CachedPair* parent = nullptr;  // the pair before it; null for the first pair of a sequence
  std::array<TokenId, kPairTokens> tokens{};
  std::string salt;                      // first pairs only; the others inherit it through their parent
  PageId even = kNoPage, odd = kNoPage;  // one pool reference each, held by the entry
  int users = 0;                         // sequences whose block table points here
  int children = 0;                      // entries whose parent this is
  uint64_t hash = 0;
  std::list<CachedPair*>::iterator idle_position;  // in the eviction order while users and children are 0
};

// Invariants: an entry's ancestors are in the cache too; an entry with users or children is never evicted.
// Entries are at stable addresses. Not thread-safe; engine thread only.
class PrefixCache {
 public:
  explicit PrefixCache(PagePool& pool) : pool_(pool) {}
  ~PrefixCache();
  PrefixCache(const PrefixCache&) = delete;

  // The child of `parent` (null: a first pair with this salt) that holds `tokens`, or null. No side effects.
  CachedPair* find(const CachedPair* parent, std::span<const TokenId> tokens, const std::string& salt) const;
  // Makes an entry for pages that the caller owns; the entry takes its own references. The caller checked with
  // find() that there is none. Users: 0; call pin().
  CachedPair& insert(CachedPair* parent, std::span<const TokenId> tokens, const std::string& salt, PageId even,
                     PageId odd);
  void pin(CachedPair& entry);    // one more sequence uses it
  void unpin(CachedPair& entry);  // one fewer; at 0 the entry may be evicted, last used last

  int num_entries() const { return int(entries_.size()); }
  int num_idle_pages() const;  // pages that eviction could free in the end: no sequence uses the entry
  bool evict_one();            // forgets the least recently used idle leaf; false: there is none
  void clear();                // forgets every entry without users, children first

  // Every invariant above, recomputed from scratch; aborts with what is wrong. For tests and idle checks.
  void check_integrity() const;

 private:
  struct Hit;
  PagePool& pool_;
  std::unordered_multimap<uint64_t, std::unique_ptr<CachedPair>> entries_;
  std::list<CachedPair*> idle_;  // leaves without users, least recently used first
  int num_used_ = 0;             // entries with users > 0
};

}  // namespace ekv
