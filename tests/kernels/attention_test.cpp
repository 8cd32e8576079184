// attention_test.cpp -- paged attention against its definition; links against run_cpu.cpp or run_cuda.cpp.
//
// BASE is held to the values its bytes stand for, at the tolerance of TARGET: a kernel bug and the loss of
// fidelity are different things. Every byte of the pool that holds no value is poison, every table entry past
// the end is absurd.

#include <gtest/gtest.h>

#include <random>

#include "support/seed.h"
#include "tests/support/cases.h"
#include "tests/support/compare.h"
#include "tests/support/reference.h"
#include "tests/support/run_attention.h"

namespace ekv::test {
namespace {

void expect_matches_definition(const AttnCase& c, const BuiltCase& b, const AttnOutput& got,
                               Element element = Element::fp16) {
  const std::vector<double> out = decode_all(element, got.out);
  for (int s = 0; s < b.in.num_seqs(); ++s) {
    const int first = b.in.q_start[s], rows = b.in.q_start[s + 1] - first, keys = b.in.kv_len[s];
    const size_t row = size_t(c.heads) * c.head_dim, begin = first * row, end = (first + rows) * row;
    if (keys == 0) {
      for (size_t i = begin; i < end; ++i)
        ASSERT_EQ(got.out[i], kUntouched) << "row without keys, element " << i;
      continue;
    }
    const RefAttention ref = ref_attention(rows, keys, c.heads, c.kv_heads, c.head_dim, b.in.scale,
                                           {b.q.begin() + begin, b.q.begin() + end}, b.k[s], b.v[s]);
    double top_value = 0;
    for (double v : b.v[s]) top_value = std::max(top_value, std::fabs(v));
    EXPECT_TRUE(
        all_near(std::vector<double>(out.begin() + begin, out.begin() + end), ref.out,
                 [&](size_t i) { return attention_tolerance(ref, top_value, keys, ref.out[i], element); }))
        << "sequence " << s << " of " << c.name;
    const auto lse = got.lse.begin() + size_t(first) * c.heads;
    EXPECT_TRUE(all_near(
        std::vector<float>(lse, lse + size_t(rows) * c.heads), ref.lse,
        [&](size_t i) { return 1e-5 + std::ldexp(ref.score_size, -20) + 1e-6 * std::fabs(ref.lse[i]); }))
        << "lse of sequence " << s << " of " << c.name;
  }
}

// Every path that covers the case, the least general first.
std::vector<Path> paths_of(const AttnCase& c) {
  bool any = false, runs = true;
  for (const SeqCase& s : c.seqs) {
    any |= !s.base_pairs.empty();
    if (!s.base_pairs.empty())
      runs &= s.base_pairs.back() - s.base_pairs.front() + 1 == int(s.base_pairs.size());
  }
  if (!any) return {Path::native, Path::structured, Path::general};
  if (runs) return {Path::structured, Path::general};
  return {Path::general};
}

// All paths give the definition's result and, among each other, the same bits.
void check_case(const AttnCase& c, AttnRun run = {}, unsigned seed = 1) {
  const BuiltCase b = build_case(c, seed);
  std::vector<uint16_t> first;
  for (Path path : paths_of(c)) {
    run.path = path;
    const AttnOutput got = run_attention(b.in, run);
    EXPECT_TRUE(got.repeats_equal);
    if (first.empty()) {
      first = got.out;
      expect_matches_definition(c, b, got, run.out);
    }
    EXPECT_EQ(got.out, first) << "path " << int(path) << " of " << c.name << " differs in bits";
    if (testing::Test::HasFailure()) return;
  }
}

bool has_shares() { return attention_target() != "cpu"; }

class Attention : public testing::TestWithParam<AttnCase> {};
// Cut into as many shares as the device takes, where a warp sees a slot or two, and in one share, where maxima
// rise, windows of the tables move and rings turn.
TEST_P(Attention, MatchesDefinition) { check_case(GetParam()); }
TEST_P(Attention, MatchesDefinitionInOneShare) {
  if (!has_shares()) GTEST_SKIP() << "the plain twin does not cut its work";
  AttnRun run;
  run.num_ctas = GetParam().kv_heads;
  check_case(GetParam(), run);
}
TEST_P(Attention, MatchesDefinitionInBf16) {
  AttnRun run;
  run.out = Element::bf16;
  check_case(GetParam(), run);
  run.num_ctas = GetParam().kv_heads;
  if (has_shares()) check_case(GetParam(), run);
}
INSTANTIATE_TEST_SUITE_P(Named, Attention, testing::ValuesIn(named_cases()),
                         [](const auto& info) { return info.param.name; });

// The prefill kernels of older devices, on whatever device this is.
class AttentionPlainMma : public testing::TestWithParam<AttnCase> {};
TEST_P(AttentionPlainMma, MatchesDefinition) {
  AttnRun run;
  run.plain_mma = true;
  check_case(GetParam(), run);
}
TEST_P(AttentionPlainMma, MatchesDefinitionInBf16) {
  AttnRun run;
  run.plain_mma = true, run.out = Element::bf16;
  check_case(GetParam(), run);
}
std::vector<AttnCase> prefill_cases() {
  std::vector<AttnCase> cases = named_cases();
  std::erase_if(cases,
                [](const AttnCase& c) { return !c.name.starts_with("prefill") && c.name != "mixed_batch"; });
  return cases;
}
INSTANTIATE_TEST_SUITE_P(Named, AttentionPlainMma, testing::ValuesIn(prefill_cases()),
                         [](const auto& info) { return info.param.name; });

class AttentionSplits : public testing::TestWithParam<int> {};
// Shares of every size: splits inside each region of a sequence and exactly on each boundary.
TEST_P(AttentionSplits, AnyNumberOfShares) {
  if (!has_shares() && GetParam() != 1) GTEST_SKIP() << "the plain twin does not cut its work";
  AttnRun run;
  run.num_ctas = GetParam();
  check_case(
      {"splits", 128, 8, 2, {{1, 333, pair_range(2, 5)}, {1, 0}, {1, 17}, {1, 500}, {1, 128, {0, 1, 2, 3}}}},
      run);
  check_case({"splits_mixed",
              64,
              8,
              2,
              {{1, 400, {1, 3, 4, 9}}, {1, 64, {0, 1}}, {1, 65}, {1, 3000, every_third(93)}}},
             run);
  // Shares that begin with an odd slot and are longer than a window of the table.
  check_case({"splits_long", 64, 4, 1, {{1, 50}, {1, 3401}, {1, 20}}}, run);
}
INSTANTIATE_TEST_SUITE_P(Shares, AttentionSplits, testing::Values(1, 2, 3, 5, 7, 13, 31, 64, 100, 132));

// TARGET, BASE, TARGET: all cuts of up to 5 pairs, each with a last block of 1, 15 and 16 tokens and a last
// pair of one or two blocks.
TEST(AttentionSweep, TargetBaseTarget) {
  for (int pairs = 1; pairs <= 5; ++pairs) {
    AttnCase c{"sweep", 64, 4, 2, {}};
    for (int first = 0; first < pairs; ++first)
      for (int count = 0; first + count <= pairs; ++count)
        for (int tail : {-31, -17, -16, -15, -1, 0}) {
          const bool last_is_base = count > 0 && first + count == pairs;
          if (last_is_base && tail != 0) continue;
          c.seqs.push_back({1, pairs * kPairTokens + tail, pair_range(first, count)});
        }
    check_case(c);
    if (HasFailure()) return;
  }
}

TEST(AttentionRandom, ModesAndLengths) {
  const unsigned seed = drawn_seed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 rng(seed);
  for (int round = 0; round < 8; ++round) {
    const int dims[] = {64, 80, 96, 128, 256};
    AttnCase c{"random", dims[rng() % 5], 0, int(1 + rng() % 3), {}};
    c.heads = c.kv_heads * int(1 + rng() % 16);
    c.format = rng() % 4 ? BaseFormat::fixed8 : BaseFormat::e5m2;
    for (int s = 0; s < int(1 + rng() % 6); ++s) {
      SeqCase seq{rng() % 4 ? 1 : int(1 + rng() % 40), int(1 + rng() % 700)};
      seq.rows = std::min(seq.rows, seq.kv_len);
      for (int pair = 0; pair < (seq.kv_len - seq.rows) / kPairTokens; ++pair)
        if (rng() % 2) seq.base_pairs.push_back(pair);
      c.seqs.push_back(seq);
    }
    AttnRun run;
    run.num_ctas = int(1 + rng() % 40);
    check_case(c, run, rng());
    if (HasFailure()) return;
  }
}

TEST(AttentionBatch, OneTo257Sequences) {
  std::mt19937 rng(7);
  for (int seqs : {1, 2, 31, 33, 128, 257}) {
    AttnCase c{"batch", 64, 4, 2, {}};
    for (int s = 0; s < seqs; ++s) c.seqs.push_back({1, int(rng() % 5 ? 1 + rng() % 60 : 0)});
    check_case(c);
    if (HasFailure()) return;
  }
}

TEST(AttentionGroups, OneTo16) {
  for (int group = 1; group <= 16; ++group) {
    check_case({"group", 128, 2 * group, 2, {{1, 100, {0, 1}}, {9, 60}}});
    if (HasFailure()) return;
  }
}

TEST(AttentionDeterminism, TwentyRepeatsOnOnePlan) {
  AttnRun run;
  run.repeats = 20;
  check_case({"repeats", 128, 32, 8, {{1, 900, pair_range(3, 9)}, {1, 64}, {40, 300, {1}}, {1, 2000}}}, run);
}

// One captured step serves batches whose lengths, modes, tables and number of sequences change, as an engine
// replays it: captured at the largest batch, replayed down to one sequence and to none.
TEST(AttentionGraph, EverythingChangesBetweenReplays) {
  const unsigned seed = drawn_seed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 rng(seed);
  constexpr int kSeqs = 9;
  std::vector<AttnCase> cases;
  for (int replay = 0; replay < 12; ++replay) {
    AttnCase c{"replay", 128, 8, 2, {}};
    c.min_pages = 900, c.min_pairs = 1900;  // wide enough for a planner of several CTAs
    const int live = replay == 0 ? kSeqs : replay == 5 ? 0 : replay == 6 ? 1 : int(1 + rng() % kSeqs);
    for (int s = 0; s < kSeqs; ++s) {
      SeqCase seq{0, 0};
      if (s < live) seq = {rng() % 4 ? 1 : int(1 + rng() % 40), int(1 + rng() % (rng() % 3 ? 200 : 1500))};
      seq.rows = replay == 0 && s < 3 ? 60 : std::min(seq.rows, seq.kv_len);
      seq.kv_len = std::max(seq.kv_len, seq.rows);
      for (int pair = 0; pair < (seq.kv_len - seq.rows) / kPairTokens; ++pair)
        if (rng() % 3 == 0) seq.base_pairs.push_back(pair);
      c.seqs.push_back(seq);
    }
    cases.push_back(c);
  }
  std::vector<BuiltCase> built;
  std::vector<AttnInput> inputs;
  for (const AttnCase& c : cases) {
    built.push_back(build_case(c, rng()));
    inputs.push_back(built.back().in);
  }
  for (const bool plain_mma : {false, true}) {
    AttnRun run;
    run.plain_mma = plain_mma;
    const std::vector<AttnOutput> got = run_attention_replayed(inputs, run);
    for (size_t i = 0; i < cases.size() && !HasFailure(); ++i) {
      SCOPED_TRACE("replay " + std::to_string(i));
      expect_matches_definition(cases[i], built[i], got[i]);
      const size_t used = built[i].q.size();
      EXPECT_EQ(std::count(got[i].out.begin() + used, got[i].out.end(), kUntouched),
                std::ptrdiff_t(got[i].out.size() - used));
    }
  }
}

// Slots beyond 2^31 and 2^32 bytes. The pool's 5 GiB are taken on a GPU only; the host keeps the few pages in
// use.
TEST(AttentionOffsets, BeyondFourGiB) {
  AttnCase c{"far_pages", 128, 8, 2, {{1, 200, {0, 1}}, {30, 90}}};
  c.spare_pages = 100000;
  c.layers = 3;
  c.layer = 2;
  check_case(c);
}

TEST(AttentionOffsets, LongContext) {
  check_case({"long", 64, 2, 1, {{1, 40000, pair_range(5, 800)}, {1, 1}}});
}

}  // namespace
}  // namespace ekv::test
