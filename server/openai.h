#pragma once
// openai.h -- the HTTP API in native types, pure: JSON -> ApiRequest or Error, results -> JSON.
//
// Names, ranges and defaults are those of vLLM's OpenAI server. Where it leaves a choice or we differ:
//   * every error is {"error": {"message", "type", "param", "code"}}; `type` is invalid_request_error for all
//     4xx but 401 (authentication_error) and 404 (not_found_error), server_error for 500, unavailable_error
//     for 503; `code` is the HTTP status as an integer, and the string "context_length_exceeded" when a prompt
//     does not fit.
//   * null is the same as absent; unknown fields are ignored; what this server knows but cannot do is refused.
//   * max_tokens beyond the context is cut to what fits, as in vLLM; a prompt that leaves no room is a 400.
//   * a seed fixes choice 0 to the text of the same request with n = 1; further choices have derived seeds.
//   * a stop token counts as a completion token and has its logprobs; its text is only shown with
//     include_stop_str_in_output.
//   * an end in the middle of a character shows one U+FFFD, streaming or not.
//   * an echo is the prompt that the model saw, after truncate_prompt_tokens.
//   * logprobs of minus infinity are written -9999.0.
//   * refused where vLLM clamps or ignores: logit_bias beyond 100, best_of > 1, stream_interval other than 1,
//     suffix, -1 for prompt_logprobs and top_logprobs.
//   * bounded besides: the constants below and those of request.h, `n` over all prompts together.
//   * a temperature between 0 and 0.01 is used as it is; a content type other than JSON is 415.
//   * with --api-key, /tokenize and /detokenize ask for the key as /v1 does; /tokenize refuses, as a prompt, a
//   text
//     that could not fit the context.
//   * a client that closes its sending side counts as gone; SIGTERM drains for 30 s, a second signal cancels.

#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "elastickv/model.h"
#include "elastickv/request.h"
#include "elastickv/tokenizer.h"
#include "util/json.h"

namespace ekv {

// What a request is checked against; fixed at start.
struct ApiLimits {
  std::vector<std::string> model_names;  // accepted in `model`; replies carry the first
  int max_model_len = 0;                 // tokens of prompt and output together
  int vocab_size = 0;                    // rows of logits
  int max_logprobs = 20;
  GenerationDefaults defaults;   // where the request is silent
  std::vector<TokenId> eos_ids;  // end the output unless ignore_eos
  bool cached_tokens_in_usage = false;
};

constexpr int kMaxStopStrings = 4;
constexpr size_t kMaxStopBytes = 4096;  // of one stop string
constexpr size_t kMaxSaltBytes = 256;
constexpr int64_t kMaxChoiceTokens = 4 << 20;  // of all choices: each has a copy of its prompt and more
constexpr int kMaxPrompts = 1024;
constexpr int kMaxChoices = 16384;  // of one request, all prompts together

// How the reply must look.
struct ReplyOptions {
  bool chat = false;
  bool stream = false;
  bool include_usage = false;     // one more chunk with the usage
  bool continuous_usage = false;  // usage in every chunk
  bool echo = false;              // the prompt (chat: the message to be continued) before the output
  bool return_token_ids = false;
  bool skip_special_tokens = true;
  bool include_stop = false;   // the text keeps the stop string or token that ended it
  bool cached_tokens = false;  // in the usage
  bool kv_fidelity = false;    // in the usage
  int logprobs = -1;           // alternatives per token; -1: none
  int prompt_logprobs = -1;
  int min_tokens = 0;       // stop strings count only after so many tokens
  bool score_only = false;  // echo with max_tokens 0: the one token that the engine makes is dropped
  std::vector<std::string> stop;
  std::vector<TokenId> stop_token_ids;  // the client's own
};

struct ChatInput {
  Json messages = Json::array();
  Json tools;  // null: none
  Json template_kwargs = Json::object();
  bool add_generation_prompt = true;
  bool continue_final_message = false;
};

using PromptInput = std::variant<std::string, std::vector<TokenId>>;

struct ApiRequest {
  std::string model;  // as replies name it
  ReplyOptions reply;
  SamplingParams sampling;  // seed and max_tokens come from the next two
  std::optional<uint64_t> seed;
  std::optional<int> max_tokens;  // absent: as much as the context leaves
  int n = 1;
  std::vector<PromptInput> prompts;  // of a completion
  ChatInput chat;                    // of a chat completion
  bool add_special_tokens = true;
  std::optional<int> truncate_prompt_tokens;  // keep so many; -1: what leaves room for the output
  bool truncate_left = true;                  // keep the last ones
  int64_t priority = 0;
  std::string cache_salt;
  KvTier tier = KvTier::elastic;
  double max_base_fraction = 1;
};

Result<ApiRequest> parse_completion(const Json& body, const ApiLimits& limits);
Result<ApiRequest> parse_chat(const Json& body, const ApiLimits& limits);
// Also for /tokenize: messages, tools, chat_template_kwargs, add_generation_prompt, continue_final_message.
Result<ChatInput> parse_chat_input(const Json& body);
Result<PromptInput> parse_prompt(const Json& value, int vocab_size);
Status check_model(const Json& body, const ApiLimits& limits);

// The engine's requests of one prompt: n choices with their own seeds. Fails when the prompt leaves no room.
Result<std::vector<Request>> engine_requests(const ApiRequest& request, std::vector<TokenId> prompt,
                                             const ApiLimits& limits, uint64_t random_seed, int64_t now_us);

int http_status(const Error& error);
// `status` and `code` as the header of this file says.
std::string error_body(const Error& error);
std::string error_body(int status, const std::string& message, const std::string& param = {});

}  // namespace ekv
