// Global functions, methods of lists and dictionaries, and text helpers.

#include <fmt/format.h>

#include <algorithm>
#include <ctime>

#include "text/jinja/methods.h"
#include "text/jinja/unicode.h"

namespace ekv::jinja {
namespace {

constexpr Int kMaxRange = 100'000;  // as Jinja2's sandbox

Value range(Runtime& rt, const CallArgs& args) {
  if (!args.named.empty() || args.positional.empty() || args.positional.size() > 3)
    fail("'range' takes one to three positional arguments");
  std::vector<Int> n;
  for (const Value& v : args.positional) {
    if (v.is(Kind::undefined)) fail_undefined(v);
    n.push_back(index_of(v, "an argument of 'range'"));
  }
  const Int start = n.size() > 1 ? n[0] : 0, stop = n.size() > 1 ? n[1] : n[0], step = n.size() > 2 ? n[2] : 1;
  if (step == 0) fail("the step of 'range' is zero");
  const Int distance = step > 0 ? stop - start : start - stop, stride = step > 0 ? step : -step;
  const Int count = distance > 0 ? (distance + stride - 1) / stride : 0;
  if (count > kMaxRange)
    throw Failure{fmt::format("'range' is limited to {} items", int(kMaxRange)), Error::too_large};
  std::vector<Value> items;
  for (Int i = 0; i < count; ++i) items.push_back(make_int(start + i * step));
  return rt.list(items, ListKind::range);
}

// dict(mapping or pairs, name=value ...).
Value dict(Runtime& rt, const CallArgs& args) {
  if (args.positional.size() > 1) fail("'dict' and 'namespace' take at most one positional argument");
  std::vector<Entry> entries;
  if (!args.positional.empty() && args.positional[0].is(Kind::dict)) {
    const auto all = args.positional[0].dict->view();
    entries.assign(all.begin(), all.end());
  } else if (!args.positional.empty()) {
    for (const Value& pair : items_of(rt, args.positional[0])) {
      const auto parts = items_of(rt, pair);
      if (parts.size() != 2) fail("'dict' and 'namespace' need pairs of two items");
      entries.push_back({parts[0], parts[1]});
    }
  }
  for (const NamedValue& n : args.named) entries.push_back({rt.text(n.name), n.value});
  return make_dict(rt.arena, rt.budget, entries);
}

Value name_space(Runtime& rt, const CallArgs& args) {
  const Value d = dict(rt, args);
  return make_object(rt.arena.make<Namespace>(d.dict->entries, d.dict->size, d.dict->size));
}

Value raise_exception(Runtime& rt, const CallArgs& args) {
  const Arguments a("raise_exception", args, {"message"}, 1);
  fail(text_of(rt, *a.get(0)));
}

// Naive local time, as datetime.now().strftime prints it: no time zone, no microseconds below the second.
Value strftime_now(Runtime& rt, const CallArgs& args) {
  const Arguments a("strftime_now", args, {"format"}, 1);
  if (!a.get(0)->is(Kind::string)) fail("'strftime_now' needs a string");
  std::string pattern;
  const std::string_view text = a.get(0)->str();
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\0') fail("'strftime_now' does not accept a zero character");
    if (text[i] != '%' || i + 1 == text.size()) {
      pattern += text[i];
      continue;
    }
    const char c = text[++i];
    if (c == 'f') fail_unsupported("%f in 'strftime_now' is not supported");
    if (c != 'z' && c != 'Z') (pattern += '%') += c;
  }
  const time_t now = time_t(rt.unix_seconds);
  std::tm local{};
  localtime_r(&now, &local);
  std::string out(pattern.size() * 16 + 256, '\0');
  pattern += ' ';  // strftime returns 0 both for an empty result and for a buffer that is too small
  const size_t size = std::strftime(out.data(), out.size(), pattern.c_str(), &local);
  if (size == 0) fail("the format of 'strftime_now' gives a text that is too long");
  return rt.text(std::string_view(out).substr(0, size - 1));
}

Value pair_views(Runtime& rt, const Dict& d) {
  std::vector<Value> pairs;
  for (const Entry& e : d.view()) {
    const Value pair[] = {e.key, e.value};
    pairs.push_back(rt.list(pair, ListKind::tuple));
  }
  return rt.list(pairs, ListKind::items);
}

Value dict_method(Runtime& rt, const Value& self, std::string_view name, const CallArgs& args) {
  const Dict& d = *self.dict;
  if (name == "get") {
    if (!args.named.empty() || args.positional.empty() || args.positional.size() > 2)
      fail("'get' takes a key and a default");
    if (!hashable(rt.budget, args.positional[0]))
      fail(fmt::format("unhashable type: {}", type_name(args.positional[0])));
    const Value* v = find_key(rt.budget, d.view(), args.positional[0]);
    return v ? *v : args.positional.size() > 1 ? args.positional[1] : make_none();
  }
  const Arguments none(name, args, {});
  if (name == "items") return pair_views(rt, d);
  if (name == "copy") return make_dict(rt.arena, rt.budget, d.view());
  std::vector<Value> items;
  for (const Entry& e : d.view()) items.push_back(name == "keys" ? e.key : e.value);
  return rt.list(items, name == "keys" ? ListKind::keys : ListKind::values);
}

Value list_method(Runtime& rt, const Value& self, std::string_view name, const CallArgs& args) {
  const List& l = *self.list;
  if (name == "copy") {
    const Arguments none(name, args, {});
    return rt.list(l.view(), l.kind);
  }
  const size_t most = name == "index" && l.kind != ListKind::range ? 3 : 1;
  if (!args.named.empty() || args.positional.empty() || args.positional.size() > most)
    fail(fmt::format("'{}' takes an item to look for", name));
  const auto bound = [&](size_t i, Int fallback) {
    if (args.positional.size() <= i) return fallback;
    const Int v = index_of(args.positional[i], "a position");
    return std::clamp<Int>(v < 0 ? v + Int(l.size) : v, 0, Int(l.size));
  };
  Int n = 0;
  for (Int i = bound(1, 0); i < bound(2, Int(l.size)); ++i) {
    if (!equals(rt.budget, l.items[size_t(i)], args.positional[0])) continue;
    if (name == "index") return make_int(i);
    ++n;
  }
  if (name == "index") fail("the item is not in the list");
  return make_int(n);
}

bool ends_line(char32_t c) {
  return (c >= 0x0A && c <= 0x0D) || (c >= 0x1C && c <= 0x1E) || c == 0x85 || c == 0x2028 || c == 0x2029;
}

}  // namespace

Value call_builtin(Runtime& rt, Builtin builtin, const CallArgs& args) {
  switch (builtin) {
    case Builtin::range:
      return range(rt, args);
    case Builtin::dict:
      return dict(rt, args);
    case Builtin::name_space:
      return name_space(rt, args);
    case Builtin::raise_exception:
      return raise_exception(rt, args);
    default:
      return strftime_now(rt, args);
  }
}

Value call_method(Runtime& rt, const Method& method, const CallArgs& args) {
  if (method.self.is(Kind::string)) return call_string_method(rt, method.self, method.name, args);
  if (method.self.is(Kind::dict)) return dict_method(rt, method.self, method.name, args);
  return list_method(rt, method.self, method.name, args);
}

std::vector<std::string_view> split_lines(std::string_view text, bool keep_ends) {
  std::vector<std::string_view> lines;
  size_t start = 0;
  for (size_t i = 0; i < text.size();) {
    const size_t at = i;
    const char32_t c = next_code_point(text, i);
    if (!ends_line(c)) continue;
    if (c == '\r' && i < text.size() && text[i] == '\n') ++i;
    lines.push_back(text.substr(start, (keep_ends ? i : at) - start));
    start = i;
  }
  if (start < text.size()) lines.push_back(text.substr(start));
  return lines;
}

std::string replace(Runtime& rt, std::string_view text, std::string_view from, std::string_view to, Int count) {
  rt.spend_on_search(text, from);
  std::string out;
  size_t at = 0;
  for (; count != 0; --count) {
    // An empty pattern stands before every character and at the end.
    size_t hit = text.find(from, at);
    if (hit == text.npos || (from.empty() && at > text.size())) break;
    out += text.substr(at, hit - at);
    out += to;
    at = hit + from.size();
    if (from.empty() && at < text.size()) {
      const size_t start = at;
      next_code_point(text, at);
      out += text.substr(start, at - start);
    } else if (from.empty()) {
      at = text.size() + 1;
    }
    if (out.size() > kMaxTextBytes) throw Failure{"a string is too large", Error::too_large};
  }
  return at <= text.size() ? out + std::string(text.substr(at)) : out;
}

std::string join(Runtime& rt, std::string_view separator, std::span<const Value> items, bool convert) {
  std::string out;
  for (size_t i = 0; i < items.size(); ++i) {
    if (!convert && !items[i].is(Kind::string))
      fail(fmt::format("'join' needs strings, item {} is of type {}", i, type_name(items[i])));
    if (i) out += separator;
    out += items[i].is(Kind::string) ? std::string(items[i].str()) : text_of(rt, items[i]);
    if (out.size() > kMaxTextBytes) throw Failure{"a string is too large", Error::too_large};
  }
  rt.budget.spend(out.size() / 64);
  return out;
}

std::string pad(std::string_view text, Int width, std::string_view fill, int left_share) {
  if (width > Int(kMaxTextBytes)) throw Failure{"a string is too large", Error::too_large};
  const Int missing = std::max<Int>(width - Int(length(text)), 0);
  // str.center gives the odd character to the left when the width is odd.
  const Int left = left_share == 0 ? 0 : left_share == 2 ? missing : missing / 2 + (missing & width & 1);
  std::string out;
  for (Int i = 0; i < left; ++i) out += fill;
  out += text;
  for (Int i = left; i < missing; ++i) out += fill;
  return out;
}

}  // namespace ekv::jinja
