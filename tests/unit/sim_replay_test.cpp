// Whole runs in virtual time: arrivals, concurrency, replicas, the log and its hash.

#include "bench/sim_replay.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <random>

#include "bench/sim_log.h"
#include "util/json.h"

namespace ekv {
namespace {

SimOptions options(const std::string& model = "a100-llama-3.1-8b") {
  Result<CostModel> loaded = load_cost_model(model);
  EXPECT_TRUE(bool(loaded));
  SimOptions options{.model = *loaded};
  options.engine.kv.num_pages = 600;
  options.engine.max_model_len = 4096;
  return options;
}

std::vector<SimRequest> random_requests(unsigned seed, int count) {
  std::mt19937 rng(seed);
  std::vector<SimRequest> requests;
  int64_t time_us = 0;
  for (int i = 0; i < count; ++i) {
    time_us += rng() % 400'000;
    SimRequest request{.arrival_us = time_us, .num_output = 1 + int(rng() % 200)};
    for (int length = 1 + int(rng() % 1500); length > 0; --length)
      request.prompt.push_back(TokenId(rng() % 1000));
    requests.push_back(std::move(request));
  }
  return requests;
}

SimResult run(std::span<const SimRequest> requests, const SimOptions& options) {
  Result<SimResult> result = run_sim(requests, options);
  EXPECT_TRUE(bool(result)) << (result ? "" : result.error().message);
  return result ? *std::move(result) : SimResult{};
}

void expect_complete(std::span<const SimRequest> requests, const SimResult& result) {
  ASSERT_EQ(result.requests.size(), requests.size());
  for (size_t i = 0; i < requests.size(); ++i) {
    const SimRequestRecord& record = result.requests[i];
    EXPECT_EQ(record.finish, FinishReason::length);
    EXPECT_EQ(int(record.token_us.size()), requests[i].num_output);
    EXPECT_TRUE(std::ranges::is_sorted(record.token_us));
    EXPECT_GE(record.first_scheduled_us, record.arrival_us);
    EXPECT_GT(record.token_us.front(), record.first_scheduled_us);
    EXPECT_LE(record.token_us.back(), result.end_us);
  }
}

TEST(SimReplay, EqualRunsHaveEqualLogs) {
  const auto requests = random_requests(1, 60);
  SimOptions sim = options();
  const SimResult first = run(requests, sim), second = run(requests, sim);
  expect_complete(requests, first);
  EXPECT_GT(first.preemptions, 0) << "the run must be under pressure to mean something";
  EXPECT_EQ(first.log_hash, second.log_hash);
  EXPECT_EQ(first.end_us, second.end_us);
  sim.event_log = testing::TempDir() + "/ekv_sim_same.jsonl";
  EXPECT_EQ(run(requests, sim).log_hash, first.log_hash) << "writing the log changes nothing";
  sim.engine.scheduler.max_step_tokens = 512;
  EXPECT_NE(run(requests, sim).log_hash, first.log_hash);
}

TEST(SimReplay, OpenLoopKeepsTheTimesOfTheTrace) {
  const auto requests = random_requests(2, 40);
  const SimResult result = run(requests, options());
  expect_complete(requests, result);
  for (size_t i = 0; i < requests.size(); ++i) EXPECT_EQ(result.requests[i].arrival_us, requests[i].arrival_us);
  EXPECT_EQ(result.last_arrival_us, requests.back().arrival_us);
}

TEST(SimReplay, AnIdleEngineSleepsUntilTheNextArrival) {
  std::vector<SimRequest> requests = synthetic_requests(2, 10, 3);
  requests[1].arrival_us = 3'600'000'000;
  const SimResult result = run(requests, options());
  EXPECT_EQ(result.requests[1].first_scheduled_us, 3'600'000'000);
  const auto& a = result.requests[0].token_us;
  const auto& b = result.requests[1].token_us;
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(b[i] - a[i], 3'600'000'000) << "an hour later the same happens";
}

TEST(SimReplay, AnArrivalDuringAStepWaitsForItsEnd) {
  std::vector<SimRequest> requests = synthetic_requests(2, 2000, 3);
  requests[1].arrival_us = 1;
  const SimResult result = run(requests, options());
  EXPECT_EQ(result.requests[1].first_scheduled_us, result.requests[0].token_us[0]);
}

TEST(SimReplay, ClosedLoopKeepsSoManyUnderWay) {
  const auto requests = random_requests(3, 50);
  SimOptions sim = options();
  sim.concurrency = 7;
  const SimResult result = run(requests, sim);
  expect_complete(requests, result);
  std::map<int64_t, int> starts, ends;
  for (const SimRequestRecord& r : result.requests) ++starts[r.arrival_us], ++ends[r.token_us.back()];
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
  const auto requests = synthetic_requests(20, 10, 30);
  SimOptions sim = options();
  sim.concurrency = 3;
  for (const SimRequestRecord& record : run(requests, sim).requests)
    EXPECT_EQ(record.first_scheduled_us, record.arrival_us);
}

TEST(SimReplay, ReplicasShareTheLoadAndKeepTheirOwnTime) {
  const auto requests = random_requests(4, 120);
  SimOptions sim = options();
  const SimResult one = run(requests, sim);
  sim.replicas = 3;
  std::map<int, int64_t> end_us;
  sim.on_step = [&](int replica, const StepRecord& record) {
    EXPECT_GE(record.start_us, end_us[replica]);
    end_us[replica] = record.end_us;
  };
  const SimResult three = run(requests, sim);
  expect_complete(requests, three);
  EXPECT_EQ(end_us.size(), 3u);
  std::map<int, int> share;
  for (const SimRequestRecord& record : three.requests) ++share[record.replica];
  for (const auto& [replica, count] : share) EXPECT_GT(count, 20) << replica;
  EXPECT_LT(three.mean_waiting, one.mean_waiting);
  sim.on_step = nullptr;
  EXPECT_EQ(run(requests, sim).log_hash, three.log_hash);
}

TEST(SimReplay, WhatCanNeverFitIsRefusedAndTheRestGoesOn) {
  auto requests = synthetic_requests(3, 100, 5);
  requests[1].num_output = 4096;
  SimOptions sim = options();
  for (const int concurrency : {0, 1}) {
    sim.concurrency = concurrency;
    const SimResult result = run(requests, sim);
    EXPECT_EQ(result.requests[1].finish, FinishReason::error);
    EXPECT_NE(result.requests[1].error.find("4196"), std::string::npos) << result.requests[1].error;
    EXPECT_EQ(result.requests[2].token_us.size(), 5u);
  }
}

TEST(SimReplay, SettingsThatMakeNoSenseAreErrors) {
  auto requests = synthetic_requests(2, 10, 1);
  SimOptions sim = options();
  sim.replicas = 0;
  EXPECT_FALSE(bool(run_sim(requests, sim)));
  sim = options();
  sim.event_log = "/nonexistent/log.jsonl";
  EXPECT_FALSE(bool(run_sim(requests, sim)));
  sim = options();
  sim.engine.scheduler.max_step_seqs = 0;
  EXPECT_FALSE(bool(run_sim(requests, sim)));
  requests[0].arrival_us = 5;
  EXPECT_FALSE(bool(run_sim(requests, options())));
  requests[0].arrival_us = 0, requests[1].num_output = 0;
  EXPECT_FALSE(bool(run_sim(requests, options())));
}

TEST(SimReplay, TheLogHoldsEveryFigureOfTheResult) {
  const auto requests = random_requests(5, 40);
  SimOptions sim = options();
  sim.engine.kv.num_pages = 300;
  sim.event_log = testing::TempDir() + "/ekv_sim_log.jsonl";
  const SimResult result = run(requests, sim);
  std::ifstream file(sim.event_log);
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
    const SimRequestRecord& record = result.requests[(*json)["request"].get<size_t>()];
    int64_t time_us = record.arrival_us;
    std::vector<int64_t> token_us;
    for (const Json& gap : (*json)["gaps_us"]) token_us.push_back(time_us += gap.get<int64_t>());
    EXPECT_EQ(token_us, record.token_us);
    EXPECT_EQ((*json)["preemptions"], record.num_preemptions);
  }
  EXPECT_EQ(ended, requests.size());
  EXPECT_EQ(steps, result.steps);
  EXPECT_EQ(preemptions, result.preemptions);
  EXPECT_GT(recomputed, 0) << "the run must be under pressure to mean something";
  EXPECT_EQ(recomputed, result.recomputed_tokens);
  EXPECT_EQ(prefill, result.prefill_tokens);
}

uint64_t hash_of(const char* kind, std::vector<LogField> fields, std::vector<int64_t> list) {
  Result<std::unique_ptr<SimLog>> log = SimLog::open("");
  EXPECT_TRUE(bool(log));
  (*log)->write(kind, fields, "list", list);
  return (*log)->hash();
}

TEST(SimLog, TheHashSeesEveryValue) {
  const uint64_t plain = hash_of("step", {{"a", 1}, {"b", 2}}, {3, 4});
  EXPECT_EQ(hash_of("step", {{"a", 1}, {"b", 2}}, {3, 4}), plain);
  EXPECT_NE(hash_of("request", {{"a", 1}, {"b", 2}}, {3, 4}), plain);
  EXPECT_NE(hash_of("step", {{"a", 1}, {"b", 3}}, {3, 4}), plain);
  EXPECT_NE(hash_of("step", {{"a", 2}, {"b", 2}}, {3, 4}), plain);
  EXPECT_NE(hash_of("step", {{"a", 1}, {"b", 2}}, {3, 5}), plain);
  EXPECT_NE(hash_of("step", {{"a", 1}, {"b", 2}, {"c", 3}}, {4}), plain) << "fields and list are told apart";
}

}  // namespace
}  // namespace ekv
