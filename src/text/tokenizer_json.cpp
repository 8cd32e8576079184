#include "text/tokenizer_json.h"

#include <fmt/format.h>

namespace ekv {
namespace {

const SortedJson& null_json() {
  static const SortedJson null;
  return null;
}

}  // namespace

void Field::record(Error::Code code, std::string message) const {
  if (!status_->has_value()) *status_ = Error{code, std::move(message), path_};
}

void Field::fail(std::string_view what) const {
  record(Error::invalid_argument, fmt::format("'{}' {}", path_, what));
}

void Field::unsupported(std::string_view what) const {
  record(Error::unsupported, fmt::format("'{}': {} is not supported", path_, what));
}

Field Field::operator[](const char* key) const {
  std::string path = path_.empty() ? key : path_ + "." + key;
  if (!value_->is_object()) {
    if (!absent()) fail(fmt::format("must be an object, got {}", value_->type_name()));
    return {null_json(), std::move(path), status_};
  }
  const auto it = value_->find(key);
  return {it == value_->end() ? null_json() : *it, std::move(path), status_};
}

Field Field::operator[](size_t index) const {
  return {(*value_)[index], fmt::format("{}[{}]", path_, index), status_};
}

const SortedJson& Field::object() const {
  static const SortedJson empty = SortedJson::object();
  if (value_->is_object()) return *value_;
  fail(fmt::format("must be an object, got {}", value_->type_name()));
  return empty;
}

const SortedJson& Field::array() const {
  static const SortedJson empty = SortedJson::array();
  if (value_->is_array()) return *value_;
  fail(fmt::format("must be an array, got {}", value_->type_name()));
  return empty;
}

std::string Field::string() const {
  if (value_->is_string()) return value_->get<std::string>();
  fail(fmt::format("must be a string, got {}", value_->type_name()));
  return {};
}

bool Field::boolean_or(bool fallback) const {
  if (value_->is_boolean()) return value_->get<bool>();
  if (!absent()) fail(fmt::format("must be true or false, got {}", value_->type_name()));
  return fallback;
}

int64_t Field::integer() const {
  const bool fits = value_->is_number_integer() &&
                    !(value_->is_number_unsigned() && value_->get<uint64_t>() > uint64_t(INT64_MAX));
  if (fits) return value_->get<int64_t>();
  fail(value_->is_number() ? "must be an integer of 64 bits"
                           : fmt::format("must be an integer, got {}", value_->type_name()));
  return 0;
}

void Field::expect_absent_or(const SortedJson& neutral) const {
  if (!absent() && *value_ != neutral)
    unsupported(fmt::format("the value {}",
                            value_->dump(-1, ' ', false, SortedJson::error_handler_t::replace).substr(0, 60)));
}

}  // namespace ekv
