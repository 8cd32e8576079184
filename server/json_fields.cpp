#include "server/json_fields.h"

#include <fmt/format.h>

namespace ekv {

bool JsonFields::flag(const char* key, bool fallback) {
  Result<bool> value = bool_member(object_, key, fallback);
  if (value) return *value;
  if (!error_) error_ = value.error();
  return fallback;
}

std::string JsonFields::text(const char* key, std::string fallback) {
  Result<std::string> value = string_member(object_, key, fallback);
  if (value) return *value;
  if (!error_) error_ = value.error();
  return fallback;
}

int64_t JsonFields::integer(const char* key, int64_t fallback, int64_t least, int64_t most) {
  Result<int64_t> value = int_member(object_, key, fallback);
  if (!value) {
    if (!error_) error_ = value.error();
    return fallback;
  }
  if (*value >= least && *value <= most) return *value;
  fail(key, fmt::format("must be between {} and {}, got {}", least, most, *value));
  return fallback;
}

std::optional<int64_t> JsonFields::optional_integer(const char* key, int64_t least, int64_t most) {
  if (!has(key)) return std::nullopt;
  return integer(key, least, least, most);
}

double JsonFields::number(const char* key, double fallback, double least, double most) {
  Result<double> value = number_member(object_, key, fallback);
  if (!value) {
    if (!error_) error_ = value.error();
    return fallback;
  }
  if (*value >= least && *value <= most) return *value;
  fail(key, fmt::format("must be between {} and {}, got {}", least, most, *value));
  return fallback;
}

std::vector<int32_t> JsonFields::token_ids(const char* key, int vocab_size) {
  std::vector<int32_t> ids;
  const Json& list = get(key);
  if (list.is_null()) return ids;
  if (!list.is_array()) {
    fail(key, "must be a list of token ids");
    return ids;
  }
  for (const Json& id : list) {
    if (!id.is_number_integer() || (id.is_number_unsigned() && id.get<uint64_t>() >= uint64_t(vocab_size)) ||
        id.get<int64_t>() < 0 || id.get<int64_t>() >= vocab_size) {
      fail(key, fmt::format("holds {}, which is not a token id from 0 to {}", dump_json(id), vocab_size - 1));
      return {};
    }
    ids.push_back(id.get<int32_t>());
  }
  return ids;
}

void JsonFields::refuse(const char* key, const Json& harmless, const char* why) {
  const Json& value = get(key);
  if (!value.is_null() && value != harmless) fail(key, why);
}

void JsonFields::fail(const char* key, std::string message) {
  if (!error_) error_ = Error{Error::invalid_argument, fmt::format("'{}' {}", key, message), key};
}

void JsonFields::fail_inside(const char* key, const Error& inner) {
  const std::string quoted = fmt::format("'{}'", inner.param);
  EKV_CHECK(inner.message.starts_with(quoted), "a message about a member begins with its name in quotes");
  fail(fmt::format("{}.{}", key, inner.param).c_str(), inner.message.substr(quoted.size() + 1));
}

}  // namespace ekv
