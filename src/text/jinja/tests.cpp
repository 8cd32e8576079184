// The tests behind `is`, and the look-up of filters and tests.

#include <fmt/format.h>

#include <algorithm>

#include "text/jinja/filters.h"
#include "text/jinja/operators.h"
#include "text/jinja/unicode.h"

namespace ekv::jinja {
namespace {

template <bool (*F)(const Value&)>
bool plain(Runtime&, const Value& v, const CallArgs& args) {
  const Arguments a("test", args, {});
  return F(v);
}

template <Op kOp>
bool comparison(Runtime& rt, const Value& v, const CallArgs& args) {
  if (args.positional.size() != 1 || !args.named.empty()) fail("a comparison test takes one argument");
  return compare_with(rt, kOp, v, args.positional[0]);
}

template <int kDivisor, int kRemainder>
bool parity(Runtime& rt, const Value& v, const CallArgs& args) {
  const Arguments a("test", args, {});
  return equals(rt.budget, binary(rt, Op::mod, v, make_int(kDivisor)), make_int(kRemainder));
}

bool divisible(Runtime& rt, const Value& v, const CallArgs& args) {
  const Arguments a("divisibleby", args, {"num"}, 1);
  return equals(rt.budget, binary(rt, Op::mod, v, *a.get(0)), make_int(0));
}

bool in_test(Runtime& rt, const Value& v, const CallArgs& args) {
  const Arguments a("in", args, {"seq"}, 1);
  return contains(rt, *a.get(0), v);
}

// Identity is known for the singletons and for containers; equal strings or numbers may or may not be one
// object.
bool same_as(Runtime&, const Value& v, const CallArgs& args) {
  const Arguments a("sameas", args, {"other"}, 1);
  const Value& o = *a.get(0);
  if (v.kind != o.kind) return false;
  switch (v.kind) {
    case Kind::none:
      return true;
    case Kind::boolean:
      return v.boolean == o.boolean;
    case Kind::list:
      return v.list == o.list;
    case Kind::dict:
      return v.dict == o.dict;
    case Kind::name_space:
      return v.name_space == o.name_space;
    case Kind::macro:
      return v.macro == o.macro;
    default:
      fail_unsupported(fmt::format("'sameas' between values of type {} is not supported", type_name(v)));
  }
}

// Filters that Jinja2 has and this engine does not.
bool is_foreign_filter(std::string_view name) {
  static constexpr std::string_view kForeign[] = {"attr",     "filesizeformat", "groupby",   "pprint",
                                                  "random",   "striptags",      "urlencode", "urlize",
                                                  "wordwrap", "xmlattr"};
  return std::find(std::begin(kForeign), std::end(kForeign), name) != std::end(kForeign);
}

bool filter_exists(Runtime& rt, const Value& v, const CallArgs& args) {
  const Arguments a("filter", args, {});
  if (!hashable(rt.budget, v)) fail(fmt::format("unhashable type: {}", type_name(v)));
  return v.is(Kind::string) && (find_filter(v.str()) || is_foreign_filter(v.str()));
}

bool test_exists(Runtime& rt, const Value& v, const CallArgs& args) {
  const Arguments a("test", args, {});
  if (!hashable(rt.budget, v)) fail(fmt::format("unhashable type: {}", type_name(v)));
  return v.is(Kind::string) && find_test(v.str());
}

bool is_sequence(const Value& v) {
  if (v.is(Kind::list))
    return v.list->kind == ListKind::list || v.list->kind == ListKind::tuple || v.list->kind == ListKind::range;
  return v.is(Kind::dict) || v.is(Kind::string) || v.is(Kind::undefined);
}

bool is_callable(const Value& v) {
  return v.is(Kind::macro) || v.is(Kind::builtin) || v.is(Kind::method) || v.is(Kind::loop) ||
         v.is(Kind::undefined);
}

template <bool kUpper>
bool cased_as(Runtime& rt, const Value& v, const CallArgs& args) {
  const Arguments a("test", args, {});
  const std::string text = text_of(rt, v);
  bool any = false;
  for (size_t i = 0; i < text.size();) {
    const char32_t c = next_code_point(text, i);
    if (!is_cased(c)) continue;
    if (!(kUpper ? is_upper(c) : is_lower(c))) return false;
    any = true;
  }
  return any;
}

struct NamedTest {
  std::string_view name;
  TestFn test;
};

constexpr NamedTest kTests[] = {
    {"!=", comparison<Op::ne>},
    {"<", comparison<Op::lt>},
    {"<=", comparison<Op::le>},
    {"==", comparison<Op::eq>},
    {">", comparison<Op::gt>},
    {">=", comparison<Op::ge>},
    {"boolean", plain<[](const Value& v) { return v.is(Kind::boolean); }>},
    {"callable", plain<is_callable>},
    {"defined", plain<[](const Value& v) { return !v.is(Kind::undefined); }>},
    {"divisibleby", divisible},
    {"eq", comparison<Op::eq>},
    {"equalto", comparison<Op::eq>},
    {"escaped", plain<[](const Value& v) { return v.is(Kind::string) && v.markup; }>},
    {"even", parity<2, 0>},
    {"false", plain<[](const Value& v) { return v.is(Kind::boolean) && !v.boolean; }>},
    {"filter", filter_exists},
    {"float", plain<[](const Value& v) { return v.is(Kind::real); }>},
    {"ge", comparison<Op::ge>},
    {"greaterthan", comparison<Op::gt>},
    {"gt", comparison<Op::gt>},
    {"in", in_test},
    {"integer", plain<[](const Value& v) { return v.is(Kind::integer); }>},
    {"iterable", plain<is_iterable>},
    {"le", comparison<Op::le>},
    {"lessthan", comparison<Op::lt>},
    {"lower", cased_as<false>},
    {"lt", comparison<Op::lt>},
    {"mapping", plain<[](const Value& v) { return v.is(Kind::dict); }>},
    {"ne", comparison<Op::ne>},
    {"none", plain<[](const Value& v) { return v.is(Kind::none); }>},
    {"number", plain<[](const Value& v) { return v.is_number(); }>},
    {"odd", parity<2, 1>},
    {"sameas", same_as},
    {"sequence", plain<is_sequence>},
    {"string", plain<[](const Value& v) { return v.is(Kind::string); }>},
    {"test", test_exists},
    {"true", plain<[](const Value& v) { return v.is(Kind::boolean) && v.boolean; }>},
    {"undefined", plain<[](const Value& v) { return v.is(Kind::undefined); }>},
    {"upper", cased_as<true>},
};

// Filters that keep a string marked as safe what it is, or do not care.
bool accepts_markup(std::string_view name) {
  static constexpr std::string_view kNames[] = {
      "capitalize", "count",  "d",     "default", "e",    "escape", "first",
      "float",      "int",    "last",  "length",  "list", "lower",  "replace",
      "safe",       "string", "title", "tojson",  "trim", "upper",  "wordcount"};
  return std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames);
}

FilterFn find_in(std::span<const NamedFilter> filters, std::string_view name) {
  const auto it =
      std::find_if(filters.begin(), filters.end(), [&](const NamedFilter& f) { return f.name == name; });
  return it == filters.end() ? nullptr : it->filter;
}

}  // namespace

FilterFn find_filter(std::string_view name) {
  const FilterFn f = find_in(text_filters(), name);
  return f ? f : find_in(sequence_filters(), name);
}

TestFn find_test(std::string_view name) {
  const auto it =
      std::find_if(std::begin(kTests), std::end(kTests), [&](const NamedTest& t) { return t.name == name; });
  return it == std::end(kTests) ? nullptr : it->test;
}

Value apply_filter(Runtime& rt, std::string_view name, const Value& self, const CallArgs& args) {
  const FilterFn filter = find_filter(name);
  if (!filter) fail(fmt::format("there is no filter named '{}'", name));
  if (self.is(Kind::string) && self.markup && !accepts_markup(name))
    fail_unsupported(fmt::format("the filter '{}' on a string marked as safe is not supported", name));
  rt.budget.spend();
  if (self.is(Kind::string)) rt.spend_on(self.str());
  return filter(rt, self, args);
}

bool apply_test(Runtime& rt, std::string_view name, const Value& self, const CallArgs& args) {
  const TestFn test = find_test(name);
  if (!test) fail(fmt::format("there is no test named '{}'", name));
  rt.budget.spend();
  return test(rt, self, args);
}

}  // namespace ekv::jinja
