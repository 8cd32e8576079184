#pragma once
// tokenizer_json.h -- reading a configuration tree so that every mistake is reported with its place.

#include <cstdint>
#include <string>
#include <string_view>

#include "elastickv/base.h"
#include "util/json.h"

namespace ekv {

// One value of the tree and its path, such as "model.merges[3]". The readers return a harmless value after a
// mistake and record the first one in `status`, so that a loader reads straight on and asks once at the end of
// a stage. A Field points into the tree and the status: both must outlive it.
class Field {
 public:
  Field(const SortedJson& value, std::string path, Status* status)
      : value_(&value), path_(std::move(path)), status_(status) {}

  bool ok() const { return !status_->has_value(); }  // nothing has gone wrong anywhere so far
  bool absent() const { return value_->is_null(); }  // not there, or null
  bool is_string() const { return value_->is_string(); }
  bool is_object() const { return value_->is_object(); }
  bool is_array() const { return value_->is_array(); }
  const std::string& path() const { return path_; }

  Field operator[](const char* key) const;  // absent when this is an object without `key`
  Field operator[](size_t index) const;     // index < size()
  size_t size() const { return value_->size(); }
  const SortedJson& object() const;  // an empty object after a mistake
  const SortedJson& array() const;   // an empty array after a mistake

  std::string string() const;
  std::string string_or(std::string fallback) const { return absent() ? std::move(fallback) : string(); }
  bool boolean_or(bool fallback) const;
  int64_t integer() const;

  // The value must be null, or the one neutral value given.
  void expect_absent_or(const SortedJson& neutral) const;
  void fail(std::string_view what) const;         // "<path> <what>"
  void unsupported(std::string_view what) const;  // a part of the format that this engine does not have

 private:
  void record(Error::Code code, std::string message) const;

  const SortedJson* value_;
  std::string path_;
  Status* status_;
};

}  // namespace ekv
