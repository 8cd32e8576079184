// The engine on a device that stores tokens in pages, with one and with two steps in flight: events, limits,
// cancellation, failure, refusal, times.

#include "elastickv/engine.h"

#include <gtest/gtest.h>

#include <cmath>
#include <deque>
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
  explicit Fixture(bool async, int pages = 64, int max_model_len = 256, SchedulerConfig scheduler = {}) {
    EngineConfig config;
    config.async_scheduling = async;
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

class InFlight : public testing::TestWithParam<bool> {};  // the parameter: two steps in flight
INSTANTIATE_TEST_SUITE_P(Engine, InFlight, testing::Bool(),
                         [](const auto& info) { return info.param ? "two" : "one"; });

TEST_P(InFlight, StreamsTheTokensOfTheDefinition) {
  Fixture f(GetParam());
  const SeqId id = f.submit({1, 2, 3}, {.max_tokens = 40});
  f.run();
  EXPECT_EQ(f.recorder.tokens(id), expected({1, 2, 3}, 40));
  EXPECT_EQ(f.recorder.finish(id), FinishReason::length);
  EXPECT_EQ(f.recorder.events[id].back().stats.num_output, 40);
  EXPECT_EQ(f.used_pages(), 0);
}

TEST_P(InFlight, StopsAtAStopTokenButNotBeforeMinTokens) {
  Fixture f(GetParam());
  const std::vector<TokenId> all = expected({5, 6}, 20);
  const SeqId early = f.submit({5, 6}, {.max_tokens = 20, .stop_token_ids = {all[3], all[9]}});
  const SeqId late = f.submit({5, 6}, {.min_tokens = 5, .max_tokens = 20, .stop_token_ids = {all[3], all[9]}});
  f.run();
  EXPECT_EQ(f.recorder.tokens(early).size(), 4u);
  EXPECT_EQ(f.recorder.finish(early), FinishReason::stop);
  EXPECT_EQ(f.recorder.tokens(late).size(), 10u);
}

TEST_P(InFlight, EndsAtTheContextLimit) {
  Fixture f(GetParam(), 64, 32);
  const SeqId id = f.submit(iota(30, 1), {.max_tokens = 1000});
  f.run();
  EXPECT_EQ(f.recorder.tokens(id).size(), 2u);
  EXPECT_EQ(f.recorder.finish(id), FinishReason::length);
}

// What a device has no room for, if the server did not refuse it before.
TEST_P(InFlight, RefusesListsThatAreTooLong) {
  Fixture f(GetParam(), 4, 256);
  const auto refused = [&](size_t biases, size_t stops) {
    SamplingParams sampling{.max_tokens = 1};
    sampling.logit_bias.resize(biases);
    sampling.stop_token_ids.resize(stops);
    const auto id = f.engine->submit({.prompt = {1}, .sampling = sampling});
    return id ? std::string() : id.error().param;
  };
  EXPECT_EQ(refused(kMaxLogitBias, kMaxStopTokenIds + kMaxEosIds), "");
  EXPECT_EQ(refused(kMaxLogitBias + 1, 0), "logit_bias");
  EXPECT_EQ(refused(0, kMaxStopTokenIds + kMaxEosIds + 1), "stop_token_ids");
}

TEST_P(InFlight, RefusesWhatCanNeverFit) {
  Fixture f(GetParam(), 4, 256);
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

TEST_P(InFlight, CancelFreesEverythingWithinOneStep) {
  Fixture f(GetParam());
  const SeqId running = f.submit(iota(40, 1), {.max_tokens = 100});
  for (int i = 0; i < 5; ++i) f.engine->step();
  const SeqId waiting = f.submit(iota(40, 9), {.max_tokens = 100});
  f.engine->cancel(running);
  f.engine->cancel(waiting);
  f.engine->cancel(SeqId{12345});
  EXPECT_EQ(f.engine->step(), GetParam()) << "what is in flight is collected, and nothing else runs";
  EXPECT_EQ(f.recorder.finish(running), FinishReason::cancelled);
  EXPECT_EQ(f.recorder.finish(waiting), FinishReason::cancelled);
  EXPECT_EQ(f.used_pages(), 0);
  EXPECT_TRUE(f.engine->idle());
}

// A failure is local to its request: its KV is not published, its neighbour and the next request are right.
TEST_P(InFlight, NonFiniteOutputFailsItsRequestOnly) {
  Fixture f(GetParam());
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

TEST_P(InFlight, PromptLogprobsCoverThePromptOnceDespiteChunksAndPreemption) {
  Fixture f(GetParam(), 6, 96, {.max_step_tokens = 8, .max_step_seqs = 4});
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

TEST_P(InFlight, FailAllEndsRunningAndWaiting) {
  Fixture f(GetParam(), 64, 256, {.max_step_tokens = 4, .max_step_seqs = 1});
  const SeqId running = f.submit({1}, {.max_tokens = 100}), waiting = f.submit({2}, {.max_tokens = 100});
  f.engine->step();
  f.engine->fail_all("device lost");
  for (const SeqId id : {running, waiting}) {
    EXPECT_EQ(f.recorder.finish(id), FinishReason::error);
    EXPECT_EQ(f.recorder.events[id].back().error, "device lost");
  }
  f.run();  // nothing comes of what is in flight
  for (const SeqId id : {running, waiting}) EXPECT_EQ(f.recorder.finish(id), FinishReason::error);
}

TEST(TwoStepsInFlight, ATokenIsDeliveredWhenTheNextStepHasBeenSubmitted) {
  Fixture f(true);
  const SeqId id = f.submit({1, 2, 3}, {.max_tokens = 3});
  for (const auto& [submitted, delivered] : {std::pair(1, 0), {2, 1}, {3, 2}, {3, 3}}) {
    EXPECT_TRUE(f.engine->step());
    EXPECT_EQ(f.backend->steps, submitted);
    EXPECT_EQ(f.recorder.tokens(id).size(), size_t(delivered));
    f.engine->check_integrity();
  }
  EXPECT_FALSE(f.engine->step());
  EXPECT_EQ(f.recorder.tokens(id), expected({1, 2, 3}, 3));
  EXPECT_EQ(f.backend->resolved, 2 + 2) << "each of two tokens once as input and once in the history";
}

// The length is known before the token is, a stop token is not.
TEST(TwoStepsInFlight, OnlyAStopTokenIsComputedBeyond) {
  for (const bool stops : {false, true}) {
    Fixture f(true);
    const std::vector<TokenId> all = expected({1, 2, 3}, 10);
    SamplingParams params{.max_tokens = stops ? 100 : 10};
    if (stops) params.stop_token_ids = {all.back()};
    const SeqId id = f.submit({1, 2, 3}, params);
    f.run();
    EXPECT_EQ(f.recorder.tokens(id), all);
    EXPECT_EQ(f.recorder.events[id].size(), 10u) << "the row of the step beyond is nobody's";
    EXPECT_EQ(f.backend->steps, stops ? 11 : 10);
  }
}

// Both steps of a request may be reported as not finite: it fails once, and nothing of it becomes findable.
TEST(TwoStepsInFlight, AFailedRequestLeavesNothingOfTheStepInFlight) {
  Fixture f(true);
  const std::vector<TokenId> prompt = iota(64, 1);
  f.backend->poison_token = expected(prompt, 1)[0];
  const SeqId bad = f.submit(prompt, {.max_tokens = 10});
  f.run();
  EXPECT_EQ(f.recorder.finish(bad), FinishReason::error);
  EXPECT_EQ(f.recorder.events[bad].size(), 1u);
  EXPECT_EQ(f.recorder.last.cached_pages, 0);
  EXPECT_EQ(f.used_pages(), 0);
}

TEST_P(InFlight, TheErrorOfWhatIsNotFiniteTellsOfBfloat16WhereThatHelps) {
  for (const bool fp16 : {false, true}) {
    Fixture f(GetParam());
    f.backend->fp16_activations(fp16);
    f.backend->poison_token = expected({1, 2, 3}, 1)[0];
    const SeqId bad = f.submit({1, 2, 3}, {.max_tokens = 10});
    f.run();
    const std::string& error = f.recorder.events[bad].back().error;
    EXPECT_NE(error.find("not finite"), std::string::npos) << error;
    EXPECT_EQ(error.find("--dtype bfloat16") != std::string::npos, fp16) << error;
  }
}

// A pool for one and a half: the later one gives up its pages while its token is still in flight.
TEST(TwoStepsInFlight, APreemptedSequenceGetsItsPendingToken) {
  Fixture f(true, 6, 96, {.max_step_tokens = 64, .max_step_seqs = 4});
  const SeqId a = f.submit(iota(33, 1), {.max_tokens = 40}), b = f.submit(iota(33, 50), {.max_tokens = 40});
  int known_preemptions = 0, late_tokens = 0;
  size_t num_events = 0;
  bool late = false;  // the last call delivered a token to a sequence that had been preempted since
  while (f.engine->step()) {
    f.engine->check_integrity();
    late_tokens += late && f.recorder.last.num_preempted > 0;  // the step that did it is reported now
    const auto& events = f.recorder.events[b];
    late = events.size() > num_events && events.back().stats.num_preemptions > known_preemptions;
    num_events = events.size();
    if (num_events > 0) known_preemptions = events.back().stats.num_preemptions;
  }
  EXPECT_GT(late_tokens, 0);
  EXPECT_EQ(f.recorder.tokens(a), expected(iota(33, 1), 40));
  EXPECT_EQ(f.recorder.tokens(b), expected(iota(33, 50), 40));
  EXPECT_GT(f.recorder.events[b].back().stats.num_preemptions, 0);
}

class ManualClock : public Clock {
 public:
  int64_t now_us() const override { return now; }
  int64_t now = 100;
};

// A device that takes `step_us` for every step, one after the other, and a host that takes `host_us` to
// deliver.
struct Timed : Backend, EngineListener {
  explicit Timed(ManualClock& clock_) : clock(clock_) {}
  const BackendInfo& info() const override { return info_; }
  void submit(const StepInput& in) override {
    free_at = std::max(free_at, clock.now) + step_us;
    ends.push_back(free_at);
    output.rows.assign(in.sample_rows.size(), {.token = 7});
  }
  const StepOutput& collect() override {
    clock.now = std::max(clock.now, ends.front());
    ends.pop_front();
    return output;
  }
  void on_event(SeqEvent) override { clock.now += host_us; }
  void on_step(const StepRecord& record) override { records.push_back(record); }

  ManualClock& clock;
  BackendInfo info_{.name = "timed", .num_pages = 64, .max_steps_in_flight = 2};
  StepOutput output;
  std::deque<int64_t> ends;
  int64_t free_at = 0, step_us = 1000, host_us = 300;
  std::vector<StepRecord> records;
};

// Lets the engine own one that the test keeps.
struct Borrowed : Backend {
  explicit Borrowed(Backend& backend_) : backend(backend_) {}
  const BackendInfo& info() const override { return backend.info(); }
  void submit(const StepInput& in) override { backend.submit(in); }
  const StepOutput& collect() override { return backend.collect(); }
  Backend& backend;
};

std::vector<StepRecord> timed_steps(bool async, int64_t host_us, int tokens) {
  ManualClock clock;
  Timed device(clock);
  device.host_us = host_us;
  EngineConfig config;
  config.async_scheduling = async;
  Engine engine(config, std::make_unique<Borrowed>(device), clock, device);
  EXPECT_TRUE(bool(engine.submit({.prompt = {1, 2}, .sampling = {.max_tokens = tokens}})));
  while (!engine.idle()) engine.step();
  return device.records;
}

TEST(StepTimes, OneStepInFlightLetsTheDeviceWaitForTheHost) {
  const std::vector<StepRecord> steps = timed_steps(false, 300, 5);
  ASSERT_EQ(steps.size(), 5u);
  for (const StepRecord& r : steps) {
    EXPECT_EQ(r.device_us, 1000);
    EXPECT_EQ(r.wait_us, 1000);
    EXPECT_EQ(r.host_gap_us, &r == &steps[0] ? 0 : 300);
  }
  EXPECT_EQ(steps.back().end_us - steps.front().start_us, 5 * 1300);
}

TEST(StepTimes, TwoStepsInFlightHideTheHost) {
  const std::vector<StepRecord> steps = timed_steps(true, 300, 5);
  ASSERT_EQ(steps.size(), 5u);
  for (const StepRecord& r : steps) {
    EXPECT_EQ(r.device_us, 1000);
    EXPECT_EQ(r.wait_us, &r == &steps[0] ? 1000 : 700);
    EXPECT_EQ(r.host_gap_us, 0);
  }
  EXPECT_EQ(steps.back().end_us - steps.front().start_us, 5 * 1000 + 300);
}

// A host that is slower than the device cannot be hidden: the host never waits, and the time shows in
// device_us.
TEST(StepTimes, AHostThatIsTooSlowShows) {
  const std::vector<StepRecord> steps = timed_steps(true, 1500, 5);
  for (size_t i = 1; i < steps.size(); ++i) {
    EXPECT_EQ(steps[i].wait_us, 0);
    EXPECT_EQ(steps[i].device_us, 1500);
    EXPECT_EQ(steps[i].host_gap_us, 0);
  }
}

}  // namespace
}  // namespace ekv
