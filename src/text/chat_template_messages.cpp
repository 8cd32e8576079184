#include <fmt/format.h>

#include "text/chat_template.h"

namespace ekv {
namespace {

Error at(const std::string& path, std::string_view what) {
  return {Error::invalid_argument, fmt::format("{}: {}", path, what), path};
}

Result<std::string> part_text(const Json& part, const std::string& path) {
  if (part.is_string()) return part.get<std::string>();
  if (!part.is_object())
    return at(path, fmt::format("must be an object with a 'type', got {}", part.type_name()));
  const Json& type = member(part, "type");
  if (!type.is_string()) return at(path + ".type", "must be a string");
  const auto& kind = type.get_ref<const std::string&>();
  if (kind != "text" && kind != "input_text" && kind != "output_text" && kind != "refusal")
    return at(path + ".type",
              fmt::format("'{}' is not supported: this model reads text only", dump_json(type)));
  const char* key = kind == "refusal" ? "refusal" : "text";
  const Json& text = member(part, key);
  if (!text.is_string()) return at(path + "." + key, "must be a string");
  return text.get<std::string>();
}

Result<std::string> content_text(const Json& content, const std::string& path) {
  if (content.is_null()) return std::string();
  if (content.is_string()) return content.get<std::string>();
  if (!content.is_array())
    return at(path, fmt::format("must be a string, a list of parts or null, got {}", content.type_name()));
  std::string joined;
  for (size_t i = 0; i < content.size(); ++i) {
    Result<std::string> text = part_text(content[i], fmt::format("{}[{}]", path, i));
    if (!text) return text;
    if (i) joined += '\n';
    joined += *text;
  }
  return joined;
}

// Arguments that are not the JSON text of an object stay as they are: the template decides what to make of
// them.
Status parse_arguments(Json& call, const std::string& path) {
  if (!call.is_object()) return at(path, fmt::format("must be an object, got {}", call.type_name()));
  const auto function = call.find("function");
  if (function == call.end() || function->is_null()) return std::nullopt;
  if (!function->is_object())
    return at(path + ".function", fmt::format("must be an object, got {}", function->type_name()));
  const auto arguments = function->find("arguments");
  if (arguments == function->end() || !arguments->is_string()) return std::nullopt;
  const std::string text = arguments->get<std::string>();
  if (text.empty()) {
    *arguments = Json::object();
    return std::nullopt;
  }
  Result<Json> parsed = parse_json(text);
  if (parsed && parsed->is_object()) *arguments = std::move(*parsed);
  return std::nullopt;
}

Result<Json> normalise_message(const Json& message, const std::string& path) {
  if (!message.is_object()) return at(path, fmt::format("must be an object, got {}", message.type_name()));
  if (!member(message, "role").is_string()) return at(path + ".role", "must be a string");
  Result<std::string> content = content_text(member(message, "content"), path + ".content");
  if (!content) return content.error();
  Json out = message;
  out["content"] = std::move(*content);
  const auto calls = out.find("tool_calls");
  if (calls == out.end()) return out;
  if (calls->is_null()) {
    out.erase("tool_calls");
    return out;
  }
  if (!calls->is_array())
    return at(path + ".tool_calls", fmt::format("must be a list, got {}", calls->type_name()));
  for (size_t i = 0; i < calls->size(); ++i)
    if (const Status bad = parse_arguments((*calls)[i], fmt::format("{}.tool_calls[{}]", path, i))) return *bad;
  return out;
}

}  // namespace

Result<Json> normalise_messages(const Json& messages) {
  if (!messages.is_array()) return at("messages", fmt::format("must be a list, got {}", messages.type_name()));
  Json out = Json::array();
  for (size_t i = 0; i < messages.size(); ++i) {
    Result<Json> message = normalise_message(messages[i], fmt::format("messages[{}]", i));
    if (!message) return message;
    out.push_back(std::move(*message));
  }
  return out;
}

}  // namespace ekv
