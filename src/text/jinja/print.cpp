// Text forms of values: str(), repr() and json.dumps() of Python 3.

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "text/jinja/unicode.h"
#include "text/jinja/value.h"

namespace ekv::jinja {
namespace {

constexpr int kMaxPrintDepth = 200;

void check_size(const std::string& out, size_t max_bytes, int depth) {
  if (out.size() > max_bytes) throw Failure{"the text of a value is too large", Error::too_large};
  if (depth > kMaxPrintDepth) fail("a value is nested too deeply to be printed");
}

bool key_less(const Entry* a, const Entry* b) {
  for (const Entry* e : {a, b})
    if (!e->key.is(Kind::string)) fail_unsupported("sort_keys with keys that are not strings is not supported");
  return a->key.str() < b->key.str();
}

void append_repr_char(std::string& out, std::string_view text, size_t& at, char quote) {
  const size_t start = at;
  const char32_t c = next_code_point(text, at);
  if (c == char32_t(quote) || c == '\\') {
    out += '\\';
    out += char(c);
  } else if (c == '\n' || c == '\r' || c == '\t') {
    out += c == '\n' ? "\\n" : c == '\r' ? "\\r" : "\\t";
  } else if (is_printable(c)) {
    out += text.substr(start, at - start);
  } else if (c < 0x100) {
    out += fmt::format("\\x{:02x}", unsigned(c));
  } else if (c < 0x10000) {
    out += fmt::format("\\u{:04x}", unsigned(c));
  } else {
    out += fmt::format("\\U{:08x}", unsigned(c));
  }
}

void append_string_repr(std::string& out, std::string_view text) {
  const bool has_single = text.find('\'') != text.npos, has_double = text.find('"') != text.npos;
  const char quote = has_single && !has_double ? '"' : '\'';
  out += quote;
  for (size_t i = 0; i < text.size();) append_repr_char(out, text, i, quote);
  out += quote;
}

class Printer {
 public:
  explicit Printer(size_t max_bytes) : max_bytes_(max_bytes) {}
  std::string take() { return std::move(out_); }

  void repr(const Value& v, int depth) {
    check_size(out_, max_bytes_, depth);
    switch (v.kind) {
      case Kind::string:
        if (v.markup) {
          out_ += "Markup(";
          append_string_repr(out_, v.str());
          out_ += ')';
        } else {
          append_string_repr(out_, v.str());
        }
        return;
      case Kind::undefined:
        out_ += "Undefined";
        return;
      case Kind::list:
        list(*v.list, depth);
        return;
      case Kind::dict:
        entries(v.dict->view(), depth);
        return;
      case Kind::name_space:
        out_ += "<Namespace ";
        entries({v.name_space->entries, v.name_space->size}, depth);
        out_ += '>';
        return;
      default:
        out_ += to_text(v, max_bytes_);
    }
  }

 private:
  void list(const List& l, int depth) {
    switch (l.kind) {
      case ListKind::list:
        return items(l, "[", "]", depth);
      case ListKind::tuple:
        return items(l, "(", l.size == 1 ? ",)" : ")", depth);
      case ListKind::keys:
        return items(l, "dict_keys([", "])", depth);
      case ListKind::values:
        return items(l, "dict_values([", "])", depth);
      case ListKind::items:
        return items(l, "dict_items([", "])", depth);
      default:
        fail_unsupported("printing a " + std::string(l.kind == ListKind::range ? "range" : "generator") +
                         " is not supported; add the filter 'list'");
    }
  }

  void items(const List& l, const char* open, const char* close, int depth) {
    out_ += open;
    for (size_t i = 0; i < l.size; ++i) {
      if (i) out_ += ", ";
      repr(l.items[i], depth + 1);
    }
    out_ += close;
  }

  void entries(std::span<const Entry> all, int depth) {
    out_ += '{';
    for (size_t i = 0; i < all.size(); ++i) {
      if (i) out_ += ", ";
      repr(all[i].key, depth + 1);
      out_ += ": ";
      repr(all[i].value, depth + 1);
    }
    out_ += '}';
  }

  std::string out_;
  size_t max_bytes_;
};

void append_json_string(std::string& out, std::string_view text, bool ascii) {
  out += '"';
  for (size_t i = 0; i < text.size();) {
    const size_t start = i;
    const char32_t c = next_code_point(text, i);
    static constexpr std::string_view kPlain = "\"\\\n\r\t\f\b", kNames = "\"\\nrtfb";
    const size_t named = c < 0x80 ? kPlain.find(char(c)) : kPlain.npos;
    if (named != kPlain.npos) {
      out += '\\';
      out += kNames[named];
    } else if (c < 0x20 || (ascii && c > 0x7E && c < 0x10000)) {
      out += c == 0x7F ? "\x7F" : fmt::format("\\u{:04x}", unsigned(c));
    } else if (ascii && c >= 0x10000) {
      out += fmt::format("\\u{:04x}\\u{:04x}", 0xD800 + unsigned((c - 0x10000) >> 10),
                         0xDC00 + unsigned(c & 0x3FF));
    } else {
      out += text.substr(start, i - start);
    }
  }
  out += '"';
}

class JsonWriter {
 public:
  JsonWriter(const JsonStyle& style, size_t max_bytes) : style_(style), max_bytes_(max_bytes) {}
  std::string take() { return std::move(out_); }

  void write(const Value& v, int depth) {
    check_size(out_, max_bytes_, depth);
    switch (v.kind) {
      case Kind::none:
        out_ += "null";
        return;
      case Kind::boolean:
        out_ += v.boolean ? "true" : "false";
        return;
      case Kind::integer:
        out_ += int_to_text(v.integer);
        return;
      case Kind::real:
        out_ += real(v.real);
        return;
      case Kind::string:
        append_json_string(out_, v.str(), style_.ascii);
        return;
      case Kind::dict:
        object(*v.dict, depth);
        return;
      case Kind::list:
        if (v.list->kind == ListKind::list || v.list->kind == ListKind::tuple) return array(*v.list, depth);
        [[fallthrough]];
      default:
        fail("a value of type " + type_name(v) + " cannot be written as JSON");
    }
  }

 private:
  static std::string real(double d) {
    if (std::isnan(d)) return "NaN";
    if (std::isinf(d)) return d > 0 ? "Infinity" : "-Infinity";
    return real_to_text(d);
  }

  void line(int depth) {
    if (!style_.multiline) return;
    out_ += '\n';
    for (int i = 0; i < depth; ++i) out_ += style_.indent;
  }

  void array(const List& l, int depth) {
    if (l.size == 0) {
      out_ += "[]";
      return;
    }
    out_ += '[';
    for (size_t i = 0; i < l.size; ++i) {
      if (i) out_ += style_.item_separator;
      line(depth + 1);
      write(l.items[i], depth + 1);
    }
    line(depth);
    out_ += ']';
  }

  std::string key(const Value& k) {
    switch (k.kind) {
      case Kind::string:
        return std::string(k.str());
      case Kind::none:
        return "null";
      case Kind::boolean:
        return k.boolean ? "true" : "false";
      case Kind::integer:
        return int_to_text(k.integer);
      case Kind::real:
        return real(k.real);
      default:
        fail("a key of type " + type_name(k) + " cannot be written as JSON");
    }
  }

  void object(const Dict& d, int depth) {
    if (d.size == 0) {
      out_ += "{}";
      return;
    }
    std::vector<const Entry*> order;
    for (const Entry& e : d.view()) order.push_back(&e);
    if (style_.sort_keys) std::stable_sort(order.begin(), order.end(), key_less);
    out_ += '{';
    for (size_t i = 0; i < order.size(); ++i) {
      if (i) out_ += style_.item_separator;
      line(depth + 1);
      append_json_string(out_, key(order[i]->key), style_.ascii);
      out_ += style_.key_separator;
      write(order[i]->value, depth + 1);
    }
    line(depth);
    out_ += '}';
  }

  const JsonStyle& style_;
  std::string out_;
  size_t max_bytes_;
};

}  // namespace

std::string int_to_text(Int i) {
  return i < 0 ? fmt::format("{}", int64_t(i)) : fmt::format("{}", uint64_t(i));
}

// Shortest digits that read back as `d`, laid out as Python's repr does: exponent form below 1e-4 and from
// 1e16.
std::string real_to_text(double d) {
  if (std::isnan(d)) return "nan";
  if (std::isinf(d)) return d > 0 ? "inf" : "-inf";
  char buffer[64];
  const auto end =
      std::to_chars(buffer, buffer + sizeof buffer, std::fabs(d), std::chars_format::scientific).ptr;
  const std::string_view text(buffer, size_t(end - buffer));
  const size_t e = text.find('e');
  const int exponent = std::stoi(std::string(text.substr(e + 1)));
  std::string digits(text.substr(0, 1));
  if (e > 2) digits += text.substr(2, e - 2);
  std::string out = std::signbit(d) ? "-" : "";
  if (exponent < -4 || exponent >= 16) {
    out += digits[0];
    if (digits.size() > 1) out.append(".").append(digits, 1);
    return out + fmt::format("e{}{:02}", exponent < 0 ? '-' : '+', std::abs(exponent));
  }
  if (exponent < 0) return out + "0." + std::string(size_t(-exponent - 1), '0') + digits;
  const size_t whole = size_t(exponent) + 1;
  if (digits.size() <= whole) return out + digits + std::string(whole - digits.size(), '0') + ".0";
  return out.append(digits, 0, whole).append(".").append(digits, whole);
}

std::string to_text(const Value& v, size_t max_bytes) {
  switch (v.kind) {
    case Kind::undefined:
      return "";
    case Kind::none:
      return "None";
    case Kind::boolean:
      return v.boolean ? "True" : "False";
    case Kind::integer:
      return int_to_text(v.integer);
    case Kind::real:
      return real_to_text(v.real);
    case Kind::string:
      check_size({}, max_bytes, 0);
      return std::string(v.str());
    case Kind::list:
    case Kind::dict:
    case Kind::name_space:
      return to_repr(v, max_bytes);
    default:
      fail_unsupported("printing a value of type " + type_name(v) + " is not supported");
  }
}

std::string to_repr(const Value& v, size_t max_bytes) {
  Printer printer(max_bytes);
  printer.repr(v, 0);
  return printer.take();
}

std::string to_json(const Value& v, const JsonStyle& style, size_t max_bytes) {
  JsonWriter writer(style, max_bytes);
  writer.write(v, 0);
  return writer.take();
}

}  // namespace ekv::jinja
