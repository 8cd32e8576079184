#pragma once
// jinja/runtime.h -- what operators, filters and methods share: memory, work, iteration, look-up, arguments.

#include <initializer_list>

#include "text/jinja/value.h"

namespace ekv::jinja {

constexpr size_t kMaxTextBytes = size_t(16) << 20;  // of the output and of any string a template makes
constexpr size_t kMaxArenaBytes = size_t(256) << 20;
constexpr int64_t kMaxSteps = 20'000'000;

// One rendering. Used by one thread.
struct Runtime {
  Arena arena{kMaxArenaBytes};
  Budget budget{kMaxSteps};
  int64_t unix_seconds = 0;  // what strftime_now prints

  // A string value of its own. Fails past kMaxTextBytes.
  Value text(std::string_view s);
  Value list(std::span<const Value> items, ListKind kind = ListKind::list);
  // Work that grows with a text, and the worst case of looking for `what` in it.
  void spend_on(std::string_view s) { budget.spend(s.size() / 64); }
  void spend_on_search(std::string_view s, std::string_view what) {
    budget.spend(s.size() / 64 + s.size() * what.size() / 1024);
  }
};

std::string text_of(Runtime& rt, const Value& v);  // str(v) within kMaxTextBytes

// Iteration as Python's iter(): takes what is left of an iterator. Fails for values that cannot be walked.
std::span<const Value> items_of(Runtime& rt, const Value& v);
bool is_iterable(const Value& v);
// len(); fails for values without one.
size_t size_of(const Value& v);

// obj.name and obj[key] by the rules of the sandbox. Attributes of `loop` are answered by the interpreter.
Value get_attribute(Runtime& rt, const Value& object, std::string_view name);
Value get_item(Runtime& rt, const Value& object, const Value& key);
Value get_slice(Runtime& rt, const Value& object, const Value* start, const Value* stop, const Value* step);
// "a.b.0": the paths that filters take; a value of another kind is one key, none is the object itself.
Value get_path(Runtime& rt, const Value& object, const Value& path, const Value* fallback = nullptr);

// Methods that exist: names the result of get_attribute when Python has them.
Value call_method(Runtime& rt, const Method& method, const CallArgs& args);
Value call_builtin(Runtime& rt, Builtin builtin, const CallArgs& args);

// Positional and keyword arguments matched with parameter names, as Python does for a call.
class Arguments {
 public:
  // `required`: how many of the first parameters must be given. Fails with the name of the function.
  Arguments(std::string_view function, const CallArgs& args, std::initializer_list<std::string_view> names,
            size_t required = 0);
  const Value* get(size_t i) const { return values_[i].is(Kind::missing) ? nullptr : &values_[i]; }
  bool flag(size_t i, bool fallback) const { return get(i) ? truthy(*get(i)) : fallback; }
  Int integer(size_t i, Int fallback) const;  // fails when it is not an integer

 private:
  std::string_view function_;
  std::vector<Value> values_;
};

// An index argument: int or bool. Fails with `what`.
Int index_of(const Value& v, std::string_view what);

}  // namespace ekv::jinja
