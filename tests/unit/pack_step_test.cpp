#include "sched/pack_step.h"

#include <gtest/gtest.h>

#include <vector>

#include "support/allocation_counter.h"
#include "support/fake_serving.h"

namespace ekv {
namespace {

using Ints = std::vector<int32_t>;
using Slots = std::vector<Slot>;

Request request(std::vector<TokenId> prompt, SamplingParams sampling = {}) {
  return {.prompt = std::move(prompt), .sampling = std::move(sampling), .cache_salt = {}};
}

std::vector<TokenId> numbered(int count, TokenId first) {
  std::vector<TokenId> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back(first + i);
  return tokens;
}

// A pool of 16 pages, all taken, so that a test can say which page a pair has.
struct Pairs {
  Pairs() {
    while (table.acquire_page()) {
    }
  }
  PairId target(int even, int odd = -1) {
    const PairId pair = table.create(PageId{even});
    if (odd >= 0) table.set_odd(pair, PageId{odd});
    return pair;
  }
  PairId base(int even, int odd) {
    const PairId pair = target(even, odd);
    table.demote(pair, false);
    return pair;
  }
  void give(Sequence& s, std::vector<PairId> pairs) {
    s.blocks.num_blocks = 2 * int(pairs.size()) - (!pairs.empty() && table.entry(pairs.back()).odd == -1 &&
                                                   !table.is_base(pairs.back()));
    s.blocks.pairs = std::move(pairs);
  }
  void pack(const StepPlan& plan, SequenceTable& sequences, PackedStep& packed,
            AttentionPath path = AttentionPath::automatic) {
    pack_step(plan, table, path, sequences, packed);
  }
  PairTable table{16, 0};
};

TEST(PackStep, AMixedBatch) {
  SequenceTable sequences(SchedulingPolicy::fcfs);
  Pairs pairs;
  // Decodes its 35th token; three blocks in pages 7, 2 | 9.
  Sequence& decode = sequences.add(SeqId{1}, request(numbered(33, 100)));
  decode.tokens.insert(decode.tokens.end(), {500, 501});
  decode.num_computed = 34;
  pairs.give(decode, {pairs.target(7, 2), pairs.target(9)});
  // The middle of a prompt, across a block border: positions 14 to 18.
  Sequence& middle = sequences.add(SeqId{2}, request(numbered(40, 200)));
  middle.num_computed = 14;
  pairs.give(middle, {pairs.target(4, 5)});
  // The end of a prompt.
  Sequence& last = sequences.add(SeqId{3}, request(numbered(3, 300), {.logprobs = 5}));
  pairs.give(last, {pairs.target(0)});

  const StepPlan plan{{{SeqId{1}, 34, 1, true}, {SeqId{2}, 14, 5, false}, {SeqId{3}, 0, 3, true}}, {}, {}};
  PackedStep packed;
  pairs.pack(plan, sequences, packed);

  EXPECT_EQ(packed.tokens, (Ints{501, 214, 215, 216, 217, 218, 300, 301, 302}));
  EXPECT_EQ(packed.positions, (Ints{34, 14, 15, 16, 17, 18, 0, 1, 2}));
  EXPECT_EQ(packed.slot_mapping,
            (Slots{9 * 16 + 2, 4 * 16 + 14, 4 * 16 + 15, 5 * 16, 5 * 16 + 1, 5 * 16 + 2, 0, 1, 2}));
  EXPECT_EQ(packed.q_start, (Ints{0, 1, 6, 9}));
  EXPECT_EQ(packed.kv_len, (Ints{35, 19, 3}));
  EXPECT_EQ(packed.max_pairs, 2);
  EXPECT_EQ(packed.table, (std::vector<PairEntry>{{7, 2}, {9, -1}, {4, 5}, {-1, -1}, {0, -1}, {-1, -1}}));

  ASSERT_EQ(packed.sample_rows.size(), 2u);
  EXPECT_EQ(packed.sample_seqs, (std::vector<SeqId>{SeqId{1}, SeqId{3}}));
  const SampleRow& first = packed.sample_rows[0];
  EXPECT_EQ(first.row, 0);
  EXPECT_EQ(first.target, -1);
  EXPECT_EQ(first.output_index, 2);
  EXPECT_EQ(first.num_logprobs, -1);
  EXPECT_EQ(first.params, &decode.request.sampling);
  EXPECT_EQ(first.num_prompt, 33);
  EXPECT_EQ(first.tokens.size(), 35u);
  EXPECT_EQ(first.tokens.back(), 501);
  const SampleRow& second = packed.sample_rows[1];
  EXPECT_EQ(second.row, 8);
  EXPECT_EQ(second.output_index, 0);
  EXPECT_EQ(second.num_logprobs, 5);
}

TEST(PackStep, ABasePairIsMarkedInItsEvenPage) {
  SequenceTable sequences(SchedulingPolicy::fcfs);
  Pairs pairs;
  Sequence& s = sequences.add(SeqId{1}, request(numbered(64, 0)));
  s.tokens.push_back(9);
  s.num_computed = 64;
  pairs.give(s, {pairs.target(3, 4), pairs.base(5, 7), pairs.target(6)});
  PackedStep packed;
  pairs.pack({{{SeqId{1}, 64, 1, true}}, {}, {}}, sequences, packed);
  ASSERT_EQ(packed.table.size(), 3u);
  EXPECT_FALSE(packed.table[0].is_base());
  EXPECT_TRUE(packed.table[1].is_base());
  EXPECT_EQ(packed.table[1].even_page(), 5);
  EXPECT_EQ(packed.table[1].odd, -1);
  EXPECT_EQ(packed.slot_mapping, (Slots{6 * 16}));
  EXPECT_EQ(packed.base_runs, (std::vector<BaseRun>{{1, 2, 1}}));
  EXPECT_EQ(packed.path, KvPath::structured);
}

TEST(PackStep, ThePathIsTheLeastGeneralThatCoversTheBatch) {
  SequenceTable sequences(SchedulingPolicy::fcfs);
  Pairs pairs;
  Sequence& s = sequences.add(SeqId{1}, request(numbered(129, 0)));
  Sequence& plain = sequences.add(SeqId{2}, request(numbered(1, 0)));
  s.num_computed = 128;
  pairs.give(plain, {pairs.target(15)});
  const PairId a = pairs.base(0, 1), b = pairs.base(2, 3), c = pairs.target(4, 5), d = pairs.target(6, 7);
  const PairId e = pairs.target(9, 10), f = pairs.target(11, 12);
  const StepPlan plan{{{s.id, 128, 1, true}, {plain.id, 0, 1, true}}, {}, {}};
  PackedStep packed;
  const auto path = [&](std::vector<PairId> table, AttentionPath asked = AttentionPath::automatic) {
    table.push_back(pairs.table.create(PageId{8}));
    pairs.give(s, std::move(table));
    pairs.pack(plan, sequences, packed, asked);
    return packed.path;
  };
  EXPECT_EQ(path({c, d, e, f}), KvPath::native);
  EXPECT_EQ(path({c, d, e, f}, AttentionPath::general), KvPath::native);
  EXPECT_EQ(path({c, a, b, d}), KvPath::structured);
  EXPECT_EQ(path({c, a, b, d}, AttentionPath::general), KvPath::general);
  EXPECT_EQ(path({a, c, b, d}), KvPath::general);
  EXPECT_EQ(packed.base_runs, (std::vector<BaseRun>{{0, 3, 2}, {}}));
  // Who sees BASE pays for it; the other one does not.
  mark_taint(plan, packed, sequences);
  const Exposure seen = charge_exposure(plan, packed, sequences);
  EXPECT_EQ(seen.pairs, 5 + 1);
  EXPECT_EQ(seen.base_pairs, 2);
  EXPECT_EQ(s.stats.base_pairs_seen, 2);
  EXPECT_DOUBLE_EQ(s.stats.peak_base_fraction, 0.4);
  EXPECT_EQ(s.tainted_from, 128);
  EXPECT_EQ(s.stats.num_tainted, 1);
  EXPECT_EQ(plain.tainted_from, kClean);
  EXPECT_EQ(plain.stats.pairs_seen, 1);
}

// Row r predicts position r + 1: of a prompt of 5, rows 0 to 3 report prompt tokens 1 to 4, row 4 samples.
TEST(PackStep, PromptLogprobsAskForEachPromptTokenButTheFirst) {
  SequenceTable sequences(SchedulingPolicy::fcfs);
  Pairs pairs;
  Sequence& s = sequences.add(SeqId{1}, request({10, 11, 12, 13, 14}, {.logprobs = 1, .prompt_logprobs = 3}));
  pairs.give(s, {pairs.target(0)});
  PackedStep packed;
  pairs.pack({{{SeqId{1}, 0, 3, false}}, {}, {}}, sequences, packed);
  Ints rows, targets;
  const auto collect = [&] {
    rows.clear(), targets.clear();
    for (const SampleRow& row : packed.sample_rows) rows.push_back(row.row), targets.push_back(row.target);
  };
  collect();
  EXPECT_EQ(rows, (Ints{0, 1, 2}));
  EXPECT_EQ(targets, (Ints{11, 12, 13}));
  EXPECT_EQ(packed.sample_rows[0].num_logprobs, 3);

  s.num_computed = 3;
  s.prompt_logprobs.resize(3);
  pairs.pack({{{SeqId{1}, 3, 2, true}}, {}, {}}, sequences, packed);
  collect();
  EXPECT_EQ(rows, (Ints{0, 1}));
  EXPECT_EQ(targets, (Ints{14, -1}));
  EXPECT_EQ(packed.sample_rows[1].num_logprobs, 1);

  // Preempted in its output and resumed: nothing is reported twice.
  s.tokens.push_back(50);
  s.num_computed = 0;
  s.prompt_logprobs.resize(4);
  pairs.pack({{{SeqId{1}, 0, 6, true}}, {}, {}}, sequences, packed);
  collect();
  EXPECT_EQ(rows, (Ints{5}));
  EXPECT_EQ(targets, (Ints{-1}));
  EXPECT_EQ(packed.sample_rows[0].output_index, 1);
}

TEST(PackStep, AnEmptyPlanGivesAnEmptyBatch) {
  SequenceTable sequences(SchedulingPolicy::fcfs);
  Pairs pairs;
  PackedStep packed;
  packed.tokens = {1};
  pairs.pack({}, sequences, packed);
  EXPECT_TRUE(packed.tokens.empty());
  EXPECT_EQ(packed.q_start, (Ints{0}));
  EXPECT_EQ(packed.max_pairs, 0);
  EXPECT_TRUE(packed.table.empty());
}

TEST(PackStepDeathTest, AWrittenPositionHasATargetPage) {
  SequenceTable sequences(SchedulingPolicy::fcfs);
  Pairs pairs;
  Sequence& s = sequences.add(SeqId{1}, request(numbered(20, 0)));
  PackedStep packed;
  pairs.give(s, {pairs.target(0)});
  EXPECT_DEATH(pairs.pack({{{SeqId{1}, 0, 20, true}}, {}, {}}, sequences, packed), "must lie in a TARGET page");
  pairs.give(s, {pairs.base(2, 3)});
  EXPECT_DEATH(pairs.pack({{{SeqId{1}, 0, 1, false}}, {}, {}}, sequences, packed), "must lie in a TARGET page");
}

// 256 sequences decode 600 tokens each, in a pool with room for all: pages are taken and pairs are published
// all the time. The views, the plan, the commit and the packing allocate nothing.
TEST(PackStep, AStepAllocatesNothingInSteadyState) {
  testing::FakeServing serving({.max_step_tokens = 4096, .max_step_seqs = 256}, {}, 256 * 50, 1000);
  for (int i = 0; i < 256; ++i) serving.add(request(numbered(20 + i % 50, i), {.max_tokens = 700}));
  long allocated = 0;
  const auto step = [&] {
    const long before = testing::num_allocations;
    serving.plan_next();
    serving.commit();
    allocated += testing::num_allocations - before;
    for (const ChunkPlan& chunk : serving.plan.chunks) {
      Sequence& s = serving.sequences[chunk.seq];
      s.num_computed += chunk.num_tokens;
      serving.kv.publish(s);
      if (chunk.sample) s.tokens.push_back(TokenId(s.id) + s.num_tokens());
    }
  };
  // Everything is admitted. The flat table widens by one pair per 32 tokens, which is growth and not steady
  // state: it gets its final size beforehand.
  for (int i = 0; i < 100; ++i) step();
  serving.packed.table.reserve(256 * 32);
  allocated = 0;
  for (int i = 0; i < 500; ++i) step();
  EXPECT_EQ(allocated, 0);
  EXPECT_EQ(serving.plan.chunks.size(), 256u);
  EXPECT_EQ(serving.kv.view(*serving.sequences.running()[0]).num_blocks, ceil_div(20 + 599, kBlockTokens));
}

}  // namespace
}  // namespace ekv
