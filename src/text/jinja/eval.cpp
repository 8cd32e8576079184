// Expressions, and what `loop` answers.

#include <fmt/format.h>

#include "text/jinja/depth.h"
#include "text/jinja/filters.h"
#include "text/jinja/interpreter.h"
#include "text/jinja/operators.h"

namespace ekv::jinja {

Value& Interpreter::slot(SlotRef ref) {
  Activation* a = activation_;
  for (int i = 0; i < ref.hops; ++i) a = a->parent;
  return a->slots[ref.slot];
}

Value Interpreter::resolve(std::string_view name) {
  if (const Value* v = find_key(rt_.budget, context_.view(), name)) return *v;
  static constexpr std::pair<std::string_view, Builtin> kGlobals[] = {
      {"range", Builtin::range},
      {"dict", Builtin::dict},
      {"namespace", Builtin::name_space},
      {"raise_exception", Builtin::raise_exception},
      {"strftime_now", Builtin::strftime_now}};
  for (const auto& [global, builtin] : kGlobals)
    if (global == name) return make_object(builtin);
  return {};
}

Value Interpreter::eval(const Expr& e) {
  const Depth depth(*this);
  rt_.budget.spend();
  line_ = e.line;
  switch (e.kind) {
    case ExprKind::literal:
      return e.value;
    case ExprKind::name:
      return eval_name(e);
    case ExprKind::list:
      return rt_.list(eval_all(e.children, 0));
    case ExprKind::tuple:
      return rt_.list(eval_all(e.children, 0), ListKind::tuple);
    case ExprKind::dict:
      return eval_dict(e);
    case ExprKind::unary:
      return eval_unary(e);
    case ExprKind::logic:
      return eval_logic(e);
    case ExprKind::compare:
      return eval_compare(e);
    case ExprKind::concat:
      return eval_concat(e);
    case ExprKind::conditional:
      return eval_conditional(e);
    case ExprKind::item:
      return eval_item(e);
    case ExprKind::call:
      return eval_call(e, nullptr);
    case ExprKind::filter:
      return eval_filter(e);
    case ExprKind::binary: {
      const Value a = eval(*e.children[0]), b = eval(*e.children[1]);
      line_ = e.line;
      return binary(rt_, e.op, a, b);
    }
    case ExprKind::attribute: {
      const Value object = eval(*e.children[0]);
      line_ = e.line;
      return attribute(object, e.text);
    }
    case ExprKind::test: {
      const Value v = eval(*e.children[0]);
      const CallArgs args = eval_args(e);
      line_ = e.line;
      return make_bool(apply_test(rt_, e.text, v, args));
    }
    default:
      fail_unsupported("a slice outside of a subscript is not supported");
  }
}

Value Interpreter::eval_name(const Expr& e) {
  const Value v = slot(e.slot);
  if (!v.is(Kind::missing)) return v;
  static constexpr std::string_view kForeign[] = {"lipsum", "cycler", "joiner"};
  for (const auto name : kForeign)
    if (e.text == name) fail_unsupported(fmt::format("the function '{}' is not supported", name));
  return make_undefined(e.text);
}

std::vector<Value> Interpreter::eval_all(const std::vector<ExprPtr>& exprs, size_t first) {
  std::vector<Value> values;
  for (size_t i = first; i < exprs.size(); ++i) values.push_back(eval(*exprs[i]));
  return values;
}

Value Interpreter::eval_dict(const Expr& e) {
  std::vector<Entry> entries;
  for (size_t i = 0; i < e.children.size(); i += 2) {
    const Value key = eval(*e.children[i]);
    entries.push_back({key, eval(*e.children[i + 1])});
  }
  line_ = e.line;
  return make_dict(rt_.arena, rt_.budget, entries);
}

Value Interpreter::eval_unary(const Expr& e) {
  const Value v = eval(*e.children[0]);
  line_ = e.line;
  return e.op == Op::not_ ? make_bool(!truthy(v)) : e.op == Op::neg ? negate(v) : plus(v);
}

Value Interpreter::eval_logic(const Expr& e) {
  const Value left = eval(*e.children[0]);
  return truthy(left) == (e.op == Op::or_) ? left : eval(*e.children[1]);
}

Value Interpreter::eval_compare(const Expr& e) {
  Value left = eval(*e.children[0]);
  for (size_t i = 0; i < e.ops.size(); ++i) {
    const Value right = eval(*e.children[i + 1]);
    line_ = e.line;
    if (!compare_with(rt_, e.ops[i], left, right)) return make_bool(false);
    left = right;
  }
  return make_bool(true);
}

Value Interpreter::eval_concat(const Expr& e) {
  const std::vector<Value> parts = eval_all(e.children, 0);
  line_ = e.line;
  Value out = parts[0].is(Kind::string) ? make_str(parts[0].str()) : rt_.text(text_of(rt_, parts[0]));
  for (size_t i = 1; i < parts.size(); ++i) out = concat(rt_, out, parts[i]);
  return out;
}

Value Interpreter::eval_conditional(const Expr& e) {
  if (truthy(eval(*e.children[0]))) return eval(*e.children[1]);
  if (e.children[2]) return eval(*e.children[2]);
  return make_undefined_because("a conditional expression without 'else' was false");
}

Value Interpreter::attribute(const Value& object, std::string_view name) {
  return object.is(Kind::loop) ? loop_attribute(*object.loop, name) : get_attribute(rt_, object, name);
}

Value Interpreter::eval_item(const Expr& e) {
  const Value object = eval(*e.children[0]);
  const Expr& key = *e.children[1];
  if (key.kind == ExprKind::slice) {
    Value bounds[3];
    for (size_t i = 0; i < 3; ++i) bounds[i] = key.children[i] ? eval(*key.children[i]) : make_none();
    line_ = e.line;
    return get_slice(rt_, object, &bounds[0], &bounds[1], &bounds[2]);
  }
  const Value k = eval(key);
  line_ = e.line;
  if (object.is(Kind::loop) && k.is(Kind::string)) return loop_attribute(*object.loop, k.str());
  return get_item(rt_, object, k);
}

CallArgs Interpreter::eval_args(const Expr& e) {
  CallArgs args;
  args.positional = eval_all(e.children, 1);
  for (const auto& [name, value] : e.named) args.named.push_back({name, eval(*value)});
  if (e.star)
    for (const Value& v : items_of(rt_, eval(*e.star))) args.positional.push_back(v);
  if (!e.star_star) return args;
  const Value more = eval(*e.star_star);
  if (!more.is(Kind::dict)) fail("what follows '**' must be a mapping");
  for (const Entry& entry : more.dict->view()) {
    if (!entry.key.is(Kind::string)) fail("the keys of a mapping after '**' must be strings");
    for (const NamedValue& known : args.named)
      if (known.name == entry.key.str())
        fail(fmt::format("the keyword argument '{}' is given twice", known.name));
    args.named.push_back({entry.key.str(), entry.value});
  }
  return args;
}

Value Interpreter::eval_call(const Expr& e, const Value* caller) {
  const Value callee = eval(*e.children[0]);
  CallArgs args = eval_args(e);
  if (caller) args.named.push_back({"caller", *caller});
  line_ = e.line;
  return call(callee, std::move(args));
}

Value Interpreter::call(const Value& callee, CallArgs args) {
  switch (callee.kind) {
    case Kind::undefined:
      fail_undefined(callee);
    case Kind::builtin:
      return call_builtin(rt_, callee.builtin, args);
    case Kind::macro:
      return call_macro(*callee.macro, std::move(args));
    case Kind::method:
      if (callee.method->self.is(Kind::loop))
        return call_loop_method(*callee.method->self.loop, callee.method->name, args);
      return call_method(rt_, *callee.method, args);
    case Kind::loop: {
      const LoopState& l = *callee.loop;
      const Arguments a("loop", args, {"iterable"}, 1);
      if (!l.stmt->recursive) fail("'loop' can be called only in a loop that is marked 'recursive'");
      return render_recursive(*l.stmt, *a.get(0), l.depth0 + 1, l.outer);
    }
    default:
      fail(fmt::format("a value of type {} cannot be called", type_name(callee)));
  }
}

Value Interpreter::eval_filter(const Expr& e) {
  const Value self = e.children[0] ? eval(*e.children[0]) : filter_input_;
  const CallArgs args = eval_args(e);
  line_ = e.line;
  return apply_filter(rt_, e.text, self, args);
}

// -- `loop`. --

// The next item that passes the `if` part of the loop.
bool Interpreter::pull(LoopState& l, Value& item) {
  while (true) {
    if (l.iterator ? l.iterator->next >= l.iterator->size : l.next >= l.items.size()) return false;
    const Value candidate = l.iterator ? l.iterator->items[l.iterator->next++] : l.items[l.next++];
    item = candidate;
    if (!l.filtered) return true;
    rt_.budget.spend();
    Activation* const outer = std::exchange(activation_, l.activation);
    assign(l.stmt->test_targets[0], candidate);
    const bool passes = truthy(eval(*l.stmt->filter));
    activation_ = outer;
    if (passes) return true;
  }
}

bool Interpreter::advance(LoopState& l) {
  Value item = l.after;
  if (!l.has_after && !pull(l, item)) return false;
  l.has_after = false;
  ++l.index0;
  l.previous = l.current;
  l.current = item;
  return true;
}

bool Interpreter::peek(LoopState& l) {
  if (!l.has_after) l.has_after = pull(l, l.after);
  return l.has_after;
}

Int Interpreter::loop_length(LoopState& l) {
  if (l.length >= 0) return l.length;
  if (!l.filtered && !l.iterator) return l.length = Int(l.items.size());
  std::vector<Value> rest;
  for (Value item; pull(l, item);) rest.push_back(item);
  l.items = rt_.list(rest).list->view();
  l.next = 0;
  l.iterator = nullptr;
  l.filtered = false;
  return l.length = Int(rest.size()) + l.index0 + 1 + l.has_after;
}

Value Interpreter::loop_attribute(LoopState& l, std::string_view name) {
  if (name == "index") return make_int(l.index0 + 1);
  if (name == "index0") return make_int(l.index0);
  if (name == "first") return make_bool(l.index0 == 0);
  if (name == "last") return make_bool(!peek(l));
  if (name == "length") return make_int(loop_length(l));
  if (name == "revindex") return make_int(loop_length(l) - l.index0);
  if (name == "revindex0") return make_int(loop_length(l) - l.index0 - 1);
  if (name == "depth") return make_int(l.depth0 + 1);
  if (name == "depth0") return make_int(l.depth0);
  if (name == "previtem")
    return l.index0 == 0 ? make_undefined_because("there is no previous item") : l.previous;
  if (name == "nextitem") return peek(l) ? l.after : make_undefined_because("there is no next item");
  if (name == "cycle" || name == "changed") {
    return make_object(rt_.arena.make<Method>(make_object(&l), rt_.arena.copy(name)));
  }
  return make_undefined(name);
}

Value Interpreter::call_loop_method(LoopState& l, std::string_view name, const CallArgs& args) {
  if (!args.named.empty()) fail(fmt::format("'loop.{}' takes no keyword arguments", name));
  if (name == "cycle") {
    if (args.positional.empty()) fail("'loop.cycle' needs at least one item");
    return args.positional[size_t(l.index0) % args.positional.size()];
  }
  const Value now = rt_.list(args.positional, ListKind::tuple);
  const bool changed = !l.has_changed || !equals(rt_.budget, l.changed, now);
  l.changed = now;
  l.has_changed = true;
  return make_bool(changed);
}

}  // namespace ekv::jinja
