// Fidelity control step by step: how much is demoted, what promotion leaves alone, which shape BASE takes.

#include "sched/step_planner.h"

#include <gtest/gtest.h>

#include "support/allocation_counter.h"
#include "support/planned_serving.h"

namespace ekv {
namespace {

EngineConfig elastic_config() {
  EngineConfig config;
  config.scheduler = {.max_step_tokens = 4096, .max_step_seqs = 64};
  config.fidelity.policy = KvPolicy::elastic;
  config.max_model_len = 4096;
  return config;
}

Request request(int num_prompt, int max_tokens, TokenId first) {
  Request r{.prompt = {}, .sampling = {.max_tokens = max_tokens}, .cache_salt = {}};
  for (int i = 0; i < num_prompt; ++i) r.prompt.push_back(first + i);
  return r;
}

using test::PlannedServing;

// Eight sequences grow to 600 to 810 tokens in a pool for 60 % of that, then leave one after the other.
TEST(StepPlanner, DemotesByTheShortageAndPromotesBeyondTheReserve) {
  EngineConfig config = elastic_config();
  config.kv.prefix_cache = false;
  PlannedServing serving(config, 8 * 51 * 6 / 10, 1000);
  for (int i = 0; i < 8; ++i) serving.add(request(200, 400 + 30 * i, 1000 * i));
  const FidelityConfig& f = config.fidelity;
  int reserve = 0, demotions = 0, restores = 0, full_batches = 0;
  for (int i = 0; i < 700 && !serving.sequences.empty(); ++i) {
    serving.prepare();
    const StepPlan& plan = serving.plan;
    const int demoted = int(plan.demotes.size()), restored = int(plan.restores.size());
    const int shortage = serving.planner.shortage();
    ASSERT_TRUE(plan.preempted.empty());
    const int batch = shortage > 0 ? std::max(shortage, f.min_demote_pairs) : 0;
    EXPECT_GE(demoted, shortage);
    EXPECT_LE(demoted, batch);
    full_batches += demoted > 0 && demoted == batch;
    reserve = std::max(0, reserve - f.reserve_decay) + demoted - shortage;
    EXPECT_EQ(serving.planner.reserve(), reserve);
    const int free_after = serving.kv.budget().free_pages + restored;  // F_post
    const int headroom = f.headroom_pages * int(serving.sequences.running().size());
    EXPECT_LE(restored, std::max(0, free_after - reserve - headroom));
    EXPECT_GE(free_after, 0);
    for (const BaseRun& run : serving.packed.base_runs) {
      EXPECT_EQ(run.count, run.end - run.first);
      EXPECT_TRUE(run.count == 0 || run.first >= f.sink_pairs);
    }
    serving.kv.check_integrity(serving.sequences.running());
    serving.finish_step();
    demotions += demoted, restores += restored;
  }
  EXPECT_TRUE(serving.sequences.empty());
  EXPECT_GT(demotions, 50);
  EXPECT_GT(full_batches, 3);
  EXPECT_GT(restores, 20);
}

// What is planned and never committed leaves no trace.
TEST(StepPlanner, PlanningTwiceGivesTheSamePlan) {
  for (const BackingMode backing : {BackingMode::lazy, BackingMode::writethrough}) {
    EngineConfig config = elastic_config();
    config.fidelity.backing = backing;
    PlannedServing serving(config, 8 * 51 * 6 / 10, 1000);
    for (int i = 0; i < 8; ++i) serving.add(request(200, 400 + 30 * i, 1000 * i));
    size_t changes = 0;
    for (int i = 0; i < 700 && !serving.sequences.empty(); ++i) {
      StepPlan unused;
      StepPlanner(serving.planner).plan(serving.kv, serving.sequences, unused);
      serving.step();
      ASSERT_EQ(serving.plan, unused);
      changes += serving.plan.demotes.size() + serving.plan.backups.size() + serving.plan.restores.size();
    }
    EXPECT_GT(changes, 50u);
  }
}

// By definition: what a plan without demotion would preempt, less what the step does preempt.
TEST(StepPlanner, AvoidedPreemptionsAreThoseOfTheSameStepWithoutDemotion) {
  int avoided = 0, preempted = 0, both = 0;
  for (int i = 0; i < 40; ++i) {
    EngineConfig config = elastic_config();
    config.scheduler.preempt_self = i % 2 != 0;
    config.scheduler.reserve_full_prompt = false;
    PlannedServing serving(config, 150 + 3 * i, i % 3 ? 1000 : 10 * i);
    for (int k = 0; k < 8; ++k) serving.add(request(200, 400 + 30 * k, 1000 * k));
    for (int step = 0; step < 900 && !serving.sequences.empty(); ++step) {
      std::vector<SeqView> running;
      for (const Sequence* s : serving.sequences.running()) running.push_back(serving.kv.view(*s));
      StepPlan native;
      plan_step(config.scheduler, running, {}, serving.kv.budget(), native);
      serving.prepare();
      const int done = int(serving.plan.preempted.size()), would = int(native.preempted.size());
      ASSERT_EQ(serving.planner.num_avoided(), std::max(0, would - done));
      avoided += serving.planner.num_avoided(), preempted += done, both += would > 0 && done > 0;
      serving.finish_step();
    }
  }
  EXPECT_GT(avoided, 50);
  EXPECT_GT(preempted, 5);
  EXPECT_GT(both, 0);
}

TEST(StepPlanner, SinkAndRecentPairsStayTarget) {
  EngineConfig config = elastic_config();
  config.fidelity.demotion = DemotionMode::eager;
  PlannedServing serving(config, 100, 1000);
  Sequence& s = serving.add(request(320, 100, 0));
  for (int i = 0; i < 50; ++i) {
    serving.step();
    const int complete = s.num_computed / kPairTokens;
    for (size_t pair = 0; pair < s.blocks.pairs.size(); ++pair) {
      const bool is_protected = pair < 1 || int(pair) >= complete - 4;
      EXPECT_FALSE(is_protected && serving.kv.pairs().is_base(s.blocks.pairs[pair])) << pair;
    }
  }
  EXPECT_EQ(serving.packed.base_runs[0].count, (320 + 48) / 32 - 1 - 4);
}

// Nothing comes back while somebody waits, however many pages are free.
TEST(StepPlanner, NobodyIsPromotedWhileAnybodyWaits) {
  EngineConfig config = elastic_config();
  config.kv.prefix_cache = false;
  config.fidelity.promotion = PromotionMode::eager;
  PlannedServing serving(config, 60, 1000);
  serving.add(request(480, 300, 0));
  serving.step();
  Sequence& second = serving.add(request(500, 300, 5000));
  serving.step(), serving.step();
  ASSERT_EQ(second.state, SeqState::running);
  ASSERT_GT(serving.kv.pairs().num_base(), 0);
  serving.add(request(700, 10, 9000));  // cannot be admitted beside the others
  serving.end(second);
  serving.add(request(700, 10, 12000));
  for (int i = 0; i < 5; ++i) {
    serving.step();
    EXPECT_TRUE(serving.plan.restores.empty());
  }
}

// Whoever waits for a place in the batch waits too.
TEST(StepPlanner, NobodyIsPromotedWhileTheBatchIsFullAndSomebodyWaits) {
  EngineConfig config = elastic_config();
  config.kv.prefix_cache = false;
  config.fidelity.promotion = PromotionMode::eager;
  config.scheduler.max_step_seqs = 2;
  PlannedServing serving(config, 60, 1000);
  serving.add(request(480, 300, 0));
  serving.step();
  Sequence& second = serving.add(request(500, 300, 5000));
  serving.step(), serving.step();
  ASSERT_GT(serving.kv.pairs().num_base(), 0);
  serving.end(second);
  serving.add(request(40, 300, 7000)), serving.add(request(40, 10, 9000));
  serving.step();
  ASSERT_EQ(serving.sequences.running().size(), 2u);
  for (int i = 0; i < 5; ++i) {
    serving.step();
    EXPECT_TRUE(serving.plan.restores.empty());
  }
  serving.end(*serving.sequences.waiting().front());
  serving.step();
  EXPECT_FALSE(serving.plan.restores.empty());
}

// The oldest pairs of the one that runs are those that the newcomer shares and must find as they are: younger
// ones are demoted for it, and nobody behind it waits for ever.
TEST(StepPlanner, AnExactRequestIsAdmittedBesideTheSharerOfItsPrefix) {
  for (const KvTier tier : {KvTier::exact, KvTier::elastic}) {
    PlannedServing serving(elastic_config(), 60, 1000);
    serving.add(request(40 * kPairTokens / 2 + 320, 300, 0));  // 960 tokens, 60 pages
    serving.sequences.waiting().front()->request.prompt.resize(900);
    serving.sequences.waiting().front()->tokens.resize(900);
    serving.step();
    Request shares = request(320, 10, 0);  // ten pairs are cached, nine may be hit
    for (int i = 0; i < 100; ++i) shares.prompt.push_back(50000 + i);
    shares.tier = tier;
    Sequence& newcomer = serving.add(shares);
    for (int i = 0; i < 5 && newcomer.state == SeqState::waiting; ++i) serving.step();
    ASSERT_EQ(newcomer.state, SeqState::running) << int(tier);
    EXPECT_GT(serving.kv.pairs().num_base(), 0);
    for (PairId pair : newcomer.blocks.pairs)
      EXPECT_FALSE(tier == KvTier::exact && serving.kv.pairs().is_base(pair));
  }
}

// A cold prefix keeps all of its content in half of its pages before any of it is forgotten.
TEST(StepPlanner, CachedPairsAreDemotedBeforeTheyAreForgotten) {
  PlannedServing serving(elastic_config(), 60, 1000);
  const Request old = request(640, 1, 0);
  serving.add(old);
  serving.step();
  ASSERT_TRUE(serving.sequences.empty());
  serving.add(request(400, 1, 5000));  // 25 pages; 20 are free
  serving.step();
  EXPECT_EQ(serving.kv.jobs().demotes.size(), 5u);
  Sequence& again = serving.add(old);
  EXPECT_EQ(serving.kv.lookup(again).num_tokens, 608);
  int at = 0;  // BASE is one run behind the sink, far from the pairs that are recent for whoever comes back
  serving.kv.for_each_hit(again, [&](const CachedPair& entry) {
    EXPECT_EQ(serving.kv.pairs().is_base(entry.pair), at >= 1 && at <= 5) << at;
    ++at;
  });
  again.request.tier = KvTier::exact;
  EXPECT_LT(serving.kv.lookup(again).num_tokens, 608);
  serving.kv.check_integrity(serving.sequences.running());
}

// Without a host slot for its low bytes nothing is demoted; what exists is, and then somebody is preempted.
TEST(StepPlanner, TheHostBudgetIsHard) {
  for (int slots : {0, 3}) {
    PlannedServing serving(elastic_config(), 60, slots);
    serving.add(request(400, 400, 0)), serving.add(request(400, 400, 5000));
    int preempted = 0;
    for (int i = 0; i < 300; ++i) {
      serving.step();
      preempted += int(serving.plan.preempted.size());
      EXPECT_LE(serving.kv.pairs().num_base(), slots);
    }
    EXPECT_GT(preempted, 0) << slots;
  }
}

TEST(StepPlanner, PeaksAreThoseOfTheLastChunkOrTheLastToken) {
  EngineConfig config = elastic_config();
  config.scheduler.admission = AdmissionMode::guaranteed;
  const auto peak = [&](Request r) {
    PlannedServing serving(config, 100, 1000);
    serving.add(std::move(r));
    serving.planner.plan(serving.kv, serving.sequences, serving.plan);
    return serving.planner.waiting()[0].peak_pages;
  };
  EXPECT_EQ(peak(request(480, 1, 0)), 30);    // the whole prompt in one chunk, all of it TARGET
  EXPECT_EQ(peak(request(480, 100, 0)), 30);  // more than the 37 - 13 pages at the end
  EXPECT_EQ(peak(request(64, 600, 0)),
            42 - (20 - 5));  // 663 tokens; all but the sink and four recent pairs BASE
  Request exact = request(64, 600, 0);
  exact.tier = KvTier::exact;
  EXPECT_EQ(peak(exact), 42);
  config.scheduler.max_chunk_tokens = 64;
  EXPECT_EQ(peak(request(480, 1, 0)), 30 - (13 - 5));
}

// A prompt that has been computed can be BASE: what its last chunk needed is promised to the next one.
TEST(StepPlanner, APromptHoldsItsPeakOnlyWhileItIsComputed) {
  EngineConfig config = elastic_config();
  config.scheduler.admission = AdmissionMode::guaranteed;
  for (const int pages : {24 + 30, 24 + 29}) {  // the first at its end, and the prompt of the second
    PlannedServing serving(config, pages, 1000);
    for (int i = 0; i < 2; ++i) serving.add(request(480, 100, 5000 * i));
    serving.step();
    EXPECT_EQ(serving.sequences.running().size(), 1u);
    serving.step();
    EXPECT_EQ(serving.sequences.running().size(), pages == 24 + 30 ? 2u : 1u);
    for (int i = 0; i < 1000 && !serving.sequences.empty(); ++i) {
      serving.step();
      ASSERT_TRUE(serving.plan.preempted.empty());
    }
    EXPECT_TRUE(serving.sequences.empty());
  }
}

// With too little host memory for BASE the promise is kept at TARGET size, and nobody waits for ever.
TEST(StepPlanner, GuaranteedAdmissionWithoutHostMemory) {
  for (int slots : {0, 1, 5, 50}) {
    EngineConfig config = elastic_config();
    config.scheduler.admission = AdmissionMode::guaranteed;
    PlannedServing serving(config, 60, slots);
    for (int i = 0; i < 5; ++i) serving.add(request(400, 300, 5000 * i));
    size_t most_running = 0;
    for (int i = 0; i < 3000 && !serving.sequences.empty(); ++i) {
      serving.step();
      ASSERT_TRUE(serving.plan.preempted.empty()) << slots;
      most_running = std::max(most_running, serving.sequences.running().size());
    }
    EXPECT_TRUE(serving.sequences.empty()) << slots;
    EXPECT_EQ(most_running, slots < 50 ? 1u : 2u) << slots;
  }
}

TEST(StepPlanner, FidelityControlAllocatesNothingInSteadyState) {
  EngineConfig config = elastic_config();
  PlannedServing serving(config, 64 * 60 * 7 / 10, 4000);
  for (int i = 0; i < 64; ++i) serving.add(request(20 + i % 50, 900, 1000 * i));
  for (int i = 0; i < 700; ++i) serving.step();
  serving.packed.table.reserve(64 * 64);
  ASSERT_GT(serving.kv.pairs().num_base(), 0);
  long allocated = 0;
  int demoted = 0;
  for (int i = 0; i < 150; ++i) {
    const long before = testing::num_allocations;
    serving.prepare();
    allocated += testing::num_allocations - before;
    demoted += int(serving.plan.demotes.size());
    serving.finish_step();
  }
  EXPECT_GT(demoted, 100);
  EXPECT_EQ(allocated, 0);
}

// A full host evicts a pair for each that becomes whole.
TEST(StepPlanner, WritingThroughToTheHostAllocatesNothingInSteadyState) {
  EngineConfig config = elastic_config();
  config.fidelity.policy = KvPolicy::exact_offload;
  PlannedServing serving(config, 64 * 60, 300);
  for (int i = 0; i < 64; ++i) serving.add(request(20 + i % 50, 900, 1000 * i));
  for (int i = 0; i < 700; ++i) serving.step();
  serving.packed.table.reserve(64 * 64);
  ASSERT_EQ(serving.kv.host().num_used(), 300);
  long allocated = 0;
  size_t stored = 0;
  for (int i = 0; i < 150; ++i) {
    const long before = testing::num_allocations;
    serving.prepare();
    for (const ChunkPlan& chunk : serving.plan.chunks) {
      Sequence& s = serving.sequences[chunk.seq];
      s.num_computed += chunk.num_tokens;
      serving.kv.publish(s);
    }
    allocated += testing::num_allocations - before;
    for (const ChunkPlan& chunk : serving.plan.chunks) serving.sequences[chunk.seq].tokens.push_back(i);
    for (const TransferJob& job : serving.kv.jobs().transfers) serving.kv.transfer_done(job.ticket);
    stored += serving.kv.jobs().transfers.size();
  }
  EXPECT_GT(stored, 10u);
  EXPECT_EQ(allocated, 0);
}

}  // namespace
}  // namespace ekv
