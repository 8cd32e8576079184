// "%s" % values and "{}".format(values), and the text helpers that methods and filters share.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "text/jinja/methods.h"
#include "text/jinja/operators.h"
#include "text/jinja/unicode.h"

namespace ekv::jinja {
namespace {

constexpr Int kMaxWidth = 1'000'000;

struct Spec {
  std::string fill = " ";
  char align = 0;  // '<' '>' '^' '='
  char sign = '-';
  bool alternate = false, zero = false, grouped = false;
  Int width = 0, precision = -1;
  char type = 0;
};

Int read_number(std::string_view s, size_t& i) {
  Int n = 0;
  for (; i < s.size() && s[i] >= '0' && s[i] <= '9'; ++i) {
    n = n * 10 + (s[i] - '0');
    if (n > kMaxWidth) throw Failure{"a width or precision is too large", Error::too_large};
  }
  return n;
}

std::string with_commas(std::string digits) {
  const size_t end = std::min(digits.find_first_not_of("0123456789"), digits.size());
  for (size_t i = end; i > 3; i -= 3) digits.insert(i - 3, ",");
  return digits;
}

std::string integer_digits(Int magnitude, const Spec& s) {
  const uint64_t u = uint64_t(magnitude);
  switch (s.type) {
    case 'x':
      return (s.alternate ? "0x" : "") + fmt::format("{:x}", u);
    case 'X':
      return (s.alternate ? "0X" : "") + fmt::format("{:X}", u);
    case 'o':
      return (s.alternate ? "0o" : "") + fmt::format("{:o}", u);
    case 'b':
      return (s.alternate ? "0b" : "") + fmt::format("{:b}", u);
    default:
      return fmt::format("{}", u);
  }
}

std::string real_digits(double magnitude, const Spec& s) {
  const int precision = s.precision < 0 ? 6 : int(s.precision);
  const std::string pattern =
      fmt::format("%{}.{}{}", s.alternate ? "#" : "", precision, s.type == '%' ? 'f' : s.type);
  const double d = s.type == '%' ? magnitude * 100 : magnitude;
  const int size = std::snprintf(nullptr, 0, pattern.c_str(), d);
  std::string out(size_t(size) + 1, '\0');
  std::snprintf(out.data(), out.size(), pattern.c_str(), d);
  out.resize(size_t(size));
  return s.type == '%' ? out + "%" : out;
}

std::string aligned(std::string_view sign, std::string body, const Spec& s, char default_align) {
  const Int missing = s.width - Int(length(body)) - Int(sign.size());
  if (missing <= 0) return std::string(sign) + body;
  const char align = s.align ? s.align : s.zero ? '=' : default_align;
  const std::string fill_one = s.zero && !s.align ? "0" : s.fill;
  const Int before = align == '<' ? 0 : align == '^' ? missing / 2 : missing;
  std::string left, right;
  for (Int i = 0; i < before; ++i) left += fill_one;
  for (Int i = before; i < missing; ++i) right += fill_one;
  return align == '=' ? std::string(sign) + left + body + right : left + std::string(sign) + body + right;
}

std::string format_number(const Value& v, Spec s) {
  const bool wants_real = std::string_view("eEfFgG%").find(s.type) != std::string_view::npos && s.type;
  const bool is_real = v.is(Kind::real);
  const bool negative = is_real ? std::signbit(v.real) : v.as_int() < 0;
  std::string body;
  if (is_real || wants_real) {
    if (!s.type && s.precision >= 0) fail_unsupported("a precision without a format type is not supported");
    body = s.type ? real_digits(std::fabs(v.as_real()), s) : real_to_text(std::fabs(v.real));
  } else {
    body = integer_digits(negative ? -v.as_int() : v.as_int(), s);
  }
  if (s.grouped) {
    if (s.zero) fail_unsupported("zero padding with a thousands separator is not supported");
    body = with_commas(std::move(body));
  }
  const std::string_view sign = negative ? "-" : s.sign == '-' ? "" : s.sign == '+' ? "+" : " ";
  return aligned(sign, std::move(body), s, '>');
}

std::string format_text(std::string_view text, const Spec& s) {
  if (s.precision >= 0) text = text.substr(0, offset_of(text, size_t(s.precision)));
  return aligned("", std::string(text), s, '<');
}

Spec parse_spec(std::string_view s) {
  Spec spec;
  size_t i = 0;
  const auto is_align = [&](size_t k) { return k < s.size() && std::string_view("<>=^").find(s[k]) != s.npos; };
  size_t after_fill = 0;
  if (!s.empty()) next_code_point(s, after_fill);
  if (!s.empty() && is_align(after_fill)) {
    spec.fill = s.substr(0, after_fill);
    spec.align = s[after_fill];
    i = after_fill + 1;
  } else if (is_align(0)) {
    spec.align = s[i++];
  }
  if (i < s.size() && (s[i] == '+' || s[i] == '-' || s[i] == ' ')) spec.sign = s[i++];
  if (i < s.size() && s[i] == '#') spec.alternate = true, ++i;
  if (i < s.size() && s[i] == '0') spec.zero = true, ++i;
  spec.width = read_number(s, i);
  if (i < s.size() && s[i] == ',') spec.grouped = true, ++i;
  if (i < s.size() && s[i] == '.') {
    const size_t start = ++i;
    spec.precision = read_number(s, i);
    if (i == start) fail("a format specification lacks its precision");
  }
  if (i < s.size()) spec.type = s[i++];
  if (i < s.size()) fail(fmt::format("invalid format specification '{}'", s));
  return spec;
}

std::string format_with_spec(Runtime& rt, const Value& v, std::string_view text) {
  if (text.empty()) return text_of(rt, v);
  const Spec s = parse_spec(text);
  const auto one_of = [&](std::string_view types) { return !s.type || types.find(s.type) != types.npos; };
  if (v.is(Kind::string) && one_of("s") && s.sign == '-' && s.align != '=' && !s.zero && !s.grouped &&
      !s.alternate)
    return format_text(v.str(), s);
  if (v.is(Kind::integer) && one_of("dxXobeEfFgG%") && (s.precision < 0 || one_of("eEfFgG%")))
    return format_number(v, s);
  if (v.is(Kind::real) && one_of("eEfFgG%")) return format_number(v, s);
  fail_unsupported(fmt::format("the format specification '{}' for {} is not supported", text, type_name(v)));
}

// Replacement fields of str.format.
class BraceFormatter {
 public:
  BraceFormatter(Runtime& rt, const CallArgs& args) : rt_(rt), args_(args) {}

  std::string run(std::string_view s, int depth = 0) {
    std::string out;
    for (size_t i = 0; i < s.size();) {
      if ((s[i] == '{' || s[i] == '}') && i + 1 < s.size() && s[i + 1] == s[i]) {
        out += s[i];
        i += 2;
      } else if (s[i] == '}') {
        fail("a single '}' in a format string");
      } else if (s[i] == '{') {
        out += field(s, i, depth);
      } else {
        out += s[i++];
      }
      if (out.size() > kMaxTextBytes) throw Failure{"a formatted string is too large", Error::too_large};
    }
    return out;
  }

 private:
  std::string field(std::string_view s, size_t& i, int depth) {
    int open = 0;
    size_t end = i;
    do {
      if (end >= s.size()) fail("a '{' in a format string is not closed");
      open += s[end] == '{' ? 1 : s[end] == '}' ? -1 : 0;
      ++end;
    } while (open > 0);
    const std::string_view inside = s.substr(i + 1, end - i - 2);
    i = end;
    if (inside.find('[') != inside.npos && inside.find_first_of(":!") < inside.find(']'))
      fail_unsupported("':' and '!' inside a subscript of a format string are not supported");
    const size_t mark = std::min(inside.find_first_of(":!"), inside.size());
    Value v = lookup(inside.substr(0, mark));
    std::string_view rest = inside.substr(mark);
    if (!rest.empty() && rest[0] == '!') {
      if (rest.size() < 2 || (rest.size() > 2 && rest[2] != ':'))
        fail("a conversion in a format string is wrong");
      if (rest[1] == 'a') fail_unsupported("the conversion !a is not supported");
      if (rest[1] != 's' && rest[1] != 'r') fail("a conversion in a format string is wrong");
      v = rt_.text(rest[1] == 'r' ? to_repr(v, kMaxTextBytes) : text_of(rt_, v));
      rest = rest.substr(2);
    }
    if (rest.empty()) return text_of(rt_, v);
    if (depth > 0) fail("format specifications are nested too deeply");
    return format_with_spec(rt_, v, run(rest.substr(1), depth + 1));
  }

  Value lookup(std::string_view path) {
    const size_t end = std::min(path.find_first_of(".["), path.size());
    Value v = first(path.substr(0, end));
    path = path.substr(end);
    while (!path.empty()) {
      const bool item = path[0] == '[';
      const size_t stop = item ? path.find(']') : std::min(path.find_first_of(".[", 1), path.size());
      if (stop == path.npos || stop == 1) fail("a field of a format string is wrong");
      const std::string_view name = path.substr(1, stop - 1);
      v = item ? get_item(rt_, v, key(name)) : get_attribute(rt_, v, rt_.arena.copy(name));
      path = path.substr(stop + item);
      if (item && !path.empty() && path[0] != '.' && path[0] != '[')
        fail("a field of a format string is wrong");
    }
    return v;
  }

  static bool all_digits(std::string_view s) {
    return !s.empty() && s.size() < 10 &&
           std::all_of(s.begin(), s.end(), [](char c) { return c >= '0' && c <= '9'; });
  }

  Value key(std::string_view name) {
    return all_digits(name) ? make_int(std::stoll(std::string(name))) : rt_.text(name);
  }

  Value first(std::string_view name) {
    if (name.empty() || all_digits(name)) {
      const int mode = name.empty() ? 1 : 2;
      if (mode_ && mode_ != mode) fail("a format string mixes '{}' with numbered fields");
      mode_ = mode;
      const size_t i = name.empty() ? next_++ : size_t(std::stoll(std::string(name)));
      if (i >= args_.positional.size()) fail("a format string has more fields than there are arguments");
      return args_.positional[i];
    }
    for (const NamedValue& n : args_.named)
      if (n.name == name) return n.value;
    fail(fmt::format("a format string names '{}', which is not an argument", name));
  }

  Runtime& rt_;
  const CallArgs& args_;
  size_t next_ = 0;
  int mode_ = 0;  // 1: automatic numbers, 2: given numbers
};

// One % conversion; `i` stands behind the '%'.
std::string percent_field(Runtime& rt, std::string_view p, size_t& i, const Value& v, const Spec& parsed) {
  Spec s = parsed;
  const char type = p[i - 1];
  if (type == 's' || type == 'r') {
    const std::string text = type == 's' ? text_of(rt, v) : to_repr(v, kMaxTextBytes);
    s.zero = false;
    if (!s.align) s.align = '>';
    return format_text(text, s);
  }
  if (type == 'c') fail_unsupported("the conversion %c is not supported");
  if (!v.is_number()) fail(fmt::format("%{} needs a number, got {}", type, type_name(v)));
  const bool is_int = type == 'd' || type == 'i' || type == 'u';
  if (!is_int && !v.is_integral() && (type == 'x' || type == 'X' || type == 'o'))
    fail("%x and %o need an integer");
  if (s.precision >= 0 && (is_int || type == 'x' || type == 'X' || type == 'o'))
    fail_unsupported("a precision for an integer is not supported");
  s.type = is_int ? 0 : type;
  Value number = v;
  if (is_int && v.is(Kind::real)) {
    if (!std::isfinite(v.real) || std::fabs(v.real) >= 0x1p64) fail("%d needs a number that fits in 64 bits");
    number = make_int(Int(v.real));
  }
  return format_number(number, s);
}

Spec percent_flags(std::string_view p, size_t& i) {
  Spec s;
  for (; i < p.size() && std::string_view("-+ #0").find(p[i]) != p.npos; ++i) {
    if (p[i] == '-') s.align = '<';
    if (p[i] == '+') s.sign = '+';
    if (p[i] == ' ' && s.sign == '-') s.sign = ' ';
    if (p[i] == '#') s.alternate = true;
    if (p[i] == '0') s.zero = true;
  }
  if (i < p.size() && p[i] == '*') fail_unsupported("a width of '*' is not supported");
  s.width = read_number(p, i);
  if (i < p.size() && p[i] == '.') {
    ++i;
    s.precision = read_number(p, i);
  }
  if (i < p.size() && std::string_view("hlL").find(p[i]) != p.npos) ++i;
  return s;
}

}  // namespace

Value format_percent(Runtime& rt, std::string_view p, const Value& values) {
  const bool is_tuple = values.is(Kind::list) && values.list->kind == ListKind::tuple;
  const std::span<const Value> all = is_tuple ? values.list->view() : std::span<const Value>(&values, 1);
  size_t used = 0;
  std::string out;
  for (size_t i = 0; i < p.size();) {
    if (out.size() > kMaxTextBytes) throw Failure{"a formatted string is too large", Error::too_large};
    if (p[i] != '%') {
      out += p[i++];
      continue;
    }
    ++i;
    Value v;
    if (i < p.size() && p[i] == '(') {
      const size_t close = p.find(')', i);
      if (close == p.npos || !values.is(Kind::dict)) fail("'%(name)s' needs a dictionary");
      const Value* found = find_key(rt.budget, values.dict->view(), p.substr(i + 1, close - i - 1));
      if (!found) fail("'%(name)s' names a key that is missing");
      v = *found;
      i = close + 1;
    }
    const Spec spec = percent_flags(p, i);
    if (i >= p.size()) fail("a format string ends after '%'");
    const char type = p[i++];
    if (type == '%') {
      out += '%';
      continue;
    }
    if (std::string_view("srdiufFeEgGxXoc").find(type) == std::string_view::npos)
      fail(fmt::format("the conversion %{} is not known", type));
    if (v.is(Kind::missing)) {
      if (used >= all.size()) fail("a format string has more conversions than there are values");
      v = all[used++];
    }
    out += percent_field(rt, p, i, v, spec);
  }
  const bool may_be_left =
      values.is(Kind::dict) || (!is_tuple && (values.is(Kind::list) || values.is(Kind::undefined)));
  if (used < all.size() && !may_be_left) fail("not all values were used by the format string");
  return rt.text(out);
}

Value format_braces(Runtime& rt, std::string_view pattern, const CallArgs& args) {
  return rt.text(BraceFormatter(rt, args).run(pattern));
}

}  // namespace ekv::jinja
