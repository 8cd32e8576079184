// Sequences whose pairs change fidelity while they grow: logprobs are the same bits alone and in company,
// whatever the chunks, the attention path, the threads, the pages, and how late copies end.

#include <gtest/gtest.h>

#include <bit>
#include <cstdio>
#include <filesystem>
#include <random>
#include <set>

#include "backend/cpu/cpu_backend.h"
#include "support/backend_driver.h"

namespace ekv::test {
namespace {

constexpr int kPages = 120, kSlots = 40;

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

std::vector<Job> make_jobs(std::mt19937& rng, int count, int vocab) {
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
  std::vector<int32_t> pages_ = all_pages(kPages);
  std::vector<DrivenSequence> sequences_;
  std::vector<std::vector<float>> got_;
  std::set<int> arriving_;  // host slots of demotions under way; their tickets
  std::set<uint32_t> restoring_;
  int written_into_freed_ = 0;
};

class CpuElastic : public testing::TestWithParam<std::tuple<const char*, BaseFormat>> {
 protected:
  void SetUp() override {
    const auto folder = std::filesystem::path(EKV_TEST_DATA) / "golden" / std::get<0>(GetParam());
    Result<ModelConfig> config = load_model_config(folder);
    ASSERT_TRUE(config) << config.error().message;
    Result<Model> model = Model::load(folder, *config);
    ASSERT_TRUE(model) << model.error().message;
    model_ = std::make_unique<Model>(std::move(*model));
  }
  std::unique_ptr<Backend> backend(int threads, int delay) const {
    EngineConfig config;
    config.kv.num_pages = kPages;
    config.kv.base_format = std::get<1>(GetParam());
    auto made = make_cpu_backend(*model_, config,
                                 {.threads = threads, .num_host_slots = kSlots, .transfer_delay = delay});
    EXPECT_TRUE(made);
    EXPECT_EQ((*made)->info().num_host_slots, kSlots);
    return std::move(*made);
  }
  std::unique_ptr<Model> model_;
};

TEST_P(CpuElastic, LogprobsDoNotDependOnTheCompany) {
  const unsigned seed = std::random_device()();
  std::printf("seed %u\n", seed);
  std::mt19937 rng(seed);
  std::vector<Job> jobs = make_jobs(rng, kSlots / kSlotsPerJob, model_->config().vocab);
  {
    const auto device = backend(1, 0);
    Runner alone(*device, KvPath::native, jobs, rng);
    for (size_t i = 0; i < jobs.size(); ++i) {
      while (!alone.done(i)) alone.step({i}, true);
      alone.finish(i);
      jobs[i].alone = alone.got(i);
      ASSERT_EQ(jobs[i].alone.size(), jobs[i].tokens.size() - 1);
    }
  }
  int reused = 0;
  for (const auto& [threads, path, delay] :
       {std::tuple{2, KvPath::native, 0}, {1, KvPath::general, 1}, {3, KvPath::structured, 3}}) {
    const auto device = backend(threads, delay);
    Runner mixed(*device, path, jobs, rng);
    for (;;) {
      std::vector<size_t> open;
      for (size_t i = 0; i < jobs.size(); ++i) {
        if (!mixed.done(i)) open.push_back(i);
      }
      if (open.empty()) break;
      std::shuffle(open.begin(), open.end(), rng);
      open.resize(1 + rng() % open.size());
      mixed.step(open, false);
      ASSERT_FALSE(HasFailure()) << "seed " << seed;
    }
    for (size_t i = 0; i < jobs.size(); ++i) {
      ASSERT_EQ(mixed.got(i).size(), jobs[i].alone.size());
      for (size_t p = 0; p < jobs[i].alone.size(); ++p) {
        ASSERT_EQ(std::bit_cast<uint32_t>(mixed.got(i)[p]), std::bit_cast<uint32_t>(jobs[i].alone[p]))
            << "seed " << seed << ", job " << i << ", token " << p + 1;
      }
    }
    reused += mixed.written_into_freed();
  }
  EXPECT_GT(reused, 0) << "no page freed by a demotion was written in the same step";
}

INSTANTIATE_TEST_SUITE_P(Models, CpuElastic,
                         testing::Values(std::tuple{"tiny-llama", BaseFormat::fixed8},
                                         std::tuple{"tiny-mistral", BaseFormat::e5m2},
                                         std::tuple{"tiny-qwen3", BaseFormat::fixed8}));

}  // namespace
}  // namespace ekv::test
