// Policy exact_offload on the CPU backend: whole models under pressure give the tokens and the logprobs, bit
// for bit, that target_only gives with pages to spare, however late copies end.

#include <gtest/gtest.h>

#include <bit>
#include <cstdio>
#include <map>
#include <random>

#include "backend/cpu/cpu_backend.h"
#include "elastickv/engine.h"
#include "support/golden_model.h"
#include "support/seed.h"

namespace ekv {
namespace {

struct Answers : EngineListener {
  void on_event(SeqEvent event) override {
    if (event.token) tokens[event.id].push_back(*event.token);
    if (event.logprobs) bits[event.id].push_back(std::bit_cast<uint32_t>(event.logprobs->chosen.logprob));
    if (event.finish == FinishReason::none) return;
    EXPECT_EQ(event.finish, FinishReason::length) << event.error;
    preemptions += event.stats.num_preemptions;
  }
  void on_step(const StepRecord& r) override {
    loads += r.loads_begun, stores += r.stores_begun, recomputed += r.num_recomputed;
    to_host += r.to_host_bytes, from_host += r.from_host_bytes;
    most_slots = std::max(most_slots, r.host_slots_used);
  }
  std::map<SeqId, std::vector<TokenId>> tokens;
  std::map<SeqId, std::vector<uint32_t>> bits;
  int64_t preemptions = 0, loads = 0, stores = 0, recomputed = 0, to_host = 0, from_host = 0;
  int most_slots = 0;
};

class CpuOffload : public testing::TestWithParam<std::tuple<const char*, BaseFormat>> {
 protected:
  void SetUp() override {
    model_ = test::load_golden(std::get<0>(GetParam()));
    ASSERT_TRUE(model_);
  }

  // `rounds` times the same requests, each round when the one before has ended.
  Answers serve(EngineConfig config, const std::vector<Request>& requests, CpuOptions options, int rounds = 1) {
    config.max_model_len = 448;
    config.kv.base_format = std::get<1>(GetParam());
    options.host_content = host_content(config.fidelity.policy);
    EXPECT_FALSE(validate(config).has_value());
    auto backend = make_cpu_backend(*model_, config, options);
    EXPECT_TRUE(backend);
    const size_t pair_bytes = (*backend)->info().pair_bytes;
    Answers answers;
    SteadyClock clock;
    Engine engine(config, *std::move(backend), clock, answers);
    for (int round = 0; round < rounds; ++round) {
      for (const Request& r : requests) EXPECT_TRUE(bool(engine.submit(r)));
      for (int step = 0; !engine.idle() && step < 20000; ++step) engine.step(), engine.check_integrity();
      EXPECT_TRUE(engine.idle()) << "requests that never end";
    }
    EXPECT_EQ(engine.kv().num_free_pages() + engine.kv().num_cached_pages(), engine.kv().num_pages());
    EXPECT_EQ(answers.to_host, int64_t(pair_bytes) * answers.stores);
    EXPECT_EQ(answers.from_host, int64_t(pair_bytes) * answers.loads);
    return answers;
  }

  void expect_bits_of_target_only(unsigned seed);

  // Prompts of 100 to 200 tokens; some sampled, some with penalties, some that share a prefix.
  std::vector<Request> draw_requests(std::mt19937& rng, int count, int output) const {
    std::vector<Request> requests(static_cast<size_t>(count));
    for (size_t i = 0; i < requests.size(); ++i) {
      Request& r = requests[i];
      const int length = 100 + int(rng() % 100), shared = i % 3 == 0 ? 70 : 0;
      for (int t = 0; t < length; ++t)
        r.prompt.push_back(TokenId((t < shared ? unsigned(t) * 7 : rng()) % unsigned(model_->config().vocab)));
      r.sampling = {.temperature = i % 4 == 1 ? 1.0f : 0.0f, .seed = i, .max_tokens = output, .logprobs = 0};
      if (i % 4 == 2) r.sampling.frequency_penalty = 1.0f;
    }
    return requests;
  }

  std::unique_ptr<Model> model_;
};

// SCH-3 with a host tier.
TEST_P(CpuOffload, UnderPressureEveryBitIsThatOfTargetOnlyWithPagesToSpare) {
  for (const unsigned seed : test::seeds(1)) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    expect_bits_of_target_only(seed);
  }
}

void CpuOffload::expect_bits_of_target_only(unsigned seed) {
  std::mt19937 rng(seed);
  const std::vector<Request> requests = draw_requests(rng, 8, 120);
  EngineConfig roomy;
  roomy.kv.num_pages = 400;
  const Answers alone = serve(roomy, requests, {.threads = 2});
  ASSERT_EQ(alone.preemptions, 0);
  ASSERT_EQ(alone.tokens.size(), requests.size());
  for (const auto preset : {&apply_preset_paper015, &apply_preset_modern})
    for (const int delay : {0, 3}) {
      SCOPED_TRACE(delay);
      EngineConfig tight;
      preset(tight);
      tight.scheduler.max_step_tokens = 256;
      tight.scheduler.max_chunk_tokens = 48;
      tight.kv.num_pages = 70;
      tight.fidelity.policy = KvPolicy::exact_offload;
      const Answers got = serve(tight, requests, {.threads = 1, .num_host_slots = 90, .transfer_delay = delay});
      EXPECT_TRUE(!test::is_fixed(seed) || got.preemptions > 0);
      EXPECT_TRUE(!test::is_fixed(seed) || got.loads > 0);
      EXPECT_LE(got.most_slots, 90);
      EXPECT_EQ(got.tokens, alone.tokens);
      EXPECT_EQ(got.bits, alone.bits);
    }
}

// OFF-1: a working set of three times the pool goes out and comes back, round after round.
TEST_P(CpuOffload, WhatComesBackFromTheHostIsWhatWasComputed) {
  std::mt19937 rng(11);
  const std::vector<Request> requests = draw_requests(rng, 12, 4);
  constexpr int kRounds = 6;
  EngineConfig roomy;
  roomy.kv.num_pages = 400;
  roomy.kv.prefix_cache = false;
  const Answers cold = serve(roomy, requests, {.threads = 1}, kRounds);
  for (const auto preset : {&apply_preset_paper015, &apply_preset_modern}) {
    EngineConfig tight;
    preset(tight);
    tight.scheduler.max_step_tokens = 256;
    tight.kv.num_pages = 40;
    tight.fidelity.policy = KvPolicy::exact_offload;
    const Answers got =
        serve(tight, requests, {.threads = 1, .num_host_slots = 80, .transfer_delay = 2}, kRounds);
    EXPECT_GT(got.loads, (kRounds - 1) * 12);
    EXPECT_EQ(got.tokens, cold.tokens);
    EXPECT_EQ(got.bits, cold.bits);
  }
}

INSTANTIATE_TEST_SUITE_P(Models, CpuOffload,
                         testing::Values(std::tuple{"tiny-llama", BaseFormat::fixed8},
                                         std::tuple{"tiny-mistral", BaseFormat::e5m2},
                                         std::tuple{"tiny-qwen3", BaseFormat::fixed8}));

}  // namespace
}  // namespace ekv
