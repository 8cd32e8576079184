// Whole runs in virtual time: arrivals, concurrency, replicas, the log and its hash.

#include "bench/sim_replay.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <random>

#include "tests/support/temp_dir.h"
#include "util/json.h"

namespace ekv {
namespace {

struct Sim {
  CostModel model;
  ReplayOptions options;
  int replicas = 1;
};

Sim simulated(const std::string& model = "a100-llama-3.1-8b") {
  Result<CostModel> loaded = load_cost_model(model);
  EXPECT_TRUE(bool(loaded));
  Sim sim{.model = *loaded};
  sim.options.engine.kv.num_pages = 600;
  sim.options.engine.max_model_len = 4096;
  return sim;
}

ReplayLoad random_load(unsigned seed, int count) {
  std::mt19937 rng(seed);
  ReplayLoad load;
  int64_t time_us = 0;
  for (int i = 0; i < count; ++i) {
    time_us += rng() % 400'000;
    load.requests.push_back(
        {.arrival_us = time_us, .num_prompt = 1 + int(rng() % 1500), .num_output = 1 + int(rng() % 200)});
  }
  load.prompt = [requests = load.requests, seed](size_t index) {
    std::mt19937 tokens(seed + unsigned(index));
    std::vector<TokenId> prompt(size_t(requests[index].num_prompt));
    for (TokenId& token : prompt) token = TokenId(tokens() % 1000);
    return prompt;
  };
  return load;
}

ReplayResult run(const ReplayLoad& load, const Sim& sim) {
  Result<ReplayResult> result = run_sim(load, sim.model, sim.replicas, sim.options);
  EXPECT_TRUE(bool(result)) << (result ? "" : result.error().message);
  return result ? *std::move(result) : ReplayResult{};
}

void expect_complete(const ReplayLoad& load, const ReplayResult& result) {
  ASSERT_EQ(result.requests.size(), load.requests.size());
  for (size_t i = 0; i < load.requests.size(); ++i) {
    const ReplayRecord& record = result.requests[i];
    EXPECT_EQ(record.finish, FinishReason::length);
    EXPECT_EQ(int(record.token_us.size()), load.requests[i].num_output);
    EXPECT_TRUE(std::ranges::is_sorted(record.token_us));
    EXPECT_GE(record.first_scheduled_us, record.arrival_us);
    EXPECT_GT(record.token_us.front(), record.first_scheduled_us);
    EXPECT_EQ(record.token_us.back(), record.end_us);
    EXPECT_LE(record.end_us, result.end_us);
  }
}

TEST(SimReplay, EqualRunsHaveEqualLogs) {
  const ReplayLoad load = random_load(1, 60);
  Sim sim = simulated();
  const ReplayResult first = run(load, sim), second = run(load, sim);
  expect_complete(load, first);
  EXPECT_GT(first.preemptions, 0) << "the run must be under pressure to mean something";
  EXPECT_EQ(first.log_hash, second.log_hash);
  EXPECT_EQ(first.end_us, second.end_us);
  const test::TempDir folder;
  sim.options.step_log = folder.file("same.jsonl");
  EXPECT_EQ(run(load, sim).log_hash, first.log_hash) << "writing the log changes nothing";
  sim.options.engine.scheduler.max_step_tokens = 512;
  EXPECT_NE(run(load, sim).log_hash, first.log_hash);
}

TEST(SimReplay, OpenLoopKeepsTheTimesOfTheTrace) {
  const ReplayLoad load = random_load(2, 40);
  const ReplayResult result = run(load, simulated());
  expect_complete(load, result);
  for (size_t i = 0; i < load.requests.size(); ++i)
    EXPECT_EQ(result.requests[i].arrival_us, load.requests[i].arrival_us);
  EXPECT_EQ(result.last_arrival_us, load.requests.back().arrival_us);
}

TEST(SimReplay, AnIdleEngineSleepsUntilTheNextArrival) {
  ReplayLoad load = synthetic_load(2, 10, 3);
  load.requests[1].arrival_us = 3'600'000'000;
  const ReplayResult result = run(load, simulated());
  EXPECT_EQ(result.requests[1].first_scheduled_us, 3'600'000'000);
  const auto& a = result.requests[0].token_us;
  const auto& b = result.requests[1].token_us;
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(b[i] - a[i], 3'600'000'000) << "an hour later the same happens";
}

void expect_refused(const ReplayLoad& load, const Sim& sim, const std::string& words) {
  const Result<ReplayResult> result = run_sim(load, sim.model, sim.replicas, sim.options);
  ASSERT_FALSE(bool(result)) << words;
  EXPECT_NE(result.error().message.find(words), std::string::npos) << result.error().message;
}

TEST(SimReplay, ASeriesOfMoreThanAMillionRowsIsRefused) {
  ReplayLoad load = synthetic_load(2, 10, 3);
  Sim sim = simulated();
  sim.options.series_period_us = 1000;
  load.requests[1].arrival_us = 900'000'000;
  EXPECT_GT(run(load, sim).series.size(), 900'000u);
  load.requests[1].arrival_us = 900'000'000'000'000;
  expect_refused(load, sim,
                 "900000000 s of the replay --time-series would have more than 1000000 rows with "
                 "--series-period 0.001");
  load.requests[1].num_prompt = sim.options.engine.max_model_len;  // refused, without a step
  expect_refused(load, sim, "--time-series");
  sim.options.series_period_us = 1'000'000'000;
  EXPECT_GT(run(load, sim).series.size(), 900'000u);
}

TEST(SimReplay, TimeEndsBeforeItsNumbersDo) {
  Sim sim = simulated();
  sim.model.step_fixed_us = 1e18;
  expect_refused(synthetic_load(1, 10, 100), sim,
                 "the times of the cost model or of the trace cannot be meant");
}

TEST(SimReplay, APoolOfTooManyPagesIsRefused) {
  Sim sim = simulated();
  sim.options.engine.kv.num_pages = 0;
  sim.options.engine.kv.pool_bytes = size_t(1) << 50;
  expect_refused(synthetic_load(1, 10, 1), sim, "at most 16777216 are simulated");
}

TEST(SimReplay, AnArrivalDuringAStepWaitsForItsEnd) {
  ReplayLoad load = synthetic_load(2, 2000, 3);
  load.requests[1].arrival_us = 1;
  const ReplayResult result = run(load, simulated());
  EXPECT_EQ(result.requests[1].first_scheduled_us, result.requests[0].token_us[0]);
}

TEST(SimReplay, ClosedLoopKeepsSoManyUnderWay) {
  const ReplayLoad load = random_load(3, 50);
  Sim sim = simulated();
  sim.options.concurrency = 7;
  const ReplayResult result = run(load, sim);
  expect_complete(load, result);
  std::map<int64_t, int> starts, ends;
  for (const ReplayRecord& r : result.requests) ++starts[r.arrival_us], ++ends[r.token_us.back()];
  EXPECT_EQ(starts.at(0), 7);
  starts.erase(0);
  int started = 7;
  for (const auto& [time_us, count] : starts) {
    EXPECT_EQ(count, ends.at(time_us)) << "one arrives for each that ends, at that time";
    started += count;
  }
  EXPECT_EQ(started, 50);
}

TEST(SimReplay, WhoArrivesAtTheEndOfAStepIsInTheNext) {
  const ReplayLoad load = synthetic_load(20, 10, 30);
  Sim sim = simulated();
  sim.options.concurrency = 3;
  for (const ReplayRecord& record : run(load, sim).requests)
    EXPECT_EQ(record.first_scheduled_us, record.arrival_us);
}

// Every step takes 1,000 us and one long request keeps them coming: another that arrives while one of them runs
// is planned at its end, into the next step, or, if that was planned already, into the one after it.
TEST(SimReplay, WithTwoStepsInFlightAnArrivalWaitsAStepLonger) {
  Sim sim = simulated();
  sim.model = {.target_bytes_per_token = 1,
               .base_bytes_per_token = 1,
               .step_fixed_us = 1000,
               .forward = {{1, 0}},
               .decode_bytes_per_us = 1e9,
               .to_host = {.bytes_per_us = 1},
               .from_host = {.bytes_per_us = 1}};
  for (const int64_t arrival_us : {1, 500, 1000, 1001, 9'999, 10'000, 17'300}) {
    SCOPED_TRACE(arrival_us);
    ReplayLoad load = synthetic_load(3, 10, 40);
    load.requests[1].num_output = 2;
    load.requests[1].arrival_us = arrival_us;
    load.requests[2].arrival_us = 1'000'500;  // nobody else is there
    for (const bool async : {false, true}) {
      sim.options.engine.async_scheduling = async;
      const ReplayResult result = run(load, sim);
      for (size_t i = 0; i < 40; ++i) {
        EXPECT_EQ(result.requests[0].token_us[i], int64_t(i + 1) * 1000) << "the device never waits";
        EXPECT_EQ(result.requests[2].token_us[i], 1'000'500 + int64_t(i + 1) * 1000);
      }
      const int64_t planned_us = (arrival_us + 999) / 1000 * 1000;
      EXPECT_EQ(result.requests[1].first_scheduled_us, planned_us);
      EXPECT_EQ(result.requests[1].token_us[0], planned_us + (async ? 2000 : 1000));
      EXPECT_EQ(result.requests[1].token_us[1], planned_us + (async ? 3000 : 2000));
    }
  }
}

TEST(SimReplay, TwoStepsInFlightGiveEqualLogsAndEveryTokenToo) {
  const ReplayLoad load = random_load(6, 60);
  Sim sim = simulated();
  sim.options.engine.kv.num_pages = 300;
  const ReplayResult one = run(load, sim);
  sim.options.engine.async_scheduling = true;
  const ReplayResult two = run(load, sim);
  expect_complete(load, two);
  EXPECT_GT(two.preemptions, 0) << "the run must be under pressure to mean something";
  EXPECT_EQ(run(load, sim).log_hash, two.log_hash);
  EXPECT_NE(one.log_hash, two.log_hash);
  sim.replicas = 3;
  const ReplayResult three = run(load, sim);
  expect_complete(load, three);
  EXPECT_EQ(run(load, sim).log_hash, three.log_hash);
}

TEST(SimReplay, ReplicasShareTheLoadAndKeepTheirOwnTime) {
  const ReplayLoad load = random_load(4, 120);
  Sim sim = simulated();
  const ReplayResult one = run(load, sim);
  sim.replicas = 3;
  std::map<int, int64_t> end_us;
  sim.options.on_step = [&](int replica, const StepRecord& record) {
    EXPECT_GE(record.start_us, end_us[replica]);
    end_us[replica] = record.end_us;
  };
  const ReplayResult three = run(load, sim);
  expect_complete(load, three);
  EXPECT_EQ(end_us.size(), 3u);
  std::map<int, int> share;
  for (const ReplayRecord& record : three.requests) ++share[record.replica];
  for (const auto& [replica, count] : share) EXPECT_GT(count, 20) << replica;
  EXPECT_LT(three.mean_waiting, one.mean_waiting);
  sim.options.on_step = nullptr;
  EXPECT_EQ(run(load, sim).log_hash, three.log_hash);
}

// Long prompts beside streams, with every policy: no step but the first, or the first two in flight, takes
// much longer than it may, so neither does a gap between two tokens; and all prompts get on.
TEST(SimReplay, StepsKeepToTheirTargetTime) {
  using enum KvPolicy;
  for (const auto& [policy, async] : {std::pair{target_only, false},
                                      {elastic, false},
                                      {exact_offload, false},
                                      {target_only, true},
                                      {elastic, true},
                                      {exact_offload, true}}) {
    SCOPED_TRACE(fmt::format("{} {}", name_of(policy), async));
    ReplayLoad load = synthetic_load(40, 1500, 150);
    for (size_t i = 0; i < load.requests.size(); ++i) load.requests[i].arrival_us = int64_t(i) * 200'000;
    Sim sim = simulated();
    sim.options.engine.fidelity.policy = policy;
    sim.options.engine.async_scheduling = async;
    sim.options.engine.kv.num_pages = 2000;
    const auto serve = [&](int target_us, int64_t& longest_us, int64_t& full_steps) {
      sim.options.engine.scheduler.target_step_us = target_us;
      longest_us = full_steps = 0;
      sim.options.on_step = [&, unknown = async ? 2 : 1](int, const StepRecord& r) mutable {
        if (unknown-- <= 0) longest_us = std::max(longest_us, r.device_us);
        full_steps += r.device_us > target_us * 8 / 10 && r.device_us < target_us * 12 / 10;
      };
      const ReplayResult result = run(load, sim);
      expect_complete(load, result);
      return result;
    };
    constexpr int kTargetUs = 40'000;
    int64_t longest_us = 0, full_steps = 0;
    serve(0, longest_us, full_steps);
    EXPECT_GT(longest_us, 2 * kTargetUs) << "the target must cut something to mean something";
    const ReplayResult cut = serve(kTargetUs, longest_us, full_steps);
    EXPECT_LT(longest_us, kTargetUs * 12 / 10);
    EXPECT_GT(full_steps, 50) << "steps are not shorter than they need be";
    EXPECT_EQ(serve(kTargetUs, longest_us, full_steps).log_hash, cut.log_hash);
  }
}

TEST(SimReplay, WhatCanNeverFitIsRefusedAndTheRestGoesOn) {
  ReplayLoad load = synthetic_load(3, 100, 5);
  load.requests[1].num_output = 4096;
  Sim sim = simulated();
  for (const int concurrency : {0, 1}) {
    sim.options.concurrency = concurrency;
    const ReplayResult result = run(load, sim);
    EXPECT_EQ(result.requests[1].finish, FinishReason::error);
    EXPECT_NE(result.requests[1].error.find("4196"), std::string::npos) << result.requests[1].error;
    EXPECT_EQ(result.requests[2].token_us.size(), 5u);
  }
}

TEST(SimReplay, SettingsThatMakeNoSenseAreErrors) {
  ReplayLoad load = synthetic_load(2, 10, 1);
  Sim sim = simulated();
  sim.replicas = 0;
  EXPECT_FALSE(bool(run_sim(load, sim.model, sim.replicas, sim.options)));
  sim = simulated();
  sim.options.step_log = "/nonexistent/log.jsonl";
  EXPECT_FALSE(bool(run_sim(load, sim.model, sim.replicas, sim.options)));
  sim = simulated();
  sim.options.engine.scheduler.max_step_seqs = 0;
  EXPECT_FALSE(bool(run_sim(load, sim.model, sim.replicas, sim.options)));
  load.requests[0].arrival_us = 5;
  EXPECT_FALSE(bool(run_sim(load, simulated().model, 1, simulated().options)));
  load.requests[0].arrival_us = 0, load.requests[1].num_output = 0;
  EXPECT_FALSE(bool(run_sim(load, simulated().model, 1, simulated().options)));
}

TEST(SimReplay, TheLogHoldsEveryFigureOfTheResult) {
  const ReplayLoad load = random_load(5, 40);
  Sim sim = simulated();
  sim.options.engine.kv.num_pages = 300;
  const test::TempDir folder;
  sim.options.step_log = folder.file("log.jsonl");
  const ReplayResult result = run(load, sim);
  std::ifstream file(sim.options.step_log);
  int64_t steps = 0, preemptions = 0, recomputed = 0, prefill = 0;
  size_t ended = 0;
  for (std::string line; std::getline(file, line);) {
    const Result<Json> json = parse_json(line);
    ASSERT_TRUE(bool(json)) << line;
    if ((*json)["kind"] == "step") {
      ++steps, preemptions += (*json)["preempted"].get<int>(),
          recomputed += (*json)["recomputed_tokens"].get<int>();
      prefill += (*json)["prefill_tokens"].get<int>();
      continue;
    }
    ++ended;
    const ReplayRecord& record = result.requests[(*json)["request"].get<size_t>()];
    int64_t time_us = record.arrival_us;
    std::vector<int64_t> token_us;
    for (const Json& gap : (*json)["gaps_us"]) token_us.push_back(time_us += gap.get<int64_t>());
    EXPECT_EQ(token_us, record.token_us);
    EXPECT_EQ((*json)["preemptions"], record.num_preemptions);
  }
  EXPECT_EQ(ended, load.requests.size());
  EXPECT_EQ(steps, result.steps);
  EXPECT_EQ(preemptions, result.preemptions);
  EXPECT_GT(recomputed, 0) << "the run must be under pressure to mean something";
  EXPECT_EQ(recomputed, result.recomputed_tokens);
  EXPECT_EQ(prefill, result.prefill_tokens);
}

}  // namespace
}  // namespace ekv
