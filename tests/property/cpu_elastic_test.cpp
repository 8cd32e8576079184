// Sequences whose pairs change fidelity while they grow: logprobs are the same bits alone and in company,
// whatever the chunks, the attention path, the threads, the pages, and how late copies end.

#include <gtest/gtest.h>

#include <bit>
#include <cstdio>
#include <random>

#include "backend/cpu/cpu_backend.h"
#include "support/elastic_runner.h"
#include "support/golden_model.h"
#include "support/seed.h"

namespace ekv::test {
namespace {

constexpr int kPages = kRunnerPages, kSlots = kRunnerSlots;

class CpuElastic : public testing::TestWithParam<std::tuple<const char*, BaseFormat>> {
 protected:
  void SetUp() override {
    model_ = load_golden(std::get<0>(GetParam()));
    ASSERT_TRUE(model_);
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
  // Adds how many pages that a demotion freed were written in the same step.
  void mix(unsigned seed, int& reused);

  std::unique_ptr<Model> model_;
};

TEST_P(CpuElastic, LogprobsDoNotDependOnTheCompany) {
  int reused = 0, by_chance = 0;
  for (const unsigned seed : seeds(1)) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    mix(seed, is_fixed(seed) ? reused : by_chance);
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(reused, 0) << "no page freed by a demotion was written in the same step";
}

void CpuElastic::mix(unsigned seed, int& reused) {
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
      ASSERT_FALSE(HasFailure());
    }
    for (size_t i = 0; i < jobs.size(); ++i) {
      ASSERT_EQ(mixed.got(i).size(), jobs[i].alone.size());
      for (size_t p = 0; p < jobs[i].alone.size(); ++p) {
        ASSERT_EQ(std::bit_cast<uint32_t>(mixed.got(i)[p]), std::bit_cast<uint32_t>(jobs[i].alone[p]))
            << "job " << i << ", token " << p + 1;
      }
    }
    reused += mixed.written_into_freed();
  }
}

INSTANTIATE_TEST_SUITE_P(Models, CpuElastic,
                         testing::Values(std::tuple{"tiny-llama", BaseFormat::fixed8},
                                         std::tuple{"tiny-mistral", BaseFormat::e5m2},
                                         std::tuple{"tiny-qwen3", BaseFormat::fixed8}));

}  // namespace
}  // namespace ekv::test
