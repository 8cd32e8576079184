#include "text/jinja/runtime.h"

#include <fmt/format.h>

#include <algorithm>

#include "text/jinja/methods.h"
#include "text/jinja/unicode.h"

namespace ekv::jinja {
namespace {

Value unsafe_attribute(Runtime& rt, const Value& object, std::string_view name) {
  return make_undefined_because(
      rt.arena.copy(fmt::format("access to attribute '{}' of '{}' is unsafe", name, type_name(object))));
}

bool contains(std::initializer_list<std::string_view> names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool changes_dict(std::string_view name) {
  return contains({"clear", "pop", "popitem", "setdefault", "update"}, name);
}

bool changes_list(std::string_view name) {
  return contains({"append", "clear", "pop", "reverse", "insert", "sort", "extend", "remove"}, name);
}

// Attributes that Python objects of this kind have and that are not modelled: reading them fails.
bool is_foreign_attribute(const Value& object, std::string_view name) {
  switch (object.kind) {
    case Kind::string:
      return is_foreign_string_method(name);
    case Kind::dict:
      return name == "fromkeys";
    case Kind::integer:
    case Kind::boolean:
    case Kind::real:
      return contains({"real", "imag", "numerator", "denominator", "bit_length", "bit_count", "conjugate",
                       "as_integer_ratio", "from_bytes", "to_bytes", "hex", "fromhex", "is_integer"},
                      name);
    case Kind::macro:
      return contains({"name", "arguments", "catch_kwargs", "catch_varargs", "caller", "explicit_caller"},
                      name);
    case Kind::list:
      switch (object.list->kind) {
        case ListKind::range:
          return contains({"start", "stop", "step"}, name);
        case ListKind::iterator:
          return contains({"send", "throw", "close"}, name) || name.starts_with("gi_");
        case ListKind::list:
        case ListKind::tuple:
          return false;
        default:
          return contains({"mapping", "isdisjoint"}, name);
      }
    default:
      return false;
  }
}

bool has_method(const Value& object, std::string_view name) {
  if (object.is(Kind::string)) return is_string_method(name);
  if (object.is(Kind::dict)) return contains({"keys", "values", "items", "get", "copy"}, name);
  if (!object.is(Kind::list)) return false;
  const ListKind k = object.list->kind;
  if (k == ListKind::list && name == "copy") return true;
  return (k == ListKind::list || k == ListKind::tuple || k == ListKind::range) &&
         (name == "count" || name == "index");
}

// An attribute in Python's sense; missing when there is none.
Value own_attribute(Runtime& rt, const Value& object, std::string_view name) {
  if (object.is(Kind::name_space)) {
    const Value* v = find_key(rt.budget, {object.name_space->entries, object.name_space->size}, name);
    return v ? *v : Value{};
  }
  if (is_foreign_attribute(object, name))
    fail_unsupported(fmt::format("the attribute '{}' of {} is not supported", name, type_name(object)));
  if (has_method(object, name)) return make_object(rt.arena.make<Method>(object, rt.arena.copy(name)));
  const bool is_list = object.is(Kind::list) && object.list->kind == ListKind::list;
  const bool dunder = name.size() > 4 && name.starts_with("__") && name.ends_with("__");
  if ((object.is(Kind::dict) && changes_dict(name)) || (is_list && changes_list(name)) || dunder)
    return unsafe_attribute(rt, object, name);
  return {};
}

Value sequence_item(Runtime& rt, const Value& object, Int index) {
  const bool is_text = object.is(Kind::string);
  const Int size = is_text ? Int(length(object.str())) : Int(object.list->size);
  if (index < 0) index += size;
  if (index < 0 || index >= size) return {};
  if (!is_text) return object.list->items[size_t(index)];
  rt.budget.spend(object.text.size / 64);
  size_t at = offset_of(object.str(), size_t(index));
  const size_t start = at;
  next_code_point(object.str(), at);
  return make_str(object.str().substr(start, at - start));
}

bool is_indexable(const Value& v) {
  return v.is(Kind::string) ||
         (v.is(Kind::list) && (v.list->kind == ListKind::list || v.list->kind == ListKind::tuple ||
                               v.list->kind == ListKind::range));
}

Int slice_bound(const Value* v, Int size, Int fallback, Int low, Int high) {
  if (!v || v->is(Kind::none)) return fallback;
  Int i = index_of(*v, "a slice index");
  if (i < 0) i += size;
  return std::clamp(i, low, high);
}

}  // namespace

Value Runtime::text(std::string_view s) {
  if (s.size() > kMaxTextBytes) throw Failure{"a string is too large", Error::too_large};
  budget.spend(s.size() / 64);
  return make_str(arena.copy(s));
}

Value Runtime::list(std::span<const Value> items, ListKind kind) {
  budget.spend(items.size());
  return make_list(arena, items, kind);
}

std::string text_of(Runtime& rt, const Value& v) {
  std::string text = to_text(v, kMaxTextBytes);
  rt.spend_on(text);
  return text;
}

bool is_iterable(const Value& v) {
  return v.is(Kind::list) || v.is(Kind::dict) || v.is(Kind::string) || v.is(Kind::undefined) ||
         v.is(Kind::loop);
}

std::span<const Value> items_of(Runtime& rt, const Value& v) {
  if (v.is(Kind::list)) {
    const List& l = *v.list;
    rt.budget.spend(l.size);
    if (l.kind != ListKind::iterator) return l.view();
    return l.view().subspan(std::exchange(l.next, l.size));
  }
  if (v.is(Kind::undefined)) return {};
  std::vector<Value> items;
  if (v.is(Kind::dict)) {
    for (const Entry& e : v.dict->view()) items.push_back(e.key);
  } else if (v.is(Kind::string)) {
    const std::string_view s = v.str();
    rt.budget.spend(s.size());
    for (size_t i = 0; i < s.size();) {
      const size_t start = i;
      next_code_point(s, i);
      items.push_back(make_str(s.substr(start, i - start)));
    }
  } else {
    fail(fmt::format("a value of type {} cannot be iterated over", type_name(v)));
  }
  rt.budget.spend(items.size());
  return {rt.arena.copy_array(std::span<const Value>(items)), items.size()};
}

size_t size_of(const Value& v) {
  if (v.is(Kind::string)) return length(v.str());
  if (v.is(Kind::dict)) return v.dict->size;
  if (v.is(Kind::undefined)) return 0;
  if (v.is(Kind::list) && v.list->kind != ListKind::iterator) return v.list->size;
  fail(fmt::format("a value of type {} has no length", type_name(v)));
}

Value get_attribute(Runtime& rt, const Value& object, std::string_view name) {
  if (object.is(Kind::undefined)) fail_undefined(object);
  const Value own = own_attribute(rt, object, name);
  if (!own.is(Kind::missing)) return own;
  if (object.is(Kind::dict))
    if (const Value* v = find_key(rt.budget, object.dict->view(), name)) return *v;
  return make_undefined(name);
}

Value get_item(Runtime& rt, const Value& object, const Value& key) {
  if (object.is(Kind::undefined)) fail_undefined(object);
  if (object.is(Kind::dict)) {
    const Value* v = hashable(rt.budget, key) ? find_key(rt.budget, object.dict->view(), key) : nullptr;
    if (v) return *v;
  } else if (is_indexable(object) && key.is_integral()) {
    const Value v = sequence_item(rt, object, key.as_int());
    if (!v.is(Kind::missing)) return v;
  }
  if (key.is(Kind::string)) {
    const Value own = own_attribute(rt, object, key.str());
    return own.is(Kind::missing) ? make_undefined(key.str()) : own;
  }
  return make_undefined(key.is(Kind::integer) ? rt.arena.copy(int_to_text(key.integer)) : "item");
}

Value get_slice(Runtime& rt, const Value& object, const Value* start, const Value* stop, const Value* step) {
  if (object.is(Kind::undefined)) fail_undefined(object);
  if (!is_indexable(object)) fail(fmt::format("a value of type {} cannot be sliced", type_name(object)));
  const Int by = step && !step->is(Kind::none) ? index_of(*step, "a slice step") : 1;
  if (by == 0) fail("a slice step cannot be zero");
  const Value characters = object.is(Kind::string) ? rt.list(items_of(rt, object)) : object;
  const List& source = *characters.list;
  const Int size = Int(source.size);
  const Int low = by > 0 ? 0 : -1, high = by > 0 ? size : size - 1;
  const Int from = slice_bound(start, size, by > 0 ? 0 : size - 1, low, high);
  const Int to = slice_bound(stop, size, by > 0 ? size : -1, low, high);
  std::vector<Value> picked;
  for (Int i = from; by > 0 ? i < to : i > to; i += by) picked.push_back(source.items[size_t(i)]);
  rt.budget.spend(picked.size());
  if (!object.is(Kind::string)) return rt.list(picked, object.list->kind);
  std::string out;
  for (const Value& c : picked) out += c.str();
  Value v = rt.text(out);
  v.markup = object.markup;
  return v;
}

Value get_path(Runtime& rt, const Value& object, const Value& path, const Value* fallback) {
  if (path.is(Kind::none)) return object;
  const auto step = [&](const Value& at, const Value& key) {
    const Value next = get_item(rt, at, key);
    return fallback && !fallback->is(Kind::none) && next.is(Kind::undefined) ? *fallback : next;
  };
  if (!path.is(Kind::string)) return step(object, path);
  Value at = object;
  for (size_t start = 0; start <= path.text.size;) {
    const size_t dot = std::min(path.str().find('.', start), path.text.size);
    const std::string_view part = path.str().substr(start, dot - start);
    const bool digits = !part.empty() && part.size() < 18 &&
                        std::all_of(part.begin(), part.end(), [](char c) { return c >= '0' && c <= '9'; });
    at = step(at, digits ? make_int(std::stoll(std::string(part))) : make_str(part));
    start = dot + 1;
  }
  return at;
}

Arguments::Arguments(std::string_view function, const CallArgs& args,
                     std::initializer_list<std::string_view> names, size_t required)
    : function_(function), values_(names.size()) {
  if (args.positional.size() > names.size())
    fail(
        fmt::format("'{}' takes at most {} arguments, got {}", function, names.size(), args.positional.size()));
  std::copy(args.positional.begin(), args.positional.end(), values_.begin());
  for (const NamedValue& n : args.named) {
    const auto it = std::find(names.begin(), names.end(), n.name);
    if (it == names.end()) fail(fmt::format("'{}' has no argument named '{}'", function, n.name));
    Value& slot = values_[size_t(it - names.begin())];
    if (!slot.is(Kind::missing)) fail(fmt::format("'{}' got the argument '{}' twice", function, n.name));
    slot = n.value;
  }
  for (size_t i = 0; i < required; ++i)
    if (values_[i].is(Kind::missing))
      fail(fmt::format("'{}' needs the argument '{}'", function, names.begin()[i]));
}

Int Arguments::integer(size_t i, Int fallback) const {
  return get(i) ? index_of(*get(i), fmt::format("an argument of '{}'", function_)) : fallback;
}

Int index_of(const Value& v, std::string_view what) {
  if (!v.is_integral()) fail(fmt::format("{} must be an integer, got {}", what, type_name(v)));
  return v.as_int();
}

}  // namespace ekv::jinja
