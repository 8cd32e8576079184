#pragma once
// jinja/interpreter.h -- renders a syntax tree.

#include "text/jinja/ast.h"
#include "text/jinja/runtime.h"

namespace ekv::jinja {

// The variables of one running function: the template, a macro, a call block, a recursive loop.
struct Activation {
  Activation* parent;
  Value* slots;
};

struct Macro {
  const Stmt* definition;  // macro or call_block
  Activation* closure;
};

// What `loop` is: a walk over items that can look one ahead.
struct LoopState {
  const Stmt* stmt = nullptr;
  Activation* activation = nullptr;  // where the `if` part is evaluated
  Activation* outer = nullptr;       // recursive: parent of the activations of deeper levels
  const List* iterator = nullptr;    // set when the items come from a one-pass iterator
  std::span<const Value> items;
  size_t next = 0;
  bool filtered = false;  // the `if` part is still to be applied
  bool has_after = false, has_changed = false;
  Value after, current, previous, changed;
  Int index0 = -1, length = -1;
  int depth0 = 0;
};

// One rendering; used once. Throws Failure.
class Interpreter {
 public:
  Interpreter(const TemplateAst& ast, Runtime& rt, const Dict& context)
      : ast_(ast), rt_(rt), context_(context) {}
  std::string run();
  int line() const { return line_; }  // being executed

 private:
  enum class Flow { normal, break_, continue_ };
  class Depth;

  // Statements.
  Flow exec(const Body& body);
  Flow exec(const Stmt& s);
  Flow exec_if(const Stmt& s);
  Flow exec_filter_block(const Stmt& s);
  Flow exec_set_block(const Stmt& s);
  Flow exec_with(const Stmt& s);
  void exec_generation(const Stmt& s);
  void exec_call_block(const Stmt& s);
  void enter(const ScopeInit& init);
  void emit(std::string_view text);
  template <class F>
  Value capture(const F& body, Flow* flow = nullptr);
  template <class F>
  Value in_activation(Activation* activation, const F& body);
  Activation* make_activation(Activation* parent, int num_slots);
  void check_namespaces(const Target& t);
  void assign(const Target& t, const Value& v);
  void set_member(Namespace& ns, std::string_view name, const Value& v);

  // Loops.
  Flow exec_for(const Stmt& s);
  Flow run_loop(const Stmt& s, const Value& iterable, int depth0, Activation* outer);
  Value render_recursive(const Stmt& s, const Value& iterable, int depth0, Activation* outer);
  bool pull(LoopState& l, Value& item);
  bool advance(LoopState& l);
  bool peek(LoopState& l);
  Int loop_length(LoopState& l);
  Value loop_attribute(LoopState& l, std::string_view name);
  Value call_loop_method(LoopState& l, std::string_view name, const CallArgs& args);

  // Expressions.
  Value eval(const Expr& e);
  Value eval_name(const Expr& e);
  Value eval_dict(const Expr& e);
  Value eval_unary(const Expr& e);
  Value eval_logic(const Expr& e);
  Value eval_compare(const Expr& e);
  Value eval_concat(const Expr& e);
  Value eval_conditional(const Expr& e);
  Value eval_item(const Expr& e);
  Value eval_call(const Expr& e, const Value* caller);
  Value eval_filter(const Expr& e);
  std::vector<Value> eval_all(const std::vector<ExprPtr>& exprs, size_t first);
  CallArgs eval_args(const Expr& e);
  Value call(const Value& callee, CallArgs args);
  Value call_macro(const Macro& macro, CallArgs args);
  void bind_parameters(const Stmt& s, CallArgs& args);
  Value attribute(const Value& object, std::string_view name);
  Value resolve(std::string_view name);
  Value& slot(SlotRef ref);

  const TemplateAst& ast_;
  Runtime& rt_;
  const Dict& context_;
  Activation* activation_ = nullptr;
  std::string* out_ = nullptr;
  Value filter_input_;  // text of the filter block that is being finished
  int depth_ = 0;
  int line_ = 1;
};

}  // namespace ekv::jinja
