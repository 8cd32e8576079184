// Policy exact_offload in parts: what the scheduler plans for sequences that the host knows, and what the
// manager makes of it.

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "elastickv/kv_manager.h"
#include "elastickv/scheduler.h"
#include "support/seed.h"

namespace ekv {
namespace {

StepPlan planned(const std::vector<SeqView>& running, const std::vector<SeqView>& waiting, KvBudget budget,
                 SchedulerConfig config = {.max_step_tokens = 64, .max_step_seqs = 4}) {
  StepPlan plan;
  plan_step(config, running, waiting, budget, plan);
  return plan;
}

TEST(OffloadPlan, WhatTheHostHoldsIsLoadedAndNothingOfItRuns) {
  const std::vector<SeqView> waiting{{.id = SeqId{1}, .num_tokens = 200, .num_cached = 32, .num_loadable = 128},
                                     {.id = SeqId{2}, .num_tokens = 40}};
  const StepPlan plan = planned({}, waiting, {.free_pages = 100, .total_pages = 100});
  EXPECT_EQ(plan.loads, (std::vector<LoadPlan>{{SeqId{1}, 32, 128}}));
  EXPECT_EQ(plan.admitted, std::vector<SeqId>{SeqId{2}}) << "the next in line runs beside it";
  EXPECT_EQ(plan.chunks, (std::vector<ChunkPlan>{{SeqId{2}, 0, 40, true}}));
}

// Without them it could only give up what it has just loaded, and load it again.
TEST(OffloadPlan, ALoadIsAdmittedWhenTheChunkAfterItFitsToo) {
  SchedulerConfig config{.max_step_tokens = 64, .max_step_seqs = 4, .reserve_full_prompt = false};
  const auto least_pages = [&config](const SeqView& s) {
    int pages = 0;
    while (planned({}, {s}, {pages, 100}, config).loads.empty()) ++pages;
    return pages;
  };
  const SeqView preempted{.id = SeqId{1}, .num_tokens = 129, .num_loadable = 128};
  const SeqView longer{.id = SeqId{1}, .num_tokens = 200, .num_loadable = 128};
  const SeqView hit{
      .id = SeqId{1}, .num_tokens = 129, .num_cached = 64, .num_cached_free = 2, .num_loadable = 64};
  EXPECT_EQ(least_pages(preempted), 8 + 1) << "the copies and a token";
  EXPECT_EQ(least_pages(hit), 2 + 4 + 1) << "the rest is somebody's already";
  EXPECT_EQ(least_pages(longer), 8 + 4) << "the chunk is as long as it may be";
  config.max_chunk_tokens = 20;
  EXPECT_EQ(least_pages(longer), 8 + 2);
  config.reserve_full_prompt = true;
  EXPECT_EQ(least_pages(preempted), 8 + 1);
  EXPECT_EQ(least_pages(longer), 8 + 5) << "all of the prompt";
}

TEST(OffloadPlan, NobodyIsAdmittedIntoThePagesOfTheChunkThatFollowsALoad) {
  const SchedulerConfig config{.max_step_tokens = 64, .max_step_seqs = 4, .reserve_full_prompt = false};
  const auto num_admitted = [&config](const std::vector<SeqView>& running, const std::vector<SeqView>& waiting,
                                      int pages) {
    const StepPlan plan = planned(running, waiting, {pages, 100}, config);
    return plan.loads.size() + plan.admitted.size();
  };
  const SeqView load{.id = SeqId{2}, .num_tokens = 65, .num_loadable = 64};
  const SeqView prompt{.id = SeqId{3}, .num_tokens = 32};
  EXPECT_EQ(num_admitted({}, {load, prompt}, 5 + 1), 1u) << "admitted in the same step";
  EXPECT_EQ(num_admitted({}, {load, prompt}, 5 + 2), 2u);
  const SeqView loading{
      .id = SeqId{1}, .num_tokens = 129, .num_computed = 128, .num_blocks = 8, .num_loading = 4};
  for (const SeqView& next : {load, prompt}) {
    const int pages = next.num_loadable > 0 ? 5 : 2;
    EXPECT_EQ(num_admitted({loading}, {next}, pages), 0u) << "while its copies are under way";
    EXPECT_EQ(num_admitted({loading}, {next}, pages + 1), 1u);
  }
  // Loaded, and nothing of the step's tokens is left for it.
  const SeqView prefill{.id = SeqId{0}, .num_tokens = 200, .num_computed = 64, .num_blocks = 8};
  const SeqView loaded{.id = SeqId{1}, .num_tokens = 150, .num_computed = 128, .num_blocks = 8};
  EXPECT_EQ(num_admitted({prefill, loaded}, {load}, 2 + 5 - 1), 0u);
  EXPECT_EQ(num_admitted({prefill, loaded}, {load}, 2 + 5), 1u);
}

TEST(OffloadPlan, PagesThatALoadingPromptStillNeedsAreNotGivenAway) {
  const std::vector<SeqView> running{
      {.id = SeqId{1}, .num_tokens = 200, .num_computed = 128, .num_blocks = 8, .num_loading = 4}};
  const std::vector<SeqView> waiting{{.id = SeqId{2}, .num_tokens = 32}};
  EXPECT_TRUE(planned(running, waiting, {6, 100}).admitted.empty());  // 5 are promised to the first
  EXPECT_EQ(planned(running, waiting, {7, 100}).admitted.size(), 1u);
}

TEST(OffloadPlan, WhileItsCopiesAreUnderWayASequenceHasNoChunkAndIsNoVictim) {
  const std::vector<SeqView> running{
      {.id = SeqId{1}, .num_tokens = 33, .num_computed = 32, .num_blocks = 2, .num_freeable = 2},
      {.id = SeqId{2}, .num_tokens = 20, .num_computed = 19, .num_blocks = 2, .num_freeable = 2},
      {.id = SeqId{3}, .num_tokens = 65, .num_computed = 64, .num_blocks = 4, .num_loading = 2}};
  const StepPlan plan = planned(running, {}, {0, 8});
  EXPECT_EQ(plan.preempted, std::vector<SeqId>{SeqId{2}}) << "its pages are of no use now";
  EXPECT_EQ(plan.chunks, (std::vector<ChunkPlan>{{SeqId{1}, 32, 1, true}}));
}

TEST(OffloadPlan, OnceTheyHaveEndedItIsTheFirstVictim) {
  const std::vector<SeqView> running{
      {.id = SeqId{1}, .num_tokens = 33, .num_computed = 32, .num_blocks = 2, .num_freeable = 2},
      {.id = SeqId{3}, .num_tokens = 65, .num_computed = 64, .num_blocks = 4, .num_freeable = 4}};
  const StepPlan plan = planned(running, {}, {0, 6});
  EXPECT_EQ(plan.preempted, std::vector<SeqId>{SeqId{3}});
  EXPECT_EQ(plan.chunks, (std::vector<ChunkPlan>{{SeqId{1}, 32, 1, true}}));
}

TEST(OffloadPlan, NobodyGivesUpPagesWhenOnlyThoseUnderACopyWouldDo) {
  const std::vector<SeqView> running{
      {.id = SeqId{1}, .num_tokens = 33, .num_computed = 32, .num_blocks = 2, .num_freeable = 2},
      {.id = SeqId{3}, .num_tokens = 65, .num_computed = 64, .num_blocks = 4, .num_loading = 2}};
  EXPECT_TRUE(planned(running, {}, {0, 6}).empty());
}

TEST(OffloadPlan, WhoeverNeedsWhatAnotherLoadsWaitsAndNobodyOvertakesIt) {
  const std::vector<SeqView> waiting{
      {.id = SeqId{1}, .num_tokens = 200, .num_loadable = 128, .load_later = true},
      {.id = SeqId{2}, .num_tokens = 40}};
  EXPECT_TRUE(planned({}, waiting, {100, 100}).empty());
}

constexpr SamplingParams kLong{.max_tokens = 1000};

// A manager under the policy, its sequences, and the tickets of the copies it has asked for.
struct OffloadManager : testing::Test {
  void start(int num_pages, int num_slots, bool prefix_cache = true) {
    kv.emplace(KvConfig{.prefix_cache = prefix_cache}, num_pages,
               FidelityConfig{.policy = KvPolicy::exact_offload}, num_slots);
  }
  Sequence& add(int num_tokens, TokenId first = 1) {
    Request request{.prompt = {}, .sampling = kLong};
    for (int i = 0; i < num_tokens; ++i) request.prompt.push_back(first + i);
    return sequences.add(SeqId(++next_id), std::move(request));
  }
  void commit(const StepPlan& plan) {
    kv->commit(plan, sequences);
    sequences.follow(plan);
    for (const TransferJob& job : kv->jobs().transfers) jobs.push_back(job);
    check();
  }
  // Computes all of a waiting sequence in one step, from `first_pos` on.
  void run(Sequence& s, int first_pos = 0) {
    commit(
        {.chunks = {{s.id, first_pos, s.num_tokens() - first_pos, true}}, .admitted = {s.id}, .preempted = {}});
    s.num_computed = s.num_tokens();
    kv->publish(s);
    check();
  }
  void load(Sequence& s, int first_pos, int num_tokens) {
    commit({.chunks = {}, .admitted = {}, .preempted = {}, .loads = {{s.id, first_pos, num_tokens}}});
  }
  void end_copies() {
    for (const TransferJob& job : std::exchange(jobs, {})) kv->transfer_done(job.ticket);
    kv->finish_loads(sequences.running());
    check();
  }
  void leave(Sequence& s) {
    kv->release(s);
    sequences.erase(s.id);
    check();
  }
  void check() { kv->check_integrity(sequences.running()); }

  std::optional<KvManager> kv;
  SequenceTable sequences{SchedulingPolicy::fcfs};
  std::vector<TransferJob> jobs;
  uint64_t next_id = 0;
};

TEST_F(OffloadManager, EveryWholePairGoesToTheHostOnceWithTheNextStep) {
  start(20, 10);
  Sequence& s = add(70);
  run(s);
  EXPECT_TRUE(jobs.empty());
  commit({});
  ASSERT_EQ(jobs.size(), 2u);
  EXPECT_EQ(jobs[0].kind, TransferKind::store_pair);
  EXPECT_EQ(jobs[0].even, kv->pairs().entry(s.blocks.pairs[0]).even);
  EXPECT_EQ(jobs[0].odd, kv->pairs().entry(s.blocks.pairs[0]).odd);
  EXPECT_NE(jobs[0].host, jobs[1].host);
  kv->publish(s);
  commit({});
  EXPECT_EQ(jobs.size(), 2u) << "nothing new is whole";
  Sequence& same = add(70);
  run(same, 64);
  commit({});
  EXPECT_EQ(jobs.size(), 2u) << "the host has it, or will";
  EXPECT_EQ(kv->host().num_used(), 2);
}

TEST_F(OffloadManager, PagesAndPairsUnderACopyAreNobodysUntilItEnds) {
  start(6, 10, false);
  Sequence& s = add(64);
  run(s);
  leave(s);
  EXPECT_EQ(kv->budget().free_pages, 2) << "its copies have not even begun";
  commit({});
  EXPECT_EQ(kv->budget().locked_pages, 4);
  end_copies();
  EXPECT_EQ(kv->budget().free_pages, 6);
  EXPECT_EQ(kv->host().num_used(), 2);
}

TEST_F(OffloadManager, AWaitingSequenceFindsOnTheHostWhatTheDeviceHasForgotten) {
  start(20, 40);
  Sequence& s = add(100);
  run(s);
  commit({});
  Sequence& next = add(100);
  EXPECT_EQ(kv->lookup(next).num_tokens, 96);
  EXPECT_EQ(kv->lookup(next).num_loadable, 0);
  leave(s);
  Sequence& other = add(300, 5000);  // takes all the pages
  end_copies();
  run(other);
  const PrefixHit hit = kv->lookup(next);
  EXPECT_EQ(hit.num_tokens, 0);
  EXPECT_EQ(hit.num_loadable, 96);
  EXPECT_FALSE(hit.load_later);
  Sequence& whole = add(96);
  EXPECT_EQ(kv->lookup(whole).num_loadable, 64) << "a token must be left to compute";
  Sequence& salted = add(100);
  salted.request.cache_salt = "x";
  EXPECT_EQ(kv->lookup(salted).num_loadable, 0);
  Sequence& scored = add(100);
  scored.request.sampling.prompt_logprobs = 0;
  EXPECT_EQ(kv->lookup(scored).num_loadable, 0);
}

// A pair is known by all that stands before it: the host has tokens 1 to 32 as the beginning of something else.
TEST_F(OffloadManager, WhatFollowsAGapIsNotFound) {
  start(20, 1);
  run(add(40, 1));
  commit({});
  Sequence& gap = add(40, 101);
  run(gap);
  EXPECT_EQ(kv->num_skipped_stores(), 1);
  end_copies();
  Sequence& both = add(32, 101);
  for (int i = 0; i < 40; ++i) both.tokens.push_back(1 + i);
  EXPECT_EQ(kv->lookup(both).num_tokens, 32);
  EXPECT_EQ(kv->lookup(both).num_loadable, 0);
}

TEST_F(OffloadManager, ASaltSeparatesWhatTheHostHolds) {
  start(20, 40, false);
  const auto salted = [](Sequence& s, const char* salt) -> Sequence& {
    s.request.cache_salt = salt;
    return s;
  };
  run(salted(add(100), "mine"));
  commit({});
  end_copies();
  EXPECT_EQ(kv->lookup(salted(add(100), "mine")).num_loadable, 96);
  EXPECT_EQ(kv->lookup(salted(add(100), "yours")).num_loadable, 0);
  EXPECT_EQ(kv->lookup(add(100)).num_loadable, 0);
}

TEST_F(OffloadManager, WhatHasNotArrivedIsNotLoaded) {
  start(20, 10, false);
  Sequence& s = add(70);
  run(s);
  commit({});
  Sequence& next = add(70);
  EXPECT_EQ(kv->lookup(next).num_loadable, 0);
  kv->transfer_done(jobs[0].ticket);
  EXPECT_EQ(kv->lookup(next).num_loadable, 32);
  kv->transfer_done(jobs[1].ticket);
  EXPECT_EQ(kv->lookup(next).num_loadable, 64);
}

TEST_F(OffloadManager, WhoWasPreemptedWaitsForItsOwnCopiesToArrive) {
  start(20, 10, false);
  Sequence& s = add(70);
  run(s);
  s.stats.num_preemptions = 1;
  commit({.chunks = {}, .admitted = {}, .preempted = {s.id}});
  Sequence& other = add(70);
  EXPECT_FALSE(kv->lookup(other).load_later);
  EXPECT_TRUE(kv->lookup(s).load_later);
  kv->transfer_done(jobs[0].ticket);
  EXPECT_TRUE(kv->lookup(s).load_later) << "all of it, not the first half now and the rest computed";
  kv->transfer_done(jobs[1].ticket);
  EXPECT_FALSE(kv->lookup(s).load_later);
  EXPECT_EQ(kv->lookup(s).num_loadable, 64);
}

TEST_F(OffloadManager, WhatAPreemptedSequenceWaitsForIsNotTheOldest) {
  start(40, 4, false);
  Sequence& a = add(70);
  run(a);
  a.stats.num_preemptions = 1;
  commit({.chunks = {}, .admitted = {}, .preempted = {a.id}});
  Sequence& b = add(40, 500);
  run(b);
  commit({});
  end_copies();
  commit({});
  Sequence& c = add(70, 900);
  run(c);
  EXPECT_EQ(kv->lookup(a).num_loadable, 64) << "it is used as long as somebody waits for it";
}

// What is remembered of a sequence that waits changes no result: the host forgets pairs of its chain, gives
// their slots to others and gets them back, and a sequence that was never looked up finds the same.
TEST_F(OffloadManager, WhoWaitsFindsOnTheHostWhatANewcomerFinds) {
  const unsigned seed = test::drawn_seed();
  std::mt19937 rng(seed);
  start(40, 9, false);  // what is found is on the host alone, and of 24 pairs it holds 9
  std::vector<Sequence*> waiting;
  for (int i = 0; i < 4; ++i) waiting.push_back(&add(200, 1000 * i));
  std::vector<int> last(waiting.size(), 0);
  int shorter = 0, longer = 0, partial = 0, later = 0;
  const auto look = [&] {
    for (size_t i = 0; i < waiting.size(); ++i) {
      Sequence& newcomer = add(200, TokenId(1000 * i));
      newcomer.stats.num_preemptions = waiting[i]->stats.num_preemptions = int(i % 2);
      const PrefixHit known = kv->lookup(*waiting[i]), fresh = kv->lookup(newcomer);
      sequences.erase(newcomer.id);
      ASSERT_EQ(known.num_tokens, 0);
      ASSERT_EQ(known.num_loadable, fresh.num_loadable);
      ASSERT_EQ(known.load_later, fresh.load_later);
      shorter += known.num_loadable<last[i], longer += known.num_loadable> last[i];
      partial += known.num_loadable > 0 && known.num_loadable < 192;
      later += known.load_later;
      last[i] = known.num_loadable;
    }
  };
  for (int round = 0; round < 300; ++round) {
    const int length = 33 + int(rng() % 168), which = int(rng() % waiting.size());
    Sequence& s = add(length, 1000 * which);
    run(s);
    commit({});
    look();  // copies are under way
    for (const TransferJob& job : std::exchange(jobs, {}))
      if (kv->transfer_done(job.ticket); rng() % 4 == 0) look();
    leave(s);
    look();
    if (rng() % 20 == 0) kv->reset_prefix_cache(), look();
    if (HasFatalFailure()) return;
  }
  // The least of 2,000 drawn seeds: 197, 223, 1480 and 105.
  EXPECT_GT(shorter, 100) << "evictions cut the chains";
  EXPECT_GT(longer, 100) << "and they grow again";
  EXPECT_GT(partial, 100);
  EXPECT_GT(later, 50) << "copies that are under way are waited for";
}

TEST_F(OffloadManager, ALoadedSequenceGoesOnWhereItsCopiesEnd) {
  start(20, 40);
  Sequence& s = add(70);
  run(s);
  commit({});
  end_copies();
  leave(s);
  Sequence& other = add(300, 5000);
  run(other);
  leave(other);
  commit({});
  end_copies();
  kv->reset_prefix_cache();
  Sequence& again = add(70);
  EXPECT_EQ(kv->lookup(again).num_loadable, 0) << "the reset forgot the host too";
  run(again);
  commit({});
  end_copies();
  leave(again);
  Sequence& fill = add(318, 9000);
  run(fill);
  leave(fill);
  commit({});
  end_copies();
  Sequence& resumed = add(70);
  ASSERT_EQ(kv->lookup(resumed).num_tokens, 0);
  ASSERT_EQ(kv->lookup(resumed).num_loadable, 64);
  load(resumed, 0, 64);
  EXPECT_EQ(jobs.size(), 2u);
  EXPECT_EQ(kv->view(resumed).num_loading, 2);
  EXPECT_EQ(kv->view(resumed).num_computed, 64);
  EXPECT_EQ(kv->view(resumed).num_freeable, 0);
  Sequence& twin = add(70);
  EXPECT_TRUE(kv->lookup(twin).load_later);
  kv->transfer_done(jobs[0].ticket);
  kv->finish_loads(sequences.running());
  EXPECT_EQ(kv->view(resumed).num_loading, 2) << "all of it or nothing";
  kv->transfer_done(jobs[1].ticket);
  kv->finish_loads(sequences.running());
  jobs.clear();
  check();
  EXPECT_EQ(kv->view(resumed).num_loading, 0);
  EXPECT_EQ(kv->view(resumed).num_freeable, 4);
  EXPECT_EQ(kv->lookup(twin).num_tokens, 64) << "what was loaded is in the cache";
  EXPECT_FALSE(kv->lookup(twin).load_later);
  commit({});
  EXPECT_TRUE(jobs.empty()) << "and goes to the host no second time";
}

TEST_F(OffloadManager, WithoutACacheNobodyWaitsForAnothersLoad) {
  start(20, 10, false);
  Sequence& s = add(70);
  run(s);
  commit({});
  end_copies();
  leave(s);
  Sequence& a = add(70);
  load(a, 0, 64);
  Sequence& b = add(70);
  EXPECT_FALSE(kv->lookup(b).load_later) << "it would find nothing on the device afterwards";
  load(b, 0, 64);
  end_copies();
  EXPECT_EQ(kv->view(a).num_loading + kv->view(b).num_loading, 0);
}

TEST_F(OffloadManager, WhoLeavesWhileLoadingLeavesItsPagesToTheCopies) {
  start(8, 10, false);
  Sequence& s = add(70);
  run(s);
  commit({});
  end_copies();
  leave(s);
  Sequence& a = add(70);
  load(a, 0, 64);
  leave(a);
  EXPECT_EQ(kv->budget().free_pages, 4);
  EXPECT_EQ(kv->budget().locked_pages, 4);
  end_copies();
  EXPECT_EQ(kv->budget().free_pages, 8);
  EXPECT_EQ(kv->host().num_loads(), 0);
}

TEST_F(OffloadManager, AFullHostSkipsAndTriesAgain) {
  start(40, 2, false);
  Sequence& s = add(100);
  run(s);
  EXPECT_EQ(kv->num_skipped_stores(), 1);
  commit({});
  EXPECT_EQ(jobs.size(), 2u);
  kv->publish(s);
  EXPECT_EQ(kv->num_skipped_stores(), 2);
  end_copies();
  kv->publish(s);
  EXPECT_EQ(kv->num_skipped_stores(), 3)
      << "the pair before the one that it needs a place for is none to evict";
  Sequence& other = add(40, 700);
  run(other);
  commit({});
  EXPECT_EQ(jobs.size(), 1u) << "the oldest makes room";
  Sequence& next = add(100);
  EXPECT_EQ(kv->lookup(next).num_loadable, 32);
  for (int i = 0; i < 40; ++i) s.tokens.push_back(i);
  s.num_computed = 100;
  kv->publish(s);
  commit({});
  EXPECT_EQ(jobs.size(), 1u) << "what was evicted does not come back while its sequence runs";
}

TEST_F(OffloadManager, WithoutHostMemoryItIsTargetOnly) {
  start(20, 0);
  Sequence& s = add(70);
  run(s);
  commit({});
  EXPECT_TRUE(jobs.empty());
  EXPECT_EQ(kv->num_skipped_stores(), 0);
}

}  // namespace
}  // namespace ekv
