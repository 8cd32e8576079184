#pragma once
// host_store.h -- whole pairs that the host holds, for policy exact_offload: a prefix cache one level below
// that of the device, findable by the same content. It knows slots and copies under way, no pages.

#include <memory_resource>
#include <span>
#include <string_view>
#include <vector>

#include "elastickv/block_table.h"
#include "elastickv/chain_index.h"
#include "elastickv/page_pool.h"

namespace ekv {

struct StoredPair : ChainLink<StoredPair> {
  HostSlot slot = kNoHostSlot;  // where it lies; fixed
  bool arriving = false;        // its copy to the host has not ended: it cannot be loaded yet
  int loads = 0;                // copies from it that have not ended
  int children = 0;             // entries whose parent this is
  uint64_t last_use = 0;        // of it, or of what came after it and was evicted since
  StoredPair *older = nullptr,
             *newer = nullptr;  // its neighbours among those that may be evicted; null: it may not

  bool in_flight() const { return arriving || loads > 0; }
};

// Least recently used first, and a pair never before those that continue it: what is left of a chain is always
// a prefix, which is all that a lookup can use. So the recency of a pair is the latest use of it or of any pair
// after it. Pairs with a copy under way stay.
//
// Invariants: an entry's ancestors are here too; no more entries than slots. All memory but that of long salts
// is taken at the start, or recycled. Not thread-safe; engine thread only.
class HostStore {
 public:
  explicit HostStore(int num_slots, PairHash hash = hash_pair);  // tests bring a hash that collides
  HostStore(const HostStore&) = delete;
  HostStore& operator=(const HostStore&) = delete;

  // The child of `parent` (null: a first pair with this salt) that holds the 32 `tokens`, or null. No side
  // effects.
  StoredPair* find(const StoredPair* parent, std::span<const TokenId> tokens, std::string_view salt) const {
    return index_.find(parent, tokens, salt, false);
  }
  // Makes a place for a pair that find() does not find, evicting if it must. Null: every slot is needed.
  StoredPair* begin_store(StoredPair* parent, std::span<const TokenId> tokens, std::string_view salt);
  void begin_load(StoredPair& entry);  // one that is not arriving; counts as a use
  void touch(StoredPair& entry);       // a use
  // The copy has ended. The slot is that of the job.
  void store_done(HostSlot slot);
  void load_done(HostSlot slot);
  void clear();  // forgets all but what is in flight, and what that continues

  int num_slots() const { return slots_.size(); }
  int num_used() const { return slots_.size() - slots_.num_free(); }
  int num_arriving() const { return num_arriving_; }
  int num_loads() const { return num_loads_; }

  // Every invariant above, recomputed from scratch; aborts with what is wrong.
  void check_integrity() const;

 private:
  StoredPair& at(HostSlot slot) { return entries_[size_t(slot)]; }
  bool evict_one(const StoredPair* keep);
  void settle(StoredPair& entry);
  void link(StoredPair& entry);
  void unlink(StoredPair& entry);
  static bool is_evictable(const StoredPair& e) { return !e.in_flight() && e.children == 0; }

  FreeList<HostSlot> slots_;
  std::vector<StoredPair> entries_;  // [HostSlot]
  StoredPair evictable_;             // the head of the ring of those that may be evicted: newer is the oldest
  std::pmr::unsynchronized_pool_resource memory_;  // of the index; keeps what it frees
  ChainIndex<StoredPair> index_;
  uint64_t now_ = 0;
  int num_arriving_ = 0, num_loads_ = 0;
};

}  // namespace ekv
