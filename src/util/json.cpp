#include "util/json.h"

#include <fmt/format.h>

#include <cmath>
#include <stdexcept>
#include <type_traits>
#include <vector>

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

// Refuses objects whose members `Json` would search too long: without a limit a body of one megabyte costs
// seconds.
class MemberLimit {
 public:
  template <class Value>
  bool operator()(int depth, nlohmann::json::parse_event_t event, Value&) {
    using Event = nlohmann::json::parse_event_t;
    if (event == Event::object_start) members_.resize(size_t(depth) + 2), members_[size_t(depth) + 1] = 0;
    if (event == Event::key && ++members_.at(size_t(depth)) > kMaxJsonMembers)
      throw std::length_error(fmt::format("a JSON object has more than {} members", kMaxJsonMembers));
    return true;
  }

 private:
  std::vector<int> members_;  // [depth] of the objects being read
};

template <class Value>
Result<Value> parse_as(std::string_view text, int max_depth) {
  if (deeper_than(text, max_depth))
    return Error{Error::invalid_argument, fmt::format("JSON is nested deeper than {} levels", max_depth), {}};
  try {
    constexpr bool ordered = std::is_same_v<Value, Json>;
    return ordered ? Value::parse(text, MemberLimit()) : Value::parse(text);
  } catch (const std::length_error& e) {
    return Error{Error::invalid_argument, e.what(), {}};
  } catch (const nlohmann::json::exception& e) {
    // The library quotes the offending bytes, which need not be UTF-8: pass its words on as clean text.
    const std::string clean = Json(e.what()).dump(-1, ' ', false, Json::error_handler_t::replace);
    return Error{Error::invalid_argument, "not valid JSON: " + Json::parse(clean).get<std::string>(), {}};
  }
}

}  // namespace

Result<Json> parse_json(std::string_view text, int max_depth) { return parse_as<Json>(text, max_depth); }

Result<SortedJson> parse_sorted_json(std::string_view text, int max_depth) {
  return parse_as<SortedJson>(text, max_depth);
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
  if (value.is_number_unsigned() && value.get<uint64_t>() > uint64_t(INT64_MAX))
    return bad_member(key, "a 64-bit integer", value);
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
