#include "elastickv/pair_table.h"

#include <algorithm>

namespace ekv {
PairTable::PairTable(int num_pages, int num_host_slots) : pages_(num_pages), slots_(num_host_slots) {
  EKV_CHECK(num_pages > 0, "a pool has at least one page");
  pairs_.reserve(size_t(num_pages)), entries_.reserve(size_t(num_pages)), traits_.reserve(size_t(num_pages));
  free_pairs_.reserve(size_t(num_pages));
}

uint8_t PairTable::traits_of(PairId pair) const {
  const Pair& p = (*this)[pair];
  const bool is_base = p.fidelity == Fidelity::base;
  const bool demotable = !is_base && p.transition == Transition::none && entry(pair).odd != -1;
  const int releasable = holds_pages(p.transition) ? 0 : num_pages_of(pair);
  return uint8_t((demotable ? kDemotable : 0) | (p.slot != kNoHostSlot ? kBacked : 0) | (is_base ? kBase : 0) |
                 releasable * kReleasablePage);
}

PairId PairTable::create(PageId even) {
  EKV_CHECK(pages_.in_use(even), "a pair begins with a page that was acquired");
  if (free_pairs_.empty()) {
    free_pairs_.push_back(PairId(pairs_.size()));
    pairs_.emplace_back(), entries_.emplace_back(), traits_.emplace_back();
  }
  const PairId pair = free_pairs_.back();
  free_pairs_.pop_back();
  at(pair) = {.refs = 1};
  entries_[size_t(pair)] = {.even = int32_t(even), .odd = -1};
  changed(pair);
  ++num_pairs_;
  return pair;
}

void PairTable::set_odd(PairId pair, PageId odd) {
  PairEntry& e = entries_[size_t(pair)];
  EKV_CHECK(at(pair).refs > 0 && !e.is_base() && e.odd == -1, "a pair gets its odd page once, as TARGET");
  e.odd = int32_t(odd);
  changed(pair);
}

void PairTable::retain(PairId pair) {
  EKV_CHECK(at(pair).refs > 0, "only a pair in use can be shared");
  ++at(pair).refs;
}

void PairTable::release(PairId pair) {
  Pair& p = at(pair);
  EKV_CHECK(p.refs > 0, "a pair is released once per reference");
  if (--p.refs > 0) return;
  EKV_CHECK(!p.cached, "a cached pair has its entry's reference");
  --num_pairs_;
  if (p.fidelity == Fidelity::base) --num_base_;
  if (holds_pages(p.transition)) {
    lock(num_pages_of(pair) - (p.reserved_odd != kNoPage));
    num_locked_host_slots_ += p.slot != kNoHostSlot;
    return;
  }
  if (p.transition == Transition::draining) {
    Transfer& transfer = transfers_[p.ticket - 1];
    transfer.pair = kNoPair;
    transfer.slot = p.slot;
    ++num_locked_host_slots_;
    p.slot = kNoHostSlot;
  }
  free_slot(pair);
  forget(pair);
}

bool PairTable::has_releasable_host_slot(PairId pair) const {
  return (*this)[pair].slot != kNoHostSlot && (*this)[pair].transition == Transition::none;
}

void PairTable::forget(PairId pair) {
  free_pages(pair);
  at(pair) = {};
  entries_[size_t(pair)] = {};
  traits_[size_t(pair)] = 0;
  free_pairs_.push_back(pair);
}

void PairTable::free_pages(PairId pair) {
  const PairEntry& e = entry(pair);
  if (e.odd != -1) pages_.release(PageId(e.odd));
  pages_.release(PageId(e.even_page()));
}

void PairTable::free_slot(PairId pair) {
  if (at(pair).slot == kNoHostSlot) return;
  slots_.release(at(pair).slot);
  at(pair).slot = kNoHostSlot;
}

uint32_t PairTable::open_transfer(PairId pair, TransferKind kind, HostSlot slot) {
  if (free_tickets_.empty()) {
    transfers_.emplace_back();
    free_tickets_.reserve(transfers_.capacity());
    free_tickets_.push_back(uint32_t(transfers_.size()));
  }
  const uint32_t ticket = free_tickets_.back();
  free_tickets_.pop_back();
  transfers_[ticket - 1] = {.pair = pair, .slot = slot, .kind = kind, .open = true};
  at(pair).ticket = ticket;
  ++num_transfers_;
  return ticket;
}

DemoteJob PairTable::demote(PairId pair, bool keep_low) {
  EKV_CHECK(at(pair).refs > 0 && may_demote(pair, false), "only a whole idle TARGET pair can be demoted");
  Pair& p = at(pair);
  PairEntry& e = entries_[size_t(pair)];
  DemoteJob job{.even = e.even, .odd = e.odd};
  if (keep_low && p.slot == kNoHostSlot) {
    const std::optional<HostSlot> slot = slots_.acquire();
    EKV_CHECK(slot.has_value(), "no demotion without room for the low bytes");
    p.slot = *slot;
    p.transition = Transition::draining;
    job.low = int32_t(p.slot);
    job.ticket = open_transfer(pair, TransferKind::backup_low);
  }
  pages_.release(PageId(e.odd));
  e = {.even = int32_t(uint32_t(e.even) | kBasePair), .odd = -1};
  p.fidelity = Fidelity::base;
  ++num_base_;
  changed(pair);
  return job;
}

TransferJob PairTable::back_up(PairId pair) {
  EKV_CHECK(at(pair).refs > 0 && may_demote(pair, false) && at(pair).slot == kNoHostSlot,
            "only a whole idle TARGET pair without backing is backed up");
  const std::optional<HostSlot> slot = slots_.acquire();
  EKV_CHECK(slot.has_value(), "no backup without room for the low bytes");
  at(pair).slot = *slot;
  at(pair).transition = Transition::backing_up;
  changed(pair);
  const PairEntry& e = entry(pair);
  return {TransferKind::backup_low, e.even, e.odd, int32_t(*slot),
          open_transfer(pair, TransferKind::backup_low)};
}

TransferJob PairTable::copy(PairId pair, HostSlot slot, TransferKind kind) {
  EKV_CHECK(at(pair).refs > 0 && may_demote(pair, false), "only a whole idle TARGET pair is stored or loaded");
  at(pair).transition = kind == TransferKind::store_pair ? Transition::storing : Transition::loading;
  changed(pair);
  const PairEntry& e = entry(pair);
  return {kind, e.even, e.odd, int32_t(slot), open_transfer(pair, kind, slot)};
}

TransferJob PairTable::restore(PairId pair, PageId odd) {
  Pair& p = at(pair);
  EKV_CHECK(
      p.refs > 0 && p.fidelity == Fidelity::base && p.transition == Transition::none && p.slot != kNoHostSlot,
      "only an idle BASE pair with its low bytes on the host is restored");
  EKV_CHECK(pages_.in_use(odd), "promotion takes a page that was acquired");
  p.reserved_odd = odd;
  p.transition = Transition::restoring;
  changed(pair);
  lock(1);
  ++num_restoring_;
  return {TransferKind::restore_low, entry(pair).even_page(), int32_t(odd), int32_t(p.slot),
          open_transfer(pair, TransferKind::restore_low)};
}

PromoteJob PairTable::promote(PairId pair, bool keep_slot) {
  Pair& p = at(pair);
  PairEntry& e = entries_[size_t(pair)];
  EKV_CHECK(p.transition == Transition::restored, "the low bytes have arrived");
  const PromoteJob job{e.even_page(), int32_t(p.reserved_odd), int32_t(p.slot)};
  e = {.even = e.even_page(), .odd = int32_t(p.reserved_odd)};
  p.reserved_odd = kNoPage;
  p.transition = Transition::none;
  p.fidelity = Fidelity::target;
  --num_restoring_, --num_transfers_;
  if (p.refs > 0) {
    lock(-1);
    --num_base_;
    if (!keep_slot) promoted_slots_.push_back(std::exchange(p.slot, kNoHostSlot));
    changed(pair);
  } else {
    lock(-num_pages_of(pair));
    --num_locked_host_slots_;
    promoted_slots_.push_back(std::exchange(p.slot, kNoHostSlot));
    forget(pair);
  }
  return job;
}

void PairTable::free_promoted_slots() {
  for (HostSlot slot : promoted_slots_) slots_.release(slot);
  promoted_slots_.clear();
}

PairTable::Done PairTable::transfer_done(uint32_t ticket) {
  EKV_CHECK(ticket >= 1 && ticket <= transfers_.size() && transfers_[ticket - 1].open,
            "a ticket is reported once, and only if it was given out");
  Transfer& transfer = transfers_[ticket - 1];
  const Done done{transfer.pair, transfer.kind, transfer.slot};
  transfer.open = false;
  free_tickets_.push_back(ticket);
  if (done.pair == kNoPair) {
    --num_transfers_, --num_locked_host_slots_;
    slots_.release(transfer.slot);
    return done;
  }
  Pair& p = at(done.pair);
  p.ticket = 0;
  if (done.kind == TransferKind::restore_low) {
    p.transition = Transition::restored;  // still counted as a transfer: it holds staging of the device
    changed(done.pair);
    return done;
  }
  --num_transfers_;
  p.transition = Transition::none;
  changed(done.pair);
  if (p.refs > 0) return done;
  lock(-num_pages_of(done.pair));
  num_locked_host_slots_ -= p.slot != kNoHostSlot;
  free_slot(done.pair);
  forget(done.pair);
  return {kNoPair, done.kind, done.slot};
}

int PairTable::num_open(TransferKind kind) const {
  return int(std::ranges::count_if(transfers_, [kind](const Transfer& t) { return t.open && t.kind == kind; }));
}

void PairTable::check_integrity() const {
  pages_.check_integrity();
  slots_.check_integrity();
  std::vector<bool> owned(size_t(num_pages()), false), held(size_t(num_host_slots()), false);
  int in_use = 0, locked = 0, alive = 0, base = 0, restoring = 0, transfers = 0;
  int locked_slots = 0;
  const auto own = [&](int page) {
    EKV_CHECK(pages_.in_use(PageId(page)) && !owned[size_t(page)], "a page belongs to one pair");
    owned[size_t(page)] = true;
  };
  const auto hold = [&](HostSlot slot) {
    EKV_CHECK(slots_.in_use(slot) && !held[size_t(slot)], "a host slot belongs to one pair");
    held[size_t(slot)] = true;
  };
  for (size_t i = 0; i < pairs_.size(); ++i) {
    const Pair& p = pairs_[i];
    const PairEntry& e = entries_[i];
    if (p.refs == 0 && p.transition == Transition::none) continue;
    EKV_CHECK(traits_[i] == traits_of(PairId(i)), "the traits of a pair are those of its record");
    const bool is_base = p.fidelity == Fidelity::base;
    EKV_CHECK(is_base == e.is_base() && !(is_base && e.odd != -1), "BASE lives in the even page alone");
    EKV_CHECK(p.refs > 0 || holds_pages(p.transition), "a pair nobody refers to waits for its transfer");
    EKV_CHECK((p.reserved_odd != kNoPage) ==
                  (p.transition == Transition::restoring || p.transition == Transition::restored),
              "promotion reserves one page");
    EKV_CHECK((p.ticket != 0) == (p.transition != Transition::none && p.transition != Transition::restored),
              "a transfer has a ticket");
    EKV_CHECK(p.ticket == 0 || (transfers_[p.ticket - 1].open && transfers_[p.ticket - 1].pair == PairId(i)),
              "a ticket knows its pair");
    own(e.even_page());
    if (e.odd != -1) own(e.odd);
    if (p.reserved_odd != kNoPage) own(int(p.reserved_odd));
    if (p.slot != kNoHostSlot) hold(p.slot), locked_slots += p.refs == 0;
    const int pages = num_pages_of(PairId(i)), reserved = p.reserved_odd != kNoPage;
    in_use += pages, restoring += reserved;
    locked += p.refs > 0 ? reserved : pages;
    transfers += p.transition == Transition::restored;
    if (p.refs > 0) ++alive, base += is_base;
  }
  for (const Transfer& transfer : transfers_) {
    transfers += transfer.open;
    if (transfer.open && transfer.pair == kNoPair) hold(transfer.slot), ++locked_slots;
  }
  EKV_CHECK(in_use + num_free_pages() == num_pages(), "free + held + promoting = all pages");
  EKV_CHECK(promoted_slots_.empty(), "a step ends with the slots of its promotions free");
  for (size_t slot = 0; slot < held.size(); ++slot)
    EKV_CHECK(held[slot] == slots_.in_use(HostSlot(slot)),
              "a host slot in use belongs to a pair or a transfer");
  EKV_CHECK(locked == num_locked_ && alive == num_pairs_ && base == num_base_ && restoring == num_restoring_ &&
                transfers == num_transfers_ && locked_slots == num_locked_host_slots_,
            "the counts of the table are those of its pairs");
}

}  // namespace ekv
