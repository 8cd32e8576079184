#pragma once
// request.h -- what one client call asked for, in native types, and what the engine tells back. JSON ends
// before these structs, text begins after them.

#include <string>
#include <utility>
#include <vector>

#include "elastickv/base.h"

namespace ekv {

enum class FinishReason : uint8_t { none, stop, length, cancelled, error };

// Most entries of the lists of one request: a device has room for those of all sequences of a step.
constexpr size_t kMaxLogitBias = 1024;
constexpr size_t kMaxStopTokenIds = 1024;  // the client's
constexpr size_t kMaxEosIds = 64;          // the model's own, which end the output beside them

// What they do, and in which order: sampling_rule.h.
struct SamplingParams {
  float temperature = 1.0f;         // below 1e-5: greedy
  int top_k = 0;                    // keep the k most likely, and others as likely as the last; 0: all
  float top_p = 1.0f;               // keep the smallest set with at least this probability
  float min_p = 0.0f;               // keep tokens with at least min_p times the largest probability
  float repetition_penalty = 1.0f;  // over prompt and output; divides positive logits, multiplies negative ones
  float presence_penalty = 0.0f;    // over the output; subtracted once per token that occurred
  float frequency_penalty = 0.0f;   // over the output; subtracted per occurrence
  std::vector<std::pair<TokenId, float>> logit_bias;  // added to the logits
  uint64_t seed = 0;    // with the output index it fixes every random draw, on every device, whatever else runs
  int min_tokens = 0;   // stop tokens are impossible before so many output tokens
  int max_tokens = 16;  // output tokens at most
  std::vector<TokenId>
      stop_token_ids;        // end the output; includes the model's own unless the client ignores them
  int logprobs = -1;         // alternatives reported beside the sampled token; -1: no logprobs at all
  int prompt_logprobs = -1;  // the same for each prompt token but the first; -1: none

  bool has_penalties() const {
    return repetition_penalty != 1 || presence_penalty != 0 || frequency_penalty != 0;
  }
};

enum class KvTier : uint8_t {
  exact,  // never sees BASE, nor KV that was computed from BASE
  elastic,
  best_effort,  // demoted before elastic ones
};

struct Request {
  std::vector<TokenId> prompt;  // at least one token
  SamplingParams sampling;
  int64_t priority = 0;    // lower runs sooner; only with SchedulingPolicy::priority
  std::string cache_salt;  // requests share cached KV only with equal salts
  int64_t arrival_us = 0;  // Clock time at which the server read the request
  KvTier tier = KvTier::elastic;
  double max_base_fraction = 1.0;  // of the sequence's pairs, in [0, 1]; 0 and tier exact keep all TARGET
};

struct TokenLogprob {
  TokenId token = 0;
  float logprob = 0;  // natural log of the softmax of the raw logits
};

struct TokenLogprobs {
  TokenLogprob chosen;
  std::vector<TokenLogprob> top;  // most likely first; as many as were asked for
  int32_t rank = 0;               // of `chosen`: 1 + the tokens with larger logits; 0: the device does not say
};

// What happened to a sequence so far. Times are Clock times; 0: not yet.
struct SeqStats {
  int num_prompt = 0, num_output = 0;
  int num_cached = 0;  // prompt tokens whose KV came from the prefix cache or the host at first admission
  int num_preemptions = 0;
  int64_t arrival_us = 0, queued_us = 0;  // read from the client; tokenised and handed to the engine
  int64_t first_scheduled_us = 0, first_token_us = 0, last_token_us = 0;
  int64_t pairs_seen = 0, base_pairs_seen = 0;  // summed over steps; exposure = base_pairs_seen / pairs_seen
  double peak_base_fraction = 0;                // largest share of BASE pairs in one step
  int num_tainted = 0;                          // tokens computed from BASE, or from KV that was
};

// One message from the engine to whoever submitted the request.
struct SeqEvent {
  SeqId id{};
  std::optional<TokenId> token;
  std::optional<TokenLogprobs> logprobs;
  std::vector<TokenLogprobs> prompt_logprobs;  // with the first token: one per prompt token but the first
  FinishReason finish = FinishReason::none;    // other than none: the last event of this sequence
  SeqStats stats;
  std::string error;  // with FinishReason::error: what went wrong
};

}  // namespace ekv
