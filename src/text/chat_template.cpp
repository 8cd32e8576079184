#include "text/chat_template.h"

#include <fmt/format.h>

#include <ctime>

#include "text/jinja/interpreter.h"
#include "text/jinja/parser.h"
#include "text/jinja/unicode.h"

namespace ekv {
namespace {

constexpr size_t kMaxSourceBytes = size_t(1) << 20;

jinja::Value to_value(jinja::Runtime& rt, const Json& j, int depth) {
  using jinja::Value;
  if (depth > kMaxJsonDepth) jinja::fail("the template's input is nested too deeply");
  rt.budget.spend();
  switch (j.type()) {
    case Json::value_t::boolean:
      return jinja::make_bool(j.get<bool>());
    case Json::value_t::number_integer:
      return jinja::make_int(j.get<int64_t>());
    case Json::value_t::number_unsigned:
      return jinja::make_int(j.get<uint64_t>());
    case Json::value_t::number_float:
      return jinja::make_real(j.get<double>());
    case Json::value_t::string: {
      const auto& s = j.get_ref<const std::string&>();
      if (!jinja::is_valid_utf8(s)) jinja::fail("a string of the template's input is not UTF-8");
      return jinja::make_str(s);  // the caller's JSON outlives the rendering
    }
    case Json::value_t::array: {
      std::vector<Value> items;
      for (const Json& item : j) items.push_back(to_value(rt, item, depth + 1));
      return rt.list(items);
    }
    case Json::value_t::object: {
      std::vector<jinja::Entry> entries;
      for (const auto& [key, item] : j.items()) {
        if (!jinja::is_valid_utf8(key)) jinja::fail("a key of the template's input is not UTF-8");
        entries.push_back({rt.text(key), to_value(rt, item, depth + 1)});
      }
      auto* copied = rt.arena.copy_array(std::span<const jinja::Entry>(entries));
      return jinja::make_object(rt.arena.make<jinja::Dict>(copied, entries.size()));
    }
    default:
      return jinja::make_none();
  }
}

Error located(const jinja::Failure& f, const std::string& name, int line) {
  return {f.code, fmt::format("{}:{}: {}", name, f.line ? f.line : line, f.what), {}};
}

}  // namespace

Result<ChatTemplate> ChatTemplate::compile(std::string source, std::string name) {
  if (source.size() > kMaxSourceBytes)
    return Error{Error::too_large, fmt::format("{}:1: the template is larger than 1 MiB", name), {}};
  if (!jinja::is_valid_utf8(source))
    return Error{Error::invalid_argument, fmt::format("{}:1: the template is not UTF-8", name), {}};
  try {
    auto ast = std::make_shared<jinja::TemplateAst>(jinja::parse(source));
    return ChatTemplate(std::move(name), std::move(ast));
  } catch (const jinja::Failure& f) {
    return located(f, name, 1);
  }
}

Result<std::string> ChatTemplate::render(const Json& context, std::optional<int64_t> unix_seconds) const {
  if (!context.is_object())
    return Error{
        Error::invalid_argument, fmt::format("{}:1: the template's input must be an object", name_), {}};
  jinja::Runtime rt;
  rt.unix_seconds = unix_seconds.value_or(int64_t(std::time(nullptr)));
  int line = 1;
  try {
    const jinja::Value root = to_value(rt, context, 0);
    jinja::Interpreter interpreter(*ast_, rt, *root.dict);
    try {
      return interpreter.run();
    } catch (const jinja::Failure&) {
      line = interpreter.line();
      throw;
    }
  } catch (const jinja::Failure& f) {
    return located(f, name_, line);
  }
}

}  // namespace ekv
