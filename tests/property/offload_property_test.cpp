// Policy exact_offload end to end without a model: random settings, pools, host budgets, copy delays,
// cancellations. The device checks every byte that it reads or copies: a page written, read or given away while
// a copy uses it, a slot that was not filled, a pair loaded for somebody else's tokens all show as wrong
// output. Failures name the seed.

#include <gtest/gtest.h>

#include <cstdio>

#include "support/random_serving.h"

namespace ekv {
namespace {

using test::current_seed, test::expected_tokens, test::kServingLen, test::PagedBackend;

struct Listener : test::TokenListener {
  void on_step(const StepRecord& r) override {
    stores += r.stores_begun, loads += r.loads_begun, skipped += r.stores_skipped;
    recomputed += r.num_recomputed;
    computed += r.num_prefill_tokens + r.num_decode_tokens;
    loading_steps += r.num_loading > 0;
    log.push_back({r.num_prefill_tokens, r.num_decode_tokens, r.num_running, r.num_waiting, r.num_admitted,
                   r.num_preempted, r.free_pages, r.cached_pages, r.locked_pages, r.host_slots_used,
                   r.stores_begun, r.loads_begun});
    record = r;
  }
  std::vector<std::vector<int>> log;  // of every step all that is not time
  int64_t stores = 0, loads = 0, skipped = 0, recomputed = 0, computed = 0, loading_steps = 0;
};

struct Totals {
  int64_t stores = 0, loads = 0, skipped = 0, preemptions = 0, recomputed = 0, cancelled = 0, loading_steps = 0;
};

class RandomServing : public test::RandomServing {
 public:
  RandomServing(unsigned seed, Totals& totals) : test::RandomServing(seed, listener_), totals_(totals) {}

  EngineConfig draw_config() {
    EngineConfig c;
    if (below(3) == 0) below(2) ? apply_preset_paper015(c) : apply_preset_modern(c);
    c.max_model_len = kServingLen;
    c.scheduler.max_step_seqs = 1 + below(12);
    c.scheduler.max_step_tokens = c.scheduler.max_step_seqs + below(200);
    c.scheduler.max_chunk_tokens = below(2) ? 0 : 1 + below(64);
    c.scheduler.reserve_full_prompt = below(2) != 0;
    c.scheduler.watermark = below(3) ? 0.0 : 0.01 * below(30);
    c.scheduler.preempt_self = below(3) == 0;
    c.scheduler.policy = below(2) ? SchedulingPolicy::fcfs : SchedulingPolicy::priority;
    c.kv.prefix_cache = below(2) != 0;
    c.fidelity.policy = KvPolicy::exact_offload;
    if (below(12) == 0) c.scheduler.admission = AdmissionMode::guaranteed;
    return c;
  }

  const Listener& listener() const { return listener_; }

 private:
  Request draw_request() override {
    Request r = draw_tokens();
    r.priority = below(3);
    if (below(3) == 0) r.tier = KvTier::exact;
    if (below(5) == 0) r.cache_salt = "salt";
    return r;
  }

  void check_step(const StepRecord& r) const override { ASSERT_EQ(r.base_pairs_seen, 0); }

  void check_end(const PagedBackend& device) override {
    ASSERT_EQ(listener_.stores, device.stored) << "every copy begun has ended";
    ASSERT_EQ(listener_.loads, device.loaded);
    totals_.stores += listener_.stores, totals_.loads += listener_.loads, totals_.skipped += listener_.skipped;
    totals_.preemptions += listener_.preemptions, totals_.recomputed += listener_.recomputed;
    totals_.loading_steps += listener_.loading_steps, totals_.cancelled += num_cancelled_;
  }

  Listener listener_;
  Totals& totals_;
};

class OffloadInFlight : public testing::TestWithParam<bool> {};  // the parameter: two steps in flight
INSTANTIATE_TEST_SUITE_P(Steps, OffloadInFlight, testing::Bool(),
                         [](const auto& info) { return info.param ? "two" : "one"; });

TEST_P(OffloadInFlight, EverythingHoldsUnderAnySettings) {
  Totals totals;
  test::print_seed_on_abort();
  for (unsigned seed = 1; seed <= (GetParam() ? 750 : 1500); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    current_seed = seed;
    RandomServing run(seed, totals);
    EngineConfig config = run.draw_config();
    config.async_scheduling = GetParam();
    const int slots = run.below(3) ? 50 + run.below(300) : run.below(30);
    run.run(config, 28 + run.below(60), slots);
    if (HasFailure()) return;
  }
  EXPECT_GT(totals.stores, 10000);
  EXPECT_GT(totals.loads, 5000);
  EXPECT_GT(totals.skipped, 1000);
  EXPECT_GT(totals.preemptions, 1000);
  EXPECT_GT(totals.recomputed, 10000);
  EXPECT_GT(totals.cancelled, 500);
  EXPECT_GT(totals.loading_steps, 1000);
  std::printf("stores %ld loads %ld skipped %ld preempted %ld recomputed %ld loading steps %ld\n",
              long(totals.stores), long(totals.loads), long(totals.skipped), long(totals.preemptions),
              long(totals.recomputed), long(totals.loading_steps));
}

TEST(Offload, SameRequestsSameSteps) {
  for (unsigned seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Totals totals;
    RandomServing first(seed, totals), second(seed, totals);
    for (RandomServing* run : {&first, &second}) {
      const EngineConfig config = run->draw_config();
      run->run(config, 28 + run->below(60), 200);
    }
    ASSERT_EQ(first.listener().log, second.listener().log);
  }
}

struct Served {
  Listener listener;
  int num_loading_turns = 0;
};

// Requests of the same lengths, all at once, in less than the pages that they need.
Served serve(KvPolicy policy, int num_slots, int num_pages, int count, int prompt, int output,
             void (*preset)(EngineConfig&), std::function<int()> delay = nullptr) {
  EngineConfig config;
  preset(config);
  config.max_model_len = kServingLen;
  config.scheduler.max_step_tokens = 256;
  config.fidelity.policy = policy;
  SteadyClock clock;
  Served served;
  auto device = std::make_unique<PagedBackend>(num_pages, num_slots);
  device->draw_delay = std::move(delay);
  Engine engine(config, std::move(device), clock, served.listener);
  for (int i = 0; i < count; ++i) {
    Request r{.prompt = std::vector<TokenId>(size_t(prompt), 10 + i), .sampling = {.max_tokens = output}};
    EXPECT_TRUE(bool(engine.submit(std::move(r))));
  }
  for (int step = 0; !engine.idle() && step < 100000; ++step) engine.step(), engine.check_integrity();
  EXPECT_EQ(served.listener.last.size(), size_t(count)) << "somebody waits for ever";
  return served;
}

// Twelve conversations in three quarters of the pages that they need.
TEST(Offload, ResumingIsACopyWhereTargetOnlyComputesAgain) {
  for (const auto preset : {&apply_preset_paper015, &apply_preset_modern}) {
    const Listener exact = serve(KvPolicy::target_only, 0, 225, 12, 200, 201, preset).listener;
    const Listener offload = serve(KvPolicy::exact_offload, 400, 225, 12, 200, 201, preset).listener;
    EXPECT_GT(exact.preemptions, 0);
    EXPECT_GT(offload.preemptions, 0);
    EXPECT_GT(offload.loads, 0);
    EXPECT_GT(exact.recomputed, 100 * exact.preemptions);
    // What is not on the host yet is less than the last pair, and one that is on its way.
    EXPECT_LT(offload.recomputed, 3 * kPairTokens * offload.preemptions);
    EXPECT_EQ(offload.tokens, exact.tokens);
    EXPECT_EQ(exact.computed - exact.recomputed, offload.computed - offload.recomputed) << "each token once";
  }
}

// Without host memory the policy is target_only, step by step.
TEST(Offload, WithoutHostMemoryNothingDiffersFromTargetOnly) {
  for (const auto preset : {&apply_preset_paper015, &apply_preset_modern}) {
    const Listener exact = serve(KvPolicy::target_only, 0, 225, 12, 200, 201, preset).listener;
    EXPECT_EQ(serve(KvPolicy::exact_offload, 0, 225, 12, 200, 201, preset).listener.log, exact.log);
  }
}

// Prompts that each take one step and then end: no sequence ever grows beyond what its admission counted. So
// whoever loads has the pages of its step when the copies have ended, and nobody is preempted: neither by the
// need of a load nor for it.
TEST(Offload, WhoHasLoadedTakesAStepWithThePagesCountedAtItsAdmission) {
  int64_t loads = 0;
  test::print_seed_on_abort();
  for (unsigned seed = 1; seed <= 400; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    current_seed = seed;
    std::mt19937 rng(seed);
    const auto below = [&rng](int n) { return int(rng() % unsigned(n)); };
    EngineConfig config;
    below(2) ? apply_preset_paper015(config) : apply_preset_modern(config);
    config.max_model_len = kServingLen;
    config.scheduler.policy = below(2) ? SchedulingPolicy::fcfs : SchedulingPolicy::priority;
    config.kv.prefix_cache = below(2) != 0;
    config.async_scheduling = below(2) != 0;
    config.fidelity.policy = KvPolicy::exact_offload;
    SteadyClock clock;
    Listener listener;
    auto device = std::make_unique<PagedBackend>(20 + below(60), 500);
    device->draw_delay = [&below, slowest = 1 + below(6)] { return below(slowest); };
    Engine engine(config, std::move(device), clock, listener);
    std::vector<Request> prompts;
    for (int i = 0; i < 6; ++i)
      prompts.push_back(
          {.prompt = std::vector<TokenId>(size_t(20 + below(280)), 10 + i), .sampling = {.max_tokens = 1}});
    for (int sent = 0, step = 0; sent < 60 || !engine.idle(); ++step) {
      ASSERT_LT(step, 5000) << "requests that never end";
      for (; sent < 60 && below(3) > 0; ++sent) {
        Request r = prompts[size_t(below(6))];
        r.priority = below(3);
        ASSERT_TRUE(bool(engine.submit(std::move(r))));
      }
      engine.step();
      ASSERT_EQ(listener.record.num_preempted, 0) << "in step " << step;
    }
    loads += listener.loads;
  }
  EXPECT_GT(loads, 10000);
}

// Two loaded sequences, each with pages and in need of one more, and nothing else that runs: the one before
// gets those of the one behind it. Copies are slow, so that loads overlap with everything.
TEST(Offload, LoadedSequencesDoNotBlockEachOther) {
  for (const auto preset : {&apply_preset_paper015, &apply_preset_modern})
    for (int pages = 26; pages <= 64; ++pages)
      for (int slowest : {0, 7}) {
        SCOPED_TRACE(std::to_string(pages) + " pages, copies take up to " + std::to_string(slowest) + " steps");
        int n = 0;
        const auto delay = [n, slowest]() mutable { return slowest ? n++ % (slowest + 1) : 0; };
        const Served served = serve(KvPolicy::exact_offload, 200, pages, 5, 180, 220, preset, delay);
        ASSERT_GT(served.listener.loads, 0);
      }
}

// The host forgets what it must and no more: a working set of three times the pool goes out and comes back, and
// every answer is that of the first time.
TEST(Offload, AWorkingSetLargerThanThePoolComesBackUnchanged) {
  EngineConfig config;
  apply_preset_modern(config);
  config.max_model_len = kServingLen;
  config.scheduler.max_step_tokens = 300;
  config.fidelity.policy = KvPolicy::exact_offload;
  SteadyClock clock;
  Listener listener;
  constexpr int kPrompts = 24, kRounds = 20, kPages = 24 * 20 / 3;
  auto made = std::make_unique<PagedBackend>(kPages, kPrompts * 12);
  std::mt19937 rng(7);
  made->draw_delay = [&] { return int(rng() % 4); };
  Engine engine(config, std::move(made), clock, listener);
  for (int round = 0; round < kRounds; ++round) {
    std::vector<std::pair<SeqId, Request>> asked;
    for (int i = 0; i < kPrompts; ++i) {
      Request r{.prompt = {}, .sampling = {.max_tokens = 8}};
      for (int t = 0; t < 310; ++t) r.prompt.push_back((i * 37 + t * (1 + i % 3)) % 900);
      asked.emplace_back(*engine.submit(r), r);
    }
    while (!engine.idle()) {
      engine.step(), engine.check_integrity();
    }
    for (const auto& [id, request] : asked)
      ASSERT_EQ(listener.tokens[id], expected_tokens(request, kServingLen)) << "round " << round;
  }
  EXPECT_GT(listener.loads, (kRounds - 1) * kPrompts * 5) << "most of each round comes from the host";
  EXPECT_EQ(engine.kv().num_free_pages() + engine.kv().num_cached_pages(), kPages);
}

// PFX-1: a prompt that the host holds whole still has a token to compute, and what continues it finds all its
// pairs.
TEST(Offload, AWholePromptOnTheHostLeavesATokenToCompute) {
  for (const bool prefix_cache : {false, true})
    for (const int length : {1, 15, 16, 31, 32, 33, 48, 63, 64, 65, 96, 97}) {
      SCOPED_TRACE(length);
      EngineConfig config;
      config.max_model_len = kServingLen;
      config.kv.prefix_cache = prefix_cache;
      config.fidelity.policy = KvPolicy::exact_offload;
      SteadyClock clock;
      Listener listener;
      Engine engine(config, std::make_unique<PagedBackend>(12, 100), clock, listener);
      const auto ask = [&](int tokens, TokenId first, int output) {
        Request r{.prompt = {}, .sampling = {.max_tokens = output}};
        for (int t = 0; t < tokens; ++t) r.prompt.push_back((first + t) % 900);
        const SeqId id = *engine.submit(r);
        while (!engine.idle()) engine.step(), engine.check_integrity();
        EXPECT_EQ(listener.tokens[id], expected_tokens(r, kServingLen));
        return listener.last.at(id).stats.num_cached;
      };
      EXPECT_EQ(ask(length, 0, 1), 0);
      for (int again = 0; again < 3; ++again) {
        ask(190, 300 + 200 * again, 2);  // takes every page, so that the device forgets
        const int64_t loads = listener.loads;
        EXPECT_EQ(ask(length, 0, 1), (length - 1) / kPairTokens * kPairTokens);
        EXPECT_EQ(listener.loads - loads, (length - 1) / kPairTokens);
      }
      ask(190, 10, 2);
      EXPECT_EQ(ask(length + 20, 0, 1), length / kPairTokens * kPairTokens) << "all whole pairs of the first";
    }
}

// SCH-1: what can never fit is refused at once; what fits alone runs, whatever the host holds.
TEST(Offload, OnlyWhatCanNeverFitIsRefused) {
  EngineConfig config;
  apply_preset_modern(config);
  config.max_model_len = 2048;
  config.fidelity.policy = KvPolicy::exact_offload;
  SteadyClock clock;
  Listener listener;
  Engine engine(config, std::make_unique<PagedBackend>(50, 500), clock, listener);
  const auto ask = [&](int prompt, int output) {
    return engine.submit(
        {.prompt = std::vector<TokenId>(size_t(prompt), prompt % 900), .sampling = {.max_tokens = output}});
  };
  EXPECT_FALSE(ask(1000, 10));
  const Result<SeqId> large = ask(700, 101);
  ASSERT_TRUE(bool(large)) << large.error().message;
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(bool(ask(20 + i, 10)));
  for (int step = 0; step < 2000 && !engine.idle(); ++step) engine.step();
  EXPECT_EQ(listener.last.size(), 6u);
  for (const auto& [id, event] : listener.last) EXPECT_EQ(event.finish, FinishReason::length);
}

// PFX-5: what a failed chunk computed never reaches the host.
TEST(Offload, WhatAFailedRequestComputedIsNotStored) {
  EngineConfig config;
  apply_preset_modern(config);
  config.max_model_len = kServingLen;
  config.fidelity.policy = KvPolicy::exact_offload;
  SteadyClock clock;
  Listener listener;
  auto made = std::make_unique<PagedBackend>(50, 100);
  PagedBackend& device = *made;
  Engine engine(config, std::move(made), clock, listener);
  Request r{.prompt = std::vector<TokenId>(100, 3), .sampling = {.max_tokens = 1}};
  device.poison_token = test::next_token(r.prompt);
  const SeqId id = *engine.submit(r);
  while (!engine.idle()) engine.step();
  EXPECT_EQ(listener.last.at(id).finish, FinishReason::error);
  EXPECT_EQ(listener.stores, 0);
  EXPECT_EQ(engine.kv().host().num_used(), 0);
}

}  // namespace
}  // namespace ekv
