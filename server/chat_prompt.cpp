#include "server/chat_prompt.h"

#include <algorithm>

#include "text/chat_template.h"

namespace ekv {
namespace {

// What no client writes and no template looks for; its first character ends no message.
constexpr const char* kMarker = "\uE0FF<end of the last message>\uE0FF";

Json context_of(const ChatInput& chat, Json messages, const Tokenizer& tokenizer) {
  Json context = chat.template_kwargs;
  context["messages"] = std::move(messages);
  if (!chat.tools.is_null()) context["tools"] = chat.tools;
  context["add_generation_prompt"] = chat.add_generation_prompt;
  context["continue_final_message"] = chat.continue_final_message;
  context["bos_token"] = tokenizer.bos_text();
  context["eos_token"] = tokenizer.eos_text();
  context["pad_token"] = tokenizer.pad_text();
  return context;
}

// Ends the prompt with the last message, so that the model goes on with it. The end is where the same prompt
// with a marker behind that message begins to differ: what the template writes after the message is cut off,
// whatever it is, and a trailing space stays unless the template trims it.
Result<std::string> cut_after_last_message(std::string prompt, const std::string& marked) {
  if (marked.find(kMarker) == std::string::npos)
    return Error{
        Error::invalid_argument,
        "continue_final_message needs a last message whose text the chat template writes into the prompt",
        "continue_final_message"};
  const auto end = std::mismatch(prompt.begin(), prompt.end(), marked.begin(), marked.end()).first;
  prompt.erase(end, prompt.end());
  return prompt;
}

// Whatever the template objects to is the caller's messages.
Error callers_fault(const Error& error) { return {Error::invalid_argument, error.message, "messages"}; }

}  // namespace

Result<RenderChat> make_chat_renderer(const std::string& source, const std::string& name,
                                      const Tokenizer& tokenizer) {
  if (source.empty())
    return RenderChat([](const ChatInput&) -> Result<std::string> {
      return Error{
          Error::invalid_argument,
          "this model has no chat template: use /v1/completions, or start the server with --chat-template",
          "messages"};
    });
  Result<ChatTemplate> compiled = ChatTemplate::compile(source, name);
  if (!compiled) return compiled.error();
  return RenderChat([compiled = *std::move(compiled), tokenizer](const ChatInput& chat) -> Result<std::string> {
    Result<Json> messages = normalise_messages(chat.messages);
    if (!messages) return callers_fault(messages.error());
    Result<std::string> prompt = compiled.render(context_of(chat, *messages, tokenizer));
    if (!prompt) return callers_fault(prompt.error());
    if (!chat.continue_final_message) return prompt;
    Json& content = messages->back()["content"];
    if (content.is_string()) content = content.get<std::string>() + kMarker;
    const Result<std::string> marked = compiled.render(context_of(chat, *messages, tokenizer));
    if (!marked) return callers_fault(marked.error());
    return cut_after_last_message(*std::move(prompt), *marked);
  });
}

}  // namespace ekv
