#include "backend/cpu/cpu_sampler.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

namespace ekv {
namespace {

constexpr float kGreedyBelow = 1e-5f;
constexpr float kImpossible = -std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max();

TokenId argmax(std::span<const float> logits) {  // ties: the lowest id
  return TokenId(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

}  // namespace

std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> c, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t(0xD2511F53u) * c[0], b = uint64_t(0xCD9E8D57u) * c[2];
    c = {uint32_t(b >> 32) ^ c[1] ^ key[0], uint32_t(b), uint32_t(a >> 32) ^ c[3] ^ key[1], uint32_t(a)};
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return c;
}

double uniform_draw(uint64_t seed, int64_t output_index) {
  const auto words = philox4x32({uint32_t(output_index), uint32_t(uint64_t(output_index) >> 32), 0, 0},
                                {uint32_t(seed), uint32_t(seed >> 32)});
  const uint64_t bits = (uint64_t(words[0]) << 32 | words[1]) >> 12;  // 52, so that adding a half is exact
  return (double(bits) + 0.5) * 0x1p-52;
}

CpuSampler::CpuSampler(const CpuKernels& kernels, int vocab)
    : kernels_(kernels),
      weights_(size_t(vocab)),
      order_(size_t(vocab)),
      prompt_count_(size_t(vocab)),
      output_count_(size_t(vocab)) {}

std::optional<SampledRow> CpuSampler::sample(const SampleRow& row, std::span<float> logits, TokenId last) {
  if (!all_finite(logits)) return std::nullopt;
  SampledRow out;
  if (row.target >= 0) {
    out.token = row.target;
    out.logprobs = report(row.target, std::max(0, row.num_logprobs), logits);
    return out;
  }
  const bool wanted = row.num_logprobs >= 0;
  if (wanted) raw_.assign(logits.begin(), logits.end());
  out.token = choose(row, logits, last);
  if (wanted) out.logprobs = report(out.token, row.num_logprobs, raw_);
  return out;
}

bool CpuSampler::all_finite(std::span<const float> logits) const {
  return std::isfinite(kernels_.max_abs(logits.data(), int(logits.size())));
}

// Natural logs of the softmax of the raw logits: what the model said, before bias, penalties and temperature.
TokenLogprobs CpuSampler::report(TokenId token, int num_top, std::span<const float> logits) {
  const float max = *std::max_element(logits.begin(), logits.end());
  const double log_sum = double(max) + std::log(kernels_.sum_exp(logits.data(), max, int(logits.size())));
  const auto logprob = [&](TokenId id) { return TokenLogprob{id, float(double(logits[id]) - log_sum)}; };
  const float own = logits[token];
  TokenLogprobs out{.chosen = logprob(token), .top = {}};
  out.rank =
      1 + int32_t(std::count_if(logits.begin(), logits.end(), [own](float other) { return other > own; }));
  const int count = std::min(num_top, int(logits.size()));
  if (count == 0) return out;
  std::iota(order_.begin(), order_.end(), 0);
  order_first(count, 0, logits);
  for (int i = 0; i < count; ++i) out.top.push_back(logprob(order_[i]));
  return out;
}

// Puts the `count` most likely ids in front of order_, sorted; the first `sorted` already are. Ties: lower id.
void CpuSampler::order_first(int count, int sorted, std::span<const float> logits) {
  const auto likelier = [&](TokenId a, TokenId b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  };
  if (count < int(order_.size())) {
    std::nth_element(order_.begin() + sorted, order_.begin() + count, order_.end(), likelier);
  }
  std::sort(order_.begin() + sorted, order_.begin() + count, likelier);
}

TokenId CpuSampler::choose(const SampleRow& row, std::span<float> logits, TokenId last) {
  adjust(row, logits);
  penalise(row, logits, last);
  const TokenId best = argmax(logits);
  if (row.params->temperature < kGreedyBelow) return best;
  // Subtracting the maximum first keeps every quotient at or below 0, however small the temperature.
  const float max = logits[best], factor = 1.0f / row.params->temperature;
  for (float& logit : logits) logit = (logit - max) * factor;
  return draw(*row.params, uniform_draw(row.params->seed, row.output_index), logits);
}

// Ids outside the vocabulary are refused where requests are read; here they name no logit.
void CpuSampler::adjust(const SampleRow& row, std::span<float> logits) {
  const auto known = [&](TokenId id) { return id >= 0 && size_t(id) < logits.size(); };
  for (const auto& [id, bias] : row.params->logit_bias) {
    if (known(id)) logits[id] += bias;
  }
  if (row.output_index >= row.params->min_tokens) return;
  for (TokenId id : row.params->stop_token_ids) {
    if (known(id)) logits[id] = kImpossible;
  }
}

void CpuSampler::penalise(const SampleRow& row, std::span<float> logits, TokenId last) {
  const SamplingParams& p = *row.params;
  if (p.repetition_penalty == 1 && p.presence_penalty == 0 && p.frequency_penalty == 0) return;
  const auto known = [&](TokenId id) { return is_pending(id) ? last : id; };
  for (size_t i = 0; i < row.tokens.size(); ++i) {
    ++(i < size_t(row.num_prompt) ? prompt_count_ : output_count_)[known(row.tokens[i])];
  }
  for (TokenId token : row.tokens) {
    const TokenId id = known(token);
    const int in_prompt = prompt_count_[id], in_output = output_count_[id];
    if (in_prompt + in_output == 0) continue;  // this id was met before: its counts are used up
    prompt_count_[id] = output_count_[id] = 0;
    float& logit = logits[id];
    if (logit == kImpossible) continue;
    logit = logit > 0 ? logit / p.repetition_penalty : logit * p.repetition_penalty;
    logit -= p.frequency_penalty * float(in_output);
    if (in_output > 0) logit -= p.presence_penalty;
    logit = std::clamp(logit, -kLargest, kLargest);  // two infinite logits have no order
  }
}

// The first candidate, in their fixed order, whose cumulated weight exceeds u times the total.
TokenId CpuSampler::draw(const SamplingParams& params, double u, std::span<float> logits) {
  const int vocab = int(logits.size());
  kernels_.exp_all(logits.data(), 0.0f, weights_.data(), vocab);
  const Candidates kept = keep_likely(params, logits);
  const int count = kept.ids.empty() ? vocab : int(kept.ids.size());
  double left = u * kept.total;
  TokenId last = -1;
  for (int i = 0; i < count; ++i) {
    const TokenId id = kept.ids.empty() ? i : kept.ids[i];
    const double weight = double(weights_[id]);
    if (weight == 0) continue;
    last = id;
    left -= weight;
    if (left < 0) break;
  }
  return last;
}

// min_p, then top_k, then top_p of what is left. The most likely token, whose weight is 1, always stays.
CpuSampler::Candidates CpuSampler::keep_likely(const SamplingParams& params, std::span<const float> logits) {
  const int vocab = int(logits.size());
  const int k = params.top_k > 0 ? std::min(params.top_k, vocab) : vocab;
  double total = std::accumulate(weights_.begin(), weights_.end(), 0.0);
  if (k == vocab && params.top_p >= 1 && params.min_p <= 0) return {{}, total};

  std::iota(order_.begin(), order_.end(), 0);
  if (k < vocab) order_first(k, 0, logits);
  total = 0;
  for (int i = 0; i < k; ++i) {
    const float weight = weights_[order_[i]];
    if (weight >= params.min_p) total += double(weight);
  }
  // Few tokens hold most of the probability: sort a front part and double it only when that was not enough.
  int kept = 0, sorted = k < vocab ? k : 0;
  double mass = 0;
  while (kept < k) {
    if (kept == sorted) {
      const int more = std::min(k, std::max(256, 2 * sorted));
      order_first(more, sorted, logits);
      sorted = more;
    }
    const float weight = weights_[order_[kept]];
    if (kept > 0 && (mass >= double(params.top_p) * total || weight < params.min_p)) break;
    mass += double(weight);
    ++kept;
  }
  return {std::span<const TokenId>(order_).first(size_t(kept)), mass};
}

}  // namespace ekv
