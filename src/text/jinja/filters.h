#pragma once
// jinja/filters.h -- the filters and tests of Jinja2, found by name.

#include "text/jinja/runtime.h"

namespace ekv::jinja {

using FilterFn = Value (*)(Runtime& rt, const Value& self, const CallArgs& args);
using TestFn = bool (*)(Runtime& rt, const Value& self, const CallArgs& args);

FilterFn find_filter(std::string_view name);  // nullptr: there is no such filter
TestFn find_test(std::string_view name);
// Filters with the rules for strings marked as safe. Both fail when the name is unknown.
Value apply_filter(Runtime& rt, std::string_view name, const Value& self, const CallArgs& args);
bool apply_test(Runtime& rt, std::string_view name, const Value& self, const CallArgs& args);

struct NamedFilter {
  std::string_view name;
  FilterFn filter;
};
std::span<const NamedFilter> text_filters();
std::span<const NamedFilter> sequence_filters();

}  // namespace ekv::jinja
