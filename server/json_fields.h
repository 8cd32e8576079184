#pragma once
// json_fields.h -- reads the members of a request body and remembers the first that is wrong.

#include <optional>
#include <string>
#include <vector>

#include "util/json.h"

namespace ekv {

// Absent and null are the same. After a failure every read returns its fallback; look at error() at the end.
class JsonFields {
 public:
  explicit JsonFields(const Json& object) : object_(object) {}

  bool has(const char* key) const { return !member(object_, key).is_null(); }
  const Json& get(const char* key) const { return member(object_, key); }
  bool flag(const char* key, bool fallback);
  std::string text(const char* key, std::string fallback = {});
  int64_t integer(const char* key, int64_t fallback, int64_t least, int64_t most);
  std::optional<int64_t> optional_integer(const char* key, int64_t least, int64_t most);
  double number(const char* key, double fallback, double least, double most);
  std::vector<int32_t> token_ids(const char* key, int vocab_size);

  // A member that must be absent, null or `harmless`.
  void refuse(const char* key, const Json& harmless, const char* why = "is not supported by this server");
  void fail(const char* key, std::string message);
  // What another JsonFields found wrong in the object that member `key` is: 'tier' becomes 'kv_fidelity.tier'.
  void fail_inside(const char* key, const Error& inner);
  const Status& error() const { return error_; }

 private:
  const Json& object_;
  Status error_;
};

}  // namespace ekv
