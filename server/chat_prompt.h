#pragma once
// chat_prompt.h -- chat input to prompt text, through the model's chat template.

#include <string>

#include "elastickv/tokenizer.h"
#include "server/generate.h"

namespace ekv {

// `source`: the template; empty: the model has none, and every chat is refused with words about it. `name`:
// where the source comes from, for error messages.
Result<RenderChat> make_chat_renderer(const std::string& source, const std::string& name,
                                      const Tokenizer& tokenizer);

}  // namespace ekv
