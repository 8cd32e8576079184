#pragma once
// json.h -- the one place that names the JSON library. Parsing hostile text: bounded depth, strict UTF-8, no
// exceptions out. Key order is kept, because chat templates print objects in the order in which they came.

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "elastickv/base.h"

namespace ekv {

using Json = nlohmann::ordered_json;

constexpr int kMaxJsonDepth = 128;
constexpr int kMaxJsonMembers = 1024;  // of one object; `Json` searches them linearly
constexpr size_t kMostNameBytes = 64;  // of a member whose name a message repeats

// The whole text must be one JSON value. Refused: invalid UTF-8, lone surrogate escapes, nesting deeper than
// `max_depth`, objects of more than kMaxJsonMembers members, anything after the value. A leading UTF-8 byte
// order mark is skipped. An error names the member of the outermost object that has too many members.
Result<Json> parse_json(std::string_view text, int max_depth = kMaxJsonDepth);

// Text that any strict parser reads. Invalid UTF-8 inside strings becomes U+FFFD. indent < 0: one line.
std::string dump_json(const Json& value, int indent = -1);

// Objects sorted by key, with logarithmic access: for files whose objects have 100,000 members, such as a
// vocabulary. `Json` keeps the order and searches it linearly, so that reading such a file would be quadratic.
using SortedJson = nlohmann::json;
Result<SortedJson> parse_sorted_json(std::string_view text, int max_depth = kMaxJsonDepth);

// The member `key` of an object, or null when it is absent.
const Json& member(const Json& object, const char* key);

// Typed members: `fallback` when the key is absent or null, an Error naming `key` when the type is wrong.
Result<int64_t> int_member(const Json& object, const char* key, int64_t fallback);
Result<double> number_member(const Json& object, const char* key, double fallback);
Result<bool> bool_member(const Json& object, const char* key, bool fallback);
Result<std::string> string_member(const Json& object, const char* key, std::string fallback);

}  // namespace ekv
