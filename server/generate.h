#pragma once
// generate.h -- the two generating routes: body -> engine requests -> text as it comes -> reply or stream.

#include <atomic>
#include <functional>
#include <string>

#include "server/disconnect_watcher.h"
#include "server/engine_loop.h"
#include "server/http.h"
#include "server/openai.h"

namespace ekv {

// Messages -> prompt text. An Error carries the template's own words.
using RenderChat = std::function<Result<std::string>(const ChatInput& chat)>;

// The model as the routes see it; immutable once the server runs.
struct ServedModel {
  ApiLimits limits;
  Tokenizer tokenizer;
  RenderChat render_chat;
  int64_t created_s = 0;  // Unix time
  std::string root;       // where the weights come from
};

class Generate {
 public:
  // All outlive this object.
  Generate(const ServedModel& model, EngineLoop& loop, DisconnectWatcher& watcher, const Clock& clock);

  HttpResponse completion(const HttpRequest& request);
  HttpResponse chat(const HttpRequest& request);

  struct Prompt {
    std::string text;  // as given; of token prompts empty
    std::vector<TokenId> tokens;
  };

 private:
  HttpResponse answer(const HttpRequest& http, const ApiRequest& request, std::vector<Prompt> prompts,
                      int64_t arrival_us);
  Result<std::vector<Prompt>> tokenize(const HttpRequest& http, const ApiRequest& request) const;

  const ServedModel& model_;
  EngineLoop& loop_;
  DisconnectWatcher& watcher_;
  const Clock& clock_;
  std::atomic<uint64_t> next_seed_;
};

// Tokens of a prompt. Errors: so many bytes that they fit no context, which is told before the work; those of
// the tokenizer.
Result<std::vector<TokenId>> encode_prompt(const ServedModel& model, const std::string& text,
                                           bool add_special_tokens);
// An Error when the client has left. Rendering and tokenising a long prompt takes a second, which nobody needs
// then: looked at between the steps, not within one; from submit() on the watcher does it.
Status check_client(const HttpRequest& http);
// "chatcmpl-" or "cmpl-" and the client's X-Request-Id, or 32 random hexadecimal digits.
Result<std::string> reply_id(const HttpRequest& request, const char* prefix);
HttpResponse error_reply(const Error& error);
HttpResponse json_reply(std::string body, int status = 200);

}  // namespace ekv
