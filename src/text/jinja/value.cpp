#include "text/jinja/value.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace ekv::jinja {
namespace {

constexpr size_t kBlockBytes = size_t(64) << 10;
constexpr size_t kAlign = 16;
constexpr size_t kRoomToGrowFrom = 256;  // shorter results of concat get no spare room
constexpr size_t kBytesPerStep = 64, kEntriesPerStep = 16;
constexpr int kMaxCompareDepth = 200;
constexpr size_t kMaxBuiltEntries = 4096;  // look-up is linear; dictionaries of a request have no such limit

void check_depth(int depth) {
  if (depth > kMaxCompareDepth) fail("values are nested too deeply to be compared");
}

// Exact, as Python compares: converting the integer to double first would round it.
int compare_int_real(Int i, double d) {
  if (std::isinf(d)) return d > 0 ? -1 : 1;
  if (d >= 0x1p100) return -1;
  if (d <= -0x1p100) return 1;
  const double whole = std::trunc(d);
  const Int j = Int(whole);
  if (i != j) return i < j ? -1 : 1;
  return d > whole ? -1 : d < whole ? 1 : 0;
}

bool numbers_equal(const Value& a, const Value& b) {
  if (a.is_integral() && b.is_integral()) return a.as_int() == b.as_int();
  if (a.is(Kind::real) && b.is(Kind::real)) return a.real == b.real;
  const double d = a.is(Kind::real) ? a.real : b.real;
  const Int i = a.is(Kind::real) ? b.as_int() : a.as_int();
  return !std::isnan(d) && compare_int_real(i, d) == 0;
}

int compare_numbers(const Value& a, const Value& b) {
  if ((a.is(Kind::real) && std::isnan(a.real)) || (b.is(Kind::real) && std::isnan(b.real)))
    fail_unsupported("ordering NaN is not supported");
  if (a.is_integral() && b.is_integral()) return a.as_int() < b.as_int() ? -1 : a.as_int() > b.as_int();
  if (a.is(Kind::real) && b.is(Kind::real)) return a.real < b.real ? -1 : a.real > b.real;
  return a.is(Kind::real) ? -compare_int_real(b.as_int(), a.real) : compare_int_real(a.as_int(), b.real);
}

bool lists_equal(Budget& budget, const List& a, const List& b, int depth) {
  if (&a == &b) return true;
  if (a.kind != b.kind) return false;
  if (a.kind == ListKind::iterator || a.kind == ListKind::values) return false;
  if (a.kind == ListKind::keys || a.kind == ListKind::items)
    fail_unsupported("comparing dictionary views is not supported");
  return std::equal(a.items, a.items + a.size, b.items, b.items + b.size,
                    [&](const Value& x, const Value& y) { return equals(budget, x, y, depth + 1); });
}

bool dicts_equal(Budget& budget, const Dict& a, const Dict& b, int depth) {
  if (a.size != b.size) return false;
  for (const Entry& e : a.view()) {
    const Value* other = find_key(budget, b.view(), e.key);
    if (!other || !equals(budget, e.value, *other, depth + 1)) return false;
  }
  return true;
}

}  // namespace

void fail(std::string what) { throw Failure{std::move(what)}; }
void fail_unsupported(std::string what) { throw Failure{std::move(what), Error::unsupported}; }

void* Arena::allocate(size_t bytes) {
  if (bytes > SIZE_MAX / 4) throw Failure{"the template needs too much memory", Error::too_large};
  bytes = (bytes + kAlign - 1) / kAlign * kAlign;
  if (bytes > size_t(end_ - at_)) {
    const size_t block = std::max(kBlockBytes, 2 * bytes);
    if (block > bytes_left_) throw Failure{"the template needs too much memory", Error::too_large};
    bytes_left_ -= block;
    blocks_.emplace_back(new std::byte[block]);
    at_ = blocks_.back().get();
    end_ = at_ + block;
  }
  return std::exchange(at_, at_ + bytes);
}

std::string_view Arena::copy(std::string_view text) {
  return {copy_array(std::span<const char>(text.data(), text.size())), text.size()};
}

std::string_view Arena::concat(std::string_view left, std::string_view right) {
  const size_t size = left.size() + right.size();
  char* begin = const_cast<char*>(left.data());
  if (left.empty() || left.data() + left.size() != growing_end_ ||
      right.size() > size_t(growing_limit_ - growing_end_)) {
    const size_t room = size < kRoomToGrowFrom ? size : 2 * size;
    begin = static_cast<char*>(allocate(room));
    growing_limit_ = begin + room;
    if (!left.empty()) std::memcpy(begin, left.data(), left.size());
  }
  if (!right.empty()) std::memcpy(begin + left.size(), right.data(), right.size());
  growing_end_ = begin + size;
  return {begin, size};
}

Value make_int(Int i) {
  if (i < kMinInt || i > kMaxInt) fail_unsupported("an integer does not fit in 64 bits");
  Value v;
  v.kind = Kind::integer;
  v.integer = i;
  return v;
}

Value make_list(Arena& arena, std::span<const Value> items, ListKind kind) {
  Value* copied = arena.copy_array(items);
  return make_object(arena.make<List>(kind, copied, items.size(), size_t(0)));
}

Value make_dict(Arena& arena, Budget& budget, std::span<const Entry> entries) {
  if (entries.size() > kMaxBuiltEntries)
    throw Failure{"a dictionary made by the template is too large", Error::too_large};
  std::vector<Entry> unique;
  unique.reserve(entries.size());
  for (const Entry& e : entries) {
    if (!hashable(budget, e.key)) fail("unhashable type: '" + type_name(e.key) + "'");
    const Value* known = find_key(budget, unique, e.key);
    if (known)
      const_cast<Value&>(*known) = e.value;
    else
      unique.push_back(e);
  }
  Entry* copied = arena.copy_array(std::span<const Entry>(unique));
  return make_object(arena.make<Dict>(copied, unique.size()));
}

std::string type_name(const Value& v) {
  static constexpr const char* kNames[] = {"missing", "Undefined", "NoneType", "bool",       "int",
                                           "float",   "str",       "list",     "dict",       "Namespace",
                                           "Macro",   "method",    "method",   "LoopContext"};
  static constexpr const char* kListNames[] = {"list",        "tuple",      "range",    "dict_keys",
                                               "dict_values", "dict_items", "generator"};
  if (v.is(Kind::list)) return kListNames[size_t(v.list->kind)];
  if (v.is(Kind::string) && v.markup) return "Markup";
  return kNames[size_t(v.kind)];
}

bool truthy(const Value& v) {
  switch (v.kind) {
    case Kind::missing:
    case Kind::undefined:
    case Kind::none:
      return false;
    case Kind::boolean:
      return v.boolean;
    case Kind::integer:
      return v.integer != 0;
    case Kind::real:
      return v.real != 0;
    case Kind::string:
      return v.text.size != 0;
    case Kind::list:
      return v.list->kind == ListKind::iterator || v.list->size != 0;
    case Kind::dict:
      return v.dict->size != 0;
    default:
      return true;
  }
}

bool equals(Budget& budget, const Value& a, const Value& b, int depth) {
  check_depth(depth);
  budget.spend();
  if (a.is_number() && b.is_number()) return numbers_equal(a, b);
  if (a.kind != b.kind) return false;
  switch (a.kind) {
    case Kind::undefined:
    case Kind::none:
      return true;
    case Kind::string:
      if (a.text.size == b.text.size) budget.spend(a.text.size / kBytesPerStep);
      return a.str() == b.str();
    case Kind::list:
      return lists_equal(budget, *a.list, *b.list, depth);
    case Kind::dict:
      return a.dict == b.dict || dicts_equal(budget, *a.dict, *b.dict, depth);
    case Kind::name_space:
      return a.name_space == b.name_space;
    case Kind::macro:
      return a.macro == b.macro;
    case Kind::loop:
      return a.loop == b.loop;
    case Kind::builtin:
      return a.builtin == b.builtin;
    default:
      fail_unsupported("comparing methods is not supported");
  }
}

bool hashable(Budget& budget, const Value& v) {
  budget.spend();
  if (v.is(Kind::dict)) return false;
  if (!v.is(Kind::list)) return true;
  if (v.list->kind == ListKind::tuple)
    return std::all_of(v.list->items, v.list->items + v.list->size,
                       [&](const Value& x) { return hashable(budget, x); });
  return v.list->kind == ListKind::range || v.list->kind == ListKind::iterator ||
         v.list->kind == ListKind::values;
}

int compare(Budget& budget, const Value& a, const Value& b, int depth) {
  check_depth(depth);
  budget.spend();
  if (a.is(Kind::undefined)) fail_undefined(a);
  if (b.is(Kind::undefined)) fail_undefined(b);
  if (a.is_number() && b.is_number()) return compare_numbers(a, b);
  if (a.is(Kind::string) && b.is(Kind::string)) {
    budget.spend(std::min(a.text.size, b.text.size) / kBytesPerStep);
    return a.str().compare(b.str());  // UTF-8 keeps code point order
  }
  const bool sequences = a.is(Kind::list) && b.is(Kind::list) && a.list->kind == b.list->kind &&
                         (a.list->kind == ListKind::list || a.list->kind == ListKind::tuple);
  if (!sequences) fail(fmt::format("'{}' and '{}' have no order between them", type_name(a), type_name(b)));
  for (size_t i = 0; i < std::min(a.list->size, b.list->size); ++i)
    if (!equals(budget, a.list->items[i], b.list->items[i], depth + 1))
      return compare(budget, a.list->items[i], b.list->items[i], depth + 1);
  return a.list->size < b.list->size ? -1 : a.list->size > b.list->size;
}

const Value* find_key(Budget& budget, std::span<const Entry> entries, const Value& key) {
  if (key.is(Kind::string)) return find_key(budget, entries, key.str());
  for (const Entry& e : entries)
    if (equals(budget, e.key, key)) return &e.value;
  return nullptr;
}

const Value* find_key(Budget& budget, std::span<const Entry> entries, std::string_view key) {
  budget.spend(entries.size() / kEntriesPerStep);
  for (const Entry& e : entries)
    if (e.key.is(Kind::string) && e.key.str() == key) return &e.value;
  return nullptr;
}

void fail_undefined(const Value& v) {
  fail(v.markup ? std::string(v.str()) : fmt::format("'{}' is undefined", v.str()));
}

}  // namespace ekv::jinja
