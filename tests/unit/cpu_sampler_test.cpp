// The sampler against definitions: published vectors of the generator, the order of the rules, distributions.

#include "backend/cpu/cpu_sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <set>

namespace ekv::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Row {
  explicit Row(std::vector<float> logits) : logits(std::move(logits)) {}
  std::vector<float> logits;
  SamplingParams params;
  std::vector<TokenId> tokens;
  int num_prompt = 0, output_index = 0, num_logprobs = -1;
  TokenId target = -1;
};

std::optional<SampledRow> sample(CpuSampler& sampler, const Row& row) {
  SampleRow request;
  request.target = row.target;
  request.output_index = row.output_index;
  request.num_logprobs = row.num_logprobs;
  request.params = &row.params;
  request.tokens = row.tokens;
  request.num_prompt = row.num_prompt;
  std::vector<float> logits = row.logits;
  return sampler.sample(request, logits);
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

std::vector<float> random_logits(uint32_t seed, int n, float sigma) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> draw(0, sigma);
  std::vector<float> out(static_cast<size_t>(n));
  for (float& x : out) x = draw(rng);
  return out;
}

// Known answers of philox4x32-10 from the authors' Random123 distribution (kat_vectors).
TEST(Philox, KnownAnswers) {
  using Words = std::array<uint32_t, 4>;
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  const uint32_t f = 0xffffffff;
  EXPECT_EQ(philox4x32({f, f, f, f}, {f, f}), (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(UniformDraw, LiesInsideTheOpenIntervalAndIsSpreadEvenly) {
  double sum = 0;
  std::array<int, 10> tenth{};
  constexpr int kDraws = 100000;
  for (int i = 0; i < kDraws; ++i) {
    const double u = uniform_draw(uint64_t(i % 7) << 40, i);
    ASSERT_GT(u, 0);
    ASSERT_LT(u, 1);
    sum += u;
    ++tenth[size_t(u * 10)];
  }
  EXPECT_NEAR(sum / kDraws, 0.5, 5 / std::sqrt(12.0 * kDraws));
  for (int count : tenth) EXPECT_NEAR(count, kDraws / 10, 5 * std::sqrt(kDraws * 0.09));
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

TEST(Sampler, NotFiniteLogitsAreNotSampled) {
  for (float bad : {NAN, kInfinity, -kInfinity}) {
    Row row(random_logits(4, 500, 1));
    row.logits[499] = bad;
    CpuSampler sampler(best_cpu_kernels(), 500);
    EXPECT_FALSE(sample(sampler, row));
    row.target = 3;
    EXPECT_FALSE(sample(sampler, row));
  }
}

TEST(Sampler, FrequenciesFollowTheSoftmaxAtEveryTemperature) {
  for (float temperature : {0.5f, 1.0f, 3.0f}) {
    Row row(random_logits(6, 12, 1.5f));
    row.params.temperature = temperature;
    row.params.seed = 99;
    constexpr int kDraws = 40000;
    const auto counts = histogram(row, kDraws);
    double sum = 0;
    for (float x : row.logits) sum += std::exp(double(x) / double(temperature));
    for (int id = 0; id < 12; ++id) {
      const double p = std::exp(double(row.logits[size_t(id)]) / double(temperature)) / sum;
      const auto found = counts.find(id);
      EXPECT_NEAR(found == counts.end() ? 0 : found->second, p * kDraws,
                  5 * std::sqrt(kDraws * p * (1 - p)) + 1);
    }
  }
}

// The set that a rule keeps, by its definition over a full sort.
std::set<TokenId> kept_by_definition(const Row& row) {
  const int n = int(row.logits.size());
  std::vector<TokenId> order(static_cast<size_t>(n));
  for (int i = 0; i < n; ++i) order[size_t(i)] = i;
  const auto& l = row.logits;
  std::stable_sort(order.begin(), order.end(),
                   [&](TokenId a, TokenId b) { return l[size_t(a)] > l[size_t(b)]; });
  const TokenId top = order[0];
  const auto weight = [&](TokenId id) {
    return std::exp(double(l[size_t(id)] - l[size_t(top)]) / double(row.params.temperature));
  };
  std::erase_if(order, [&](TokenId id) { return weight(id) < double(row.params.min_p); });
  if (row.params.top_k > 0) order.resize(std::min(order.size(), size_t(row.params.top_k)));
  double total = 0, mass = 0;
  for (TokenId id : order) total += weight(id);
  std::set<TokenId> kept;
  for (TokenId id : order) {
    if (!kept.empty() && mass >= double(row.params.top_p) * total) break;
    mass += weight(id);
    kept.insert(id);
  }
  return kept;
}

TEST(Sampler, TopKTopPMinPKeepWhatTheirDefinitionsKeep) {
  struct Case {
    int top_k;
    float top_p, min_p;
  };
  for (const Case& c : {Case{1, 1, 0},
                        {3, 1, 0},
                        {0, 0.5f, 0},
                        {0, 0.9f, 0},
                        {0, 1, 0.2f},
                        {5, 0.7f, 0},
                        {8, 1, 0.3f},
                        {0, 0.8f, 0.25f},
                        {1000, 1, 0},
                        {20, 1e-6f, 0},
                        {6, 0.9f, 1}}) {
    Row row(random_logits(7, 30, 1));
    row.params.top_k = c.top_k;
    row.params.top_p = c.top_p;
    row.params.min_p = c.min_p;
    row.params.temperature = 1.3f;
    const std::set<TokenId> want = kept_by_definition(row);
    std::set<TokenId> got;
    for (const auto& [id, count] : histogram(row, 20000)) got.insert(id);
    EXPECT_EQ(got, want) << "top_k " << c.top_k << ", top_p " << c.top_p << ", min_p " << c.min_p;
  }
}

// More tokens than the first sorted part holds: a flat distribution over a large vocabulary.
TEST(Sampler, TopPOfAFlatDistributionReachesFarDown) {
  Row row(std::vector<float>(4000, 0.0f));
  row.params.top_p = 0.5f;
  std::set<TokenId> got;
  for (const auto& [id, count] : histogram(row, 30000)) got.insert(id);
  EXPECT_EQ(*got.rbegin(), 1999);  // equal logits: the lower ids come first
  EXPECT_GT(got.size(), 1990u);
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

// PAR-9's neighbour: penalties whose quotients and products overflow. The largest logit must win a draw at any
// temperature, whatever filters follow, and a token that is impossible stays so.
TEST(Sampler, PenaltiesThatOverflowStillHaveALargestLogit) {
  for (const float penalty : {1e-40f, 1e-38f, 1e38f, 3e38f})
    for (const float temperature : {0.0f, 1e-30f, 1.0f, 2.0f})
      for (const float top_p : {1.0f, 0.9f}) {
        Row row({3, -2, 1, 5, -1});
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
