#pragma once
// prefix_cache.h -- whole pairs findable by content, so that equal prompt prefixes are computed once.

#include <list>
#include <memory_resource>
#include <span>
#include <string_view>

#include "elastickv/chain_index.h"
#include "elastickv/pair_table.h"

namespace ekv {

struct CachedPair : ChainLink<CachedPair> {
  PairId pair = kNoPair;  // the entry holds one reference
  int users = 0;          // sequences whose block table points here
  int children = 0;       // entries whose parent this is
  int idle_pages = 0;     // what it adds to num_idle_pages(), and to num_idle_host_slots()
  bool idle_host_slot = false, idle_base = false;
  std::pmr::list<CachedPair>::iterator self;  // its place in one of the cache's two lists
  std::pmr::list<CachedPair*>::iterator to_shrink;
  bool may_shrink = false;  // has such a place
  int num_below = 0;        // entries that became idle with it, and stand below it in its chain
};

// Who uses an entry uses its ancestors, and lets go of it before them. So users never grow from parent to
// child, and in the order of the last use nobody stands behind his parent: the least recently used idle entry
// is always a leaf.
//
// Invariants: an entry's ancestors are in the cache too; an entry with users is never evicted. Entries are at
// stable addresses, and an EntryRef to one that was evicted can be asked. Memory is recycled: a full cache that
// evicts as much as it takes in allocates nothing.
// Not thread-safe; engine thread only.
class PrefixCache {
 public:
  // `pairs` outlives the cache. Tests bring a hash that collides. The last `num_recent` pairs that a sequence
  // leaves behind are not for shrinking: they would be recent for whoever goes on there.
  explicit PrefixCache(PairTable& pairs, PairHash hash = hash_pair, int num_recent = 0);
  ~PrefixCache();  // gives back the pairs of all entries
  PrefixCache(const PrefixCache&) = delete;
  PrefixCache& operator=(const PrefixCache&) = delete;

  // The child of `parent` (null: a first pair with this salt) on that chain that holds the 32 `tokens`, or
  // null. No side effects.
  CachedPair* find(const CachedPair* parent, std::span<const TokenId> tokens, std::string_view salt,
                   bool tainted = false) const {
    return index_.find(parent, tokens, salt, tainted);
  }
  // Makes an entry for a pair of the caller's; the entry takes its own reference, its chain is that of the
  // pair. The caller checked with find() that there is none, and is a user of `parent`. Users: 0; call pin().
  CachedPair& insert(CachedPair* parent, std::span<const TokenId> tokens, std::string_view salt, PairId pair);
  void pin(CachedPair& entry);    // one more sequence uses it
  void unpin(CachedPair& entry);  // one fewer; at 0 the entry may be evicted, last used last

  int num_entries() const { return int(index_.size()); }
  int num_idle_pages() const { return num_idle_pages_; }  // that evicting every entry without users frees now
  int num_idle_host_slots() const { return num_idle_host_slots_; }  // likewise host slots
  int num_idle_base() const { return num_idle_base_; }              // BASE pairs of entries without users
  int num_idle_entries() const { return int(idle_.size()); }
  void refresh(CachedPair& entry);  // its pair changed fidelity, or a transition began or ended
  bool evict_one();                 // forgets the least recently used idle entry; false: there is none
  // For whoever would rather shrink than forget: an idle entry that was not given out since it became idle, or
  // null. The least recently used chain first, and its beginning before its end, so that what shrinks is one
  // run that grows from the sink. O(1).
  CachedPair* next_to_shrink();
  int num_idle_whole() const { return num_idle_whole_; }  // idle entries whose eviction frees two pages
  void clear();                                           // forgets every entry without users

  // Every invariant above, recomputed from scratch; aborts with what is wrong. For tests and idle checks.
  void check_integrity() const;

 private:
  void check_entry(const CachedPair& entry) const;
  void joins_idle(CachedPair& entry);
  void leaves_idle(CachedPair& entry);

  PairTable& pairs_;
  int num_idle_pages_ = 0, num_idle_host_slots_ = 0, num_idle_whole_ = 0, num_idle_base_ = 0;
  std::pmr::unsynchronized_pool_resource memory_;  // of the containers below; keeps what they free
  std::pmr::list<CachedPair> used_, idle_;         // with and without users; idle_: least recently used first
  std::pmr::list<CachedPair> places_;              // of those that were evicted
  std::pmr::list<CachedPair*> to_shrink_;
  CachedPair* last_idle_ = nullptr;  // the last to become idle, while it is
  int num_recent_;
  ChainIndex<CachedPair> index_;
};

}  // namespace ekv
