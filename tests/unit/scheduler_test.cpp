#include "elastickv/scheduler.h"

#include <gtest/gtest.h>

#include <ostream>

#include "elastickv/kv_layout.h"
#include "support/allocation_counter.h"

namespace ekv {

// So that a failed comparison of plans shows them.
std::ostream& operator<<(std::ostream& out, const StepPlan& plan) {
  for (const ChunkPlan& c : plan.chunks)
    out << "{seq " << uint64_t(c.seq) << ": " << c.first_pos << " +" << c.num_tokens
        << (c.sample ? " sample} " : "} ");
  for (SeqId id : plan.admitted) out << "admit " << uint64_t(id) << ' ';
  for (SeqId id : plan.preempted) out << "preempt " << uint64_t(id) << ' ';
  return out;
}

namespace {

// A running sequence that holds the pages of what it has computed, alone.
SeqView runs(uint64_t id, int num_tokens, int num_computed) {
  const int blocks = ceil_div(num_computed, kBlockTokens);
  return {.id = SeqId{id},
          .num_tokens = num_tokens,
          .num_computed = num_computed,
          .num_blocks = blocks,
          .num_freeable = blocks,
          .num_cached = 0,
          .num_cached_free = 0};
}
SeqView decodes(uint64_t id, int num_tokens) { return runs(id, num_tokens, num_tokens - 1); }
SeqView waits(uint64_t id, int num_tokens, int num_cached = 0, int num_cached_free = 0) {
  return {.id = SeqId{id},
          .num_tokens = num_tokens,
          .num_computed = 0,
          .num_blocks = 0,
          .num_freeable = 0,
          .num_cached = num_cached,
          .num_cached_free = num_cached_free};
}
ChunkPlan chunk(uint64_t id, int first_pos, int num_tokens, bool sample) {
  return {SeqId{id}, first_pos, num_tokens, sample};
}

struct Case {
  const char* what;
  SchedulerConfig config;
  std::vector<SeqView> running, waiting;
  KvBudget budget;
  StepPlan expected;
};

void check(const Case& c) {
  SCOPED_TRACE(c.what);
  StepPlan plan;
  plan_step(c.config, c.running, c.waiting, c.budget, plan);
  EXPECT_EQ(plan, c.expected);
}

constexpr KvBudget kPlenty{1000, 1000};

TEST(PlanStep, Tokens) {
  const Case cases[] = {
      {"nothing to do", {}, {}, {}, kPlenty, {}},
      {"a short prompt is admitted and sampled in one step",
       {},
       {},
       {waits(1, 20)},
       kPlenty,
       {{chunk(1, 0, 20, true)}, {SeqId{1}}, {}}},
      {"a long prompt is cut to the step's tokens",
       {.max_step_tokens = 64, .max_step_seqs = 8},
       {},
       {waits(1, 100)},
       kPlenty,
       {{chunk(1, 0, 64, false)}, {SeqId{1}}, {}}},
      {"and goes on where it stopped, next to whom it lets in",
       {.max_step_tokens = 64, .max_step_seqs = 8},
       {runs(1, 100, 64)},
       {waits(2, 100)},
       kPlenty,
       {{chunk(1, 64, 36, true), chunk(2, 0, 28, false)}, {SeqId{2}}, {}}},
      {"decodes come first, whatever stands before them in the queue",
       {.max_step_tokens = 64, .max_step_seqs = 8},
       {runs(1, 500, 64), decodes(2, 40), decodes(3, 50)},
       {},
       kPlenty,
       {{chunk(2, 39, 1, true), chunk(3, 49, 1, true), chunk(1, 64, 62, false)}, {}, {}}},
      {"a prefill that is left with no token waits its turn, and nobody is admitted past it",
       {.max_step_tokens = 4, .max_step_seqs = 4},
       {runs(1, 50, 16), runs(2, 50, 16), decodes(3, 9)},
       {waits(4, 5)},
       kPlenty,
       {{chunk(3, 8, 1, true), chunk(1, 16, 3, false)}, {}, {}}},
      {"chunk limit: two long prompts advance side by side",
       {.max_step_tokens = 64, .max_step_seqs = 8, .max_chunk_tokens = 16},
       {runs(1, 500, 64), decodes(2, 40)},
       {waits(3, 300), waits(4, 10)},
       kPlenty,
       {{chunk(2, 39, 1, true), chunk(1, 64, 16, false), chunk(3, 0, 16, false), chunk(4, 0, 10, true)},
        {SeqId{3}, SeqId{4}},
        {}}},
      {"batch width counts running sequences, with or without a chunk",
       {.max_step_tokens = 4, .max_step_seqs = 2},
       {decodes(1, 9), runs(2, 9, 4)},
       {waits(3, 1)},
       kPlenty,
       {{chunk(1, 8, 1, true), chunk(2, 4, 3, false)}, {}, {}}},
      {"batch width limits admission",
       {.max_step_tokens = 64, .max_step_seqs = 2},
       {},
       {waits(1, 1), waits(2, 2), waits(3, 3)},
       kPlenty,
       {{chunk(1, 0, 1, true), chunk(2, 0, 2, true)}, {SeqId{1}, SeqId{2}}, {}}},
  };
  for (const Case& c : cases) check(c);
}

// 10 us a token and 0.01 us for each key that it sees; a decode of n tokens takes 10 us + n.
TEST(PlanStep, TimeOfAStep) {
  const StepCost cost{.fixed_us = 500, .per_token_us = 10, .per_prefill_key_us = 0.01, .per_decode_key_us = 1};
  const auto plan_of = [&](std::vector<SeqView> running, std::vector<SeqView> waiting, int target_us = 2000) {
    StepPlan plan;
    plan_step({.max_step_tokens = 4096, .max_step_seqs = 8, .target_step_us = target_us}, running, waiting,
              kPlenty, plan, cost);
    return plan;
  };
  // 1,500 us are left: 140 tokens take 1,400 + 0.01 * 140 * 141 / 2, one more 11.4.
  EXPECT_EQ(plan_of({}, {waits(1, 1000)}).chunks, (std::vector{chunk(1, 0, 140, false)}));
  // Behind 900 tokens each takes 9 more.
  EXPECT_EQ(plan_of({runs(1, 2000, 900)}, {}).chunks, (std::vector{chunk(1, 900, 77, false)}));
  // The decode takes 510 us of them, the first prefill 20 tokens, and the second what is left.
  const StepPlan shared = plan_of({runs(1, 84, 64), decodes(2, 500)}, {waits(3, 700), waits(4, 700)});
  ASSERT_EQ(shared.chunks.size(), 3u);
  EXPECT_EQ(shared.chunks[1], chunk(1, 64, 20, true));
  EXPECT_EQ(shared.admitted, std::vector{SeqId{3}}) << "no time is left for the next";
  const int n = shared.chunks[2].num_tokens;
  const auto us = [&](int tokens) { return 500 + 510 + 214.9 + 10 * tokens + 0.005 * tokens * (tokens + 1); };
  EXPECT_TRUE(us(n) <= 2000 && us(n + 1) > 2000) << n;
  // Decodes are never cut, and beside them a prompt gets on, but one only.
  const StepPlan slow = plan_of({decodes(1, 3000), runs(2, 900, 64), runs(3, 900, 64)}, {waits(4, 10)});
  EXPECT_EQ(slow.chunks, (std::vector{chunk(1, 2999, 1, true), chunk(2, 64, kPairTokens, false)}));
  // Without a target time does not matter.
  EXPECT_EQ(plan_of({}, {waits(1, 1000)}, 0).chunks, (std::vector{chunk(1, 0, 1000, true)}));
}

TEST(PlanStep, Pages) {
  const Case cases[] = {
      {"a decode inside its last page needs none",
       {},
       {decodes(1, 16)},
       {},
       {0, 10},
       {{chunk(1, 15, 1, true)}, {}, {}}},
      {"a decode that starts a page takes the last one",
       {},
       {decodes(1, 17)},
       {},
       {1, 10},
       {{chunk(1, 16, 1, true)}, {}, {}}},
      {"no page: the last one running gives up its pages; nobody is admitted",
       {},
       {decodes(1, 17), decodes(2, 20), decodes(3, 30)},
       {waits(4, 1)},
       {0, 10},
       {{chunk(1, 16, 1, true), chunk(2, 19, 1, true)}, {}, {SeqId{3}}}},
      {"one after the other, from the back, and no more than needed",
       {},
       {runs(1, 80, 17), decodes(2, 12), decodes(3, 30), decodes(4, 12)},
       {},
       {0, 10},
       {{chunk(2, 11, 1, true), chunk(1, 17, 63, true)}, {}, {SeqId{4}, SeqId{3}}}},
      {"nobody gives up pages in vain: who cannot be covered waits, those after it run",
       {},
       {decodes(1, 10), runs(2, 80, 17), decodes(3, 30)},
       {waits(4, 1)},
       {0, 10},
       {{chunk(1, 9, 1, true), chunk(3, 29, 1, true)}, {}, {}}},
      {"nobody after it: it is left out and keeps its pages; nobody is admitted",
       {},
       {decodes(1, 20), decodes(2, 17)},
       {waits(3, 1)},
       {0, 10},
       {{chunk(1, 19, 1, true)}, {}, {}}},
      {"a prefill that lacks pages takes them from those after it, not from those before",
       {},
       {decodes(1, 10), runs(2, 64, 16), decodes(3, 40)},
       {},
       {1, 10},
       {{chunk(1, 9, 1, true), chunk(2, 16, 48, true)}, {}, {SeqId{3}}}},
      {"a chunk keeps the length with which it asked for pages",
       {.max_step_tokens = 48, .max_step_seqs = 8},
       {runs(1, 96, 16), decodes(2, 40)},
       {},
       {2, 10},
       {{chunk(1, 16, 47, false)}, {}, {SeqId{2}}}},
      {"the token of a preempted decode goes to the prefill after the one that took its pages",
       {.max_step_tokens = 8, .max_step_seqs = 8},
       {decodes(1, 17), runs(2, 64, 16), decodes(3, 40)},
       {},
       {0, 10},
       {{chunk(1, 16, 1, true), chunk(2, 16, 7, false)}, {}, {SeqId{3}}}},
      {"shared pages do not come back: two victims where one looked like enough",
       {},
       {decodes(1, 17),
        {.id = SeqId{2},
         .num_tokens = 40,
         .num_computed = 39,
         .num_blocks = 3,
         .num_freeable = 1,
         .num_cached = 0,
         .num_cached_free = 0},
        {.id = SeqId{3},
         .num_tokens = 32,
         .num_computed = 31,
         .num_blocks = 2,
         .num_freeable = 0,
         .num_cached = 0,
         .num_cached_free = 0}},
       {},
       {0, 10},
       {{chunk(1, 16, 1, true)}, {}, {SeqId{3}, SeqId{2}}}},
  };
  for (const Case& c : cases) check(c);
}

TEST(PlanStep, Admission) {
  const SchedulerConfig small{.max_step_tokens = 32, .max_step_seqs = 8};
  const SchedulerConfig first_chunk{.max_step_tokens = 32, .max_step_seqs = 8, .reserve_full_prompt = false};
  SchedulerConfig watermark;
  watermark.watermark = 0.2;
  const Case cases[] = {
      {"the whole prompt must fit, not only its first chunk", small, {}, {waits(1, 100)}, {6, 10}, {}},
      {"it fits exactly", small, {}, {waits(1, 100)}, {7, 10}, {{chunk(1, 0, 32, false)}, {SeqId{1}}, {}}},
      {"first-chunk admission asks for the chunk's pages only",
       first_chunk,
       {},
       {waits(1, 100)},
       {2, 10},
       {{chunk(1, 0, 32, false)}, {SeqId{1}}, {}}},
      {"and not for fewer", first_chunk, {}, {waits(1, 100)}, {1, 10}, {}},
      {"nobody overtakes the first in line",
       {},
       {decodes(1, 10)},
       {waits(2, 170), waits(3, 5)},
       {10, 20},
       {{chunk(1, 9, 1, true)}, {}, {}}},
      {"those in front go before it",
       {},
       {},
       {waits(1, 20), waits(2, 170), waits(3, 5)},
       {10, 20},
       {{chunk(1, 0, 20, true)}, {SeqId{1}}, {}}},
      {"a prompt under way keeps a claim on what it still needs",
       {.max_step_tokens = 64, .max_step_seqs = 8, .max_chunk_tokens = 16},
       {runs(1, 64, 16)},
       {waits(2, 64)},
       {6, 10},
       {{chunk(1, 16, 16, false)}, {}, {}}},
      {"but no more than that",
       {.max_step_tokens = 64, .max_step_seqs = 8, .max_chunk_tokens = 16},
       {runs(1, 64, 16)},
       {waits(2, 64)},
       {7, 10},
       {{chunk(1, 16, 16, false), chunk(2, 0, 16, false)}, {SeqId{2}}, {}}},
      {"a prompt admitted in this step too",
       {.max_step_tokens = 64, .max_step_seqs = 8, .max_chunk_tokens = 16},
       {},
       {waits(1, 64), waits(2, 64)},
       {7, 10},
       {{chunk(1, 0, 16, false)}, {SeqId{1}}, {}}},
      {"a hit shortens the chunk and the need",
       small,
       {},
       {waits(1, 70, 64)},
       {1, 10},
       {{chunk(1, 64, 6, true)}, {SeqId{1}}, {}}},
      {"a hit nobody uses is taken out of the free pages", small, {}, {waits(1, 70, 64, 4)}, {4, 10}, {}},
      {"a hit nobody uses, and one page more",
       small,
       {},
       {waits(1, 70, 64, 4)},
       {5, 10},
       {{chunk(1, 64, 6, true)}, {SeqId{1}}, {}}},
      {"all but one token cached",
       small,
       {},
       {waits(1, 65, 64)},
       {1, 10},
       {{chunk(1, 64, 1, true)}, {SeqId{1}}, {}}},
      {"the watermark holds while somebody runs",
       watermark,
       {decodes(1, 10)},
       {waits(2, 64)},
       {5, 10},
       {{chunk(1, 9, 1, true)}, {}, {}}},
      {"the watermark is met",
       watermark,
       {decodes(1, 10)},
       {waits(2, 64)},
       {6, 10},
       {{chunk(1, 9, 1, true), chunk(2, 0, 64, true)}, {SeqId{2}}, {}}},
      {"nobody runs: no watermark for the first, but for the second",
       watermark,
       {},
       {waits(1, 128), waits(2, 16)},
       {10, 10},
       {{chunk(1, 0, 128, true)}, {SeqId{1}}, {}}},
      {"nobody runs and the pool is as large as the prompt",
       watermark,
       {},
       {waits(1, 160)},
       {10, 10},
       {{chunk(1, 0, 160, true)}, {SeqId{1}}, {}}},
      {"the watermark does not touch what runs",
       watermark,
       {decodes(1, 17)},
       {},
       {1, 10},
       {{chunk(1, 16, 1, true)}, {}, {}}},
  };
  for (const Case& c : cases) check(c);
}

TEST(PlanStep, ClearsThePlanItIsGiven) {
  StepPlan plan{{chunk(9, 1, 2, true)}, {SeqId{9}}, {SeqId{9}}};
  plan_step({}, {}, {}, kPlenty, plan);
  EXPECT_EQ(plan, StepPlan{});
}

TEST(PlanStep, AllocatesNothingOnceItHasSeenItsLargestBatch) {
  std::vector<SeqView> running, waiting;
  for (uint64_t id = 0; id < 256; ++id)
    running.push_back(id % 16 ? decodes(id, 100 + int(id)) : runs(id, 300, 100));
  for (uint64_t id = 300; id < 400; ++id) waiting.push_back(waits(id, 50));
  StepPlan plan;
  const auto plan_all = [&] {
    plan_step({.max_step_tokens = 16384, .max_step_seqs = 512}, running, waiting, {5000, 10000}, plan);
    EXPECT_EQ(plan.admitted.size(), 100u);
    plan_step({}, running, waiting, {3, 10000}, plan);
    EXPECT_GT(plan.preempted.size(), 0u);
  };
  plan_all();
  const long before = testing::num_allocations;
  plan_all();
  EXPECT_EQ(testing::num_allocations, before);
}

TEST(PlanStepDeathTest, NothingIsComputedBeyondTheTokens) {
  StepPlan plan;
  const SeqView beyond = runs(1, 10, 11);
  EXPECT_DEATH(plan_step({}, std::span(&beyond, 1), {}, kPlenty, plan), "only known and pending tokens");
}

// The last token of an ending sequence comes from a step in flight.
TEST(PlanStep, AnEndingSequenceKeepsItsPagesAndTakesNoPlace) {
  const SeqView ending = runs(2, 32, 32);
  const Case cases[] = {
      {"it has no chunk", {}, {ending}, {}, kPlenty, {}},
      {"its place in the batch is taken",
       {.max_step_seqs = 2},
       {decodes(1, 10), ending},
       {waits(3, 4), waits(4, 4)},
       kPlenty,
       {{chunk(1, 9, 1, true), chunk(3, 0, 4, true)}, {SeqId{3}}, {}}},
      {"it is not preempted: its pages come back by themselves", {}, {decodes(1, 33), ending}, {}, {0, 4}, {}},
      {"whoever is after it may be",
       {},
       {decodes(1, 33), ending, decodes(3, 20)},
       {},
       {0, 6},
       {{chunk(1, 32, 1, true)}, {}, {SeqId{3}}}},
      {"nothing is promised to it",
       {},
       {ending},
       {waits(3, 32)},
       {2, 4},
       {{chunk(3, 0, 32, true)}, {SeqId{3}}, {}}},
  };
  for (const Case& c : cases) check(c);
}

SeqView demotable(SeqView s, int num_pairs, int num_base = 0) {
  s.num_demotable = num_pairs, s.num_base = num_base;
  return s;
}

TEST(PlanStep, PagesThatDemotionCouldGiveCount) {
  const auto plan_with = [](std::vector<SeqView> running, std::vector<SeqView> waiting, KvBudget budget) {
    StepPlan plan;
    const PageDemand demand = plan_step({}, running, waiting, budget, plan);
    return std::pair(plan, demand);
  };
  // Two decodes at a block border: each needs a page.
  const std::vector<SeqView> two = {demotable(decodes(1, 161), 3), demotable(decodes(2, 161), 4)};
  {
    const auto [plan, demand] = plan_with(two, {}, {.free_pages = 0, .total_pages = 20, .max_demotions = 2});
    EXPECT_EQ(plan.chunks.size(), 2u);
    EXPECT_TRUE(plan.preempted.empty());
    EXPECT_EQ(demand.pages, 2);
    EXPECT_FALSE(demand.page_bound);
  }
  {  // the host has room for one pair only: the second one waits, because nobody stands behind it
    const auto [plan, demand] = plan_with(two, {}, {.free_pages = 0, .total_pages = 20, .max_demotions = 1});
    EXPECT_EQ(plan.chunks.size(), 1u);
    EXPECT_EQ(demand.pages, 1);
    EXPECT_TRUE(demand.page_bound);
  }
  {  // what the victim held is free, and its pairs are gone
    const auto [plan, demand] = plan_with(two, {}, {.free_pages = 0, .total_pages = 20, .max_demotions = 0});
    EXPECT_EQ(plan.preempted.size(), 1u);
    EXPECT_EQ(demand.pages, 1 - 10);
    EXPECT_TRUE(demand.page_bound);
  }
  {  // an admission may count on demotion, for its whole prompt
    const auto [plan, demand] =
        plan_with({demotable(decodes(1, 160), 5)}, {waits(2, 64)}, {.free_pages = 0, .max_demotions = 4});
    EXPECT_EQ(plan.admitted.size(), 1u);
    EXPECT_EQ(demand.pages, 4);
  }
  {  // or not at all
    const auto [plan, demand] =
        plan_with({demotable(decodes(1, 160), 5)}, {waits(2, 64)}, {.free_pages = 0, .max_demotions = 3});
    EXPECT_TRUE(plan.admitted.empty());
    EXPECT_EQ(demand.pages, 0);
    EXPECT_TRUE(demand.page_bound);
  }
  {  // the host slots of a prefix that it takes over are no longer to be had
    SeqView hit = waits(2, 65, 32, 1);
    hit.num_cached_host_slots = 2;
    EXPECT_TRUE(plan_with({demotable(decodes(1, 160), 9)}, {hit}, {.free_pages = 0, .max_demotions = 5})
                    .first.admitted.empty());
    EXPECT_FALSE(plan_with({demotable(decodes(1, 160), 9)}, {hit}, {.free_pages = 0, .max_demotions = 6})
                     .first.admitted.empty());
  }
}

TEST(PlanStep, GuaranteedAdmissionNeedsRoomForAllPeaks) {
  SchedulerConfig config;
  config.admission = AdmissionMode::guaranteed;
  const auto admitted = [&](int first_peak, int peak, KvBudget budget, int slots = 0) {
    SeqView running = decodes(1, 100), waiting = waits(2, 20);
    running.peak_pages = first_peak, waiting.peak_pages = peak;
    running.peak_host_slots = slots, waiting.peak_host_slots = slots;
    StepPlan plan;
    plan_step(config, std::span(&running, 1), std::span(&waiting, 1), budget, plan);
    return plan.admitted.size() == 1;
  };
  EXPECT_TRUE(admitted(60, 40, kPlenty));
  EXPECT_TRUE(admitted(60, 940, kPlenty));
  EXPECT_FALSE(admitted(60, 941, kPlenty));
  EXPECT_FALSE(admitted(60, 940, {.free_pages = 900, .total_pages = 1000, .locked_pages = 1}));
  EXPECT_TRUE(admitted(1, 1, {.free_pages = 900, .total_pages = 1000, .total_host_slots = 10}, 5));
  EXPECT_FALSE(admitted(1, 1, {.free_pages = 900, .total_pages = 1000, .total_host_slots = 9}, 5));
}

TEST(PlanStep, WhoFindsNoPageMayHaveToGiveUpItsOwn) {
  const std::vector<SeqView> running = {decodes(1, 161), decodes(2, 161), decodes(3, 161)};
  for (bool preempt_self : {false, true}) {
    StepPlan plan;
    const PageDemand demand =
        plan_step({.preempt_self = preempt_self}, running, {}, {.free_pages = 2, .total_pages = 32}, plan);
    EXPECT_EQ(plan.chunks.size(), 2u);
    EXPECT_EQ(plan.preempted.size(), preempt_self ? 1u : 0u);
    EXPECT_EQ(demand.pages, preempt_self ? 2 - 10 : 2);
    EXPECT_TRUE(demand.page_bound);
  }
}

}  // namespace
}  // namespace ekv
