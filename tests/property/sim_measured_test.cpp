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
  Result<CostModel> model = load_cost_model("h200-llama-3.1-8b");
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

}  // namespace
}  // namespace ekv
