#pragma once
// sampling.h -- logits to tokens, without sorting the vocabulary.
//
// For every row the rule of sampling_rule.h, with the settings params[r]; the same row gives the same token bit
// for bit, whatever the other rows and the launch are.
//
// Error:  a logprob to 4e-6 + 2^-21 |l|; of the token see the rule.
// Range:  of a row that the rule gives no token, `status` says why, the token is -1 and no logprob is written.
// Order:  asynchronous on `stream`, allocates nothing. Alias: logits are not changed.

#include "elastickv/sampling_rule.h"
#include "kernels/element.h"

namespace ekv {

constexpr int kMaxTopLogprobs = 20;
constexpr int kMaxVocab = 1 << 20;

// What the engine's SamplingParams come to for one row of one step.
struct RowSampling {
  uint64_t seed = 0;
  uint32_t output_index = 0;  // tokens generated before this one
  float temperature = 1;
  float top_p = 1;    // (0, 1]; 1: off
  float min_p = 0;    // [0, 1]; 0: off
  int32_t top_k = 0;  // 0: off
  float repetition = 1;
  float presence = 0;
  float frequency = 0;
  int32_t count_slot = -1;  // row of `counts`; -1: no penalties
  int32_t num_top = -1;     // -1: no logprobs; 0: of the token; n <= kMaxTopLogprobs: and of the n likeliest
  int32_t bias_begin = 0, bias_end = 0;  // the row's part of bias_tokens and bias_values

  constexpr bool greedy() const { return temperature < sampling::kGreedyTemperature; }
  constexpr bool truncates() const { return !greedy() && (top_k > 0 || top_p < 1 || min_p > 0); }
};

enum class SampleStatus : int32_t { ok, non_finite, nothing_left };

constexpr int count_stride(int vocab) { return (vocab + 7) / 8 * 8; }

struct SampleArgs {
  const void* logits = nullptr;  // [num_rows][vocab] of `element`, rows `row_stride` elements apart
  Element element = Element::fp32;
  int num_rows = 0;                      // 0 launches nothing
  int vocab = 0;                         // at most kMaxVocab
  int row_stride = 0;                    // >= vocab; a multiple of 8 lets loads be 16 bytes wide
  const RowSampling* params = nullptr;   // [num_rows]
  const int32_t* bias_tokens = nullptr;  // [..] bans (min_tokens, bad words) and the request's logit_bias
  const float* bias_values = nullptr;    // [..]
  const uint16_t* counts = nullptr;  // [slots][count_stride(vocab)], see below; nullptr: no row has penalties
  bool any_truncates = true;  // false: no row truncates(), and the launches for those that do are left out
  bool any_top = true;        // false: no row has num_top > 0
  void* workspace = nullptr;  // sampling_workspace_bytes(), contents irrelevant, not shared by concurrent calls

  int32_t* tokens = nullptr;       // [num_rows]
  SampleStatus* status = nullptr;  // [num_rows]
  float* logprobs = nullptr;       // [num_rows] raw logprob of the token where num_top >= 0
  int32_t* top_tokens = nullptr;   // [num_rows][kMaxTopLogprobs] likeliest first, equal ones by token
  float* top_logprobs = nullptr;   // [num_rows][kMaxTopLogprobs]; both may be nullptr when any_top is false
};
size_t sampling_workspace_bytes(int max_rows, int vocab);
void launch_sample(const SampleArgs& args, cudaStream_t stream);

// Token counts for the penalties: bit 15 = in the prompt, bits 0 to 14 = times generated (stops at 32767).
// One update adds tokens[begin, prompt_end) as prompt and tokens[prompt_end, end) as generated to `slot`.
struct CountUpdate {
  int32_t slot = 0;
  int32_t begin = 0, prompt_end = 0, end = 0;
  bool clear = false;  // empty the slot first: a new sequence, or one that starts again
};
struct CountArgs {
  uint16_t* counts = nullptr;            // [slots][count_stride(vocab)]
  const int32_t* tokens = nullptr;       // each in [0, vocab), or -1 - i: previous[i]; others are ignored
  const CountUpdate* updates = nullptr;  // [num_updates], no slot twice
  int num_updates = 0;                   // 0 launches nothing
  int vocab = 0;
  const int32_t* previous = nullptr;  // tokens that the host did not know; nullptr where none is negative
};
void launch_count_tokens(const CountArgs& args, cudaStream_t stream);

}  // namespace ekv
