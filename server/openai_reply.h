#pragma once
// openai_reply.h -- results as the JSON of the two generating routes: plain replies, chunks, logprobs, usage.

#include <cstdint>
#include <string>
#include <vector>

#include "server/choice_text.h"
#include "server/openai.h"

namespace ekv {

struct Usage {
  int64_t prompt = 0, completion = 0, cached = 0;  // tokens
  int64_t pairs_seen = 0, base_pairs_seen = 0;     // summed over steps
  double peak_base_fraction = 0;                   // largest share of BASE pairs in one step of one choice
  int64_t tainted = 0;                             // tokens computed from BASE, or from KV that was
  int64_t preemptions = 0;
};

// How a choice ended; nullptr in its place: it goes on.
struct ChoiceEnd {
  FinishReason reason = FinishReason::none;
  Json stop_reason;
};

// The prompt's part of a choice.
struct PromptReport {
  std::string echo;                     // text to put before the output; empty: none
  std::vector<TokenDetail> details;     // of the echoed tokens; the first has no logprob
  std::vector<TokenId> token_ids;       // with return_token_ids
  std::vector<TokenLogprobs> logprobs;  // with prompt_logprobs: of all prompt tokens but the first
};

class ReplyWriter {
 public:
  ReplyWriter(const Tokenizer& tokenizer, const ReplyOptions& options, std::string id, std::string model,
              int64_t created_s);

  Json choice(int index, const TextDelta& text, const ChoiceEnd& end, const PromptReport* prompt) const;
  std::string reply(Json choices, const Usage& usage) const;

  // Each is a whole server-sent event.
  std::string role_chunk(int index, const Usage& so_far, const PromptReport* prompt) const;
  std::string chunk(int index, const TextDelta& text, const ChoiceEnd* end, const Usage& so_far,
                    const PromptReport* prompt) const;
  std::string usage_chunk(const Usage& usage) const;

 private:
  Json logprobs(const TextDelta& text, const PromptReport* prompt) const;
  Json completion_logprobs(const std::vector<TokenDetail>& before,
                           const std::vector<TokenDetail>& details) const;
  Json chat_logprobs(const std::vector<TokenDetail>& details) const;
  Json prompt_logprobs(const PromptReport& prompt) const;
  Json token_logprob(const TokenLogprob& entry) const;
  Json usage_json(const Usage& usage) const;
  std::string event(Json choices, const Usage& so_far) const;

  const Tokenizer& tokenizer_;
  ReplyOptions options_;
  std::string id_, model_;
  int64_t created_s_;
};

std::string server_sent_event(const std::string& json);
const std::string& end_of_stream();  // data: [DONE]

}  // namespace ekv
