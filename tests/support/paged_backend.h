#pragma once
// paged_backend.h -- a device that computes nothing but respects every page: it stores token ids where K and V
// would go and "predicts" a hash of what it reads back through the block table. A wrong page, a stale prefix or
// a lost write changes the tokens, so tests of the engine see it as wrong output.
//
// Of a BASE pair it keeps the ids divided by kLow, of the low part what the jobs say, and copies end as late as
// `draw_delay` says. While a copy is under way its source and target must stay as they are; pages freed by a
// demotion are poisoned, and so is what a copy has not finished. Host slots hold low parts or whole pairs, and
// remember which. A row that reads BASE predicts the token after
// its true history all the same, because the high parts it reads match it: so tokens never depend on fidelity,
// and a wrong byte shows.
//
// Two steps may be in flight. All is computed and copied inside submit(); what it yields comes with its
// collect().

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <vector>

#include "elastickv/backend.h"
#include "elastickv/request.h"

namespace ekv::test {

constexpr int kFakeVocab = 1000;
constexpr int kLow = 16;  // a BASE pair keeps token / kLow, its low plane token % kLow

// The definition: what the device must predict after `history`.
inline TokenId next_token(std::span<const TokenId> history) {
  uint64_t h = 0x9e3779b97f4a7c15ull;
  for (TokenId token : history) h = (h ^ uint64_t(token)) * 0x100000001b3ull + (h >> 29);
  return TokenId(h % kFakeVocab);
}

// What a request must get from an engine on such a device whose sequences have at most `max_len` tokens.
inline std::vector<TokenId> expected_tokens(const Request& request, int max_len) {
  std::vector<TokenId> history = request.prompt, out;
  while (int(out.size()) < request.sampling.max_tokens && int(history.size()) < max_len) {
    out.push_back(next_token(history));
    history.push_back(out.back());
  }
  return out;
}

class PagedBackend : public Backend {
 public:
  explicit PagedBackend(int num_pages, int num_host_slots = 0)
      : store_(size_t(num_pages) * kBlockTokens, kPoison),
        base_(size_t(num_pages)),
        host_(size_t(num_host_slots) * kPairTokens, kPoison) {
    info_ = {
        .name = "paged", .num_pages = num_pages, .num_host_slots = num_host_slots, .max_steps_in_flight = 2};
  }
  const BackendInfo& info() const override { return info_; }
  void fp16_activations(bool on) { info_.fp16_activations = on; }

  void submit(const StepInput& in) override {
    ASSERT_LT(submitted_.size(), size_t(info_.max_steps_in_flight)) << "more steps in flight than allowed";
    before_ = output_.rows;
    output_ = {};
    for (const DemoteJob& job : in.demotes) demote(job);
    for (const PromoteJob& job : in.promotes) promote(job);
    for (size_t i = 0; i < in.tokens.size(); ++i)
      if (in.slot_mapping[i] >= 0) write(in.slot_mapping[i], known(in.tokens[i]));
    check_shapes(in);
    for (const SampleRow& row : in.sample_rows) sample(in, row);
    for (const TransferJob& job : in.transfers) begin(job);
    end_transfers();
    submitted_.push_back(output_);
    most_in_flight = std::max(most_in_flight, int(submitted_.size()));
    ++steps;
    max_batch = std::max(max_batch, int(in.kv_len.size()));
  }
  const StepOutput& collect() override {
    collected_ = std::move(submitted_.front());
    submitted_.pop_front();
    return collected_;
  }

  int steps = 0, max_batch = 0, most_in_flight = 0;
  int resolved = 0;  // pending tokens
  int demoted = 0, promoted = 0, general_steps = 0, structured_steps = 0;
  int stored = 0, loaded = 0;       // whole pairs whose copies have ended
  TokenId poison_token = -2;        // a row that would yield this token is reported as not finite
  std::function<int()> draw_delay;  // steps until a copy ends, from 0 on; null: 0

  bool in_flight() const { return !flights_.empty(); }
  int staged() const { return int(staged_.size()); }

 private:
  static constexpr TokenId kPoison = -1000000;
  struct Flight {
    TransferKind kind{};
    int even = -1, odd = -1, host = -1;
    int steps_left = 0;
    std::vector<TokenId> low, high;  // what it carries; what its source holds until it ends
  };

  TokenId& cell(int page, int i) { return store_.at(size_t(page) * kBlockTokens + size_t(i)); }
  TokenId& cell(int even, int odd, int i) {
    return i < kBlockTokens ? cell(even, i) : cell(odd, i - kBlockTokens);
  }
  TokenId& host(int slot, int i) { return host_.at(size_t(slot) * kPairTokens + size_t(i)); }

  // Pages of restores are not among them: their copies end in staging.
  bool uses_page(int page) const {
    return std::ranges::any_of(flights_,
                               [&](const auto& f) { return f.second.even == page || f.second.odd == page; });
  }
  bool uses_slot(int slot) const {
    return std::ranges::any_of(flights_, [&](const auto& f) { return f.second.host == slot; });
  }

  void write(Slot slot, TokenId token) {
    const int page = int(slot / kBlockTokens);
    ASSERT_FALSE(uses_page(page)) << "page " << page << " is written while a copy uses it";
    base_.at(size_t(page)).clear();
    store_.at(size_t(slot)) = token;
  }

  void demote(const DemoteJob& job) {
    ASSERT_FALSE(uses_page(job.even) || uses_page(job.odd)) << "demoted while a copy uses it";
    std::vector<TokenId> high, low;
    for (int i = 0; i < kPairTokens; ++i) {
      const TokenId token = cell(job.even, job.odd, i);
      ASSERT_GE(token, 0) << "a pair is demoted whose KV was never written";
      high.push_back(token / kLow), low.push_back(token % kLow);
    }
    for (int i = 0; i < kPairTokens; ++i) cell(job.even, job.odd, i) = kPoison;
    base_.at(size_t(job.even)) = high;
    ++demoted;
    if (job.low < 0) return;
    fly(job.ticket, {.kind = TransferKind::backup_low, .host = job.low, .low = low});
  }

  void promote(const PromoteJob& job) {
    const auto staged = staged_.find(job.low);
    ASSERT_NE(staged, staged_.end()) << "promoted before its low bytes arrived";
    const std::vector<TokenId> high = base_.at(size_t(job.even));
    ASSERT_EQ(high.size(), size_t(kPairTokens)) << "promoted what is not BASE";
    base_.at(size_t(job.even)).clear(), base_.at(size_t(job.odd)).clear();
    for (int i = 0; i < kPairTokens; ++i)
      cell(job.even, job.odd, i) = high[size_t(i)] * kLow + staged->second[size_t(i)];
    staged_.erase(staged);
    ++promoted;
  }

  void begin(const TransferJob& job) {
    Flight flight{.kind = job.kind, .even = job.even, .odd = job.odd, .host = job.host};
    if (is_to_host(job.kind)) {
      for (int i = 0; i < kPairTokens; ++i) {
        const TokenId token = cell(job.even, job.odd, i);
        ASSERT_GE(token, 0) << "a pair goes to the host whose KV was never written";
        flight.high.push_back(token);
        flight.low.push_back(is_whole_pair(job.kind) ? token : token % kLow);
      }
    } else {
      ASSERT_EQ(whole_.contains(job.host), is_whole_pair(job.kind)) << "the slot holds something else";
      for (int i = 0; i < kPairTokens; ++i) {
        ASSERT_GE(host(job.host, i), 0) << "a copy from a slot that holds nothing";
        flight.low.push_back(host(job.host, i));
      }
      if (job.kind == TransferKind::restore_low) flight.even = flight.odd = -1;
      if (job.kind == TransferKind::load_pair) clear_target(job);
    }
    fly(job.ticket, std::move(flight));
  }
  void clear_target(const TransferJob& job) {
    ASSERT_FALSE(uses_page(job.even) || uses_page(job.odd)) << "a load into a page that a copy uses";
    base_.at(size_t(job.even)).clear(), base_.at(size_t(job.odd)).clear();
    for (int i = 0; i < kPairTokens; ++i) cell(job.even, job.odd, i) = kPoison;
  }

  void fly(uint32_t ticket, Flight flight) {
    ASSERT_GT(ticket, 0u);
    ASSERT_FALSE(uses_slot(flight.host) && (is_to_host(flight.kind) || is_filled(flight.host)))
        << "host slot " << flight.host << " has a copy under way";
    if (is_to_host(flight.kind)) {
      ASSERT_FALSE(staged_.contains(flight.host)) << "a slot is reused before what it staged";
      for (int i = 0; i < kPairTokens; ++i) host(flight.host, i) = kPoison;
      whole_.erase(flight.host);
    }
    flight.steps_left = draw_delay ? draw_delay() : 0;
    ASSERT_TRUE(flights_.emplace(ticket, std::move(flight)).second) << "a ticket is in use";
  }
  bool is_filled(int slot) const {
    return std::ranges::any_of(
        flights_, [&](const auto& f) { return f.second.host == slot && is_to_host(f.second.kind); });
  }

  void end_transfers() {
    for (auto it = flights_.begin(); it != flights_.end();) {
      if (it->second.steps_left-- > 0) {
        ++it;
        continue;
      }
      land(it->second);
      output_.transfers_done.push_back(it->first);
      it = flights_.erase(it);
    }
  }
  void land(const Flight& flight) {
    for (int i = 0; i < kPairTokens; ++i)
      if (!is_to_host(flight.kind)) {
        ASSERT_EQ(host(flight.host, i), flight.low[size_t(i)]) << "a slot changed under a copy";
      } else if (flight.even >= 0) {
        ASSERT_EQ(cell(flight.even, flight.odd, i), flight.high[size_t(i)]) << "a page changed under a copy";
      }
    if (flight.kind == TransferKind::restore_low) staged_[flight.host] = flight.low;
    for (int i = 0; i < kPairTokens; ++i) {
      if (is_to_host(flight.kind)) host(flight.host, i) = flight.low[size_t(i)];
      if (flight.kind == TransferKind::load_pair) cell(flight.even, flight.odd, i) = flight.low[size_t(i)];
    }
    if (flight.kind == TransferKind::store_pair) whole_.insert(flight.host), ++stored;
    loaded += flight.kind == TransferKind::load_pair;
  }

  // What pack_step tells of the batch, recomputed from its tables.
  void check_shapes(const StepInput& in) {
    KvPath least = KvPath::native;
    for (size_t s = 0; s < in.kv_len.size(); ++s) {
      int first = -1, last = -1, count = 0;
      for (int i = 0; i < in.block_table.max_pairs; ++i)
        if (in.block_table.row(int(s))[size_t(i)].is_base()) {
          last = i;
          if (count++ == 0) first = i;
        }
      ASSERT_EQ(in.base_runs[s].count, count);
      if (count == 0) continue;
      ASSERT_EQ(in.base_runs[s].first, first);
      ASSERT_EQ(in.base_runs[s].end, last + 1);
      least = std::max(least, last + 1 - first == count ? KvPath::structured : KvPath::general);
    }
    ASSERT_GE(in.path, least);
    ASSERT_EQ(in.path == KvPath::native, least == KvPath::native);
    structured_steps += in.path == KvPath::structured;
    general_steps += in.path == KvPath::general;
  }

  void sample(const StepInput& in, const SampleRow& row) {
    size_t chunk = 0;
    while (in.q_start[chunk + 1] <= row.row) ++chunk;
    const int length = in.positions[size_t(row.row)] + 1;
    SampledRow sampled{.token = row.target};
    std::vector<TokenId> history(row.tokens.begin(), row.tokens.begin() + length);
    for (TokenId& token : history) token = known(token);
    const TokenId predicted = next_token(read(in.block_table.row(int(chunk)), history));
    if (row.target < 0) sampled.token = predicted;
    if (row.num_logprobs >= 0)
      sampled.logprobs = TokenLogprobs{.chosen = {sampled.token, sampled.token == predicted ? 0.0f : -9.0f}};
    if (sampled.token == poison_token) output_.invalid_chunks.push_back(int32_t(chunk));
    output_.rows.push_back(sampled);
  }

  // What a pending token stands for.
  TokenId known(TokenId token) {
    if (!is_pending(token)) return token;
    EXPECT_FALSE(submitted_.empty()) << "a token is pending though its step was collected";
    ++resolved;
    return before_.at(size_t(pending_row(token))).token;
  }

  // The history as the pages hold it; a BASE pair gives the high part, and `known` the low part that it lacks.
  std::vector<TokenId> read(std::span<const PairEntry> pairs, std::span<const TokenId> known) {
    std::vector<TokenId> history;
    for (int position = 0; position < int(known.size()); ++position) {
      const PairEntry& pair = pairs[size_t(position / kPairTokens)];
      const int i = position % kPairTokens;
      if (pair.is_base()) {
        const std::vector<TokenId>& high = base_.at(size_t(pair.even_page()));
        EXPECT_EQ(high.size(), size_t(kPairTokens)) << "read as BASE what is not";
        const TokenId top = high.empty() ? kPoison : high[size_t(i)];
        history.push_back(top * kLow + known[size_t(position)] % kLow);
      } else {
        history.push_back(cell(pair.even, pair.odd, i));
      }
    }
    return history;
  }

  BackendInfo info_;
  std::vector<TokenId> store_;                  // [page][token] of TARGET pages
  std::vector<std::vector<TokenId>> base_;      // [page] high parts of a pair; empty: the page is not BASE
  std::vector<TokenId> host_;                   // [slot][token] low parts, or whole tokens
  std::set<int> whole_;                         // slots that hold whole tokens
  std::map<int, std::vector<TokenId>> staged_;  // by host slot: restored, waiting for their promotion
  std::map<uint32_t, Flight> flights_;
  StepOutput output_;               // of the step submitted last
  std::vector<SampledRow> before_;  // of the one before it
  std::deque<StepOutput> submitted_;
  StepOutput collected_;
};

}  // namespace ekv::test
