// The same requests under random budgets, chunk sizes, pools, policies and cancellations give the same tokens,
// the pages are conserved after every step, and every request ends.

#include <gtest/gtest.h>

#include <map>
#include <random>

#include "elastickv/engine.h"
#include "support/paged_backend.h"

namespace ekv {
namespace {

struct Outcome {
  std::vector<TokenId> tokens;
  FinishReason finish = FinishReason::none;
  bool cancelled_by_test = false;
};

struct Collector : EngineListener {
  void on_event(SeqEvent event) override {
    Outcome& outcome = outcomes[event.id];
    ASSERT_EQ(outcome.finish, FinishReason::none) << "an event after the last one";
    if (event.token) outcome.tokens.push_back(*event.token);
    outcome.finish = event.finish;
    preemptions += event.finish != FinishReason::none ? event.stats.num_preemptions : 0;
    cached += event.finish != FinishReason::none ? event.stats.num_cached : 0;
  }
  void on_step(const StepRecord&) override {}
  std::map<SeqId, Outcome> outcomes;
  int preemptions = 0, cached = 0;
};

struct Job {
  Request request;
  int arrival_step = 0;
  int cancel_step = -1;
};

EngineConfig random_config(std::mt19937& rng) {
  EngineConfig config;
  config.max_model_len = 96;
  config.scheduler.max_step_seqs = 1 + int(rng() % 12);
  config.scheduler.max_step_tokens = config.scheduler.max_step_seqs + int(rng() % 64);
  config.scheduler.max_chunk_tokens = rng() % 2 ? 0 : 1 + int(rng() % 20);
  config.scheduler.reserve_full_prompt = rng() % 4 != 0;
  config.scheduler.watermark = rng() % 3 ? 0.0 : 0.1;
  config.scheduler.policy = rng() % 2 ? SchedulingPolicy::fcfs : SchedulingPolicy::priority;
  config.kv.prefix_cache = rng() % 3 != 0;
  config.scheduler.preempt_self = rng() % 4 == 0;
  return config;
}

// Prompts share prefixes from a small set, so that the cache is hit, and differ in length around pair
// boundaries.
std::vector<Job> random_jobs(std::mt19937& rng) {
  std::vector<Job> jobs(8 + rng() % 20);
  for (size_t i = 0; i < jobs.size(); ++i) {
    const int family = int(rng() % 3), shared = int(rng() % 70), own = 1 + int(rng() % 10);
    for (int t = 0; t < shared; ++t) jobs[i].request.prompt.push_back(family * 100 + t);
    for (int t = 0; t < own; ++t) jobs[i].request.prompt.push_back(int(rng() % 900));
    jobs[i].request.sampling.max_tokens = 1 + int(rng() % 40);
    jobs[i].request.priority = int(rng() % 3);
    if (rng() % 4 == 0) jobs[i].request.cache_salt = "salt";
    jobs[i].arrival_step = int(rng() % 60);
    if (rng() % 8 == 0) jobs[i].cancel_step = jobs[i].arrival_step + int(rng() % 40);
  }
  return jobs;
}

void check_outcomes(const std::vector<Job>& jobs, const std::vector<SeqId>& ids, int max_model_len,
                    Collector& got) {
  for (size_t i = 0; i < jobs.size(); ++i) {
    SCOPED_TRACE("request " + std::to_string(i));
    const std::vector<TokenId> want = test::expected_tokens(jobs[i].request, max_model_len);
    const Outcome& outcome = got.outcomes[ids[i]];
    if (outcome.finish == FinishReason::cancelled) {
      ASSERT_GE(jobs[i].cancel_step, 0);
      ASSERT_LE(outcome.tokens.size(), want.size());
      ASSERT_TRUE(std::equal(outcome.tokens.begin(), outcome.tokens.end(), want.begin()));
    } else {
      ASSERT_EQ(outcome.finish, FinishReason::length);
      ASSERT_EQ(outcome.tokens, want);
    }
  }
}

class ScheduleInvariance : public testing::TestWithParam<bool> {};  // the parameter: two steps in flight
INSTANTIATE_TEST_SUITE_P(Steps, ScheduleInvariance, testing::Bool(),
                         [](const auto& info) { return info.param ? "two" : "one"; });

TEST_P(ScheduleInvariance, TokensDoNotDependOnScheduling) {
  int preemptions = 0, cached = 0;
  for (unsigned seed = 1; seed <= 1000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 rng(seed);
    EngineConfig config = random_config(rng);
    config.async_scheduling = GetParam();
    config.scheduler.target_step_us = seed % 4 == 0 ? 1 + int(seed % 50) : 0;  // of a device that takes little
    const std::vector<Job> jobs = random_jobs(rng);
    const int pages = 6 + int(rng() % 40);  // 96 tokens, the longest sequence, need 6
    SteadyClock clock;
    Collector collector;
    Engine engine(config, std::make_unique<test::PagedBackend>(pages), clock, collector);

    std::vector<SeqId> ids(jobs.size());
    int step = 0;
    for (bool more = true; more || step <= 100; ++step) {
      ASSERT_LT(step, 20000) << "requests that never end";
      for (size_t i = 0; i < jobs.size(); ++i) {
        if (jobs[i].arrival_step == step) ids[i] = *engine.submit(jobs[i].request);
        if (jobs[i].cancel_step == step) engine.cancel(ids[i]);
      }
      if (rng() % 50 == 0) engine.reset_prefix_cache();
      more = engine.step();
      engine.check_integrity();
    }
    ASSERT_TRUE(engine.idle());
    ASSERT_EQ(engine.kv().num_free_pages() + engine.kv().num_cached_pages(), pages) << "pages are lost";
    check_outcomes(jobs, ids, config.max_model_len, collector);
    preemptions += collector.preemptions;
    cached += collector.cached;
  }
  // The seeds must reach what this test is about.
  EXPECT_GT(preemptions, 100);
  EXPECT_GT(cached, 1000);
}

}  // namespace
}  // namespace ekv
