// Whole engines on the CUDA backend under pressure: every request ends, pages and slots are conserved, and
// answers are those of the CPU backend with pages to spare, but where its two likeliest tokens were close.

#include <gtest/gtest.h>

#include <cstdio>
#include <map>
#include <random>

#include "elastickv/engine.h"
#include "support/backend_target.h"
#include "support/golden_model.h"

namespace ekv::test {
namespace {

struct Answers : EngineListener {
  struct Answer {
    std::vector<TokenId> tokens;
    std::vector<float> gaps;  // between the two likeliest tokens
  };
  void on_event(SeqEvent event) override {
    Answer& answer = all[event.id];
    if (event.token) answer.tokens.push_back(*event.token);
    if (event.logprobs)
      answer.gaps.push_back(event.logprobs->top.at(0).logprob - event.logprobs->top.at(1).logprob);
    if (event.finish == FinishReason::none) return;
    ++ended;
    EXPECT_EQ(event.finish, FinishReason::length) << event.error;
    preemptions += event.stats.num_preemptions, base_pairs += event.stats.base_pairs_seen;
  }
  void on_step(const StepRecord& r) override {
    demoted += r.demoted_pairs, promoted += r.promoted_pairs, loads += r.loads_begun,
        backups += r.backups_begun;
  }
  std::map<SeqId, Answer> all;
  int ended = 0;
  int64_t preemptions = 0, base_pairs = 0, demoted = 0, promoted = 0, loads = 0, backups = 0;
};

constexpr int kRequests = 8, kOutput = 100;

class CudaEngine : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    model_ = load_golden(GetParam());
    ASSERT_TRUE(model_);
    std::mt19937 rng(21);
    for (int i = 0; i < kRequests; ++i) {
      Request& r = requests_.emplace_back();
      for (int t = 0; t < 100 + 12 * i; ++t)
        r.prompt.push_back(TokenId(rng() % unsigned(model_->config().vocab)));
      r.sampling = {.temperature = 0, .max_tokens = kOutput, .logprobs = 2};
    }
  }

  // The answers of a device that holds `slots` host slots.
  Answers serve(EngineConfig config, bool on_cpu, int slots) {
    config.max_model_len = 448;
    config.async_scheduling = async_ && !on_cpu;
    const HostContent content = host_content(config.fidelity.policy);
    auto backend = on_cpu ? make_cpu_backend(*model_, config, {.threads = 2})
                          : make_target(*model_, config, slots, content);
    EXPECT_TRUE(backend) << backend.error().message;
    Answers answers;
    SteadyClock clock;
    Engine engine(config, *std::move(backend), clock, answers);
    for (const Request& r : requests_) EXPECT_TRUE(bool(engine.submit(r)));
    for (int step = 0; !engine.idle() && step < 20000; ++step) engine.step(), engine.check_integrity();
    EXPECT_TRUE(engine.idle()) << "requests that never end";
    EXPECT_EQ(answers.ended, kRequests);
    EXPECT_EQ(engine.kv().num_free_pages() + engine.kv().num_cached_pages(), engine.kv().num_pages());
    return answers;
  }

  static EngineConfig tight(KvPolicy policy) {
    EngineConfig config;
    apply_preset_modern(config);
    config.scheduler.max_step_tokens = 256;
    config.scheduler.max_chunk_tokens = 48;
    config.scheduler.max_step_seqs = 8;
    config.kv.num_pages = 70;
    config.fidelity.policy = policy;
    config.fidelity.min_demote_pairs = 1;
    config.fidelity.min_remaining_tokens = 0;
    return config;
  }

  // `error`: bound on the difference of logprobs. Answers that differ sooner are wrong; later tokens follow
  // another text.
  void expect_answers(const Answers& want, const Answers& got, float error) {
    int equal = 0;
    for (const auto& [id, answer] : want.all) {
      const std::vector<TokenId>& tokens = got.all.at(id).tokens;
      ASSERT_EQ(tokens.size(), answer.tokens.size());
      size_t i = 0;
      while (i < tokens.size() && tokens[i] == answer.tokens[i]) ++i;
      if (i < tokens.size()) {
        EXPECT_LT(answer.gaps[i], 2 * error) << "request " << uint64_t(id) << ", token " << i;
      }
      equal += i == tokens.size();
    }
    std::printf("%d of %d answers are the same to their end\n", equal, kRequests);
  }

  void under_pressure(bool two_in_flight);

  bool async_ = false;
  std::unique_ptr<Model> model_;
  std::vector<Request> requests_;
};

// Of golden_test.cpp for activations in fp16; of cuda_backend_test.cpp where there are BASE pairs.
constexpr float kTargetError = 0.15f, kBaseError = 1.0f;

TEST_P(CudaEngine, UnderPressureAnswersAreThoseOfTheCpu) { under_pressure(false); }
TEST_P(CudaEngine, UnderPressureAnswersAreThoseOfTheCpuWithTwoStepsInFlight) { under_pressure(true); }

void CudaEngine::under_pressure(bool two_in_flight) {
  async_ = two_in_flight;
  EngineConfig roomy;
  roomy.kv.num_pages = 400;
  const Answers alone = serve(roomy, true, 0);
  ASSERT_EQ(alone.preemptions, 0);
  {
    SCOPED_TRACE("target-only");
    const Answers got = serve(tight(KvPolicy::target_only), false, 0);
    EXPECT_GT(got.preemptions, 0);
    expect_answers(alone, got, kTargetError);
  }
  {
    SCOPED_TRACE("exact-offload");
    const Answers got = serve(tight(KvPolicy::exact_offload), false, 90);
    EXPECT_GT(got.loads, 0);
    expect_answers(alone, got, kTargetError);
  }
  for (const BackingMode backing : {BackingMode::lazy, BackingMode::writethrough}) {
    SCOPED_TRACE(name_of(backing));
    EngineConfig config = tight(KvPolicy::elastic);
    config.fidelity.backing = backing;
    config.fidelity.promotion = PromotionMode::eager;
    const Answers got = serve(config, false, 70);
    EXPECT_GT(got.demoted, 0);
    EXPECT_GT(got.promoted, 0) << "nothing came back";
    EXPECT_GT(got.base_pairs, 0);
    EXPECT_EQ(got.backups > 0, backing == BackingMode::writethrough);
    expect_answers(alone, got, kBaseError);
  }
  SCOPED_TRACE("static8");
  const Answers got = serve(tight(KvPolicy::static8), false, 0);
  EXPECT_GT(got.base_pairs, 0);
  expect_answers(alone, got, kBaseError);
}

INSTANTIATE_TEST_SUITE_P(Models, CudaEngine, testing::Values("tiny-llama", "tiny-qwen3"));

}  // namespace
}  // namespace ekv::test
