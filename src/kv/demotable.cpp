#include "kv/demotable.h"

#include <algorithm>
#include <tuple>

namespace ekv {
namespace {

bool is_nearly_done(const KvManager& kv, const Sequence& s) {
  return s.num_remaining() < kv.fidelity().min_remaining_tokens;
}

// One past the last pair that is old enough: whole pairs of valid KV, less the recent ones.
int old_end(const KvManager& kv, const Sequence& s) {
  return std::max(0, s.num_computed / kPairTokens - kv.fidelity().recent_pairs);
}

}  // namespace

void DemotableScan::scan(const KvManager& kv, std::span<const Sequence* const> running,
                         std::span<const SeqView> views, std::span<const PairId> kept) {
  ++scan_;
  sources_.clear(), starts_.clear(), pairs_.clear();
  marks_.resize(size_t(kv.num_pages()));
  for (const Sequence* s : running) count_permits(kv, *s);
  for (PairId pair : kept) mark(pair).permits = kNotNow;
  for (size_t i = 0; i < running.size(); ++i) {
    list_own(kv, *running[i], views[i].num_base);
    list_shared(kv, *running[i], views[i].num_base);
  }
}

DemotableScan::Mark& DemotableScan::mark(PairId pair) {
  Mark& m = marks_[size_t(pair)];
  if (m.scan != scan_) m = {scan_, 0};
  return m;
}

void DemotableScan::count_permits(const KvManager& kv, const Sequence& s) {
  if (s.base_cap() < 1) return;
  const int end = std::min(kv.num_shared(s.blocks), old_end(kv, s));
  for (int i = kv.fidelity().sink_pairs; i < end; ++i) ++mark(s.blocks.pairs[size_t(i)]).permits;
}

void DemotableScan::list_own(const KvManager& kv, const Sequence& s, int num_base) {
  const PairTable& pairs = kv.pairs();
  open_source(kv, s, num_base, 1);
  const FidelityConfig& f = kv.fidelity();
  const FidelitySource& source = sources_.back();
  int room = int(s.base_cap() * source.num_pairs) - source.num_base;
  const int end = old_end(kv, s);
  for (int i = std::max(f.sink_pairs, kv.num_shared(s.blocks)); i < end && room > 0; ++i) {
    const PairId pair = s.blocks.pairs[size_t(i)];
    if (!pairs.may_demote(pair, f.writes_through()) || mark(pair).permits == kNotNow) continue;
    pairs_.push_back(pair);
    --room;
  }
  close_source();
}

void DemotableScan::list_shared(const KvManager& kv, const Sequence& s, int num_base) {
  if (s.base_cap() < 1) return;
  const PairTable& pairs = kv.pairs();
  const FidelityConfig& f = kv.fidelity();
  int sharers = 0;
  for (int i = std::min(kv.num_shared(s.blocks), old_end(kv, s)) - 1; i >= f.sink_pairs; --i) {
    const PairId pair = s.blocks.pairs[size_t(i)];
    const int users = pairs[pair].num_users();
    Mark& m = mark(pair);
    if (m.permits != users || !pairs.may_demote(pair, f.writes_through())) continue;
    m.permits = kNotNow;
    if (users != sharers) {
      if (sharers > 0) close_source();
      open_source(kv, s, num_base, sharers = users);
    }
    pairs_.push_back(pair);
  }
  if (sharers > 0) close_source();
}

void DemotableScan::open_source(const KvManager& kv, const Sequence& s, int num_base, int num_sharers) {
  sources_.push_back({.seq = s.id,
                      .tier = s.request.tier,
                      .nearly_done = is_nearly_done(kv, s),
                      .in_prefill = s.num_computed + 1 < s.num_tokens(),
                      .num_sharers = num_sharers,
                      .num_pairs = int(s.blocks.pairs.size()),
                      .num_base = num_base});
  starts_.push_back(pairs_.size());
}

void DemotableScan::close_source() {
  sources_.back().num_candidates = int(pairs_.size() - starts_.back());
  if (sources_.back().num_candidates > 0) return;
  sources_.pop_back();
  starts_.pop_back();
}

void RestorableScan::scan(const KvManager& kv, std::span<const Sequence* const> running, int at_most,
                          std::vector<PairId>& restores) {
  ++scan_;
  taken_.resize(size_t(kv.num_pages()));
  order_.clear();
  for (const Sequence* s : running)
    if (!is_nearly_done(kv, *s)) order_.push_back(s);
  std::ranges::sort(order_, {},
                    [](const Sequence* s) { return std::tuple(s->request.tier, -s->num_remaining(), s->id); });
  for (const Sequence* s : order_)
    for (size_t i = s->blocks.pairs.size(); i-- > 0 && at_most > 0;) {
      const PairId pair = s->blocks.pairs[i];
      const Pair& p = kv.pairs()[pair];
      if (p.fidelity != Fidelity::base || p.transition != Transition::none || p.slot == kNoHostSlot) continue;
      if (std::exchange(taken_[size_t(pair)], scan_) == scan_) continue;
      restores.push_back(pair);
      --at_most;
    }
}

void collect_backups(const KvManager& kv, const Sequence& s, int at_most, std::vector<PairId>& backups) {
  if (s.base_cap() == 0) return;
  const int end = old_end(kv, s);
  for (int i = std::max(s.blocks.num_backed, kv.fidelity().sink_pairs); i < end && at_most > 0; ++i) {
    const PairId pair = s.blocks.pairs[size_t(i)];
    if (kv.pairs()[pair].slot != kNoHostSlot || !kv.pairs().may_demote(pair, false)) continue;
    if (std::ranges::find(backups, pair) != backups.end()) continue;
    backups.push_back(pair);
    --at_most;
  }
}

}  // namespace ekv
