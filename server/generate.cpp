#include "server/generate.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <random>

#include "server/answer.h"
#include "text/chat_template.h"

namespace ekv {
namespace {

constexpr size_t kMaxRequestIdBytes = 128;
// No tokenizer of ours makes less than one token of so many bytes: whoever sends more than the context times
// this is refused before the work of tokenising.
constexpr size_t kMaxBytesPerToken = 1024;

int64_t unix_seconds() {
  return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

// The text of the message that the model may continue; empty when the last one is not the assistant's.
std::string last_answer(const ChatInput& chat) {
  if (member(chat.messages.back(), "role") != "assistant") return {};
  const Result<Json> last = normalise_messages(Json::array({chat.messages.back()}));
  return last ? last->front()["content"].get<std::string>() : std::string();
}

// What each choice has a copy of, in the size of tokens: its prompt and what it must be compared with, the text
// of an echo, and the logprobs of the prompt. Without choices it is no more than the request itself.
Status check_copies(const ApiRequest& request, const std::vector<Generate::Prompt>& prompts) {
  if (request.n * int64_t(prompts.size()) == 1) return std::nullopt;
  const SamplingParams& s = request.sampling;
  const int64_t per_token = s.prompt_logprobs < 0 ? 1 : 1 + 2 * (s.prompt_logprobs + 1);
  int64_t sum = 0;
  for (const auto& [text, tokens] : prompts)
    sum += int64_t(tokens.size()) * per_token + int64_t(request.reply.echo ? text.size() / 4 : 0) +
           2 * int64_t(s.logit_bias.size()) + int64_t(s.stop_token_ids.size());
  if (sum * request.n <= kMaxChoiceTokens) return std::nullopt;
  return Error{
      Error::invalid_argument,
      fmt::format("'n' times all prompts, with echo, prompt logprobs, logit_bias and stop_token_ids, has "
                  "the size of {} tokens; the most is {}. Ask for fewer choices or prompts at once",
                  sum * request.n, kMaxChoiceTokens),
      "n"};
}

uint64_t random_bits() {
  std::random_device device;
  return uint64_t(device()) << 32 | device();
}

}  // namespace

Result<std::string> reply_id(const HttpRequest& request, const char* prefix) {
  const std::string given = request.header("X-Request-Id");
  const bool printable = std::all_of(given.begin(), given.end(), [](char c) { return c > 0x20 && c < 0x7f; });
  if (!printable || given.size() > kMaxRequestIdBytes)
    return Error{Error::invalid_argument,
                 fmt::format("X-Request-Id must be at most {} visible ASCII characters", kMaxRequestIdBytes),
                 "X-Request-Id"};
  return prefix + (given.empty() ? fmt::format("{:016x}{:016x}", random_bits(), random_bits()) : given);
}

HttpResponse error_reply(const Error& error) {
  HttpResponse response = json_reply(error_body(error), http_status(error));
  if (response.status == 503) response.headers.emplace_back("Retry-After", "1");
  return response;
}

HttpResponse json_reply(std::string body, int status) {
  HttpResponse response;
  response.status = status;
  response.body = std::move(body);
  return response;
}

Result<std::vector<TokenId>> encode_prompt(const ServedModel& model, const std::string& text,
                                           bool add_special_tokens) {
  const size_t limit = size_t(model.limits.max_model_len) * kMaxBytesPerToken;
  if (text.size() <= limit) return model.tokenizer.encode(text, add_special_tokens);
  return Error{
      Error::too_large,
      fmt::format("the prompt has {} bytes; no prompt of more than {} bytes fits the context of {} tokens",
                  text.size(), limit, model.limits.max_model_len),
      "prompt"};
}

Status check_client(const HttpRequest& http) {
  if (!peer_has_gone(http.socket)) return std::nullopt;
  return Error{Error::unavailable, "the client has closed the connection", {}};
}

Generate::Generate(const ServedModel& model, EngineLoop& loop, DisconnectWatcher& watcher, const Clock& clock)
    : model_(model), loop_(loop), watcher_(watcher), clock_(clock), next_seed_(random_bits()) {}

HttpResponse Generate::completion(const HttpRequest& http) {
  const int64_t arrival_us = clock_.now_us();
  Result<Json> body = parse_json(http.body);
  if (!body) return error_reply(body.error());
  Result<ApiRequest> request = parse_completion(*body, model_.limits);
  if (!request) return error_reply(request.error());
  Result<std::vector<Prompt>> prompts = tokenize(http, *request);
  if (!prompts) return error_reply(prompts.error());
  return answer(http, *request, *std::move(prompts), arrival_us);
}

HttpResponse Generate::chat(const HttpRequest& http) {
  const int64_t arrival_us = clock_.now_us();
  Result<Json> body = parse_json(http.body);
  if (!body) return error_reply(body.error());
  Result<ApiRequest> request = parse_chat(*body, model_.limits);
  if (!request) return error_reply(request.error());
  if (Status gone = check_client(http)) return error_reply(*gone);
  Result<std::string> text = model_.render_chat(request->chat);
  if (!text) return error_reply(text.error());
  if (Status gone = check_client(http)) return error_reply(*gone);
  Result<std::vector<TokenId>> tokens = encode_prompt(model_, *text, request->add_special_tokens);
  if (!tokens) return error_reply(tokens.error());
  Prompt prompt{.text = request->reply.echo ? last_answer(request->chat) : std::string(),
                .tokens = *std::move(tokens)};
  return answer(http, *request, {std::move(prompt)}, arrival_us);
}

Result<std::vector<Generate::Prompt>> Generate::tokenize(const HttpRequest& http,
                                                         const ApiRequest& request) const {
  std::vector<Prompt> prompts;
  for (const PromptInput& input : request.prompts) {
    if (const auto* tokens = std::get_if<std::vector<TokenId>>(&input)) {
      prompts.push_back({.text = {}, .tokens = *tokens});
      continue;
    }
    if (Status gone = check_client(http)) return *std::move(gone);
    const std::string& text = std::get<std::string>(input);
    Result<std::vector<TokenId>> tokens = encode_prompt(model_, text, request.add_special_tokens);
    if (!tokens) return tokens.error();
    prompts.push_back({.text = text, .tokens = *std::move(tokens)});
  }
  return prompts;
}

HttpResponse Generate::answer(const HttpRequest& http, const ApiRequest& request, std::vector<Prompt> prompts,
                              int64_t arrival_us) {
  Result<std::string> id = reply_id(http, request.reply.chat ? "chatcmpl-" : "cmpl-");
  if (!id) return error_reply(id.error());
  std::vector<Request> all;
  std::vector<AnswerPrompt> reports;
  if (Status large = check_copies(request, prompts)) return error_reply(*large);
  const uint64_t seed = next_seed_.fetch_add(0x9e3779b97f4a7c15);  // the next one differs in every bit
  for (Prompt& prompt : prompts) {
    const size_t num_given = prompt.tokens.size();
    Result<std::vector<Request>> choices =
        engine_requests(request, std::move(prompt.tokens), model_.limits, seed + all.size(), arrival_us);
    if (!choices) return error_reply(choices.error());
    // An echo is what the model saw: of a truncated prompt the text of the tokens that are left.
    const bool truncated = choices->front().prompt.size() != num_given && !request.reply.chat;
    reports.push_back({truncated ? std::string() : std::move(prompt.text), choices->front().prompt});
    std::move(choices->begin(), choices->end(), std::back_inserter(all));
  }
  if (Status gone = check_client(http)) return error_reply(*gone);
  Result<std::shared_ptr<Generation>> generation = loop_.submit(std::move(all), request.n);
  if (!generation) return error_reply(generation.error());

  const auto answer = std::make_shared<Answer>(model_.tokenizer, request, std::move(reports), *std::move(id),
                                               unix_seconds(), *std::move(generation));
  answer->watch(watcher_, http.socket);
  if (!request.reply.stream) {
    Result<std::string> reply = answer->whole_reply();
    if (!reply) return error_reply(reply.error());
    return json_reply(*std::move(reply));
  }
  // The first event before the first header: what fails until then is told by a real status.
  std::string first;
  const Result<bool> more = answer->next_events(first);
  if (!more) return error_reply(more.error());
  HttpResponse response;
  response.content_type = "text/event-stream";
  response.headers.emplace_back("Cache-Control", "no-cache");
  response.next_chunk = [answer, first = std::move(first), more = *more](std::string& chunk) mutable {
    if (!first.empty()) {
      chunk = std::exchange(first, {});
      return more;
    }
    const Result<bool> next = answer->next_events(chunk);
    if (next) return *next;
    chunk += server_sent_event(error_body(next.error())) + end_of_stream();
    return false;
  };
  return response;
}

}  // namespace ekv
