#pragma once
// jinja/methods.h -- the methods of Python strings that templates call.

#include "text/jinja/runtime.h"

namespace ekv::jinja {

bool is_string_method(std::string_view name);
bool is_foreign_string_method(std::string_view name);  // exists in Python, not here
Value call_string_method(Runtime& rt, const Value& self, std::string_view name, const CallArgs& args);

// str.format with automatic, numbered and named fields, attributes, items, !s !r and format specifications of
// strings and numbers.
Value format_braces(Runtime& rt, std::string_view pattern, const CallArgs& args);

// Shared with the filters of the same names.
std::vector<std::string_view> split_lines(std::string_view text, bool keep_ends);
std::string replace(Runtime& rt, std::string_view text, std::string_view from, std::string_view to, Int count);
std::string join(Runtime& rt, std::string_view separator, std::span<const Value> items, bool convert);
std::string pad(std::string_view text, Int width, std::string_view fill, int left_share);  // 0, 1: centre, 2

}  // namespace ekv::jinja
