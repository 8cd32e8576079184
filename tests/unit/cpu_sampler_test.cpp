// The rule of sampling_rule.h and the CPU's sampler against definitions: published vectors of the generator,
// the order of the rules, distributions.

#include "backend/cpu/cpu_sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <set>

#include "support/seed.h"
#include "tests/support/sampling_rows.h"

namespace ekv::test {
namespace {

std::optional<SampledRow> sample(CpuSampler& sampler, const Row& row) {
  std::vector<float> logits = row.logits;
  return sampler.sample(row.request(), logits);
}

TokenId token_of(const Row& row) {
  CpuSampler sampler(best_cpu_kernels(), int(row.logits.size()));
  return sample(sampler, row)->token;
}

// Tokens of `draws` consecutive output indices.
std::map<TokenId, int> histogram(Row row, int draws) {
  CpuSampler sampler(best_cpu_kernels(), int(row.logits.size()));
  std::map<TokenId, int> counts;
  for (row.output_index = 0; row.output_index < draws; ++row.output_index)
    ++counts[sample(sampler, row)->token];
  return counts;
}

// Known answers of philox4x32-10 from the authors' Random123 distribution (kat_vectors).
TEST(Philox, KnownAnswers) {
  const auto answer = [](uint64_t key, sampling::Words counter) {
    const sampling::Words c = sampling::philox(key, counter);
    return std::array<uint32_t, 4>{c.x, c.y, c.z, c.w};
  };
  using Words = std::array<uint32_t, 4>;
  EXPECT_EQ(answer(0, {0, 0, 0, 0}), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  const uint32_t f = 0xffffffff;
  EXPECT_EQ(answer(~uint64_t(0), {f, f, f, f}), (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(answer(0x299f31d0a4093822, {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

// Where the word of a token lies: written out once more, because answers of seeds depend on it.
TEST(Draws, WordsOfATokenAreThoseOfItsSeedGroupAndOutputIndex) {
  const uint64_t seed = 0x0123456789abcdef;
  const sampling::Words words = sampling::draw_words(seed, 25, 7);
  const sampling::Words want = sampling::philox(seed, {25, 7, 0, 0});
  EXPECT_EQ(sampling::word_of(words, 100), want.x);
  EXPECT_EQ(sampling::word_of(words, 101), want.y);
  EXPECT_EQ(sampling::word_of(words, 102), want.z);
  EXPECT_EQ(sampling::word_of(words, 103), want.w);
  EXPECT_EQ(want.x, 0x65d15f4c) << "changes the answer of every seed";
}

TEST(Draws, UniformLiesInsideTheOpenIntervalAndIsSpreadEvenly) {
  EXPECT_EQ(sampling::uniform(0), 0x1p-33f);
  EXPECT_EQ(sampling::uniform(0xffffffff), 1 - 0x1p-24f);
  double sum = 0;
  std::array<int, 10> tenth{};
  constexpr int kDraws = 100000;
  for (int i = 0; i < kDraws; ++i) {
    const double u = sampling::uniform(sampling::draw_words(uint64_t(i % 7) << 40, uint32_t(i), 3).w);
    ASSERT_GT(u, 0);
    ASSERT_LT(u, 1);
    sum += u;
    ++tenth[size_t(u * 10)];
  }
  EXPECT_NEAR(sum / kDraws, 0.5, 5 / std::sqrt(12.0 * kDraws));
  for (int count : tenth) EXPECT_NEAR(count, kDraws / 10, 5 * std::sqrt(kDraws * 0.09));
}

std::vector<const CpuKernels*> all_kernels() {
  std::vector<const CpuKernels*> all;
  for (const CpuIsa isa : {CpuIsa::generic, CpuIsa::avx2, CpuIsa::avx512})
    if (const CpuKernels* kernels = find_cpu_kernels(isa)) all.push_back(kernels);
  return all;
}

// Nobody who could win is left out, words are the rule's, and so few are left in that it pays.
TEST(Draws, RacersAreAllThatReachTheBest) {
  for (const CpuKernels* kernels : all_kernels())
    for (const int count : {1, 3, 64, 127, 128, 500, 2048})
      for (const float best : {-30.0f, -3.0f, 0.0f, 4.0f, 9.0f, 25.0f}) {
        const std::vector<float> z = random_logits(uint32_t(count), count, 3);
        const RaceArgs args{z.data(), 4096, count, 0x9876543210u + uint64_t(count), 11, best, -2.5f};
        std::vector<Racer> racers(static_cast<size_t>(count));
        racers.resize(size_t(kernels->find_racers(args, racers.data())));
        std::map<int, uint32_t> found;
        for (const auto& [token, word] : racers) found[token] = word;
        EXPECT_EQ(found.size(), racers.size());
        size_t reach = 0;
        for (int i = 0; i < count; ++i) {
          const int token = args.first + i;
          const uint32_t word =
              sampling::word_of(sampling::draw_words(args.seed, uint32_t(token) / 4, args.output_index), token);
          EXPECT_TRUE(!found.contains(token) || found[token] == word) << kernels->name;
          EXPECT_TRUE(!found.contains(token) || z[size_t(i)] >= args.least) << kernels->name;
          if (z[size_t(i)] < args.least || sampling::exact_race(z[size_t(i)], word) < double(best)) continue;
          ++reach;
          EXPECT_TRUE(found.contains(token)) << kernels->name << " token " << token << " best " << best;
        }
        if (best > -3) {
          EXPECT_LE(racers.size(), 4 + 3 * reach) << kernels->name << " " << count << " " << best;
        }
      }
}

TEST(Sampler, GreedyTakesTheLargestAndOfEqualsTheLowestId) {
  Row row({1, 3, 2, 3, -1});
  row.params.temperature = 0;
  EXPECT_EQ(token_of(row), 1);
  row.params.temperature = 9e-6f;
  EXPECT_EQ(token_of(row), 1);
}

TEST(Sampler, TinyTemperaturesAreTheGreedyLimit) {
  for (float temperature : {1e-38f, 1e-7f, 1e-4f, 2e-5f}) {
    Row row(random_logits(4, 5000, 4));
    row.logits[1234] = 40;
    row.logits[77] = -3e38f;  // its distance to the maximum over the temperature is infinite
    row.params.temperature = temperature;
    row.num_logprobs = 2;
    CpuSampler sampler(best_cpu_kernels(), 5000);
    const auto out = sample(sampler, row);
    ASSERT_TRUE(out);
    EXPECT_EQ(out->token, 1234);
    EXPECT_TRUE(std::isfinite(out->logprobs->chosen.logprob));
  }
  Row row(random_logits(4, 5000, 1));
  row.params.top_p = 1e-6f;
  EXPECT_EQ(histogram(row, 50).size(), 1u);
}

TEST(Sampler, BrokenRowsAreNotSampled) {
  CpuSampler sampler(best_cpu_kernels(), 500);
  for (float bad : {NAN, -NAN, kInfinity}) {
    Row row(random_logits(4, 500, 1));
    row.logits[499] = bad;
    EXPECT_FALSE(sample(sampler, row));
    row.target = 3;
    EXPECT_FALSE(sample(sampler, row));
  }
}

TEST(Sampler, MinusInfinityIsProbabilityZero) {
  Row row(random_logits(4, 20, 0.1f));
  for (size_t i = 0; i < 20; ++i)
    if (i % 4 != 1) row.logits[i] = -kInfinity;
  row.num_logprobs = 6;
  for (const float top_p : {1.0f, 0.99f}) {
    row.params.top_p = top_p;
    std::set<TokenId> got;
    for (const auto& [id, count] : histogram(row, 500)) got.insert(id);
    EXPECT_EQ(got, (std::set<TokenId>{1, 5, 9, 13, 17}));
  }
  CpuSampler sampler(best_cpu_kernels(), 20);
  EXPECT_EQ(sample(sampler, row)->logprobs->top.back().logprob, -kInfinity);
  row.target = 5;
  EXPECT_TRUE(sample(sampler, row));
  row.target = 6;
  EXPECT_FALSE(sample(sampler, row));
}

TEST(Sampler, ARowWithoutTokensHasNoAnswer) {
  for (const float temperature : {0.0f, 1.0f})
    for (const float top_p : {1.0f, 0.9f}) {
      Row banned({1, 2, 3});
      banned.params = {.temperature = temperature, .top_p = top_p};
      banned.params.stop_token_ids = {0, 1, 2};
      CpuSampler sampler(best_cpu_kernels(), 3);
      EXPECT_TRUE(sample(sampler, banned));
      banned.params.min_tokens = 1;
      EXPECT_FALSE(sample(sampler, banned));
      banned.output_index = 1;
      EXPECT_TRUE(sample(sampler, banned));
      Row impossible({-kInfinity, -kInfinity, -kInfinity});
      impossible.params = {.temperature = temperature, .top_p = top_p};
      EXPECT_FALSE(sample(sampler, impossible));
    }
}

// Every setting, and all instruction sets alike.
TEST(Sampler, DrawsWhatTheDefinitionDraws) {
  const unsigned seed = drawn_seed();
  std::mt19937 rng(seed);
  for (const int vocab : {7, 1000, 4097, 49152})
    for (int i = 0; i < (vocab > 10000 ? 40 : 200); ++i) {
      const Row row = random_row(rng, vocab);
      const SamplingParams& p = row.params;
      for (const CpuKernels* kernels : all_kernels()) {
        CpuSampler sampler(*kernels, vocab);
        const auto out = sample(sampler, row);
        ASSERT_TRUE(out);
        const bool exact = p.logit_bias.empty() && p.repetition_penalty == 1 && p.min_tokens == 0;
        ASSERT_TRUE(right_token(z_by_definition(row), settings_of(row), out->token, exact))
            << kernels->name << ", seed " << seed << ", vocab " << vocab << ", row " << i << ", temperature "
            << p.temperature << ", top_k " << p.top_k << ", top_p " << p.top_p << ", min_p " << p.min_p;
      }
    }
}

TEST(Sampler, KnownDraws) {
  std::vector<TokenId> drawn;
  for (const Row& row : known_rows()) drawn.push_back(token_of(row));
  EXPECT_EQ(drawn, known_draws());
}

// Of a fixed seed they are near, of a drawn one not impossible: a right sampler is never refused.
void expect_likely(const std::vector<double>& z, double cut, const std::vector<int>& seen, unsigned seed) {
  const double excess = chi_square_excess(z, cut, seen);
  EXPECT_TRUE(!is_fixed(seed) || excess < 8) << excess;
  EXPECT_GT(chance_of(z, cut, seen), kNoChance);
}

// 40,000 draws, of fixed seeds and of a new one each time the test runs.
TEST(Sampler, DrawsFollowTheDistribution) {
  const unsigned drawn = drawn_seed();
  struct Case {
    float temperature;
    int top_k;
    float top_p, min_p;
    bool adjusted;
  };
  for (const Case& c : {Case{1, 0, 1, 0, false},
                        {0.5f, 0, 1, 0, false},
                        {3, 0, 1, 0, false},
                        {1.25f, 9, 0.9f, 0, false},
                        {1, 0, 0.8f, 0, true},
                        {0.8f, 5, 1, 0.1f, true},
                        {1.5f, 0, 1, 0, true}}) {
    Row row(random_logits(6, 17, 1.2f));
    row.params = {.temperature = c.temperature, .top_k = c.top_k, .top_p = c.top_p, .min_p = c.min_p};
    if (c.adjusted) {
      row.params.logit_bias = {{3, 1.0f}, {4, -2.0f}};
      row.params.repetition_penalty = 1.2f, row.params.frequency_penalty = 0.3f;
      row.tokens = {0, 1, 2, 2, 3}, row.num_prompt = 2;
    }
    const std::vector<double> z = z_by_definition(row);
    SCOPED_TRACE(testing::Message() << "temperature " << c.temperature << ", top_k " << c.top_k << ", top_p "
                                    << c.top_p << ", min_p " << c.min_p);
    for (const unsigned seed : {1u, 2u, drawn}) {
      row.params.seed = seed;
      std::vector<int> seen(row.logits.size());
      for (const auto& [token, count] : histogram(row, 40000)) seen.at(size_t(token)) = count;
      expect_likely(z, cut_of(z, settings_of(row), 0), seen, seed);
    }
  }
}

// Consecutive tokens of a sequence, and the choices of a request, whose seeds are neighbours: no correlation.
TEST(Sampler, DrawsOfNeighboursAreIndependent) {
  for (const unsigned seed : seeds(2))
    for (const bool by_seed : {false, true}) {
      SCOPED_TRACE(by_seed ? "by seed" : "by index");
      Row row({0.0f, 0.5f, 1.0f, -0.5f});
      std::vector<int> pairs[2] = {std::vector<int>(16), std::vector<int>(16)};  // each without a common draw
      std::vector<double> z;
      for (const float a : row.logits)
        for (const float b : row.logits) z.push_back(double(a) + double(b));
      for (int i = 0, last = 0; i <= 80000; ++i) {
        row.params.seed = seed + (by_seed ? uint64_t(i) : 0);
        row.output_index = by_seed ? 3 : i;
        const TokenId token = token_of(row);
        if (i > 0) ++pairs[i % 2][size_t(4 * last + token)];
        last = token;
      }
      for (const std::vector<int>& seen : pairs) expect_likely(z, -INFINITY, seen, seed);
    }
}

// Equal logits at the cut stand or fall together: with top_k = 2 and three equal seconds, all four can come.
TEST(Sampler, TiesAtACutAreKeptTogether) {
  Row row({0, 2, 1, 1, 0.5f, 1});
  row.params.top_k = 2;
  const auto by_count = histogram(row, 2000);
  ASSERT_EQ(by_count.size(), 4u);
  for (const TokenId id : {1, 2, 3, 5}) EXPECT_GT(by_count.at(id), 200) << id;
  row.params.top_k = 0, row.params.top_p = 0.6f;  // token 1 alone has 0.40, with one second 0.55
  EXPECT_EQ(histogram(row, 2000).size(), 4u);
  // All equal: whatever the cut, nobody is left out. More tokens than the first sorted part holds, too.
  Row flat(std::vector<float>(4000, 0.0f));
  flat.params.top_p = 0.5f, flat.params.top_k = 100;
  EXPECT_GT(histogram(flat, 20000).size(), 3900u);
}

// The cut lies far behind the first sorted part.
TEST(Sampler, TopPOfAFlatDistributionReachesFarDown) {
  std::vector<float> logits(4000);
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = -1e-6f * float(i);
  Row row(logits);
  row.params.top_p = 0.5f;
  const auto got = histogram(row, 30000);
  EXPECT_NEAR(got.rbegin()->first, 2000, 10);
  EXPECT_GT(got.size(), 1985u);
}

TEST(Sampler, SameSeedSameTokensWhateverRanBefore) {
  Row row(random_logits(8, 300, 1));
  row.params.seed = 42;
  CpuSampler busy(best_cpu_kernels(), 300);
  std::vector<TokenId> first, second, other;
  for (row.output_index = 0; row.output_index < 50; ++row.output_index) first.push_back(token_of(row));
  for (row.output_index = 0; row.output_index < 50; ++row.output_index) {
    Row noise(random_logits(uint32_t(row.output_index), 300, 2));
    noise.params.repetition_penalty = 1.5f;
    noise.tokens = {1, 2, 3, 3};
    sample(busy, noise);
    second.push_back(sample(busy, row)->token);
  }
  EXPECT_EQ(first, second);
  row.params.seed = 43;
  for (row.output_index = 0; row.output_index < 50; ++row.output_index) other.push_back(token_of(row));
  EXPECT_NE(first, other);
  for (uint64_t seed : {uint64_t(0), uint64_t(-1), uint64_t(1) << 63}) {
    row.params.seed = seed;
    row.output_index = 0;
    EXPECT_GE(token_of(row), 0);
  }
}

TEST(Sampler, PenaltiesCountPromptAndOutputAsTheyShould) {
  // Token 0: prompt only. 1: output twice. 2: both. 3: neither, and the rival.
  Row row({2.0f, 2.0f, 2.0f, 1.0f, -1.0f, -1.0f});
  row.tokens = {0, 2, 5, 1, 1, 2};
  row.num_prompt = 3;
  row.params.temperature = 0;
  EXPECT_EQ(token_of(row), 0);
  row.params.presence_penalty = 0.5f;  // 2, 1.5, 1.5, 1
  EXPECT_EQ(token_of(row), 0);
  row.params.repetition_penalty = 3;  // 0.67, 0.17, 0.17, 1
  EXPECT_EQ(token_of(row), 3);
  row.params = {};
  row.params.temperature = 0;
  row.params.frequency_penalty = 0.6f;
  row.logits = {0.0f, 2.0f, 1.5f, 0.85f, 0.0f, 0.0f};  // 0, 0.8, 0.9, 0.85: token 1 pays twice
  EXPECT_EQ(token_of(row), 2);
  row.params = {};
  row.params.temperature = 0;
  row.params.repetition_penalty = 2;  // negative logits are multiplied: -1 becomes -2 for token 5 only
  row.logits = {-9, -9, -9, -9, -1.5f, -1.0f};
  EXPECT_EQ(token_of(row), 4);
}

// Penalties whose quotients and products overflow. The largest logit must win a draw at any temperature,
// whatever filters follow, and a token that is impossible stays so.
TEST(Sampler, PenaltiesThatOverflowStillHaveALargestLogit) {
  for (const float penalty : {1e-40f, 1e-38f, 1e38f, 3e38f})
    for (const float temperature : {0.0f, 1e-30f, 1.0f, 2.0f})
      for (const float top_p : {1.0f, 0.9f}) {
        Row row({3, -2, 30, 5, -1});
        row.params.temperature = temperature, row.params.top_p = top_p, row.params.top_k = top_p < 1 ? 3 : 0;
        row.params.repetition_penalty = penalty;
        row.params.stop_token_ids = {3};
        row.params.min_tokens = 100;
        row.tokens = {0, 1, 3, 4};
        row.num_prompt = 4;
        EXPECT_EQ(token_of(row), penalty < 1 ? 0 : 2) << penalty << " " << temperature << " " << top_p;
      }
}

TEST(Sampler, PenaltiesOfOneRowDoNotReachTheNext) {
  CpuSampler sampler(best_cpu_kernels(), 6);
  Row heavy({5, 4, 3, 2, 1, 0});
  heavy.params.temperature = 0;
  heavy.params.frequency_penalty = 2;
  heavy.params.repetition_penalty = 2;
  heavy.tokens = {0, 1, 0, 0, 2};
  heavy.num_prompt = 2;
  Row plain({5, 4, 3, 2, 1, 0});
  plain.params.temperature = 0;
  plain.params.presence_penalty = 1e-3f;
  const TokenId alone = sample(sampler, plain)->token;
  const TokenId heavy_alone = sample(sampler, heavy)->token;
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(sample(sampler, plain)->token, alone);
    EXPECT_EQ(sample(sampler, heavy)->token, heavy_alone);
  }
}

TEST(Sampler, BiasIsAddedAndStopTokensWaitForMinTokens) {
  Row row({5, 4, 3, 2});
  row.params.temperature = 0;
  row.params.logit_bias = {{3, 10.0f}, {0, -100.0f}};
  EXPECT_EQ(token_of(row), 3);
  row.params.logit_bias = {{0, -100.0f}};
  row.params.stop_token_ids = {1, 2};
  row.params.min_tokens = 2;
  for (row.output_index = 0; row.output_index < 2; ++row.output_index) EXPECT_EQ(token_of(row), 3);
  EXPECT_EQ(token_of(row), 1);
  row.params.temperature = 1;
  row.output_index = 0;
  row.params.min_tokens = 1000;
  for (const auto& [id, count] : histogram(row, 900)) EXPECT_TRUE(id == 0 || id == 3) << id;
}

TEST(Sampler, LogprobsAreThoseOfTheRawLogits) {
  Row row(random_logits(12, 2000, 3));
  row.params.temperature = 0.3f;
  row.params.top_k = 1;
  row.params.logit_bias = {{55, 50.0f}};
  row.num_logprobs = 5;
  CpuSampler sampler(best_cpu_kernels(), 2000);
  const auto out = sample(sampler, row);
  ASSERT_EQ(out->token, 55);
  double sum = 0;
  for (float x : row.logits) sum += std::exp(double(x));
  EXPECT_NEAR(out->logprobs->chosen.logprob, double(row.logits[55]) - std::log(sum), 2e-5);
  std::vector<float> sorted = row.logits;
  std::sort(sorted.rbegin(), sorted.rend());
  ASSERT_EQ(out->logprobs->top.size(), 5u);
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_NEAR(out->logprobs->top[i].logprob, double(sorted[i]) - std::log(sum), 2e-5);
    EXPECT_EQ(row.logits[size_t(out->logprobs->top[i].token)], sorted[i]);
  }
  EXPECT_EQ(
      out->logprobs->rank,
      std::lower_bound(sorted.begin(), sorted.end(), row.logits[55], std::greater()) - sorted.begin() + 1);
  EXPECT_GT(out->logprobs->rank, 5);  // else this seed shows nothing
  row.num_logprobs = 0;
  EXPECT_TRUE(sample(sampler, row)->logprobs->top.empty());
  EXPECT_EQ(sample(sampler, row)->logprobs->rank, out->logprobs->rank);
  row.num_logprobs = 5000;  // more than there are tokens
  EXPECT_EQ(sample(sampler, row)->logprobs->top.size(), 2000u);
  row.num_logprobs = -1;
  EXPECT_FALSE(sample(sampler, row)->logprobs);
}

TEST(Sampler, ATargetRowReportsItsTokenAndSamplesNothing) {
  Row row(random_logits(13, 100, 2));
  row.target = 17;
  row.num_logprobs = 3;
  CpuSampler sampler(best_cpu_kernels(), 100);
  const auto out = sample(sampler, row);
  EXPECT_EQ(out->token, 17);
  EXPECT_EQ(out->logprobs->chosen.token, 17);
  EXPECT_EQ(out->logprobs->top.size(), 3u);
}

TEST(Sampler, EqualLogitsAreReportedInOrderOfTheirIds) {
  Row row({1, 2, 2, 2, 0});
  row.params.temperature = 0;
  row.num_logprobs = 3;
  CpuSampler sampler(best_cpu_kernels(), 5);
  const auto out = sample(sampler, row);
  EXPECT_EQ(out->logprobs->top[0].token, 1);
  EXPECT_EQ(out->logprobs->top[1].token, 2);
  EXPECT_EQ(out->logprobs->top[2].token, 3);
}

}  // namespace
}  // namespace ekv::test
