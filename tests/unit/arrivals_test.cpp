#include "bench/arrivals.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>

#include "tests/support/temp_dir.h"

namespace ekv {
namespace {

std::vector<TokenId> small_pool() { return {3, 5, 7, 11, 13, 17, 19, 23}; }

std::vector<BenchPrompt> prompts_of(const DatasetOptions& options) {
  Result<std::vector<BenchPrompt>> prompts = make_prompts(options, small_pool());
  EXPECT_TRUE(bool(prompts)) << (prompts ? "" : prompts.error().message);
  return prompts ? *std::move(prompts) : std::vector<BenchPrompt>();
}

// The distribution functions of Gamma with mean 1 for shapes where they are elementary.
double gamma_cdf(double shape, double x) {
  const double y = x * shape;
  if (shape == 0.5) return std::erf(std::sqrt(y));
  if (shape == 1) return 1 - std::exp(-y);
  return 1 - std::exp(-y) * (1 + y);  // shape 2
}

class ArrivalGaps : public ::testing::TestWithParam<double> {};

// Kolmogorov-Smirnov: with the seed fixed the outcome is too; 1.63 / sqrt(n) is the 1 % bound.
TEST_P(ArrivalGaps, AreGammaWithTheAskedShapeAndRate) {
  const double shape = GetParam(), rate = 8;
  const int n = 20'000;
  const auto prompts = prompts_of(
      {.num_prompts = n, .input_len = 1, .output_len = 1, .rate = rate, .burstiness = shape, .seed = 42});
  ASSERT_EQ(prompts.size(), size_t(n));
  EXPECT_EQ(prompts.back().arrival_us, std::llround(n / rate * 1e6)) << "the last arrival is at n / rate";
  std::vector<double> gaps;
  int64_t last_us = 0;
  for (const BenchPrompt& prompt : prompts) {
    ASSERT_GE(prompt.arrival_us, last_us);
    gaps.push_back(double(prompt.arrival_us - last_us) * rate / 1e6);
    last_us = prompt.arrival_us;
  }
  std::sort(gaps.begin(), gaps.end());
  double distance = 0;
  for (size_t i = 0; i < gaps.size(); ++i) {
    const double expected = gamma_cdf(shape, gaps[i]);
    distance = std::max({distance, std::abs(expected - double(i) / n), std::abs(expected - double(i + 1) / n)});
  }
  EXPECT_LT(distance, 1.63 / std::sqrt(n));
}
INSTANTIATE_TEST_SUITE_P(Shapes, ArrivalGaps, ::testing::Values(0.5, 1.0, 2.0));

TEST(Arrivals, AnInfiniteBurstinessGivesEqualGaps) {
  const auto prompts = prompts_of({.num_prompts = 4, .rate = 2, .burstiness = INFINITY});
  std::vector<int64_t> times;
  for (const BenchPrompt& prompt : prompts) times.push_back(prompt.arrival_us);
  EXPECT_EQ(times, (std::vector<int64_t>{500'000, 1'000'000, 1'500'000, 2'000'000}));
}

TEST(Arrivals, AnInfiniteRateSendsEverythingAtOnce) {
  for (const BenchPrompt& prompt : prompts_of({.num_prompts = 10})) EXPECT_EQ(prompt.arrival_us, 0);
}

TEST(Prompts, RandomLengthsFillTheirRangeAndTokensComeFromThePool) {
  const auto prompts =
      prompts_of({.num_prompts = 4000, .input_len = 100, .output_len = 40, .range_ratio = 0.25});
  const std::vector<TokenId> pool = small_pool();
  double sum = 0;
  size_t least = 1000, most = 0;
  for (const BenchPrompt& prompt : prompts) {
    least = std::min(least, prompt.tokens.size());
    most = std::max(most, prompt.tokens.size());
    sum += double(prompt.tokens.size());
    EXPECT_GE(prompt.output_tokens, 30);
    EXPECT_LE(prompt.output_tokens, 50);
    for (const TokenId token : prompt.tokens) ASSERT_EQ(std::count(pool.begin(), pool.end(), token), 1);
  }
  EXPECT_EQ(least, 75u);
  EXPECT_EQ(most, 125u);
  EXPECT_NEAR(sum / 4000, 100, 4 * 14.7 / std::sqrt(4000.0)) << "four standard errors of the even distribution";
}

TEST(Prompts, DependOnTheSeedOnly) {
  const DatasetOptions options{.num_prompts = 5, .input_len = 50, .rate = 3, .seed = 1};
  const auto first = prompts_of(options), again = prompts_of(options);
  DatasetOptions other = options;
  other.seed = 2;
  const auto different = prompts_of(other);
  for (size_t i = 0; i < first.size(); ++i) {
    EXPECT_EQ(first[i].tokens, again[i].tokens);
    EXPECT_EQ(first[i].arrival_us, again[i].arrival_us);
    EXPECT_NE(first[i].tokens, different[i].tokens);
  }
  EXPECT_NE(first[0].tokens, first[1].tokens) << "prompts share nothing";
}

class DatasetFile : public ::testing::Test {
 protected:
  std::string write(const std::string& text) {
    const std::string path = folder_.file("prompts");
    std::ofstream(path) << text;
    return path;
  }

 private:
  const test::TempDir folder_;
};

TEST_F(DatasetFile, CustomPromptsKeepTheirOrderAndLengths) {
  const auto prompts =
      prompts_of({.name = "custom",
                  .path = write("{\"prompt\":\"one\",\"output_tokens\":7}\n\n{\"prompt\":\"two\"}\n"),
                  .custom_output_len = 9});
  ASSERT_EQ(prompts.size(), 2u);
  EXPECT_EQ(prompts[0].text, "one");
  EXPECT_EQ(prompts[0].output_tokens, 7);
  EXPECT_EQ(prompts[1].text, "two");
  EXPECT_EQ(prompts[1].output_tokens, 9);
}

TEST_F(DatasetFile, ABrokenLineIsNamed) {
  for (const char* line :
       {"{\"prompt\":1}", "[]", "{}", "{\"prompt\":\"x\",\"output_tokens\":0}", "not JSON"}) {
    const auto prompts =
        make_prompts({.name = "custom", .path = write("{\"prompt\":\"ok\"}\n" + std::string(line))}, {});
    ASSERT_FALSE(bool(prompts)) << line;
    EXPECT_NE(prompts.error().message.find(":2: "), std::string::npos) << prompts.error().message;
  }
}

TEST_F(DatasetFile, LengthsAreASampleOfTheRows) {
  const auto prompts =
      prompts_of({.name = "lengths", .path = write("10,20\n11,21\n12,22\n"), .num_prompts = 3});
  ASSERT_EQ(prompts.size(), 3u);
  std::vector<size_t> inputs;
  for (const BenchPrompt& prompt : prompts) {
    inputs.push_back(prompt.tokens.size());
    EXPECT_EQ(prompt.output_tokens, int(prompt.tokens.size()) + 10);
  }
  std::sort(inputs.begin(), inputs.end());
  EXPECT_EQ(inputs, (std::vector<size_t>{10, 11, 12}));
}

TEST(Prompts, WhatMakesNoSenseIsRefusedByItsFlag) {
  EXPECT_EQ(make_prompts({.name = "custom"}, small_pool()).error().param, "dataset-path");
  EXPECT_EQ(make_prompts({.name = "sonnet", .path = "x"}, small_pool()).error().param, "dataset-name");
  EXPECT_EQ(make_prompts({.rate = 0}, small_pool()).error().param, "request-rate");
  EXPECT_EQ(make_prompts({}, {}).error().param, "tokenizer");
}

TEST(Bodies, CompletionsCarryTokenIdsAndExactLengths) {
  const BenchPrompt prompt{.arrival_us = 5, .tokens = {1, 2, 3}, .text = {}, .output_tokens = 4};
  const auto request =
      make_request(prompt, {.model = "m", .ignore_eos = true, .extra = {{"top_p", 0.5}}, .decode = {}});
  ASSERT_TRUE(bool(request));
  EXPECT_EQ(request->arrival_us, 5);
  EXPECT_EQ(request->input_tokens, 3);
  EXPECT_EQ(*parse_json(request->body),
            *parse_json(R"({"model":"m","prompt":[1,2,3],"max_tokens":4,"stream":true,
      "stream_options":{"include_usage":true},"ignore_eos":true,"top_p":0.5})"));
}

TEST(Bodies, ChatsCarryTheText) {
  const BenchPrompt prompt{.tokens = {1, 2}, .text = {}, .output_tokens = 4};
  const auto request = make_request(prompt, {.chat = true, .model = "m", .decode = [](const auto& ids) {
                                               return Result<std::string>(std::string(ids.size(), 'x'));
                                             }});
  ASSERT_TRUE(bool(request));
  EXPECT_EQ(*parse_json(request->body),
            *parse_json(R"({"model":"m","messages":[{"role":"user","content":"xx"}],"max_completion_tokens":4,
      "stream":true,"stream_options":{"include_usage":true}})"));
}

}  // namespace
}  // namespace ekv
