// The scheduler and the cost model together against a measured engine under memory pressure.

#include <gtest/gtest.h>

#include "bench/sim_replay.h"

namespace ekv {
namespace {

// vLLM 0.26.0 on an H200, Llama-3.1-8B shapes, 20 GiB of KV, closed loop of 4 x concurrency requests of 4096 +
// 1024, budget 8,192, prefix cache off. Its scheduler admits whole prompts and preempts the youngest, as ours.
TEST(SimMeasured, UnderPressureItDoesWhatAMeasuredEngineDid) {
  const struct {
    int concurrency;
    double tpot_ms, tokens_per_s;
    int preemptions;
  } measured[] = {{32, 11.55, 2571, 0}, {38, 13.70, 2309, 26}, {48, 14.08, 2333, 37}};
  Result<CostModel> model = load_cost_model("vllm-h200-llama-3.1-8b");
  ASSERT_TRUE(bool(model));
  ReplayOptions sim;
  sim.engine.kv.num_pages = 10'240;
  sim.engine.kv.prefix_cache = false;
  sim.engine.scheduler.max_step_tokens = 8192;
  sim.engine.max_model_len = 8192;
  for (const auto& m : measured) {
    SCOPED_TRACE(m.concurrency);
    sim.concurrency = m.concurrency;
    const ReplayLoad load = synthetic_load(4 * m.concurrency, 4096, 1024);
    const Result<ReplayResult> result = run_sim(load, *model, 1, sim);
    ASSERT_TRUE(bool(result));
    double tpot_ms = 0;
    for (const ReplayRecord& r : result->requests)
      tpot_ms += double(r.token_us.back() - r.token_us.front()) * 1e-3 / 1023 / double(load.requests.size());
    EXPECT_NEAR(tpot_ms, m.tpot_ms, 0.08 * m.tpot_ms);
    EXPECT_NEAR(double(load.requests.size()) * 1024 / result->duration_s(), m.tokens_per_s,
                0.09 * m.tokens_per_s);
    EXPECT_NEAR(double(result->preemptions), m.preemptions, 0.1 * m.preemptions);
  }
}

// This program on an H200, Llama-3.1-8B shapes, 20 GiB of KV, 4,096 + 1,024 tokens, prefix cache off; the first
// run of each preset is one that the cost model was fitted to, the others are predicted. Bounds: 3 % of the
// mean gap between tokens, 10 % of the mean TTFT and of the preemptions (bench/results/serving-h200.json).
TEST(SimMeasured, AFittedModelPredictsOtherRunsOfThisProgram) {
  const struct {
    void (*preset)(EngineConfig&);
    KvPolicy policy;
    int concurrency, per_place;
    double ttft_ms, itl_ms;
    int preemptions;
  } measured[] = {
      {&apply_preset_modern, KvPolicy::elastic, 48, 4, 989, 13.00, 0},
      {&apply_preset_modern, KvPolicy::elastic, 38, 2, 1256, 11.67, 0},
      {&apply_preset_modern, KvPolicy::elastic, 32, 4, 777, 11.03, 0},
      {&apply_preset_modern, KvPolicy::target_only, 48, 2, 4652, 12.08, 17},
      {&apply_preset_modern, KvPolicy::exact_offload, 48, 2, 4370, 11.64, 17},
      {&apply_preset_modern, KvPolicy::static8, 48, 2, 1500, 11.16, 0},
      {&apply_preset_modern, KvPolicy::target_only, 16, 2, 679, 7.24, 0},
      {&apply_preset_paper015, KvPolicy::elastic, 48, 2, 1425, 12.48, 0},
      {&apply_preset_paper015, KvPolicy::target_only, 48, 2, 7522, 20.95, 526},
  };
  const Result<CostModel> model = load_cost_model("h200-llama-3.1-8b");
  ASSERT_TRUE(bool(model));
  for (const auto& m : measured) {
    SCOPED_TRACE(testing::Message() << name_of(m.policy) << ", " << m.concurrency << " clients");
    ReplayOptions sim{.concurrency = m.concurrency};
    m.preset(sim.engine);
    sim.engine.kv.prefix_cache = false;
    sim.engine.kv.num_pages = 10'082;  // 20 GiB of slots that end with their exponents
    sim.engine.max_model_len = 8192;
    sim.engine.async_scheduling = true;
    sim.engine.fidelity.policy = m.policy;
    sim.engine.fidelity.host_bytes = size_t(21) << 30;
    const ReplayLoad load = synthetic_load(m.per_place * m.concurrency, 4096, 1024);
    const Result<ReplayResult> result = run_sim(load, *model, 1, sim);
    ASSERT_TRUE(bool(result));
    double ttft_ms = 0, itl_ms = 0;
    for (const ReplayRecord& r : result->requests) {
      ttft_ms += double(r.ttft_us()) * 1e-3 / double(load.requests.size());
      itl_ms += double(r.token_us.back() - r.token_us.front()) * 1e-3 / 1023 / double(load.requests.size());
    }
    EXPECT_NEAR(itl_ms, m.itl_ms, 0.03 * m.itl_ms);
    EXPECT_NEAR(ttft_ms, m.ttft_ms, 0.1 * m.ttft_ms);
    EXPECT_NEAR(double(result->preemptions), m.preemptions, 0.1 * m.preemptions);
  }
}

}  // namespace
}  // namespace ekv
