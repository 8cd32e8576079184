#include "text/jinja/methods.h"

#include <fmt/format.h>

#include <algorithm>

#include "text/jinja/unicode.h"

namespace ekv::jinja {
namespace {

using Text = std::string_view;

struct Call {
  Runtime& rt;
  Value self;
  Text name;
  const CallArgs& args;
  Text text() const { return self.str(); }
};

using StringMethod = Value (*)(const Call&);

Text text_argument(const Call& c, const Value& v) {
  if (!v.is(Kind::string)) fail(fmt::format("'{}' needs a string, got {}", c.name, type_name(v)));
  return v.str();
}

void no_arguments(const Call& c) {
  if (!c.args.positional.empty() || !c.args.named.empty()) fail(fmt::format("'{}' takes no arguments", c.name));
}

// Most methods of str take their arguments by position only.
void positional(const Call& c, size_t least, size_t most) {
  if (!c.args.named.empty()) fail(fmt::format("'{}' takes no keyword arguments", c.name));
  const size_t n = c.args.positional.size();
  if (n < least || n > most) fail(fmt::format("'{}' takes {} to {} arguments, got {}", c.name, least, most, n));
}

template <std::string (*F)(Text)>
Value mapped(const Call& c) {
  no_arguments(c);
  return c.rt.text(F(c.text()));
}

template <bool kLeft, bool kRight>
Value strip_method(const Call& c) {
  positional(c, 0, 1);
  if (c.args.positional.empty() || c.args.positional[0].is(Kind::none))
    return make_str(strip(c.text(), nullptr, kLeft, kRight));
  const Text chars = text_argument(c, c.args.positional[0]);
  c.rt.spend_on_search(c.text(), chars);
  return make_str(strip(c.text(), &chars, kLeft, kRight));
}

// The part of the text between the optional start and end arguments, which count code points. nullopt: the
// range is empty because it starts behind its end, where not even the empty string is found.
std::optional<std::pair<size_t, size_t>> byte_range(const Call& c) {
  const auto& args = c.args.positional;
  const Int size = Int(length(c.text()));
  const auto bound = [&](size_t i, Int fallback) {
    if (args.size() <= i || args[i].is(Kind::none)) return fallback;
    const Int v = index_of(args[i], "a position");
    return v < 0 ? std::max<Int>(v + size, 0) : v;
  };
  const Int start = bound(1, 0), stop = std::min(bound(2, size), size);
  if (start > stop) return std::nullopt;
  return std::pair{offset_of(c.text(), size_t(start)), offset_of(c.text(), size_t(stop))};
}

template <bool kStart>
Value affix_test(const Call& c) {
  positional(c, 1, 3);
  const auto range = byte_range(c);
  const auto test = [&](const Value& affix) {
    const Text a = text_argument(c, affix);
    c.rt.budget.spend(1 + a.size() / 64);
    if (!range) return false;
    const Text part = c.text().substr(range->first, range->second - range->first);
    return kStart ? part.starts_with(a) : part.ends_with(a);
  };
  const Value& v = c.args.positional[0];
  if (!v.is(Kind::list) || v.list->kind != ListKind::tuple) return make_bool(test(v));
  return make_bool(std::any_of(v.list->items, v.list->items + v.list->size, test));
}

template <bool kFromRight, bool kMustExist>
Value find_method(const Call& c) {
  positional(c, 1, 3);
  const Text what = text_argument(c, c.args.positional[0]);
  const auto range = byte_range(c);
  c.rt.spend_on_search(c.text(), what);
  size_t at = Text::npos;
  if (range) {
    const Text part = c.text().substr(range->first, range->second - range->first);
    at = kFromRight ? part.rfind(what) : part.find(what);
  }
  if (at != Text::npos) return make_int(Int(length(c.text().substr(0, range->first + at))));
  if (kMustExist) fail("substring not found");
  return make_int(-1);
}

Value count_method(const Call& c) {
  positional(c, 1, 3);
  const Text what = text_argument(c, c.args.positional[0]);
  const auto range = byte_range(c);
  if (!range) return make_int(0);
  const Text part = c.text().substr(range->first, range->second - range->first);
  c.rt.spend_on_search(part, what);
  if (what.empty()) return make_int(Int(length(part)) + 1);
  Int n = 0;
  for (size_t i = 0; (i = part.find(what, i)) != Text::npos; i += what.size()) ++n;
  return make_int(n);
}

Value replace_method(const Call& c) {
  positional(c, 2, 3);
  const auto& a = c.args.positional;
  const Int count = a.size() > 2 ? index_of(a[2], "a count") : -1;
  return c.rt.text(replace(c.rt, c.text(), text_argument(c, a[0]), text_argument(c, a[1]), count));
}

std::vector<Value> pieces(const std::vector<Text>& parts) {
  std::vector<Value> out;
  for (const Text p : parts) out.push_back(make_str(p));
  return out;
}

// Runs of white space separate; none stand at the ends.
std::vector<Text> split_space(Text text, Int most, bool from_right) {
  std::vector<Text> parts;
  text = strip(text, nullptr, true, true);
  while (!text.empty()) {
    size_t cut = from_right ? text.size() : 0;
    const bool last = most >= 0 && Int(parts.size()) == most;
    while (!last && (from_right ? cut > 0 : cut < text.size())) {
      size_t next = from_right ? previous_start(text, cut) : cut;
      const size_t start = next;
      const char32_t ch = next_code_point(text, next);
      if (is_space(ch)) break;
      cut = from_right ? start : next;
    }
    if (last) cut = from_right ? 0 : text.size();
    parts.push_back(from_right ? text.substr(cut) : text.substr(0, cut));
    text = from_right ? strip(text.substr(0, cut), nullptr, false, true)
                      : strip(text.substr(cut), nullptr, true, false);
  }
  if (from_right) std::reverse(parts.begin(), parts.end());
  return parts;
}

std::vector<Text> split_at(Text text, Text separator, Int most, bool from_right) {
  std::vector<Text> parts;
  while (most < 0 || Int(parts.size()) < most) {
    const size_t at = from_right ? text.rfind(separator) : text.find(separator);
    if (at == Text::npos) break;
    const Text after = text.substr(at + separator.size());
    parts.push_back(from_right ? after : text.substr(0, at));
    text = from_right ? text.substr(0, at) : after;
  }
  parts.push_back(text);
  if (from_right) std::reverse(parts.begin(), parts.end());
  return parts;
}

template <bool kFromRight>
Value split_method(const Call& c) {
  const Arguments a(c.name, c.args, {"sep", "maxsplit"});
  const Int most = a.integer(1, -1);
  c.rt.budget.spend(c.text().size() / 16);
  if (!a.get(0) || a.get(0)->is(Kind::none)) return c.rt.list(pieces(split_space(c.text(), most, kFromRight)));
  const Text separator = text_argument(c, *a.get(0));
  if (separator.empty()) fail("the separator of 'split' is empty");
  c.rt.spend_on_search(c.text(), separator);
  return c.rt.list(pieces(split_at(c.text(), separator, most, kFromRight)));
}

template <bool kFromRight>
Value partition_method(const Call& c) {
  positional(c, 1, 1);
  const Text separator = text_argument(c, c.args.positional[0]), text = c.text();
  if (separator.empty()) fail("the separator of 'partition' is empty");
  c.rt.spend_on_search(text, separator);
  const size_t at = kFromRight ? text.rfind(separator) : text.find(separator);
  std::vector<Text> parts;
  if (at == Text::npos)
    parts = kFromRight ? std::vector<Text>{"", "", text} : std::vector<Text>{text, "", ""};
  else
    parts = {text.substr(0, at), separator, text.substr(at + separator.size())};
  return c.rt.list(pieces(parts), ListKind::tuple);
}

Value splitlines_method(const Call& c) {
  const Arguments a(c.name, c.args, {"keepends"});
  return c.rt.list(pieces(split_lines(c.text(), a.flag(0, false))));
}

Value join_method(const Call& c) {
  positional(c, 1, 1);
  return c.rt.text(join(c.rt, c.text(), items_of(c.rt, c.args.positional[0]), false));
}

template <bool kPrefix>
Value remove_affix(const Call& c) {
  positional(c, 1, 1);
  const Text affix = text_argument(c, c.args.positional[0]), text = c.text();
  if (kPrefix) return make_str(text.starts_with(affix) ? text.substr(affix.size()) : text);
  return make_str(text.ends_with(affix) ? text.substr(0, text.size() - affix.size()) : text);
}

template <int kLeftShare>
Value pad_method(const Call& c) {
  positional(c, 1, 2);
  const auto& a = c.args.positional;
  const Text fill = a.size() > 1 ? text_argument(c, a[1]) : " ";
  if (length(fill) != 1) fail(fmt::format("'{}' needs a fill of one character", c.name));
  return c.rt.text(pad(c.text(), index_of(a[0], "a width"), fill, kLeftShare));
}

Value zfill_method(const Call& c) {
  positional(c, 1, 1);
  const Text text = c.text();
  const Text sign = text.substr(0, !text.empty() && (text[0] == '+' || text[0] == '-'));
  const Int width = index_of(c.args.positional[0], "a width") - Int(sign.size());
  return c.rt.text(std::string(sign) + pad(text.substr(sign.size()), width, "0", 2));
}

Value swapcase_method(const Call& c) {
  no_arguments(c);
  std::string out;
  for (size_t i = 0; i < c.text().size();) {
    const size_t start = i;
    const char32_t ch = next_code_point(c.text(), i);
    const Text one = c.text().substr(start, i - start);
    out += is_upper(ch) ? lower(one) : is_lower(ch) ? upper(one) : std::string(one);
  }
  return c.rt.text(out);
}

// True when every character passes, and there is one.
template <class F>
Value all_of(const Call& c, const F& test) {
  no_arguments(c);
  for (size_t i = 0; i < c.text().size();)
    if (!test(next_code_point(c.text(), i))) return make_bool(false);
  return make_bool(!c.text().empty());
}

// Superscripts and fractions count as digits in ways that need tables; they are refused.
bool is_digit(char32_t ch) {
  if (is_word(ch) && !is_alpha(ch) && !is_decimal(ch) && ch != '_')
    fail_unsupported("classifying numeric characters that are not decimal digits is not supported");
  return is_decimal(ch);
}

template <bool kUpper>
Value case_test(const Call& c) {
  no_arguments(c);
  bool any = false;
  for (size_t i = 0; i < c.text().size();) {
    const char32_t ch = next_code_point(c.text(), i);
    if (!is_cased(ch)) continue;
    if (!(kUpper ? is_upper(ch) : is_lower(ch))) return make_bool(false);
    any = true;
  }
  return make_bool(any);
}

struct Named {
  Text name;
  StringMethod method;
};

constexpr Named kMethods[] = {
    {"capitalize", mapped<capitalize>},
    {"center", pad_method<1>},
    {"count", count_method},
    {"endswith", affix_test<false>},
    {"find", find_method<false, false>},
    {"format", [](const Call& c) { return format_braces(c.rt, c.text(), c.args); }},
    {"index", find_method<false, true>},
    {"isalnum",
     [](const Call& c) { return all_of(c, [](char32_t ch) { return is_alpha(ch) || is_digit(ch); }); }},
    {"isalpha", [](const Call& c) { return all_of(c, is_alpha); }},
    {"isascii",
     [](const Call& c) {
       return make_bool(c.text().empty() || all_of(c, [](char32_t ch) { return ch < 0x80; }).boolean);
     }},
    {"isdecimal", [](const Call& c) { return all_of(c, is_decimal); }},
    {"isdigit", [](const Call& c) { return all_of(c, is_digit); }},
    {"islower", case_test<false>},
    {"isnumeric", [](const Call& c) { return all_of(c, is_digit); }},
    {"isspace", [](const Call& c) { return all_of(c, is_space); }},
    {"isupper", case_test<true>},
    {"join", join_method},
    {"ljust", pad_method<0>},
    {"lower", mapped<lower>},
    {"lstrip", strip_method<true, false>},
    {"partition", partition_method<false>},
    {"removeprefix", remove_affix<true>},
    {"removesuffix", remove_affix<false>},
    {"replace", replace_method},
    {"rfind", find_method<true, false>},
    {"rindex", find_method<true, true>},
    {"rjust", pad_method<2>},
    {"rpartition", partition_method<true>},
    {"rsplit", split_method<true>},
    {"rstrip", strip_method<false, true>},
    {"split", split_method<false>},
    {"splitlines", splitlines_method},
    {"startswith", affix_test<true>},
    {"strip", strip_method<true, true>},
    {"swapcase", swapcase_method},
    {"title", mapped<title>},
    {"upper", mapped<upper>},
    {"zfill", zfill_method},
};

const Named* find_method_named(Text name) {
  const auto it =
      std::find_if(std::begin(kMethods), std::end(kMethods), [&](const Named& m) { return m.name == name; });
  return it == std::end(kMethods) ? nullptr : it;
}

// Methods whose answer is no string and whose arguments are not escaped.
bool ignores_markup(Text name) {
  static constexpr Text kNames[] = {"count", "endswith", "find", "index", "rfind", "rindex", "startswith"};
  return name.starts_with("is") || std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames);
}

}  // namespace

bool is_string_method(Text name) { return find_method_named(name) != nullptr; }

bool is_foreign_string_method(Text name) {
  static constexpr Text kForeign[] = {"casefold", "encode",    "expandtabs", "format_map", "isidentifier",
                                      "istitle",  "maketrans", "translate",  "isprintable"};
  return std::find(std::begin(kForeign), std::end(kForeign), name) != std::end(kForeign);
}

Value call_string_method(Runtime& rt, const Value& self, Text name, const CallArgs& args) {
  const Named* method = find_method_named(name);
  EKV_CHECK(method, "a method value names a method");
  const bool markup = self.markup || std::any_of(args.positional.begin(), args.positional.end(),
                                                 [](const Value& v) { return v.is(Kind::string) && v.markup; });
  if (markup && !ignores_markup(name))
    fail_unsupported(fmt::format("'{}' on a string marked as safe is not supported", name));
  rt.budget.spend(self.text.size / 64);
  return method->method({rt, self, name, args});
}

}  // namespace ekv::jinja
