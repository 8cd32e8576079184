#include "text/jinja/interpreter.h"

#include <fmt/format.h>

#include "text/jinja/depth.h"
#include "text/jinja/filters.h"

namespace ekv::jinja {

std::string Interpreter::run() {
  std::string out;
  out_ = &out;
  activation_ = make_activation(nullptr, ast_.num_slots);
  enter(ast_.enter);
  exec(ast_.body);
  return out;
}

Activation* Interpreter::make_activation(Activation* parent, int num_slots) {
  const std::vector<Value> empty(static_cast<size_t>(num_slots));
  return rt_.arena.make<Activation>(parent, rt_.arena.copy_array(std::span<const Value>(empty)));
}

void Interpreter::enter(const ScopeInit& init) {
  for (const SlotInit& i : init) {
    Value& target = activation_->slots[i.slot];
    switch (i.action) {
      case SlotInit::resolve:
        target = resolve(i.name);
        break;
      case SlotInit::alias:
        target = slot(i.source);
        break;
      case SlotInit::clear:
        target = {};
        break;
    }
  }
}

void Interpreter::emit(std::string_view text) {
  if (out_->size() + text.size() > kMaxTextBytes)
    throw Failure{"the rendered text is too large", Error::too_large};
  rt_.budget.spend(text.size() / 64);
  *out_ += text;
}

// What `body` prints, as a string value. `flow` receives a break or continue that leaves the body.
template <class F>
Value Interpreter::capture(const F& body, Flow* flow) {
  std::string text;
  std::string* const outer = std::exchange(out_, &text);
  const Flow left_by = body();
  out_ = outer;
  if (flow) *flow = left_by;
  return rt_.text(text);
}

template <class F>
Value Interpreter::in_activation(Activation* activation, const F& body) {
  Activation* const outer = std::exchange(activation_, activation);
  const Value v = body();
  activation_ = outer;
  return v;
}

Interpreter::Flow Interpreter::exec(const Body& body) {
  const Depth depth(*this);
  for (const StmtPtr& s : body)
    if (const Flow flow = exec(*s); flow != Flow::normal) return flow;
  return Flow::normal;
}

Interpreter::Flow Interpreter::exec(const Stmt& s) {
  rt_.budget.spend();
  line_ = s.line;
  switch (s.kind) {
    case StmtKind::text:
      emit(s.text);
      return Flow::normal;
    case StmtKind::print:
      for (const ExprPtr& e : s.exprs) {
        const Value v = eval(*e);
        v.is(Kind::string) ? emit(v.str()) : emit(text_of(rt_, v));
      }
      return Flow::normal;
    case StmtKind::if_:
      return exec_if(s);
    case StmtKind::for_:
      return exec_for(s);
    case StmtKind::set: {
      check_namespaces(s.targets[0]);
      assign(s.targets[0], eval(*s.exprs[0]));
      return Flow::normal;
    }
    case StmtKind::set_block:
      return exec_set_block(s);
    case StmtKind::macro:
      slot(s.name_slot) = make_object(rt_.arena.make<Macro>(&s, activation_));
      return Flow::normal;
    case StmtKind::call_block:
      exec_call_block(s);
      return Flow::normal;
    case StmtKind::filter_block:
      return exec_filter_block(s);
    case StmtKind::with:
      return exec_with(s);
    case StmtKind::generation:
      exec_generation(s);
      return Flow::normal;
    case StmtKind::break_:
      return Flow::break_;
    default:
      return Flow::continue_;
  }
}

Interpreter::Flow Interpreter::exec_if(const Stmt& s) {
  for (const Branch& b : s.branches) {
    line_ = b.line;
    if (truthy(eval(*b.test))) return exec(b.body);
  }
  return exec(s.else_body);
}

Interpreter::Flow Interpreter::exec_filter_block(const Stmt& s) {
  enter(s.enter);
  Flow flow;
  const Value text = capture([&] { return exec(s.body); }, &flow);
  if (flow != Flow::normal) return flow;
  const Value outer = std::exchange(filter_input_, text);
  emit(text_of(rt_, eval(*s.exprs[0])));
  filter_input_ = outer;
  return Flow::normal;
}

Interpreter::Flow Interpreter::exec_set_block(const Stmt& s) {
  enter(s.enter);
  Flow flow;
  Value text = capture([&] { return exec(s.body); }, &flow);
  if (flow != Flow::normal) return flow;
  if (s.filter) {
    const Value outer = std::exchange(filter_input_, text);
    text = eval(*s.filter);
    filter_input_ = outer;
  }
  check_namespaces(s.targets[0]);
  assign(s.targets[0], text);
  return Flow::normal;
}

Interpreter::Flow Interpreter::exec_with(const Stmt& s) {
  enter(s.enter);
  for (size_t i = 0; i < s.targets.size(); ++i) assign(s.targets[i], eval(*s.exprs[i]));
  return exec(s.body);
}

// Marks the assistant's part of a training example; its text is printed as it is, its variables stay inside.
void Interpreter::exec_generation(const Stmt& s) {
  in_activation(make_activation(activation_, s.num_slots), [&] {
    enter(s.enter);
    exec(s.body);
    return Value{};
  });
}

void Interpreter::exec_call_block(const Stmt& s) {
  const Value caller = make_object(rt_.arena.make<Macro>(&s, activation_));
  emit(text_of(rt_, eval_call(*s.exprs[0], &caller)));
}

void Interpreter::check_namespaces(const Target& t) {
  if (!t.attribute.empty() && !slot(t.slot).is(Kind::name_space))
    fail(fmt::format("'{}' is not a namespace: its attribute '{}' cannot be set", t.name, t.attribute));
  for (const Target& item : t.items) check_namespaces(item);
}

void Interpreter::assign(const Target& t, const Value& v) {
  if (!t.is_tuple && t.attribute.empty()) {
    slot(t.slot) = v;
  } else if (!t.is_tuple) {
    const Value target = slot(t.slot);
    if (!target.is(Kind::name_space)) fail(fmt::format("'{}' is not a namespace", t.name));
    set_member(*target.name_space, t.attribute, v);
  } else {
    const auto items = items_of(rt_, v);
    if (items.size() != t.items.size())
      fail(fmt::format("{} values cannot be assigned to {} names", items.size(), t.items.size()));
    for (size_t i = 0; i < items.size(); ++i) assign(t.items[i], items[i]);
  }
}

void Interpreter::set_member(Namespace& ns, std::string_view name, const Value& v) {
  if (const Value* known = find_key(rt_.budget, {ns.entries, ns.size}, name)) {
    const_cast<Value&>(*known) = v;
    return;
  }
  if (ns.size == ns.capacity) {
    const std::vector<Entry> grown = [&] {
      std::vector<Entry> g(ns.entries, ns.entries + ns.size);
      g.resize(2 * ns.size + 4);
      return g;
    }();
    ns.entries = rt_.arena.copy_array(std::span<const Entry>(grown));
    ns.capacity = grown.size();
  }
  ns.entries[ns.size++] = {make_str(name), v};
}

Value Interpreter::call_macro(const Macro& macro, CallArgs args) {
  const Stmt& s = *macro.definition;
  const int line = line_;
  return in_activation(make_activation(macro.closure, s.num_slots), [&] {
    bind_parameters(s, args);
    enter(s.enter);
    const size_t first_default = s.params.size() - s.defaults.size();
    for (size_t i = 0; i < s.params.size(); ++i) {
      Value& parameter = slot(s.params[i].slot);
      if (!parameter.is(Kind::missing)) continue;
      // The default may read parameters before it, so it is evaluated only now.
      const Value v = i >= first_default ? eval(*s.defaults[i - first_default])
                                         : make_undefined_because(rt_.arena.copy(fmt::format(
                                               "parameter '{}' was not provided", s.params[i].name)));
      slot(s.params[i].slot) = v;
    }
    const Value text = capture([&] { return exec(s.body); });
    line_ = line;
    return text;
  });
}

void Interpreter::bind_parameters(const Stmt& s, CallArgs& args) {
  const auto take = [&](std::string_view name) {
    for (size_t i = 0; i < args.named.size(); ++i) {
      if (args.named[i].name != name) continue;
      const Value v = args.named[i].value;
      args.named.erase(args.named.begin() + i);
      return v;
    }
    return Value{};
  };
  const size_t n = s.params.size();
  const std::string name = s.kind == StmtKind::macro ? "the macro '" + s.text + "'" : "the call block";
  for (size_t i = 0; i < n; ++i)
    slot(s.params[i].slot) = i < args.positional.size() ? args.positional[i] : take(s.params[i].name);
  if (s.caller_slot >= 0) {
    const Value caller = take("caller");
    const bool none = caller.is(Kind::missing) || caller.is(Kind::none);
    activation_->slots[s.caller_slot] = none ? make_undefined_because("no caller is defined") : caller;
  }
  if (s.kwargs_slot >= 0) {
    std::vector<Entry> entries;
    for (const NamedValue& v : args.named) entries.push_back({rt_.text(v.name), v.value});
    activation_->slots[s.kwargs_slot] = make_dict(rt_.arena, rt_.budget, entries);
  } else if (!args.named.empty()) {
    fail(fmt::format("{} has no argument named '{}'", name, args.named[0].name));
  }
  if (s.varargs_slot >= 0) {
    const std::span<const Value> all = args.positional;
    activation_->slots[s.varargs_slot] = rt_.list(all.subspan(std::min(n, all.size())), ListKind::tuple);
  } else if (args.positional.size() > n) {
    fail(fmt::format("{} takes at most {} arguments, got {}", name, n, args.positional.size()));
  }
}

// -- Loops. --

Interpreter::Flow Interpreter::exec_for(const Stmt& s) {
  const Value iterable = eval(*s.exprs[0]);
  if (!s.recursive) return run_loop(s, iterable, 0, nullptr);
  emit(render_recursive(s, iterable, 0, activation_).str());
  return Flow::normal;
}

Value Interpreter::render_recursive(const Stmt& s, const Value& iterable, int depth0, Activation* outer) {
  return in_activation(make_activation(outer, s.num_slots),
                       [&] { return capture([&] { return run_loop(s, iterable, depth0, outer); }); });
}

Interpreter::Flow Interpreter::run_loop(const Stmt& s, const Value& iterable, int depth0, Activation* outer) {
  const Depth depth(*this);
  LoopState& l = *rt_.arena.make<LoopState>();
  l.stmt = &s;
  l.activation = activation_;
  l.outer = outer;
  l.depth0 = depth0;
  l.filtered = bool(s.filter);
  if (iterable.is(Kind::list) && iterable.list->kind == ListKind::iterator)
    l.iterator = iterable.list;
  else
    l.items = items_of(rt_, iterable);
  if (s.filter) enter(s.test_enter);
  bool completed = false;  // as in Jinja2, an iteration that is left early does not keep `else` from running
  while (advance(l)) {
    rt_.budget.spend();
    assign(s.targets[0], l.current);
    if (s.loop_slot >= 0) activation_->slots[s.loop_slot] = make_object(&l);
    enter(s.enter);
    const Flow flow = exec(s.body);
    if (flow == Flow::break_) break;
    if (flow == Flow::normal) completed = true;
  }
  if (completed || s.else_body.empty()) return Flow::normal;
  enter(s.else_enter);
  return exec(s.else_body);
}

}  // namespace ekv::jinja
