// The engine on a device that stores tokens in pages: events, limits, cancellation, failure, refusal.

#include "elastickv/engine.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "support/paged_backend.h"

namespace ekv {
namespace {

struct Recorder : EngineListener {
  void on_event(SeqEvent event) override { events[event.id].push_back(std::move(event)); }
  void on_step(const StepRecord& record) override { last = record; }
  std::vector<TokenId> tokens(SeqId id) {
    std::vector<TokenId> out;
    for (const SeqEvent& event : events[id])
      if (event.token) out.push_back(*event.token);
    return out;
  }
  FinishReason finish(SeqId id) { return events[id].empty() ? FinishReason::none : events[id].back().finish; }
  std::map<SeqId, std::vector<SeqEvent>> events;
  StepRecord last;
};

struct Fixture {
  explicit Fixture(int pages = 64, int max_model_len = 256, SchedulerConfig scheduler = {}) {
    EngineConfig config;
    config.scheduler = scheduler;
    config.max_model_len = max_model_len;
    auto made = std::make_unique<test::PagedBackend>(pages);
    backend = made.get();
    engine = std::make_unique<Engine>(config, std::move(made), clock, recorder);
  }
  SeqId submit(std::vector<TokenId> prompt, SamplingParams sampling) {
    Result<SeqId> id = engine->submit({.prompt = std::move(prompt), .sampling = std::move(sampling)});
    EXPECT_TRUE(bool(id)) << (id ? "" : id.error().message);
    return id ? *id : SeqId{};
  }
  void run() {
    for (int i = 0; i < 10000 && engine->step(); ++i) engine->check_integrity();
    EXPECT_TRUE(engine->idle());
  }
  int used_pages() const {
    return engine->kv().num_pages() - recorder.last.free_pages - recorder.last.cached_pages;
  }

  SteadyClock clock;
  Recorder recorder;
  test::PagedBackend* backend = nullptr;
  std::unique_ptr<Engine> engine;
};

std::vector<TokenId> expected(std::vector<TokenId> history, int count) {
  std::vector<TokenId> out;
  for (int i = 0; i < count; ++i) {
    out.push_back(test::next_token(history));
    history.push_back(out.back());
  }
  return out;
}

std::vector<TokenId> iota(int count, int first) {
  std::vector<TokenId> out;
  for (int i = 0; i < count; ++i) out.push_back(first + i);
  return out;
}

TEST(Engine, StreamsTheTokensOfTheDefinition) {
  Fixture f;
  const SeqId id = f.submit({1, 2, 3}, {.max_tokens = 40});
  f.run();
  EXPECT_EQ(f.recorder.tokens(id), expected({1, 2, 3}, 40));
  EXPECT_EQ(f.recorder.finish(id), FinishReason::length);
  EXPECT_EQ(f.recorder.events[id].back().stats.num_output, 40);
  EXPECT_EQ(f.used_pages(), 0);
}

TEST(Engine, StopsAtAStopTokenButNotBeforeMinTokens) {
  Fixture f;
  const std::vector<TokenId> all = expected({5, 6}, 20);
  const SeqId early = f.submit({5, 6}, {.max_tokens = 20, .stop_token_ids = {all[3], all[9]}});
  const SeqId late = f.submit({5, 6}, {.min_tokens = 5, .max_tokens = 20, .stop_token_ids = {all[3], all[9]}});
  f.run();
  EXPECT_EQ(f.recorder.tokens(early).size(), 4u);
  EXPECT_EQ(f.recorder.finish(early), FinishReason::stop);
  EXPECT_EQ(f.recorder.tokens(late).size(), 10u);
}

TEST(Engine, EndsAtTheContextLimit) {
  Fixture f(64, 32);
  const SeqId id = f.submit(iota(30, 1), {.max_tokens = 1000});
  f.run();
  EXPECT_EQ(f.recorder.tokens(id).size(), 2u);
  EXPECT_EQ(f.recorder.finish(id), FinishReason::length);
}

TEST(Engine, RefusesWhatCanNeverFit) {
  Fixture f(4, 256);
  EXPECT_EQ(f.engine->submit({.prompt = {}}).error().param, "prompt");
  EXPECT_EQ(f.engine->submit({.prompt = iota(256, 0)}).error().code, Error::too_large);
  const auto wide = f.engine->submit({.prompt = iota(60, 0), .sampling = {.max_tokens = 6}});
  ASSERT_FALSE(bool(wide));
  EXPECT_NE(wide.error().message.find("the pool has 4"), std::string::npos) << wide.error().message;
  EXPECT_TRUE(bool(f.engine->submit({.prompt = iota(60, 0), .sampling = {.max_tokens = 5}})));
  EXPECT_TRUE(bool(f.engine->submit({.prompt = {1}, .sampling = {.max_tokens = INT32_MAX}})) == false);
  for (double fraction : {-0.1, 1.1, std::nan("")})
    EXPECT_EQ(f.engine->submit({.prompt = {1}, .max_base_fraction = fraction}).error().param,
              "max_base_fraction");
}

TEST(Engine, CancelFreesEverythingWithinOneStep) {
  Fixture f;
  const SeqId running = f.submit(iota(40, 1), {.max_tokens = 100});
  for (int i = 0; i < 5; ++i) f.engine->step();
  const SeqId waiting = f.submit(iota(40, 9), {.max_tokens = 100});
  f.engine->cancel(running);
  f.engine->cancel(waiting);
  f.engine->cancel(SeqId{12345});
  EXPECT_FALSE(f.engine->step());
  EXPECT_EQ(f.recorder.finish(running), FinishReason::cancelled);
  EXPECT_EQ(f.recorder.finish(waiting), FinishReason::cancelled);
  EXPECT_EQ(f.used_pages(), 0);
  EXPECT_TRUE(f.engine->idle());
}

// A failure is local to its request: its KV is not published, its neighbour and the next request are right.
TEST(Engine, NonFiniteOutputFailsItsRequestOnly) {
  Fixture f;
  const std::vector<TokenId> bad_prompt = iota(64, 1), good_prompt = iota(64, 500);
  f.backend->poison_token = expected(bad_prompt, 3)[2];
  const SeqId bad = f.submit(bad_prompt, {.max_tokens = 10}), good = f.submit(good_prompt, {.max_tokens = 10});
  f.run();
  EXPECT_EQ(f.recorder.finish(bad), FinishReason::error);
  EXPECT_FALSE(f.recorder.events[bad].back().error.empty());
  EXPECT_EQ(f.recorder.tokens(good), expected(good_prompt, 10));
  EXPECT_EQ(f.used_pages(), 0);
  f.backend->poison_token = -2;
  const SeqId again = f.submit(bad_prompt, {.max_tokens = 10});
  f.run();
  EXPECT_EQ(f.recorder.tokens(again), expected(bad_prompt, 10));
}

TEST(Engine, PromptLogprobsCoverThePromptOnceDespiteChunksAndPreemption) {
  Fixture f(6, 96, {.max_step_tokens = 8, .max_step_seqs = 4});
  const SeqId a = f.submit(iota(33, 1), {.max_tokens = 30, .prompt_logprobs = 0});
  const SeqId b = f.submit(iota(33, 50), {.max_tokens = 30, .prompt_logprobs = 0});
  f.run();
  int preemptions = 0;
  for (const SeqId id : {a, b}) {
    const auto& events = f.recorder.events[id];
    ASSERT_EQ(events.front().prompt_logprobs.size(), 32u);
    const TokenId first = id == a ? 1 : 50;
    for (int i = 0; i < 32; ++i)
      EXPECT_EQ(events.front().prompt_logprobs[size_t(i)].chosen.token, first + 1 + i);
    for (size_t i = 1; i < events.size(); ++i) EXPECT_TRUE(events[i].prompt_logprobs.empty());
    preemptions += events.back().stats.num_preemptions;
  }
  EXPECT_GT(preemptions, 0);
}

TEST(Engine, FailAllEndsRunningAndWaiting) {
  Fixture f(64, 256, {.max_step_tokens = 4, .max_step_seqs = 1});
  const SeqId running = f.submit({1}, {.max_tokens = 100}), waiting = f.submit({2}, {.max_tokens = 100});
  f.engine->step();
  f.engine->fail_all("device lost");
  for (const SeqId id : {running, waiting}) {
    EXPECT_EQ(f.recorder.finish(id), FinishReason::error);
    EXPECT_EQ(f.recorder.events[id].back().error, "device lost");
  }
  EXPECT_TRUE(f.engine->idle());
}

}  // namespace
}  // namespace ekv
