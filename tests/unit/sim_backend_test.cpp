// The simulator as a device: what it reads from a step, when the clock moves, what it answers; then under the
// engine.

#include "backend/sim/sim_backend.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "elastickv/engine.h"

namespace ekv {
namespace {

CostModel model() {
  Result<CostModel> loaded = load_cost_model("a100-llama-3.1-8b");
  EXPECT_TRUE(bool(loaded));
  return *loaded;
}

PairEntry base(int page) { return {.even = int32_t(uint32_t(page) | kBasePair), .odd = -1}; }

// Two decodes, one over BASE pairs, and a prefill chunk of 40 rows after 64 cached tokens.
struct MixedStep {
  std::vector<int32_t> q_start{0, 1, 2, 42}, kv_len{70, 100, 104};
  std::vector<PairEntry> table = {{0, 1},   {2, 3},   {4, -1},  {-1, -1},  //
                                  {5, 6},   base(7),  base(8),  {9, -1},   //
                                  {10, 11}, base(12), {13, 14}, {15, -1}};
  StepInput input() const {
    return {.q_start = q_start, .kv_len = kv_len, .block_table = {.entries = table, .max_pairs = 4}};
  }
};

TEST(SimBackend, CountsBasePairsInTheBlockTable) {
  const MixedStep step;
  StepWork work{.chunks = {{1, 1, 1}}, .num_demoted_pairs = 3};  // left over from another step
  measure_work(step.input(), work);
  ASSERT_EQ(work.chunks.size(), 3u);
  const int tokens[] = {1, 1, 40}, lengths[] = {70, 100, 104}, base_pairs[] = {0, 2, 1};
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(work.chunks[i].num_tokens, tokens[i]);
    EXPECT_EQ(work.chunks[i].kv_len, lengths[i]);
    EXPECT_EQ(work.chunks[i].num_base_pairs, base_pairs[i]);
  }
  EXPECT_EQ(work.num_demoted_pairs, 0);
}

TEST(SimBackend, TimePassesInCollectAndByThePriceOfTheStep) {
  MixedStep step;
  VirtualClock clock;
  SimBackend backend(model(), 16, clock);
  StepWork work;
  int rounded_up = 0;
  for (step.kv_len[0] = 65; step.kv_len[0] <= 96; ++step.kv_len[0]) {
    measure_work(step.input(), work);
    const double price_us = step_us(model(), work);
    rounded_up += std::llround(price_us) > int64_t(price_us);
    const int64_t start_us = clock.now_us();
    backend.submit(step.input());
    EXPECT_EQ(clock.now_us(), start_us);
    backend.collect();
    EXPECT_EQ(clock.now_us(), start_us + std::llround(price_us));
  }
  EXPECT_GT(rounded_up, 0);
}

TEST(SimBackend, ReadingBaseIsCheaperThanReadingTarget) {
  MixedStep step;
  VirtualClock clock;
  SimBackend backend(model(), 16, clock);
  backend.submit(step.input());
  backend.collect();
  const int64_t with_base_us = clock.now_us();
  for (PairEntry& entry : step.table)
    if (entry.is_base()) entry = {entry.even_page(), 15};
  backend.submit(step.input());
  backend.collect();
  const double saved_us = double(2 * with_base_us - clock.now_us());
  EXPECT_NEAR(-saved_us, 64 * (131072 - 1.05 * 66048) / 1.5e6, 1.01);  // the decode's two pairs; rounded twice
}

TEST(SimBackend, AnswersEveryRowAndNeverWithAStopToken) {
  const MixedStep step;
  const SamplingParams stops{.stop_token_ids = {0, 2, 1}}, free{};
  const std::vector<SampleRow> rows = {{.row = 0, .params = &stops},
                                       {.row = 1, .num_logprobs = 2, .params = &free},
                                       {.row = 5, .target = 77, .num_logprobs = 0, .params = &free}};
  StepInput input = step.input();
  input.sample_rows = rows;
  VirtualClock clock;
  SimBackend backend(model(), 16, clock);
  backend.submit(input);
  const StepOutput& output = backend.collect();
  ASSERT_EQ(output.rows.size(), 3u);
  EXPECT_EQ(output.rows[0].token, 3);
  EXPECT_FALSE(output.rows[0].logprobs);
  EXPECT_EQ(output.rows[1].token, 0);
  ASSERT_TRUE(output.rows[1].logprobs);
  EXPECT_EQ(output.rows[1].logprobs->top.size(), 1u);
  EXPECT_EQ(output.rows[2].token, 77);
  ASSERT_TRUE(output.rows[2].logprobs);
  EXPECT_EQ(output.rows[2].logprobs->chosen.token, 77);
  EXPECT_TRUE(output.invalid_chunks.empty());
}

TEST(SimBackend, ThePoolIsWhatFitsOrWhatIsAskedFor) {
  VirtualClock clock;
  EXPECT_EQ(make_sim_backend(model(), {.pool_bytes = size_t(1) << 30}, clock)->info().num_pages, 512);
  EXPECT_EQ(make_sim_backend(model(), {.pool_bytes = 1, .num_pages = 7}, clock)->info().num_pages, 7);
}

struct Recorder : EngineListener {
  void on_event(SeqEvent event) override { times[event.id].push_back(event.stats.last_token_us); }
  void on_step(const StepRecord& record) override { steps.push_back(record); }
  std::map<SeqId, std::vector<int64_t>> times;
  std::vector<StepRecord> steps;
};

TEST(SimBackend, UnderTheEngineStepsFollowOneAnotherInVirtualTime) {
  VirtualClock clock;
  Recorder recorder;
  EngineConfig config;
  config.kv.num_pages = 64;
  config.max_model_len = 512;
  Engine engine(config, make_sim_backend(model(), config.kv, clock), clock, recorder);
  for (int i = 0; i < 3; ++i)
    ASSERT_TRUE(
        bool(engine.submit({.prompt = std::vector<TokenId>(size_t(100), i), .sampling = {.max_tokens = 20}})));
  while (engine.step()) {
  }
  EXPECT_TRUE(engine.idle());
  ASSERT_EQ(recorder.times.size(), 3u);
  for (const auto& [id, times] : recorder.times) EXPECT_EQ(times.size(), 20u);
  ASSERT_GE(recorder.steps.size(), 20u);
  for (size_t i = 1; i < recorder.steps.size(); ++i)
    EXPECT_EQ(recorder.steps[i].start_us, recorder.steps[i - 1].end_us);
  EXPECT_EQ(recorder.steps[0].plan_us, 0);
  EXPECT_GT(recorder.steps[0].device_us, 0);
}

TEST(SimBackend, CopiesEndAfterTheStepThatCarriesThemAndAnEmptyStepWaitsForThem) {
  VirtualClock clock;
  SimBackend backend(model(), 16, clock, 4);
  EXPECT_EQ(backend.info().num_host_slots, 4);
  const std::vector<TransferJob> restore{{TransferKind::restore_low, 2, -1, 1, 8}};
  backend.submit({.transfers = restore});
  EXPECT_TRUE(backend.collect().transfers_done.empty());
  const int64_t low_us = *backend.transfers().next_done_us() - clock.now_us();
  EXPECT_GT(low_us, 0);
  backend.submit({});
  EXPECT_EQ(backend.collect().transfers_done, std::vector<uint32_t>{8});
  EXPECT_EQ(clock.now_us(), low_us);
  backend.submit({});  // nothing is on its way: no time passes
  EXPECT_TRUE(backend.collect().transfers_done.empty());
  EXPECT_EQ(clock.now_us(), low_us);
}

TEST(SimBackend, LoadsBeginWithTheirStepAndStoresAfterItEachInLine) {
  VirtualClock clock;
  SimBackend backend(model(), 16, clock, 4);
  const std::vector<DemoteJob> demotes{{8, 9, -1, 0}};  // so that the step takes time
  const std::vector<TransferJob> copies{{TransferKind::store_pair, 0, 1, 0, 1},
                                        {TransferKind::store_pair, 2, 3, 1, 2},
                                        {TransferKind::load_pair, 4, 5, 2, 3},
                                        {TransferKind::load_pair, 6, 7, 3, 4}};
  backend.submit({.demotes = demotes, .transfers = copies});
  std::vector<uint32_t> done = backend.collect().transfers_done;
  const int64_t step_end_us = clock.now_us();
  ASSERT_GT(step_end_us, 0);
  std::map<uint32_t, int64_t> end_us;
  for (uint32_t ticket : done) end_us[ticket] = step_end_us;
  while (end_us.size() < 4) {
    backend.submit({});
    for (uint32_t ticket : backend.collect().transfers_done) end_us[ticket] = clock.now_us();
  }
  const auto pair_us = [&](const LinkModel& link) {
    return link.latency_us + double(backend.info().pair_bytes) / link.bytes_per_us;
  };
  EXPECT_EQ(backend.info().pair_bytes, size_t(2 * model().page_bytes()));
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(end_us[uint32_t(1 + i)], step_end_us + int64_t(std::ceil((i + 1) * pair_us(model().to_host))));
    EXPECT_EQ(end_us[uint32_t(3 + i)],
              std::max(step_end_us, int64_t(std::ceil((i + 1) * pair_us(model().from_host)))));
  }
}

TEST(SimBackend, DemotionsArePricedAndTheirLowBytesLeaveOnlyForASlot) {
  VirtualClock clock;
  SimBackend backend(model(), 16, clock, 4);
  const std::vector<DemoteJob> demotes{{0, 1, 2, 7}, {2, 3, -1, 0}};
  backend.submit({.demotes = demotes});
  std::vector<uint32_t> done = backend.collect().transfers_done;
  EXPECT_EQ(clock.now_us(), std::llround(step_us(model(), {.num_demoted_pairs = 2})));
  if (done.empty()) {
    backend.submit({});
    done = backend.collect().transfers_done;
  }
  EXPECT_EQ(done, std::vector<uint32_t>{7});
}

TEST(SimBackend, UnderTheEngineElasticChatsNeedNoPreemption) {
  for (const KvPolicy policy : {KvPolicy::target_only, KvPolicy::elastic}) {
    VirtualClock clock;
    Recorder recorder;
    EngineConfig config;
    config.kv.num_pages = 64;
    config.max_model_len = 512;
    config.fidelity.policy = policy;
    config.fidelity.recent_pairs = 1;
    Engine engine(config, make_sim_backend(model(), config.kv, clock, 64), clock, recorder);
    for (int i = 0; i < 6; ++i)
      ASSERT_TRUE(bool(
          engine.submit({.prompt = std::vector<TokenId>(size_t(128), i), .sampling = {.max_tokens = 80}})));
    while (!engine.idle()) engine.step();
    int demoted = 0, preempted = 0;
    for (const StepRecord& step : recorder.steps)
      demoted += step.demoted_pairs, preempted += step.num_preempted;
    const bool elastic = policy == KvPolicy::elastic;
    EXPECT_EQ(preempted > 0, !elastic);
    EXPECT_EQ(demoted > 0, elastic);
    engine.check_integrity();
  }
}

}  // namespace
}  // namespace ekv
