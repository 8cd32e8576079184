// Filters on sequences and mappings.

#include <fmt/format.h>

#include <algorithm>

#include "text/jinja/filters.h"
#include "text/jinja/operators.h"
#include "text/jinja/unicode.h"

namespace ekv::jinja {
namespace {

Value default_filter(Runtime&, const Value& self, const CallArgs& args) {
  const Arguments a("default", args, {"default_value", "boolean"});
  const bool replace = self.is(Kind::undefined) || (a.flag(1, false) && !truthy(self));
  return !replace ? self : a.get(0) ? *a.get(0) : make_str("");
}

Value length_filter(Runtime&, const Value& self, const CallArgs& args) {
  const Arguments a("length", args, {});
  return make_int(Int(size_of(self)));
}

Value list_filter(Runtime& rt, const Value& self, const CallArgs& args) {
  const Arguments a("list", args, {});
  return rt.list(items_of(rt, self));
}

Value first(Runtime& rt, const Value& self, const CallArgs& args) {
  const Arguments a("first", args, {});
  static constexpr std::string_view kEmpty = "the first item of an empty sequence is undefined";
  if (self.is(Kind::list) && self.list->kind == ListKind::iterator) {
    const List& l = *self.list;
    return l.next < l.size ? l.items[l.next++] : make_undefined_because(kEmpty);
  }
  const auto items = items_of(rt, self);
  return items.empty() ? make_undefined_because(kEmpty) : items[0];
}

Value last(Runtime& rt, const Value& self, const CallArgs& args) {
  const Arguments a("last", args, {});
  if (self.is(Kind::list) && self.list->kind == ListKind::iterator)
    fail("'last' does not work with generators");
  const auto items = items_of(rt, self);
  return items.empty() ? make_undefined_because("the last item of an empty sequence is undefined")
                       : items.back();
}

Value reverse(Runtime& rt, const Value& self, const CallArgs& args) {
  const Arguments a("reverse", args, {});
  const auto items = items_of(rt, self);
  std::vector<Value> reversed(items.rbegin(), items.rend());
  if (self.is(Kind::string)) {
    std::string out;
    for (const Value& v : reversed) out += v.str();
    return rt.text(out);
  }
  const bool was_iterator = self.is(Kind::list) && self.list->kind == ListKind::iterator;
  return rt.list(reversed, was_iterator ? ListKind::list : ListKind::iterator);
}

// Strings compare without regard to case unless asked.
Value sort_key(Runtime& rt, const Value& v, bool case_sensitive) {
  return v.is(Kind::string) && !case_sensitive ? rt.text(lower(v.str())) : v;
}

struct Keyed {
  std::vector<Value> keys;
  Value item;
};

void sort_by_keys(Runtime& rt, std::vector<Keyed>& all, bool reverse) {
  const auto less = [&](const Keyed& a, const Keyed& b) {
    for (size_t i = 0; i < a.keys.size(); ++i)
      if (!equals(rt.budget, a.keys[i], b.keys[i])) return compare(rt.budget, a.keys[i], b.keys[i]) < 0;
    return false;
  };
  std::stable_sort(all.begin(), all.end(),
                   [&](const Keyed& a, const Keyed& b) { return reverse ? less(b, a) : less(a, b); });
}

std::vector<Value> items_only(const std::vector<Keyed>& all) {
  std::vector<Value> out;
  for (const Keyed& k : all) out.push_back(k.item);
  return out;
}

// "a,b.c": one path per key.
std::vector<Value> split_paths(const Value* attribute) {
  if (!attribute || !attribute->is(Kind::string)) return {attribute ? *attribute : make_none()};
  std::vector<Value> paths;
  const std::string_view s = attribute->str();
  for (size_t start = 0; start <= s.size();) {
    const size_t comma = std::min(s.find(',', start), s.size());
    paths.push_back(make_str(s.substr(start, comma - start)));
    start = comma + 1;
  }
  return paths;
}

Value sort(Runtime& rt, const Value& self, const CallArgs& args) {
  const Arguments a("sort", args, {"reverse", "case_sensitive", "attribute"});
  const auto paths = split_paths(a.get(2));
  std::vector<Keyed> all;
  for (const Value& v : items_of(rt, self)) {
    Keyed keyed{{}, v};
    for (const Value& path : paths) keyed.keys.push_back(sort_key(rt, get_path(rt, v, path), a.flag(1, false)));
    all.push_back(std::move(keyed));
  }
  sort_by_keys(rt, all, a.flag(0, false));
  return rt.list(items_only(all));
}

Value dictsort(Runtime& rt, const Value& self, const CallArgs& args) {
  const Arguments a("dictsort", args, {"case_sensitive", "by", "reverse"});
  const std::string by = a.get(1) ? text_of(rt, *a.get(1)) : "key";
  if (by != "key" && by != "value") fail("'dictsort' sorts by 'key' or 'value'");
  if (self.is(Kind::undefined)) fail_undefined(self);
  if (!self.is(Kind::dict)) fail(fmt::format("'dictsort' needs a mapping, got {}", type_name(self)));
  std::vector<Keyed> all;
  for (const Entry& e : self.dict->view()) {
    const Value pair[] = {e.key, e.value};
    all.push_back(
        {{sort_key(rt, by == "key" ? e.key : e.value, a.flag(0, false))}, rt.list(pair, ListKind::tuple)});
  }
  sort_by_keys(rt, all, a.flag(2, false));
  return rt.list(items_only(all));
}

Value unique(Runtime& rt, const Value& self, const CallArgs& args) {
  const Arguments a("unique", args, {"case_sensitive", "attribute"});
  std::vector<Value> seen, out;
  for (const Value& v : items_of(rt, self)) {
    const Value key = sort_key(rt, get_path(rt, v, a.get(1) ? *a.get(1) : make_none()), a.flag(0, false));
    if (!hashable(rt.budget, key)) fail(fmt::format("unhashable type: {}", type_name(key)));
    if (std::any_of(seen.begin(), seen.end(), [&](const Value& s) { return equals(rt.budget, s, key); }))
      continue;
    seen.push_back(key);
    out.push_back(v);
  }
  return rt.list(out, ListKind::iterator);
}

template <int kSign>
Value extreme(Runtime& rt, const Value& self, const CallArgs& args) {
  const Arguments a(kSign < 0 ? "min" : "max", args, {"case_sensitive", "attribute"});
  const auto items = items_of(rt, self);
  if (items.empty())
    return make_undefined_because("the smallest or largest item of an empty sequence is undefined");
  const auto key = [&](const Value& v) {
    return sort_key(rt, get_path(rt, v, a.get(1) ? *a.get(1) : make_none()), a.flag(0, false));
  };
  size_t best = 0;
  Value best_key = key(items[0]);
  for (size_t i = 1; i < items.size(); ++i) {
    const Value k = key(items[i]);
    if (kSign * compare(rt.budget, k, best_key) <= 0) continue;
    best = i;
    best_key = k;
  }
  return items[best];
}

Value sum(Runtime& rt, const Value& self, const CallArgs& args) {
  const Arguments a("sum", args, {"attribute", "start"});
  Value total = a.get(1) ? *a.get(1) : make_int(0);
  if (total.is(Kind::string)) fail("'sum' does not add strings");
  for (const Value& v : items_of(rt, self))
    total = binary(rt, Op::add, total, get_path(rt, v, a.get(0) ? *a.get(0) : make_none()));
  return total;
}

Value items_filter(Runtime& rt, const Value& self, const CallArgs& args) {
  const Arguments a("items", args, {});
  std::vector<Value> out;
  if (!self.is(Kind::undefined) && !self.is(Kind::dict)) fail("'items' needs a mapping");
  if (self.is(Kind::dict))
    for (const Entry& e : self.dict->view()) {
      const Value pair[] = {e.key, e.value};
      out.push_back(rt.list(pair, ListKind::tuple));
    }
  return rt.list(out, ListKind::iterator);
}

Value batch(Runtime& rt, const Value& self, const CallArgs& args) {
  const Arguments a("batch", args, {"linecount", "fill_with"}, 1);
  const Int size = a.integer(0, 0);
  std::vector<Value> row, out;
  for (const Value& v : items_of(rt, self)) {
    if (Int(row.size()) == size) {
      out.push_back(rt.list(row));
      row.clear();
    }
    row.push_back(v);
  }
  if (!row.empty()) {
    const Value* fill = a.get(1);
    if (fill && !fill->is(Kind::none) && Int(row.size()) < size) {
      if (size > Int(1) << 20) throw Failure{"'batch' makes rows that are too long", Error::too_large};
      row.resize(size_t(size), *fill);
    }
    out.push_back(rt.list(row));
  }
  return rt.list(out, ListKind::iterator);
}

Value slice(Runtime& rt, const Value& self, const CallArgs& args) {
  const Arguments a("slice", args, {"slices", "fill_with"}, 1);
  const auto items = items_of(rt, self);
  const Int slices = a.integer(0, 0);
  if (slices == 0) fail("division by zero");
  if (slices > Int(1) << 20) throw Failure{"'slice' makes too many parts", Error::too_large};
  std::vector<Value> out;
  const Int each = slices > 0 ? Int(items.size()) / slices : 0,
            longer = slices > 0 ? Int(items.size()) % slices : 0;
  size_t at = 0;
  for (Int i = 0; i < slices; ++i) {
    const size_t n = size_t(each + (i < longer));
    std::vector<Value> part(items.begin() + at, items.begin() + at + n);
    at += n;
    if (a.get(1) && !a.get(1)->is(Kind::none) && i >= longer) part.push_back(*a.get(1));
    out.push_back(rt.list(part));
  }
  return rt.list(out, ListKind::iterator);
}

// The arguments of a nested filter or test: what follows its name.
CallArgs after(const CallArgs& args, size_t n) {
  CallArgs rest = args;
  rest.positional.erase(rest.positional.begin(), rest.positional.begin() + n);
  return rest;
}

std::string_view name_argument(const Value& v) {
  if (!v.is(Kind::string)) fail("the name of a filter or test must be a string");
  return v.str();
}

Value map_attribute(Runtime& rt, std::span<const Value> items, const CallArgs& args) {
  const Arguments a("map", args, {"attribute", "default"});
  std::vector<Value> out;
  for (const Value& v : items) out.push_back(get_path(rt, v, *a.get(0), a.get(1)));
  return rt.list(out, ListKind::iterator);
}

Value map(Runtime& rt, const Value& self, const CallArgs& args) {
  if (!truthy(self)) return rt.list({}, ListKind::iterator);
  const auto items = items_of(rt, self);
  const bool by_attribute =
      args.positional.empty() &&
      std::any_of(args.named.begin(), args.named.end(), [](auto& n) { return n.name == "attribute"; });
  if (by_attribute) return map_attribute(rt, items, args);
  if (args.positional.empty()) fail("'map' needs the name of a filter, or attribute=");
  const CallArgs rest = after(args, 1);
  std::vector<Value> out;
  for (const Value& v : items) out.push_back(apply_filter(rt, name_argument(args.positional[0]), v, rest));
  return rt.list(out, ListKind::iterator);
}

template <bool kKeep, bool kByAttribute>
Value select(Runtime& rt, const Value& self, const CallArgs& args) {
  if (!truthy(self)) return rt.list({}, ListKind::iterator);
  const auto items = items_of(rt, self);
  if (kByAttribute && args.positional.empty())
    fail("'selectattr' and 'rejectattr' need the name of an attribute");
  const bool has_test = args.positional.size() > kByAttribute;
  const CallArgs rest = after(args, std::min<size_t>(args.positional.size(), kByAttribute + 1));
  std::vector<Value> out;
  for (const Value& v : items) {
    const Value subject = kByAttribute ? get_path(rt, v, args.positional[0]) : v;
    const bool passes = has_test ? apply_test(rt, name_argument(args.positional[kByAttribute]), subject, rest)
                                 : truthy(subject);
    if (passes == kKeep) out.push_back(v);
  }
  return rt.list(out, ListKind::iterator);
}

constexpr NamedFilter kFilters[] = {
    {"batch", batch},
    {"count", length_filter},
    {"d", default_filter},
    {"default", default_filter},
    {"dictsort", dictsort},
    {"first", first},
    {"items", items_filter},
    {"last", last},
    {"length", length_filter},
    {"list", list_filter},
    {"map", map},
    {"max", extreme<1>},
    {"min", extreme<-1>},
    {"reject", select<false, false>},
    {"rejectattr", select<false, true>},
    {"reverse", reverse},
    {"select", select<true, false>},
    {"selectattr", select<true, true>},
    {"slice", slice},
    {"sort", sort},
    {"sum", sum},
    {"unique", unique},
};

}  // namespace

std::span<const NamedFilter> sequence_filters() { return kFilters; }

}  // namespace ekv::jinja
