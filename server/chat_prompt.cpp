#include "server/chat_prompt.h"

#include "text/chat_template.h"

namespace ekv {
namespace {

std::string_view trimmed(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t\r\n");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t\r\n") - first + 1);
}

// The prompt ends with the last message, so that the model goes on with it. As in Hugging Face transformers:
// what the template writes behind the message is cut off, and the message's own trailing space stays if it is
// there.
Result<std::string> cut_after_last_message(std::string prompt, const Json& messages) {
  const Json& content = member(messages.back(), "content");
  const std::string text = content.is_string() ? content.get<std::string>() : std::string();
  const std::string_view core = trimmed(text);
  const size_t at = core.empty() ? std::string::npos : prompt.rfind(core);
  if (at == std::string::npos)
    return Error{
        Error::invalid_argument,
        "continue_final_message needs a last message whose text the chat template writes into the prompt",
        "continue_final_message"};
  const std::string_view with_tail = std::string_view(text).substr(text.find(core));
  const bool keeps_tail = prompt.compare(at, with_tail.size(), with_tail) == 0;
  prompt.resize(at + (keeps_tail ? with_tail.size() : core.size()));
  return prompt;
}

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
    return cut_after_last_message(*std::move(prompt), *messages);
  });
}

}  // namespace ekv
