#pragma once
// elastic_runner.h -- sequences whose pairs change fidelity while they grow, driven through a Backend in any
// company.

#include <algorithm>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "support/backend_driver.h"

namespace ekv::test {

constexpr int kRunnerPages = 120, kRunnerSlots = 40;

// Which pairs change before the first token of pair w is computed. Host slot of pair p of job j: kSlotsPerJob *
// j + p.
struct Change {
  std::vector<int> demote, promote;
};
struct Job {
  std::vector<TokenId> tokens;
  std::vector<Change> changes;  // [pairs]
  std::vector<float> alone;     // logprob of each token but the first
};
constexpr int kSlotsPerJob = 8;

inline std::vector<Job> make_jobs(std::mt19937& rng, int count, int vocab) {
  std::vector<Job> jobs(static_cast<size_t>(count));
  for (Job& job : jobs) {
    const int tokens = 40 + int(rng() % 200);
    for (int i = 0; i < tokens; ++i) job.tokens.push_back(TokenId(rng() % unsigned(vocab)));
    job.changes.resize(size_t(ceil_div(tokens, kPairTokens)));
    std::set<int> base;
    for (int w = 1; w < int(job.changes.size()); ++w) {
      for (int pair = 0; pair < w; ++pair) {
        if (rng() % 3 != 0) continue;
        Change& change = job.changes[size_t(w)];
        (base.contains(pair) ? change.promote : change.demote).push_back(pair);
        if (!base.erase(pair)) base.insert(pair);
      }
    }
  }
  return jobs;
}

// Drives some of the jobs on one backend.
class Runner {
 public:
  Runner(Backend& device, KvPath path, std::vector<Job>& jobs, std::mt19937& rng)
      : device_(device), path_(path), jobs_(jobs), rng_(rng) {
    std::shuffle(pages_.begin(), pages_.end(), rng);
    for (const Job& job : jobs) sequences_.push_back(driven(job.tokens));
    got_.resize(jobs.size());
  }

  // A step with a chunk of each of `some`; a chunk ends at the end of its pair at the latest.
  void step(const std::vector<size_t>& some, bool whole_pairs) {
    DrivenStep step(pages_);
    restore(some);
    std::set<int32_t> freed;
    for (size_t i : some) change(step, i);
    for (const DemoteJob& job : step.demotes) freed.insert(job.odd);
    std::vector<std::pair<size_t, int>> wanted;
    for (size_t i : some) {
      DrivenSequence& s = sequences_[i];
      const int begin = s.num_computed;
      const int left = std::min(kPairTokens - begin % kPairTokens, int(s.tokens.size()) - begin);
      const int count = whole_pairs ? left : 1 + int(rng_() % unsigned(left));
      const size_t pairs = s.pairs.size();
      step.add(s, count);
      if (s.num_computed == int(s.tokens.size())) wanted.emplace_back(i, -1);
      if (s.pairs.size() > pairs) written_into_freed_ += int(freed.count(s.pairs.back().even));
      for (int p = begin; p < begin + count && p + 1 < int(s.tokens.size()); ++p) {
        step.want_target(s, p, s.tokens[size_t(p) + 1], 0);
        wanted.emplace_back(i, p);
      }
    }
    step.path = path_;
    const StepOutput& out = step.run(device_);
    note(out);
    ASSERT_EQ(out.rows.size(), wanted.size());
    for (size_t k = 0; k < wanted.size(); ++k) {
      if (wanted[k].second >= 0) got_[wanted[k].first].push_back(out.rows[k].logprobs->chosen.logprob);
    }
  }

  bool done(size_t i) const { return sequences_[i].num_computed == int(jobs_[i].tokens.size()); }
  void finish(size_t i) { give_back(sequences_[i], pages_); }
  const std::vector<float>& got(size_t i) const { return got_[i]; }
  int written_into_freed() const { return written_into_freed_; }

 private:
  const Change* due(size_t i) const {
    const int at = sequences_[i].num_computed;
    return at % kPairTokens == 0 ? &jobs_[i].changes[size_t(at / kPairTokens)] : nullptr;
  }

  // Steps without tokens until the low bytes of every promotion are staged.
  void restore(const std::vector<size_t>& some) {
    std::vector<TransferJob> jobs;
    for (size_t i : some) {
      const Change* change = due(i);
      if (change == nullptr) continue;
      for (int pair : change->promote) {
        const int slot = int(i) * kSlotsPerJob + pair;
        while (arriving_.contains(slot)) note(idle({}));
        jobs.push_back({TransferKind::restore_low, sequences_[i].pairs[size_t(pair)].even_page(), -1, slot,
                        uint32_t(slot) + 1000});
      }
    }
    if (jobs.empty()) return;
    for (const TransferJob& job : jobs) restoring_.insert(job.ticket);
    note(idle(jobs));
    while (!restoring_.empty()) note(idle({}));
  }
  const StepOutput& idle(const std::vector<TransferJob>& transfers) {
    device_.submit({.transfers = transfers});
    return device_.collect();
  }
  void note(const StepOutput& out) {
    for (uint32_t ticket : out.transfers_done) {
      EXPECT_EQ(arriving_.erase(int(ticket)) + restoring_.erase(ticket), 1u) << "ticket " << ticket;
    }
  }

  void change(DrivenStep& step, size_t i) {
    const Change* change = due(i);
    if (change == nullptr) return;
    for (int pair : change->demote) {
      const int slot = int(i) * kSlotsPerJob + pair;
      while (arriving_.contains(slot)) note(idle({}));
      step.demote(sequences_[i], pair, slot, uint32_t(slot));
      arriving_.insert(slot);
    }
    for (int pair : change->promote) step.promote(sequences_[i], pair, int(i) * kSlotsPerJob + pair);
  }

  Backend& device_;
  KvPath path_;
  std::vector<Job>& jobs_;
  std::mt19937& rng_;
  std::vector<int32_t> pages_ = all_pages(kRunnerPages);
  std::vector<DrivenSequence> sequences_;
  std::vector<std::vector<float>> got_;
  std::set<int> arriving_;  // host slots of demotions under way; their tickets
  std::set<uint32_t> restoring_;
  int written_into_freed_ = 0;
};

}  // namespace ekv::test
