// The CPU backend against Hugging Face transformers in float32 on the same weights (tests/data/golden, written
// by scripts/make_goldens.py). What remains between the two: KV as fp16 on the fixed8 grid (2^-12 of a vector's
// largest element and less) and the order of fp32 sums.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <filesystem>

#include "elastickv/backend.h"
#include "elastickv/model.h"
#include "support/backend_driver.h"
#include "util/files.h"
#include "util/json.h"

namespace ekv::test {
namespace {

struct Served {
  std::unique_ptr<Model> model;
  std::unique_ptr<Backend> backend;
  std::vector<int32_t> free_pages;
};

Served serve(const std::filesystem::path& folder, int pages) {
  Served out;
  Result<ModelConfig> config = load_model_config(folder);
  EXPECT_TRUE(config) << config.error().message;
  Result<Model> model = Model::load(folder, *config);
  EXPECT_TRUE(model) << model.error().message;
  out.model = std::make_unique<Model>(std::move(*model));
  EngineConfig engine;
  engine.kv.num_pages = pages;
  auto backend = make_cpu_backend(*out.model, engine, {});
  EXPECT_TRUE(backend) << backend.error().message;
  out.backend = std::move(*backend);
  out.free_pages = all_pages(pages);
  return out;
}

Json golden(const std::string& name) {
  Result<std::string> text = read_file(std::filesystem::path(EKV_TEST_DATA) / "golden" / (name + ".json"));
  EXPECT_TRUE(text) << text.error().message;
  Result<Json> json = parse_json(*text);
  EXPECT_TRUE(json) << json.error().message;
  return std::move(*json);
}

std::vector<double> log_softmax(const std::vector<double>& logits) {
  const double max = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (double x : logits) sum += std::exp(x - max);
  std::vector<double> out;
  for (double x : logits) out.push_back(x - max - std::log(sum));
  return out;
}

// Prefills in chunks of `chunk` tokens, then decodes greedily; logprobs of `wanted` positions go to `logprobs`.
std::vector<TokenId> generate(Served& served, const std::vector<TokenId>& prompt, int count, int chunk) {
  DrivenSequence s = driven(prompt);
  while (int(s.tokens.size()) < int(prompt.size()) + count) {
    DrivenStep step(served.free_pages);
    const int left = int(s.tokens.size()) - s.num_computed;
    step.add(s, std::min(chunk, left));
    const StepOutput& out = step.run(*served.backend);
    EXPECT_TRUE(out.invalid_chunks.empty());
    for (const SampledRow& row : out.rows) s.tokens.push_back(row.token);
  }
  give_back(s, served.free_pages);
  return {s.tokens.begin() + long(prompt.size()), s.tokens.end()};
}

// A continuation may leave the reference only where its best two logits were closer than `error`.
void expect_greedy(const std::vector<TokenId>& got, const Json& record, double error, const std::string& what) {
  const auto want = record["greedy"].get<std::vector<TokenId>>();
  const auto gaps = record["gaps"].get<std::vector<double>>();
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) {
    if (got[i] == want[i]) continue;
    EXPECT_LT(gaps[i], error) << what << ": token " << i << " is " << got[i] << ", the reference has "
                              << want[i];
    return;  // later tokens follow another text
  }
}

class TinyModel : public testing::TestWithParam<const char*> {};

// fixed8 keeps at least 11 bits of a vector's largest element, 2^-12 relative; two layers and logits of size 5
// make that a few 1e-3. Measured: see the printed maximum.
constexpr double kTinyLogprobError = 4e-3;

TEST_P(TinyModel, LogitsAndContinuationsAgree) {
  Served served = serve(std::filesystem::path(EKV_TEST_DATA) / "golden" / GetParam(), 40);
  const Json data = golden(GetParam());
  double worst = 0;
  for (const Json& record : data["prompts"]) {
    const auto ids = record["ids"].get<std::vector<TokenId>>();
    DrivenSequence s = driven(ids);
    DrivenStep step(served.free_pages);
    step.add(s, int(ids.size()));
    for (int position : record["positions"]) step.want_target(s, position, 0, served.model->config().vocab);
    const StepOutput& out = step.run(*served.backend);
    ASSERT_TRUE(out.invalid_chunks.empty());
    for (size_t i = 0; i < record["positions"].size(); ++i) {
      const auto want = log_softmax(record["logits"][i].get<std::vector<double>>());
      const TokenLogprobs& got = *out.rows[i + 1].logprobs;
      ASSERT_EQ(got.top.size(), want.size());
      for (const TokenLogprob& t : got.top) {
        worst = std::max(worst, std::fabs(double(t.logprob) - want[size_t(t.token)]));
      }
    }
    give_back(s, served.free_pages);
    for (int chunk : {1000, 7}) {
      expect_greedy(generate(served, ids, int(record["greedy"].size()), chunk), record, 2 * kTinyLogprobError,
                    std::string(GetParam()) + ", prompt of " + std::to_string(ids.size()));
    }
  }
  std::printf("%s: largest logprob difference over all tokens %.2e\n", GetParam(), worst);
  EXPECT_LT(worst, kTinyLogprobError);
}

INSTANTIATE_TEST_SUITE_P(Architectures, TinyModel,
                         testing::Values("tiny-llama", "tiny-mistral", "tiny-qwen2", "tiny-qwen3"));

}  // namespace
}  // namespace ekv::test
