// Filters on text and numbers.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "text/jinja/filters.h"
#include "text/jinja/methods.h"
#include "text/jinja/operators.h"
#include "text/jinja/unicode.h"

namespace ekv::jinja {
namespace {

using Text = std::string_view;

Value marked(Value v) {
  v.markup = true;
  return v;
}

template <std::string (*F)(Text)>
Value mapped(Runtime& rt, const Value& self, const CallArgs& args) {
  const Arguments a("filter", args, {});
  Value v = rt.text(F(text_of(rt, self)));
  v.markup = self.is(Kind::string) && self.markup;
  return v;
}

bool starts_word(char32_t c) { return is_space(c) || c == '-' || c == '(' || c == '{' || c == '[' || c == '<'; }

// Unlike str.title, words end only at white space, hyphens and opening brackets.
std::string title_words(Text text) {
  std::string out;
  bool at_start = true;
  for (size_t i = 0; i < text.size();) {
    const size_t start = i;
    const char32_t c = next_code_point(text, i);
    const Text one = text.substr(start, i - start);
    out += at_start ? upper(one) : lower(one);
    at_start = starts_word(c);
  }
  return out;
}

Value trim(Runtime& rt, const Value& self, const CallArgs& args) {
  const Arguments a("trim", args, {"chars"});
  const Text text = self.is(Kind::string) ? self.str() : rt.text(text_of(rt, self)).str();
  Value v;
  if (!a.get(0) || a.get(0)->is(Kind::none)) {
    v = make_str(strip(text, nullptr, true, true));
  } else {
    if (!a.get(0)->is(Kind::string)) fail("'trim' needs a string of characters");
    const Text chars = a.get(0)->str();
    rt.spend_on_search(text, chars);
    v = make_str(strip(text, &chars, true, true));
  }
  v.markup = self.is(Kind::string) && self.markup;
  return v;
}

Value string(Runtime& rt, const Value& self, const CallArgs& args) {
  const Arguments a("string", args, {});
  return self.is(Kind::string) ? self : rt.text(text_of(rt, self));
}

Value escape(Runtime& rt, const Value& self, const CallArgs& args) {
  const Arguments a("escape", args, {});
  return self.is(Kind::string) && self.markup ? self : marked(rt.text(escape_html(text_of(rt, self))));
}

Value force_escape(Runtime& rt, const Value& self, const CallArgs& args) {
  const Arguments a("forceescape", args, {});
  return marked(rt.text(escape_html(text_of(rt, self))));
}

Value safe(Runtime& rt, const Value& self, const CallArgs& args) {
  const Arguments a("safe", args, {});
  return marked(self.is(Kind::string) ? self : rt.text(text_of(rt, self)));
}

Value replace_filter(Runtime& rt, const Value& self, const CallArgs& args) {
  const Arguments a("replace", args, {"old", "new", "count"}, 2);
  const Int count = a.get(2) && a.get(2)->is(Kind::none) ? -1 : a.integer(2, -1);
  return rt.text(replace(rt, text_of(rt, self), text_of(rt, *a.get(0)), text_of(rt, *a.get(1)), count));
}

Value center(Runtime& rt, const Value& self, const CallArgs& args) {
  const Arguments a("center", args, {"width"});
  return rt.text(pad(text_of(rt, self), a.integer(0, 80), " ", 1));
}

Value format(Runtime& rt, const Value& self, const CallArgs& args) {
  if (!args.positional.empty() && !args.named.empty())
    fail("'format' takes positional or keyword arguments, not both");
  if (args.named.empty())
    return format_percent(rt, text_of(rt, self), rt.list(args.positional, ListKind::tuple));
  std::vector<Entry> entries;
  for (const NamedValue& n : args.named) entries.push_back({rt.text(n.name), n.value});
  return format_percent(rt, text_of(rt, self), make_dict(rt.arena, rt.budget, entries));
}

Value indent(Runtime& rt, const Value& self, const CallArgs& args) {
  const Arguments a("indent", args, {"width", "first", "blank"});
  if (self.is(Kind::undefined)) fail_undefined(self);
  if (!self.is(Kind::string)) fail("'indent' needs a string");
  const bool is_text = a.get(0) && a.get(0)->is(Kind::string);
  const Int width = is_text ? 0 : std::clamp<Int>(a.integer(0, 4), 0, Int(kMaxTextBytes));
  const std::string indention = is_text ? std::string(a.get(0)->str()) : std::string(size_t(width), ' ');
  const std::string text = std::string(self.str()) + "\n";
  const auto lines = split_lines(text, false);
  std::string out = a.flag(1, false) ? indention : "";
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i) out += "\n";
    if (i && (a.flag(2, false) || !lines[i].empty())) out += indention;
    out += lines[i];
    if (out.size() > kMaxTextBytes) throw Failure{"a string is too large", Error::too_large};
  }
  return rt.text(out);
}

Value truncate(Runtime& rt, const Value& self, const CallArgs& args) {
  const Arguments a("truncate", args, {"length", "killwords", "end", "leeway"});
  if (!self.is(Kind::string)) fail("'truncate' needs a string");
  const std::string end = a.get(2) ? text_of(rt, *a.get(2)) : "...";
  const Int most = a.integer(0, 255), end_size = Int(length(end));
  const Int leeway = a.get(3) && a.get(3)->is(Kind::none) ? 5 : a.integer(3, 5);
  if (most < end_size || leeway < 0)
    fail("'truncate' needs a length that holds its ending, and a leeway of 0 or more");
  const Text text = self.str();
  if (Int(length(text)) <= most + leeway) return self;
  Text kept = text.substr(0, offset_of(text, size_t(most - end_size)));
  if (!a.flag(1, false)) kept = kept.substr(0, std::min(kept.rfind(' '), kept.size()));
  return rt.text(std::string(kept) + end);
}

Value wordcount(Runtime& rt, const Value& self, const CallArgs& args) {
  const Arguments a("wordcount", args, {});
  const std::string text = text_of(rt, self);
  Int words = 0;
  bool inside = false;
  for (size_t i = 0; i < text.size();) {
    const bool word = is_word(next_code_point(text, i));
    words += word && !inside;
    inside = word;
  }
  return make_int(words);
}

Value tojson(Runtime& rt, const Value& self, const CallArgs& args) {
  const Arguments a("tojson", args, {"ensure_ascii", "indent", "separators", "sort_keys"});
  JsonStyle style;
  style.ascii = a.flag(0, false);
  style.sort_keys = a.flag(3, false);
  if (const Value* indent = a.get(1); indent && !indent->is(Kind::none)) {
    style.multiline = true;
    if (indent->is(Kind::string))
      style.indent = indent->str();
    else
      style.indent.assign(size_t(std::clamp<Int>(index_of(*indent, "'indent' of 'tojson'"), 0, 1024)), ' ');
  }
  style.item_separator = style.multiline ? "," : ", ";
  style.key_separator = ": ";
  if (const Value* s = a.get(2); s && !s->is(Kind::none)) {
    const auto parts = items_of(rt, *s);
    if (parts.size() != 2 || !parts[0].is(Kind::string) || !parts[1].is(Kind::string))
      fail("'separators' of 'tojson' must be two strings");
    style.item_separator = parts[0].str();
    style.key_separator = parts[1].str();
  }
  return rt.text(to_json(self, style, kMaxTextBytes));
}

Value join_filter(Runtime& rt, const Value& self, const CallArgs& args) {
  const Arguments a("join", args, {"d", "attribute"});
  std::vector<Value> items;
  for (const Value& v : items_of(rt, self)) items.push_back(a.get(1) ? get_path(rt, v, *a.get(1)) : v);
  return rt.text(join(rt, a.get(0) ? text_of(rt, *a.get(0)) : "", items, true));
}

// -- Numbers. --

// What Python's int() and float() accept of a string: white space around, one underscore between digits.
std::optional<std::string> number_text(Text text) {
  text = strip(text, nullptr, true, true);
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] & 0x80) {
      size_t at = i;
      if (is_decimal(next_code_point(text, at))) fail_unsupported("digits outside ASCII are not supported");
      return std::nullopt;
    }
    const auto digit_at = [&](size_t k) { return k < text.size() && text[k] >= '0' && text[k] <= '9'; };
    if (text[i] == '_' && (i == 0 || !digit_at(i - 1) || !digit_at(i + 1))) return std::nullopt;
    if (text[i] != '_') out += text[i];
  }
  return out.empty() ? std::nullopt : std::optional(out);
}

std::optional<double> parse_real(Text text) {
  const auto clean = number_text(text);
  if (!clean) return std::nullopt;
  const std::string low = lower(*clean);
  const std::string unsigned_part = low.substr(low[0] == '-' || low[0] == '+');
  const bool word = unsigned_part == "inf" || unsigned_part == "infinity" || unsigned_part == "nan";
  if (!word &&
      (unsigned_part.empty() || unsigned_part.find_first_not_of("0123456789.e+-") != std::string::npos))
    return std::nullopt;
  char* end;
  const double d = std::strtod(low.c_str(), &end);
  return *end == '\0' ? std::optional(d) : std::nullopt;
}

std::optional<Int> parse_int(Text text) {
  const auto clean = number_text(text);
  if (!clean) return std::nullopt;
  const bool negative = (*clean)[0] == '-', sign = negative || (*clean)[0] == '+';
  if (clean->size() == size_t(sign)) return std::nullopt;
  Int value = 0;
  for (size_t i = sign; i < clean->size(); ++i) {
    const char c = (*clean)[i];
    if (c < '0' || c > '9') return std::nullopt;
    value = make_int(value * 10 + (c - '0')).integer;
  }
  return negative ? -value : value;
}

Value truncated(double d) {
  if (std::fabs(d) >= 0x1p64) fail_unsupported("an integer does not fit in 64 bits");
  return make_int(Int(d));
}

Value int_filter(Runtime&, const Value& self, const CallArgs& args) {
  const Arguments a("int", args, {"default", "base"});
  if (a.integer(1, 10) != 10) fail_unsupported("'int' with another base than 10 is not supported");
  const Value fallback = a.get(0) ? *a.get(0) : make_int(0);
  if (self.is(Kind::undefined)) fail_undefined(self);
  if (self.is_integral()) return make_int(self.as_int());
  if (self.is(Kind::real)) {
    if (std::isinf(self.real)) fail("infinity cannot be converted to an integer");
    return std::isnan(self.real) ? fallback : truncated(self.real);
  }
  if (!self.is(Kind::string)) return fallback;
  if (const auto i = parse_int(self.str())) return make_int(*i);
  const auto d = parse_real(self.str());
  return d && std::isfinite(*d) ? truncated(*d) : fallback;
}

Value float_filter(Runtime&, const Value& self, const CallArgs& args) {
  const Arguments a("float", args, {"default"});
  if (self.is(Kind::undefined)) fail_undefined(self);
  if (self.is_number()) return make_real(self.as_real());
  const auto d = self.is(Kind::string) ? parse_real(self.str()) : std::nullopt;
  return d ? make_real(*d) : a.get(0) ? *a.get(0) : make_real(0);
}

Value abs_filter(Runtime&, const Value& self, const CallArgs& args) {
  const Arguments a("abs", args, {});
  if (self.is(Kind::undefined)) fail_undefined(self);
  if (!self.is_number()) fail(fmt::format("'abs' needs a number, got {}", type_name(self)));
  if (self.is(Kind::real)) return make_real(std::fabs(self.real));
  return make_int(self.as_int() < 0 ? -self.as_int() : self.as_int());
}

Value round_up_or_down(const Value& self, Int precision, bool up) {
  const double scale = std::pow(10.0, double(precision));
  const double scaled = self.as_real() * scale;
  if (!(std::fabs(scaled) < 0x1p53)) fail_unsupported("rounding numbers beyond 2^53 is not supported");
  const double whole = up ? std::ceil(scaled) : std::floor(scaled);
  return make_real((whole == 0 ? 0.0 : whole) / scale);
}

// To the nearest decimal, ties of the exact binary value to even, as printf rounds.
Value round_filter(Runtime& rt, const Value& self, const CallArgs& args) {
  const Arguments a("round", args, {"precision", "method"});
  const std::string method = a.get(1) ? text_of(rt, *a.get(1)) : "common";
  if (method != "common" && method != "ceil" && method != "floor") fail("the method of 'round' is not known");
  if (self.is(Kind::undefined)) fail_undefined(self);
  if (!self.is_number()) fail(fmt::format("'round' needs a number, got {}", type_name(self)));
  const Int precision = a.integer(0, 0);
  if (precision < 0 || precision > 15)
    fail_unsupported("'round' to another precision than 0 to 15 is not supported");
  if (method != "common") return round_up_or_down(self, precision, method == "ceil");
  if (self.is_integral()) return make_int(self.as_int());
  if (!std::isfinite(self.real)) return self;
  return make_real(std::strtod(fmt::format("{:.{}f}", self.real, int(precision)).c_str(), nullptr));
}

constexpr NamedFilter kFilters[] = {
    {"abs", abs_filter},
    {"capitalize", mapped<capitalize>},
    {"center", center},
    {"e", escape},
    {"escape", escape},
    {"float", float_filter},
    {"format", format},
    {"forceescape", force_escape},
    {"indent", indent},
    {"int", int_filter},
    {"join", join_filter},
    {"lower", mapped<lower>},
    {"replace", replace_filter},
    {"round", round_filter},
    {"safe", safe},
    {"string", string},
    {"title", mapped<title_words>},
    {"tojson", tojson},
    {"trim", trim},
    {"truncate", truncate},
    {"upper", mapped<upper>},
    {"wordcount", wordcount},
};

}  // namespace

std::span<const NamedFilter> text_filters() { return kFilters; }

}  // namespace ekv::jinja
