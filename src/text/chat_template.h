#pragma once
// chat_template.h -- messages to prompt text, with the model's own template in a sandboxed subset of Jinja2.
//
// Environment: that of Hugging Face transformers -- trim_blocks, lstrip_blocks, no trailing newline, loop
// controls, an immutable sandbox, `tojson` without HTML escaping, raise_exception, strftime_now, {% generation
// %}. Output is equal to that of Jinja2 3.1 byte for byte; what the subset lacks is an Error, never other text.
//
// Hostile templates and messages end with an Error: work, memory, recursion, output (16 MiB) and range()
// (100,000) are bounded.

#include <memory>
#include <optional>
#include <string>

#include "elastickv/base.h"
#include "util/json.h"

namespace ekv {

namespace jinja {
struct TemplateAst;
}

class ChatTemplate {
 public:
  // `name` is the file or option that the source comes from; errors begin with "name:line: ".
  static Result<ChatTemplate> compile(std::string source, std::string name);

  // `context`: an object with messages, tools, documents, add_generation_prompt, bos_token, eos_token and
  // whatever else the template may read; an absent key is undefined, null is none. Callable from any thread.
  // `unix_seconds` is the time that strftime_now prints, the present when absent. A template that calls
  // raise_exception gives Error{invalid_argument} with its words; use of something unsupported gives
  // Error{unsupported}; a bound that is hit gives Error{too_large}.
  Result<std::string> render(const Json& context, std::optional<int64_t> unix_seconds = std::nullopt) const;

  const std::string& name() const { return name_; }

 private:
  ChatTemplate(std::string name, std::shared_ptr<const jinja::TemplateAst> ast)
      : name_(std::move(name)), ast_(std::move(ast)) {}

  std::string name_;
  std::shared_ptr<const jinja::TemplateAst> ast_;
};

// Messages of the OpenAI API as templates expect them. Null or absent content becomes "". A list of text parts
// becomes their texts joined by newlines. The JSON text in tool_calls[].function.arguments becomes the object
// it encodes, so that `tojson` encodes it once; text that is not a JSON object stays text. Unknown roles and
// keys pass. Errors name the place, as in "messages[2].content[0].type".
Result<Json> normalise_messages(const Json& messages);

}  // namespace ekv
