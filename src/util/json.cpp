#include "util/json.h"

#include <fmt/format.h>

#include <cmath>

#include "util/json_builder.h"

namespace ekv {
namespace {

Error bad_member(const char* key, const char* wanted, const Json& got) {
  return {Error::invalid_argument, fmt::format("'{}' must be {}, got {}", key, wanted, got.type_name()), key};
}

// The library parses objects and arrays without a depth limit, and destroys them recursively: depth is
// bounded by counting brackets outside strings, before any parsing.
bool deeper_than(std::string_view text, int max_depth) {
  int depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') in_string = false;
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      if (++depth > max_depth) return true;
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return false;
}

// The library quotes the offending text, which need not be short or UTF-8.
std::string clean_words(const std::string& words) {
  constexpr size_t kMostBytes = 400;
  const Json cut = words.size() <= kMostBytes ? words : words.substr(0, kMostBytes) + "...";
  return Json::parse(cut.dump(-1, ' ', false, Json::error_handler_t::replace)).get<std::string>();
}

Status check_depth(std::string_view text, int max_depth) {
  if (!deeper_than(text, max_depth)) return std::nullopt;
  return Error{Error::invalid_argument, fmt::format("JSON is nested deeper than {} levels", max_depth), {}};
}

}  // namespace

Result<Json> parse_json(std::string_view text, int max_depth) {
  if (Status deep = check_depth(text, max_depth)) return *std::move(deep);
  JsonBuilder builder;
  if (Json::sax_parse(text, &builder)) return builder.take();
  return Error{Error::invalid_argument, clean_words(builder.fault()), builder.field()};
}

Result<SortedJson> parse_sorted_json(std::string_view text, int max_depth) {
  if (Status deep = check_depth(text, max_depth)) return *std::move(deep);
  try {
    return SortedJson::parse(text);
  } catch (const nlohmann::json::exception& e) {
    return Error{Error::invalid_argument, clean_words(fmt::format("not valid JSON: {}", e.what())), {}};
  }
}

std::string dump_json(const Json& value, int indent) {
  return value.dump(indent, ' ', false, Json::error_handler_t::replace);
}

const Json& member(const Json& object, const char* key) {
  static const Json null;
  if (!object.is_object()) return null;
  const auto it = object.find(key);
  return it == object.end() ? null : *it;
}

Result<int64_t> int_member(const Json& object, const char* key, int64_t fallback) {
  const Json& value = member(object, key);
  if (value.is_null()) return fallback;
  const bool too_large = value.is_number_unsigned() && value.get<uint64_t>() > uint64_t(INT64_MAX);
  if (too_large || (value.is_number_float() && std::fabs(value.get<double>()) >= 0x1p63))
    return bad_member(key, "an integer from -9223372036854775808 to 9223372036854775807", value);
  if (!value.is_number_integer()) return bad_member(key, "an integer", value);
  return value.get<int64_t>();
}

Result<double> number_member(const Json& object, const char* key, double fallback) {
  const Json& value = member(object, key);
  if (value.is_null()) return fallback;
  if (!value.is_number() || !std::isfinite(value.get<double>()))
    return bad_member(key, "a finite number", value);
  return value.get<double>();
}

Result<bool> bool_member(const Json& object, const char* key, bool fallback) {
  const Json& value = member(object, key);
  if (value.is_null()) return fallback;
  if (!value.is_boolean()) return bad_member(key, "true or false", value);
  return value.get<bool>();
}

Result<std::string> string_member(const Json& object, const char* key, std::string fallback) {
  const Json& value = member(object, key);
  if (value.is_null()) return fallback;
  if (!value.is_string()) return bad_member(key, "a string", value);
  return value.get<std::string>();
}

}  // namespace ekv
