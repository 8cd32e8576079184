#pragma once
// pair_table.h -- the state of every pair of KV blocks: its pages, its fidelity, what the host holds of it, and
// the transition that is under way. Block tables and the prefix cache name pairs and share them by reference.
// A page belongs to exactly one pair. The paper's LogicalBlockStateTable.

#include <vector>

#include "elastickv/chain_ref.h"
#include "elastickv/kv_jobs.h"
#include "elastickv/kv_layout.h"
#include "elastickv/page_pool.h"

namespace ekv {

enum class Transition : uint8_t {
  none,
  draining,    // BASE; its low bytes travel from the device's staging to the host slot. The pages are not read
  backing_up,  // TARGET; the device reads its pages and writes the host slot
  storing,     // TARGET; the device reads its pages and writes a slot of the HostStore
  loading,     // TARGET; its pages are filled from a slot of the HostStore. Nobody reads them before that has
               // ended
  restoring,   // BASE; its low bytes travel from the host slot to the device. A page for the odd block is taken
  restored,    // BASE; they have arrived, the next step joins them
};

struct Pair {
  int refs = 0;  // block tables that hold it, and one for an entry of the prefix cache
  Fidelity fidelity = Fidelity::target;
  Transition transition = Transition::none;
  bool tainted = false;           // computed from BASE, or from KV that was
  HostSlot slot = kNoHostSlot;    // of its low bytes; they are there when no transition writes them
  PageId reserved_odd = kNoPage;  // restoring and restored only
  uint32_t ticket = 0;            // of the transfer under way; 0: none
  CachedPair* cached = nullptr;   // the entry of the prefix cache with this content

  int num_users() const { return refs - (cached != nullptr); }
};

// Invariants: pages free + in pairs with references + locked = all pages. Locked are the pages of pairs that
// nobody refers to but whose transfer is under way, and those reserved for promotion: they come back with a
// ticket, or with the promotion after it. Slots likewise. Nothing allocates once the table has seen its largest
// number of pairs. Not thread-safe; engine thread only.
class PairTable {
 public:
  PairTable(int num_pages, int num_host_slots);

  // Pages
  std::optional<PageId> acquire_page() { return pages_.acquire(); }
  int num_pages() const { return pages_.size(); }
  int num_free_pages() const { return pages_.num_free(); }
  int num_locked_pages() const { return num_locked_; }

  // Pairs. A new one is TARGET with one reference and owns `even`; `odd` follows when its block begins.
  PairId create(PageId even);
  void set_odd(PairId pair, PageId odd);
  void retain(PairId pair);
  void release(PairId pair);  // the last reference frees its pages and slot, or leaves them to its transfer
  const Pair& operator[](PairId pair) const { return pairs_[size_t(pair)]; }
  const PairEntry& entry(PairId pair) const { return entries_[size_t(pair)]; }
  bool is_base(PairId pair) const { return (traits_[size_t(pair)] & kBase) != 0; }
  void set_tainted(PairId pair) { pairs_[size_t(pair)].tainted = true; }
  void set_cached(PairId pair, CachedPair* entry) { pairs_[size_t(pair)].cached = entry; }
  // Pages that come free now when the last reference goes: none while the device still reads them.
  int num_releasable_pages(PairId pair) const { return traits_[size_t(pair)] / kReleasablePage; }
  bool has_releasable_host_slot(PairId pair) const;  // likewise its host slot

  // Transitions. Each returns what the device must do. `pair` is idle (no transition) unless said otherwise.
  bool may_demote(PairId pair, bool needs_backing) const {
    const uint8_t wanted = needs_backing ? kDemotable | kBacked : kDemotable;
    return (traits_[size_t(pair)] & wanted) == wanted;
  }  // TARGET, idle, whole; with `needs_backing` backed
  // Frees the odd page at once. With `keep_low` and no backing yet the low bytes go to a host slot, of which
  // there must be a free one.
  DemoteJob demote(PairId pair, bool keep_low);
  TransferJob back_up(PairId pair);              // TARGET without a slot; a slot must be free
  TransferJob restore(PairId pair, PageId odd);  // BASE with its low bytes on the host; `odd` was acquired
  PromoteJob promote(PairId pair,
                     bool keep_slot);  // restored -> TARGET; frees the pages when nobody refers to it
  // Whole TARGET pairs to and from a slot that is not the pair's, and that transfer_done() names.
  TransferJob store(PairId pair, HostSlot slot) { return copy(pair, slot, TransferKind::store_pair); }
  TransferJob load(PairId pair, HostSlot slot) { return copy(pair, slot, TransferKind::load_pair); }
  // Slots of promoted pairs come free: called when the demotions of the same step have theirs, because the
  // device runs those first.
  void free_promoted_slots();
  struct Done {
    PairId pair = kNoPair;        // none: it has gone meanwhile
    TransferKind kind{};          // what the transfer was; restore_low: the pair waits for promote()
    HostSlot slot = kNoHostSlot;  // store_pair and load_pair: theirs
  };
  Done transfer_done(uint32_t ticket);

  int num_pairs() const { return num_pairs_; }  // with references
  int num_base() const { return num_base_; }    // of these, BASE
  int num_restoring() const { return num_restoring_; }
  int num_transfers() const { return num_transfers_; }  // tickets the device still owes, and restored pairs
  int num_host_slots() const { return slots_.size(); }
  int num_free_host_slots() const { return slots_.num_free(); }
  int num_locked_host_slots() const { return num_locked_host_slots_; }  // nobody's until a transfer ends
  int num_open(TransferKind kind) const;                                // O(transfers)

  // Every invariant above, recomputed from scratch; aborts with what is wrong.
  void check_integrity() const;

 private:
  struct Transfer {
    PairId pair = kNoPair;
    HostSlot slot = kNoHostSlot;  // to be freed with the ticket, when the pair has gone; or that of a HostStore
    TransferKind kind{};
    bool open = false;
  };
  enum Traits : uint8_t { kDemotable = 1, kBacked = 2, kBase = 4, kReleasablePage = 8 };  // and its multiples
  uint8_t traits_of(PairId pair) const;
  void changed(PairId pair) { traits_[size_t(pair)] = traits_of(pair); }
  uint32_t open_transfer(PairId pair, TransferKind kind, HostSlot slot = kNoHostSlot);
  TransferJob copy(PairId pair, HostSlot slot, TransferKind kind);
  void free_pages(PairId pair);
  void free_slot(PairId pair);
  void forget(PairId pair);
  void lock(int num_pages) { num_locked_ += num_pages; }
  Pair& at(PairId pair) { return pairs_[size_t(pair)]; }
  int num_pages_of(PairId pair) const {
    return 1 + (entry(pair).odd != -1) + ((*this)[pair].reserved_odd != kNoPage);
  }
  // While the device still reads or fills what a pair owns, its pages stay where they are.
  static bool holds_pages(Transition t) { return t != Transition::none && t != Transition::draining; }

  PagePool pages_;
  FreeList<HostSlot> slots_;
  std::vector<Pair> pairs_;         // [PairId]
  std::vector<PairEntry> entries_;  // [PairId] as backends read it
  // [PairId] what planning asks of every pair of every sequence: one byte each stays in the first-level cache,
  // where 20,000 records would not. Follows from the two above.
  std::vector<uint8_t> traits_;
  std::vector<PairId> free_pairs_;
  std::vector<Transfer> transfers_;  // [ticket - 1]
  std::vector<uint32_t> free_tickets_;
  std::vector<HostSlot> promoted_slots_;
  int num_pairs_ = 0, num_base_ = 0, num_locked_ = 0, num_restoring_ = 0, num_transfers_ = 0;
  int num_locked_host_slots_ = 0;
};

}  // namespace ekv
