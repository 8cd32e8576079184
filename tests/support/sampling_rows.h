#pragma once
// sampling_rows.h -- rows of logits as a backend's sampler gets them, their z by definition, and random ones
// with every setting.

#include <initializer_list>
#include <limits>
#include <random>
#include <set>
#include <vector>

#include "elastickv/backend.h"
#include "tests/support/sampling_definition.h"

namespace ekv::test {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Row {
  explicit Row(std::vector<float> logits) : logits(std::move(logits)) {}
  std::vector<float> logits;
  SamplingParams params;
  std::vector<TokenId> tokens;
  int num_prompt = 0, output_index = 0, num_logprobs = -1;
  TokenId target = -1;

  // Points to this row.
  SampleRow request() const {
    return {.target = target,
            .output_index = output_index,
            .num_logprobs = num_logprobs,
            .params = &params,
            .tokens = tokens,
            .num_prompt = num_prompt};
  }
};

inline std::vector<float> random_logits(uint32_t seed, int n, float sigma) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> draw(0, sigma);
  std::vector<float> out(static_cast<size_t>(n));
  for (float& x : out) x = draw(rng);
  return out;
}

// What the rule needs to know of a row.
inline RowSampling settings_of(const Row& row) {
  const SamplingParams& p = row.params;
  return {.seed = p.seed,
          .output_index = uint32_t(row.output_index),
          .temperature = p.temperature,
          .top_p = p.top_p,
          .min_p = p.min_p,
          .top_k = p.top_k,
          .repetition = p.repetition_penalty,
          .presence = p.presence_penalty,
          .frequency = p.frequency_penalty};
}

inline std::vector<double> z_by_definition(const Row& row) {
  const SamplingParams& p = row.params;
  std::vector<double> z(row.logits.begin(), row.logits.end());
  for (const auto& [token, bias] : p.logit_bias) z[size_t(token)] += bias;
  if (row.output_index < p.min_tokens)
    for (const TokenId token : p.stop_token_ids) z[size_t(token)] = -INFINITY;
  const auto prompt_end = row.tokens.begin() + row.num_prompt;
  for (const TokenId token : std::set<TokenId>(row.tokens.begin(), row.tokens.end())) {
    const auto generated = std::count(prompt_end, row.tokens.end(), token);
    const bool in_prompt = std::count(row.tokens.begin(), prompt_end, token) > 0;
    z[size_t(token)] = penalised_by_definition(z[size_t(token)], int(generated), in_prompt, settings_of(row));
  }
  if (p.temperature >= 1e-5f)
    for (double& x : z) x /= double(p.temperature);
  return z;
}

inline SamplingParams random_params(std::mt19937& rng, int vocab) {
  const auto any = [&](auto values) { return values.begin()[rng() % values.size()]; };
  SamplingParams p;
  p.seed = uint64_t(rng()) << 32 | rng();
  p.temperature = any(std::initializer_list<float>{1, 0.7f, 0.1f, 2, 1.3f, 0.01f, 0});
  p.top_k = any(std::initializer_list<int>{0, 0, 1, 2, 40, 1000, 5000, 1 << 30});
  p.top_p = any(std::initializer_list<float>{1, 1, 0.95f, 0.5f, 0.01f, 1e-6f, 0.9999f});
  p.min_p = any(std::initializer_list<float>{0, 0, 0, 0.05f, 0.9f, 1, 1e-7f});
  if (rng() % 3 == 0) p.repetition_penalty = 1.3f, p.presence_penalty = 0.4f, p.frequency_penalty = -0.2f;
  for (int n = rng() % 3 ? 0 : 20; n > 0; --n)
    p.logit_bias.emplace_back(TokenId(rng() % unsigned(vocab)), float(rng() % 200) / 10 - 10);
  if (rng() % 4 == 0) p.stop_token_ids = {0, TokenId(vocab / 2)}, p.min_tokens = 500;
  return p;
}

inline Row random_row(std::mt19937& rng, int vocab) {
  Row row(random_logits(rng(), vocab, rng() % 2 ? 2.0f : 0.5f));
  for (int i = rng() % 2 ? 30 : 0; i > 0; --i)  // a few likely tokens far above a broad crowd, as models do
    row.logits[rng() % unsigned(vocab)] += float(rng() % 1000) / 60;
  if (rng() % 4 == 0) row.logits[rng() % unsigned(vocab)] = -kInfinity;
  if (rng() % 4 == 0)  // 8 bits: full of ties
    for (float& x : row.logits) x = std::round(x * 4) / 4;
  row.params = random_params(rng, vocab);
  row.output_index = int(rng() % 1000);
  for (int i = 0; i < 60; ++i) row.tokens.push_back(TokenId(rng() % unsigned(std::min(vocab, 40))));
  row.num_prompt = 25;
  return row;
}

// Fixed rows and what they draw: a change of the rule, which changes the answer of every seed, does not go
// unnoticed on any backend.
inline std::vector<Row> known_rows() {
  std::vector<Row> rows;
  for (int i = 0; i < 16; ++i) {
    Row& row = rows.emplace_back(std::vector<float>(32));
    for (size_t t = 0; t < 32; ++t) row.logits[t] = float(t * 7 % 32) / 8;
    row.params.seed = 42;
    row.output_index = i;
  }
  return rows;
}
inline std::vector<TokenId> known_draws() { return {22, 9, 7, 27, 31, 17, 17, 12, 9, 31, 9, 26, 17, 21, 4, 1}; }

}  // namespace ekv::test
