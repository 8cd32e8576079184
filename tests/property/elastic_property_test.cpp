// Fidelity under pressure, end to end without a model: random settings, pools, host budgets, copy delays, tiers
// and caps. The device checks every byte that changes its form or its place; here stands what must hold beyond
// that. Failures name the seed.

#include <gtest/gtest.h>

#include <cstdio>

#include "support/random_serving.h"

namespace ekv {
namespace {

using test::current_seed, test::kServingLen, test::PagedBackend;

struct Listener : test::TokenListener {
  void on_step(const StepRecord& r) override {
    step_pairs_seen += r.pairs_seen, step_base_pairs_seen += r.base_pairs_seen;
    demoted += r.demoted_pairs, promoted += r.promoted_pairs;
    log.push_back({r.num_prefill_tokens, r.num_decode_tokens, r.num_running, r.num_waiting, r.num_admitted,
                   r.num_preempted, r.free_pages, r.cached_pages, r.locked_pages, r.resident_base_pairs,
                   r.host_slots_used, r.demoted_pairs, r.promoted_pairs, r.restores_begun, r.shortage,
                   r.reserve});
    record = r;
  }
  std::vector<std::vector<int>> log;  // of every step all that is not time
  int64_t step_pairs_seen = 0, step_base_pairs_seen = 0, demoted = 0, promoted = 0;
};

struct Totals {
  int64_t demoted = 0, promoted = 0, preemptions = 0, exposed = 0, cancelled = 0, exact_under_pressure = 0;
  int64_t capped = 0, tainted = 0, structured = 0, general = 0, cached = 0;
};

class RandomServing : public test::RandomServing {
 public:
  RandomServing(unsigned seed, Totals& totals) : test::RandomServing(seed, listener_), totals_(totals) {}

  EngineConfig draw_config() {
    EngineConfig c;
    c.max_model_len = kServingLen;
    c.scheduler.max_step_seqs = 1 + below(12);
    c.scheduler.max_step_tokens = c.scheduler.max_step_seqs + below(200);
    c.scheduler.max_chunk_tokens = below(2) ? 0 : 1 + below(64);
    c.scheduler.reserve_full_prompt = below(4) != 0;
    c.kv.prefix_cache = below(3) != 0;
    FidelityConfig& f = c.fidelity;
    f.policy = below(6) ? KvPolicy::elastic : KvPolicy::static8;
    f.demotion = below(3) ? DemotionMode::shortage : below(2) ? DemotionMode::watermark : DemotionMode::eager;
    f.promotion = below(3) ? PromotionMode::reserve : below(2) ? PromotionMode::eager : PromotionMode::none;
    f.backing = below(3) ? BackingMode::lazy : BackingMode::writethrough;
    f.sink_pairs = below(2), f.recent_pairs = below(5);
    f.min_demote_pairs = 1 + below(16);
    f.headroom_pages = below(3);
    f.max_restores = 1 + below(20);
    f.min_remaining_tokens = below(3) ? 4 : 32;
    f.max_base_fraction = below(4) ? 1.0 : 0.3;
    f.attention_path = below(4) ? AttentionPath::automatic : AttentionPath::general;
    if (below(4) == 0) {
      c.scheduler.admission = AdmissionMode::guaranteed;
      f.max_base_fraction = 1.0;
      f.backing = BackingMode::lazy;
    }
    return c;
  }

  const Listener& listener() const { return listener_; }

 private:
  Request draw_request() override {
    Request r = draw_tokens();
    r.tier = below(6) == 0 ? KvTier::exact : below(3) == 0 ? KvTier::best_effort : KvTier::elastic;
    r.max_base_fraction = below(5) ? 1.0 : 0.01 * below(100);
    if (below(5) == 0) r.cache_salt = "salt";
    return r;
  }

  void check_step(const StepRecord& r) const override {
    ASSERT_LE(r.resident_base_pairs, r.resident_pairs);
    ASSERT_LE(r.base_pairs_seen, r.pairs_seen);
  }

  void check_request(const Request& request, const SeqStats& stats) override {
    const double cap = request.tier == KvTier::exact ? 0 : request.max_base_fraction;
    ASSERT_LE(stats.peak_base_fraction, cap + 1e-9) << "a cap is exceeded";
    if (request.tier == KvTier::exact) {
      ASSERT_EQ(stats.base_pairs_seen, 0);
      ASSERT_EQ(stats.num_tainted, 0);
      totals_.exact_under_pressure += listener_.demoted > 0;
    }
    totals_.capped += cap > 0 && cap < 1 && stats.base_pairs_seen > 0;
    totals_.exposed += stats.base_pairs_seen > 0, totals_.tainted += stats.num_tainted;
    totals_.cached += stats.num_cached;
  }

  void check_end(const PagedBackend& device) override {
    ASSERT_EQ(device.staged(), 0) << "staged low bytes that nobody will fetch";
    ASSERT_EQ(listener_.pairs_seen, listener_.step_pairs_seen) << "exposure by sequence and by step";
    ASSERT_EQ(listener_.base_pairs_seen, listener_.step_base_pairs_seen);
    ASSERT_EQ(listener_.demoted, device.demoted);
    ASSERT_EQ(listener_.promoted, device.promoted);
    totals_.demoted += device.demoted, totals_.promoted += device.promoted;
    totals_.structured += device.structured_steps, totals_.general += device.general_steps;
    totals_.preemptions += listener_.preemptions, totals_.cancelled += num_cancelled_;
  }

  Listener listener_;
  Totals& totals_;
};

class ElasticInFlight : public testing::TestWithParam<bool> {};  // the parameter: two steps in flight
INSTANTIATE_TEST_SUITE_P(Steps, ElasticInFlight, testing::Bool(),
                         [](const auto& info) { return info.param ? "two" : "one"; });

TEST_P(ElasticInFlight, EverythingHoldsUnderAnyMixOfPolicies) {
  Totals totals;
  test::print_seed_on_abort();
  for (unsigned seed = 1; seed <= (GetParam() ? 750 : 1500); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    current_seed = seed;
    RandomServing run(seed, totals);
    EngineConfig config = run.draw_config();
    config.async_scheduling = GetParam();
    const int slots = run.below(5) == 0 ? run.below(8) : 200;
    run.run(config, 28 + run.below(60), slots);
    if (HasFailure()) return;
  }
  EXPECT_GT(totals.demoted, 10000);
  EXPECT_GT(totals.promoted, 1000);
  EXPECT_GT(totals.preemptions, 100);
  EXPECT_GT(totals.exposed, 1000);
  EXPECT_GT(totals.tainted, 10000);
  EXPECT_GT(totals.cancelled, 500);
  EXPECT_GT(totals.exact_under_pressure, 500);
  EXPECT_GT(totals.capped, 100);
  EXPECT_GT(totals.structured, 1000);
  EXPECT_GT(totals.general, 1000);
  EXPECT_GT(totals.cached, 10000);
  std::printf("demoted %ld promoted %ld preempted %ld exposed %ld capped %ld\n", long(totals.demoted),
              long(totals.promoted), long(totals.preemptions), long(totals.exposed), long(totals.capped));
}

// However long the outputs are and however small the pool is.
TEST_P(ElasticInFlight, GuaranteedAdmissionNeverPreempts) {
  Totals totals;
  test::print_seed_on_abort();
  for (unsigned seed = 5001; seed <= (GetParam() ? 5300 : 5500); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    current_seed = seed;
    RandomServing run(seed, totals);
    EngineConfig config = run.draw_config();
    config.scheduler.admission = AdmissionMode::guaranteed;
    config.scheduler.max_step_seqs = 12;
    config.scheduler.max_step_tokens = 12 + run.below(400);
    config.fidelity.max_base_fraction = 1.0;
    config.fidelity.backing = BackingMode::lazy;
    if (run.below(8) == 0) config.fidelity.policy = KvPolicy::target_only;
    config.async_scheduling = GetParam();
    run.run(config, 28 + run.below(30), run.below(3) ? 200 : run.below(40));
    if (HasFailure()) return;
  }
  EXPECT_EQ(totals.preemptions, 0);
  EXPECT_GT(totals.demoted, 5000);
  EXPECT_GT(totals.promoted, 100);
}

TEST(Elastic, SameRequestsSameSteps) {
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

// With pages to spare elastic serving is serving, step by step.
TEST(Elastic, WithoutPressureNothingDiffersFromTargetOnly) {
  for (unsigned seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Totals totals;
    RandomServing elastic(seed, totals), target_only(seed, totals);
    for (RandomServing* run : {&elastic, &target_only}) {
      EngineConfig config = run->draw_config();
      config.scheduler.admission = AdmissionMode::native;
      config.fidelity.policy = run == &elastic ? KvPolicy::elastic : KvPolicy::target_only;
      config.fidelity.demotion = DemotionMode::shortage;
      config.fidelity.backing = BackingMode::lazy;
      run->run(config, 24 * kServingLen / kBlockTokens, 200);
    }
    ASSERT_EQ(totals.demoted, 0);
    ASSERT_EQ(elastic.listener().log, target_only.listener().log);
    ASSERT_EQ(elastic.listener().tokens, target_only.listener().tokens);
  }
}

// Twelve conversations in three quarters of the pages that they need.
TEST(Elastic, RunsToTheEndWhatTargetOnlyPreempts) {
  const auto serve = [](KvPolicy policy, DemotionMode demotion) {
    EngineConfig config;
    config.max_model_len = kServingLen;
    config.scheduler = {.max_step_tokens = 512, .max_step_seqs = 12};
    config.fidelity.policy = policy;
    config.fidelity.demotion = demotion;
    SteadyClock clock;
    Listener listener;
    Engine engine(config, std::make_unique<PagedBackend>(12 * 25 * 3 / 4, 200), clock, listener);
    for (int i = 0; i < 12; ++i) {
      Request r{.prompt = std::vector<TokenId>(200, 10 + i), .sampling = {.max_tokens = 201}};
      EXPECT_TRUE(bool(engine.submit(std::move(r))));
    }
    while (!engine.idle()) engine.step(), engine.check_integrity();
    return listener;
  };
  const Listener target_only = serve(KvPolicy::target_only, DemotionMode::shortage);
  EXPECT_GT(target_only.preemptions, 0);
  const Listener elastic = serve(KvPolicy::elastic, DemotionMode::shortage);
  EXPECT_EQ(elastic.preemptions, 0);
  EXPECT_GT(elastic.base_pairs_seen, 0);
  EXPECT_EQ(elastic.tokens, target_only.tokens);
  for (const auto& [policy, demotion] : {std::pair(KvPolicy::elastic, DemotionMode::eager),
                                         std::pair(KvPolicy::static8, DemotionMode::shortage)}) {
    const Listener eager = serve(policy, demotion);
    EXPECT_EQ(eager.preemptions, 0);
    EXPECT_GT(eager.base_pairs_seen, elastic.base_pairs_seen);
    EXPECT_EQ(eager.promoted, 0);
    EXPECT_EQ(eager.record.resident_base_pairs > 0, true);
  }
}

}  // namespace
}  // namespace ekv
