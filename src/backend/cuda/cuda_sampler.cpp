#include "backend/cuda/cuda_sampler.h"

#include <algorithm>
#include <limits>

namespace ekv {
namespace {

static_assert(kMaxTopLogprobs == kMaxCudaLogprobs);
constexpr float kImpossible = -std::numeric_limits<float>::infinity();
// A row that only reports the logprobs of a given token is a greedy row with this bias on the token: larger
// than any finite logit of a model that is not broken, and reported logprobs are of the logits before biases.
constexpr float kCertain = 1e30f;

}  // namespace

CudaSampler::CudaSampler(const CudaSizes& sizes, int vocab, const int32_t* previous)
    : vocab_(vocab),
      stride_(sizes.logit_stride),
      previous_(previous),
      workspace_(sampling_workspace_bytes(sizes.logit_rows, vocab)),
      counts_(sizes, vocab, previous) {}

void CudaSampler::pack(std::span<const SampleRow> rows, StepMemory& step, StepMemory& results,
                       SampleResults& answers, const Stream& stream) {
  params_ = step.take<RowSampling>(rows.size());
  size_t biases = 0;
  for (const SampleRow& row : rows)
    biases += row.target >= 0 ? 1 : row.params->logit_bias.size() + row.params->stop_token_ids.size();
  bias_tokens_ = step.take<int32_t>(biases);
  bias_values_ = step.take<float>(bias_tokens_.size);
  num_biases_ = 0, any_truncates_ = false, any_top_ = false;
  answers.rows.clear();
  counts_.begin_step();
  for (size_t i = 0; i < rows.size(); ++i) {
    RowSampling& row = params_.host[i] = settings(rows[i], stream);
    answers.rows.push_back({rows[i].target, row.num_top});
    any_truncates_ |= row.truncates();
    any_top_ |= row.num_top > 0;
  }
  counts_.finish_step(stream);
  pack_results(rows.size(), results, answers);
}

void CudaSampler::pack_results(size_t rows, StepMemory& results, SampleResults& answers) const {
  answers.tokens = results.take<int32_t>(rows);
  EKV_CHECK(answers.tokens.device == previous_, "the tokens of every step lie at one place");
  answers.status = results.take<SampleStatus>(rows);
  answers.logprobs = results.take<float>(rows);
  const size_t tops = any_top_ ? rows * kMaxTopLogprobs : 0;
  answers.top_tokens = results.take<int32_t>(tops);
  answers.top_logprobs = results.take<float>(tops);
}

RowSampling CudaSampler::settings(const SampleRow& row, const Stream& stream) {
  const SamplingParams& p = *row.params;
  EKV_CHECK(row.num_logprobs <= kMaxTopLogprobs, "requests for more alternatives are refused before");
  RowSampling s{.seed = p.seed, .output_index = uint32_t(row.output_index)};
  s.bias_begin = int32_t(num_biases_);
  if (row.target >= 0) {
    s.temperature = 0, s.num_top = std::max(0, row.num_logprobs);
    add_bias(row.target, kCertain);
    s.bias_end = int32_t(num_biases_);
    return s;
  }
  s.temperature = p.temperature, s.top_p = p.top_p, s.min_p = p.min_p, s.top_k = p.top_k;
  s.num_top = row.num_logprobs;
  for (const auto& [token, value] : p.logit_bias) add_bias(token, value);
  if (row.output_index < p.min_tokens)
    for (const TokenId token : p.stop_token_ids) add_bias(token, kImpossible);
  s.bias_end = int32_t(num_biases_);
  if (!p.has_penalties()) return s;
  s.repetition = p.repetition_penalty, s.presence = p.presence_penalty, s.frequency = p.frequency_penalty;
  s.count_slot = counts_.slot_of(row, stream);
  return s;
}

// Ids outside the vocabulary name no logit.
void CudaSampler::add_bias(TokenId token, float value) {
  if (token < 0 || token >= vocab_) return;
  bias_tokens_.host[num_biases_] = token;
  bias_values_.host[num_biases_++] = value;
}

void CudaSampler::sample(const float* logits, int first, int count, const SampleResults& answers,
                         const Stream& stream) {
  SampleArgs args{.logits = logits,
                  .num_rows = count,
                  .vocab = vocab_,
                  .row_stride = stride_,
                  .params = params_.device + first,
                  .bias_tokens = bias_tokens_.device,
                  .bias_values = bias_values_.device,
                  .counts = counts_.counts(),
                  .any_truncates = any_truncates_,
                  .any_top = any_top_,
                  .workspace = workspace_.data(),
                  .tokens = answers.tokens.device + first,
                  .status = answers.status.device + first,
                  .logprobs = answers.logprobs.device + first};
  if (any_top_) {
    args.top_tokens = answers.top_tokens.device + size_t(first) * kMaxTopLogprobs;
    args.top_logprobs = answers.top_logprobs.device + size_t(first) * kMaxTopLogprobs;
  }
  launch_sample(args, stream.get());
}

void CudaSampler::read(const SampleResults& answers, std::vector<SampledRow>& out,
                       std::vector<int>& failed) const {
  out.resize(answers.rows.size());
  for (size_t i = 0; i < answers.rows.size(); ++i) {
    const SampleResults::Row& asked = answers.rows[i];
    const bool ok = answers.status.host[i] == SampleStatus::ok &&
                    (asked.target < 0 || answers.tokens.host[i] == asked.target);
    out[i] = ok ? read_row(answers, i) : SampledRow{};
    if (!ok) failed.push_back(int(i));
  }
}

SampledRow CudaSampler::read_row(const SampleResults& answers, size_t index) const {
  SampledRow out{.token = answers.tokens.host[index]};
  const int num_top = answers.rows[index].num_top;
  if (num_top < 0) return out;
  out.logprobs = TokenLogprobs{{out.token, answers.logprobs.host[index]}, {}};
  const size_t at = index * kMaxTopLogprobs;
  for (size_t i = at; i < at + size_t(std::min(num_top, vocab_)); ++i)
    out.logprobs->top.push_back({answers.top_tokens.host[i], answers.top_logprobs.host[i]});
  return out;
}

}  // namespace ekv
