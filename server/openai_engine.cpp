// ApiRequest -> the engine's requests, and errors -> JSON.

#include <fmt/format.h>

#include <algorithm>

#include "server/openai.h"

namespace ekv {
namespace {

// A well-mixed function of its argument (splitmix64), so that neighbouring choices share nothing.
uint64_t mixed(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

void truncate(const ApiRequest& request, int room, std::vector<TokenId>& prompt) {
  if (!request.truncate_prompt_tokens) return;
  const int keep = *request.truncate_prompt_tokens;
  const size_t most = size_t(std::max(1, keep < 0 ? room : keep));
  if (prompt.size() <= most) return;
  if (request.truncate_left)
    prompt.erase(prompt.begin(), prompt.end() - ptrdiff_t(most));
  else
    prompt.resize(most);
}

const char* error_type(int status) {
  switch (status) {
    case 401:
      return "authentication_error";
    case 404:
      return "not_found_error";
    case 503:
      return "unavailable_error";
    case 505:  // nothing is wrong with the server
      return "invalid_request_error";
    default:
      return status >= 500 ? "server_error" : "invalid_request_error";
  }
}

std::string error_json(int status, const std::string& message, const std::string& param, const Json& code) {
  return dump_json(Json{{"error",
                         {{"message", message},
                          {"type", error_type(status)},
                          {"param", param.empty() ? Json() : Json(param)},
                          {"code", code}}}});
}

}  // namespace

Result<std::vector<Request>> engine_requests(const ApiRequest& request, std::vector<TokenId> prompt,
                                             const ApiLimits& limits, uint64_t random_seed, int64_t now_us) {
  truncate(request, limits.max_model_len - std::max(1, request.max_tokens.value_or(1)), prompt);
  if (prompt.empty())
    return Error{Error::invalid_argument, "the prompt has no tokens, and this model's tokenizer adds none",
                 "prompt"};
  const int room = limits.max_model_len - int(prompt.size());
  if (room < 1)
    return Error{
        Error::too_large,
        fmt::format("This model's maximum context length is {} tokens. The request asks for {} tokens in the "
                    "{} and at least 1 in the completion. Shorten it.",
                    limits.max_model_len, prompt.size(), request.reply.chat ? "messages" : "prompt"),
        request.reply.chat ? "messages" : "prompt"};
  Request one{.prompt = std::move(prompt),
              .sampling = request.sampling,
              .priority = request.priority,
              .cache_salt = request.cache_salt,
              .arrival_us = now_us,
              .tier = request.tier,
              .max_base_fraction = request.max_base_fraction};
  one.sampling.max_tokens = std::min(std::max(1, request.max_tokens.value_or(room)), room);
  one.sampling.min_tokens = std::min(one.sampling.min_tokens, one.sampling.max_tokens);
  const uint64_t seed = request.seed.value_or(random_seed);
  std::vector<Request> choices(size_t(request.n), one);
  for (size_t i = 0; i < choices.size(); ++i) choices[i].sampling.seed = i == 0 ? seed : mixed(seed + i);
  return choices;
}

int http_status(const Error& error) {
  switch (error.code) {
    case Error::invalid_argument:
    case Error::too_large:
    case Error::unsupported:
      return 400;
    case Error::not_found:
      return 404;
    case Error::unavailable:
      return 503;
    default:
      return 500;
  }
}

std::string error_body(const Error& error) {
  const int status = http_status(error);
  const Json code = error.code == Error::too_large ? Json("context_length_exceeded") : Json(status);
  return error_json(status, error.message, error.param, code);
}

std::string error_body(int status, const std::string& message, const std::string& param) {
  return error_json(status, message, param, status);
}

}  // namespace ekv
