#pragma once
// jinja/value.h -- values of the template language: what Python objects are to Jinja2, in a closed set of
// kinds.
//
// A value is a trivially copyable handle; what it points to lives in the arena of one rendering and is freed
// with it. Nothing is reference counted, so values may refer to each other in circles, and nesting costs no
// stack on the way out. All but namespaces, iterators and loop states are immutable.

#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "elastickv/base.h"

namespace ekv::jinja {

// Thrown inside src/text/jinja/* only and caught by ChatTemplate: errors rise through a recursive interpreter.
struct Failure {
  std::string what;
  Error::Code code = Error::invalid_argument;
  int line = 0;  // 0: the line that is being executed
};

[[noreturn]] void fail(std::string what);
[[noreturn]] void fail_unsupported(std::string what);

// Work that a rendering may still do. Everything that loops spends from it, so that a hostile template ends.
class Budget {
 public:
  explicit Budget(int64_t steps) : steps_left_(steps) {}
  void spend(size_t steps = 1) {
    if ((steps_left_ -= int64_t(steps)) < 0) throw Failure{"the template runs for too long", Error::too_large};
  }

 private:
  int64_t steps_left_;
};

// Bump allocator. Throws Failure{too_large} past `max_bytes`; runs no destructors.
class Arena {
 public:
  explicit Arena(size_t max_bytes) : bytes_left_(max_bytes) {}
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  void* allocate(size_t bytes);
  std::string_view copy(std::string_view text);
  // Extends `left` in place when it is the newest result of concat, so that a text grown in a loop costs linear
  // memory. Older handles keep their length and see the same bytes.
  std::string_view concat(std::string_view left, std::string_view right);

  template <class T, class... Args>
  T* make(Args&&... args) {
    static_assert(std::is_trivially_destructible_v<T>);
    return new (allocate(sizeof(T))) T{std::forward<Args>(args)...};
  }
  template <class T>
  T* copy_array(std::span<const T> items) {
    static_assert(std::is_trivially_copyable_v<T>);
    T* out = static_cast<T*>(allocate(items.size_bytes()));
    if (!items.empty()) std::memcpy(static_cast<void*>(out), items.data(), items.size_bytes());
    return out;
  }

 private:
  std::vector<std::unique_ptr<std::byte[]>> blocks_;
  std::byte* at_ = nullptr;
  std::byte* end_ = nullptr;
  const char* growing_end_ = nullptr;    // where the newest result of concat ends, and
  const char* growing_limit_ = nullptr;  // how far it may grow in place
  size_t bytes_left_;
};

enum class Kind : uint8_t {
  missing,  // a slot without a value; never the result of an expression
  undefined,
  none,
  boolean,
  integer,
  real,
  string,
  list,
  dict,
  name_space,
  macro,
  builtin,
  method,
  loop,
};

// `iterator` stands for every Python object that can be walked once and has no length (generators, reversed()).
enum class ListKind : uint8_t { list, tuple, range, keys, values, items, iterator };

using Int = __int128;  // wide enough to see every overflow of the range below
constexpr Int kMinInt = INT64_MIN, kMaxInt = UINT64_MAX;  // integers of JSON that other parsers keep exact

enum class Builtin : uint8_t { range, dict, name_space, raise_exception, strftime_now };

struct List;
struct Dict;
struct Namespace;
struct Macro;
struct Method;
struct LoopState;

struct Value {
  Kind kind = Kind::missing;
  bool markup = false;  // string: went through `safe` or `escape`; undefined: `text` is a whole message
  union {
    bool boolean;
    Int integer = 0;
    double real;
    struct {
      const char* data;
      size_t size;
    } text;  // string; undefined: the name that was looked up
    const List* list;
    const Dict* dict;
    Namespace* name_space;
    const Macro* macro;
    const Method* method;
    LoopState* loop;
    Builtin builtin;
  };

  std::string_view str() const { return {text.data, text.size}; }
  bool is(Kind k) const { return kind == k; }
  bool is_number() const { return kind == Kind::integer || kind == Kind::real || kind == Kind::boolean; }
  bool is_integral() const { return kind == Kind::integer || kind == Kind::boolean; }
  Int as_int() const { return kind == Kind::boolean ? Int(boolean) : integer; }
  double as_real() const { return kind == Kind::real ? real : double(as_int()); }
};

Value make_int(Int i);  // fails outside [kMinInt, kMaxInt]
inline Value make_none() {
  Value v;
  v.kind = Kind::none;
  return v;
}
inline Value make_bool(bool b) {
  Value v;
  v.kind = Kind::boolean;
  v.boolean = b;
  return v;
}
inline Value make_real(double d) {
  Value v;
  v.kind = Kind::real;
  v.real = d;
  return v;
}
inline Value make_text(Kind kind, std::string_view s, bool markup) {
  Value v;
  v.kind = kind;
  v.markup = markup;
  v.text = {s.data(), s.size()};
  return v;
}
inline Value make_str(std::string_view s) { return make_text(Kind::string, s, false); }
inline Value make_undefined(std::string_view name) { return make_text(Kind::undefined, name, false); }
inline Value make_undefined_because(std::string_view message) {
  return make_text(Kind::undefined, message, true);
}
inline Value make_object(const List* l) {
  Value v;
  v.kind = Kind::list;
  v.list = l;
  return v;
}
inline Value make_object(const Dict* d) {
  Value v;
  v.kind = Kind::dict;
  v.dict = d;
  return v;
}
inline Value make_object(Namespace* n) {
  Value v;
  v.kind = Kind::name_space;
  v.name_space = n;
  return v;
}
inline Value make_object(const Macro* m) {
  Value v;
  v.kind = Kind::macro;
  v.macro = m;
  return v;
}
inline Value make_object(const Method* m) {
  Value v;
  v.kind = Kind::method;
  v.method = m;
  return v;
}
inline Value make_object(LoopState* l) {
  Value v;
  v.kind = Kind::loop;
  v.loop = l;
  return v;
}
inline Value make_object(Builtin b) {
  Value v;
  v.kind = Kind::builtin;
  v.builtin = b;
  return v;
}

struct List {
  ListKind kind;
  Value* items;
  size_t size;
  mutable size_t next = 0;  // iterator: how many items have been taken
  std::span<const Value> view() const { return {items, size}; }
};

struct Entry {
  Value key, value;
};

struct Dict {
  Entry* entries;
  size_t size;
  std::span<const Entry> view() const { return {entries, size}; }
};

struct Namespace {
  Entry* entries;
  size_t size, capacity;
};

struct Method {
  Value self;
  std::string_view name;
};

struct NamedValue {
  std::string_view name;
  Value value;
};

struct CallArgs {
  std::vector<Value> positional;
  std::vector<NamedValue> named;
};

Value make_list(Arena& arena, std::span<const Value> items, ListKind kind = ListKind::list);
// Later values win, first positions stay, as in Python.
Value make_dict(Arena& arena, Budget& budget, std::span<const Entry> entries);

// -- What Python's protocols answer. --

std::string type_name(const Value& v);
bool truthy(const Value& v);
bool equals(Budget& budget, const Value& a, const Value& b, int depth = 0);
bool hashable(Budget& budget, const Value& v);
// Three-way order of numbers, strings and sequences; fails for pairs that Python refuses to order.
int compare(Budget& budget, const Value& a, const Value& b, int depth = 0);
const Value* find_key(Budget& budget, std::span<const Entry> entries, const Value& key);
const Value* find_key(Budget& budget, std::span<const Entry> entries, std::string_view key);
[[noreturn]] void fail_undefined(const Value& v);

// -- Text forms. Both fail with `too_large` past `max_bytes`. --

std::string to_text(const Value& v, size_t max_bytes);  // str(v)
std::string to_repr(const Value& v, size_t max_bytes);  // repr(v)
std::string real_to_text(double d);
std::string int_to_text(Int i);

struct JsonStyle {
  bool ascii = false, sort_keys = false;
  bool multiline = false;
  std::string indent;  // one level, when multiline
  std::string item_separator, key_separator;
};
std::string to_json(const Value& v, const JsonStyle& style, size_t max_bytes);

}  // namespace ekv::jinja
