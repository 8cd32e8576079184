#include "text/jinja/scope.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "text/jinja/filters.h"
#include "text/jinja/names.h"

namespace ekv::jinja {
namespace {

constexpr int64_t kMaxScopeWork = 20'000'000;  // copied names; a template of a megabyte stays far below

// What becomes one activation at run time: the template, a macro, a call block, a recursive loop.
struct Function {
  int depth = 0;
  int num_slots = 0;
};

struct Load {
  enum Action { parameter, resolve, alias, clear } action;
  SlotRef source;
};

struct Found {
  const Function* function;
  int slot;
};

// One scope. Copies, made for the branches of an `if`, share the slots.
class Scope {
 public:
  Scope(const Scope* parent, Function* function)
      : parent_(parent), function_(function), slots_(std::make_shared<std::map<std::string, int>>()) {}

  Function& function() const { return *function_; }

  std::optional<Found> find(const std::string& name) const {
    for (const Scope* s = this; s; s = s->parent_)
      if (const auto it = s->refs_.find(name); it != s->refs_.end()) return Found{s->function_, it->second};
    return std::nullopt;
  }

  SlotRef slot(const std::string& name) const {
    const auto found = find(name);
    EKV_CHECK(found, "a name was not seen by the scope analysis");
    return reference(*found);
  }

  void load(const std::string& name) {
    if (!find(name)) define(name, {Load::resolve, {}});
  }

  void store(const std::string& name) {
    stores_.insert(name);
    if (refs_.count(name)) return;
    const auto outer = parent_ ? parent_->find(name) : std::nullopt;
    define(name, outer ? Load{Load::alias, reference(*outer)} : Load{Load::clear, {}});
  }

  int declare_parameter(const std::string& name) {
    stores_.insert(name);
    return define(name, {Load::parameter, {}});
  }

  int64_t size() const { return int64_t(refs_.size() + loads_.size() + stores_.size()); }

  // After an `if`: a name that only some branches assign starts with its outer value.
  void merge(const std::vector<Scope>& branches) {
    std::set<std::string> assigned;
    for (const Scope& b : branches)
      for (const auto& name : b.stores_)
        if (!stores_.count(name)) assigned.insert(name);
    for (const Scope& b : branches) {
      for (const auto& [name, slot] : b.refs_) refs_[name] = slot;
      for (const auto& [name, load] : b.loads_) loads_[name] = load;
      stores_.insert(b.stores_.begin(), b.stores_.end());
    }
    for (const auto& name : assigned) {
      const auto outer = parent_ ? parent_->find(name) : std::nullopt;
      loads_[name] = outer ? Load{Load::alias, reference(*outer)} : Load{Load::resolve, {}};
    }
  }

  ScopeInit init() const {
    ScopeInit out;
    for (const auto& [name, load] : loads_) {
      const int slot = slots_->at(name);
      if (load.action == Load::resolve) out.push_back({SlotInit::resolve, slot, {}, name});
      if (load.action == Load::alias) out.push_back({SlotInit::alias, slot, load.source, {}});
      if (load.action == Load::clear) out.push_back({SlotInit::clear, slot, {}, {}});
    }
    return out;
  }

 private:
  SlotRef reference(const Found& f) const { return {function_->depth - f.function->depth, f.slot}; }

  int define(const std::string& name, Load load) {
    const auto [it, is_new] = slots_->try_emplace(name, function_->num_slots);
    if (is_new) ++function_->num_slots;
    refs_[name] = it->second;
    loads_[name] = load;
    return it->second;
  }

  const Scope* parent_;
  Function* function_;
  std::shared_ptr<std::map<std::string, int>> slots_;
  std::map<std::string, int> refs_;
  std::map<std::string, Load> loads_;
  std::set<std::string> stores_;
};

class Resolver {
 public:
  void run(TemplateAst& ast) {
    Function function;
    Scope scope(nullptr, &function);
    analyze(scope, ast.body);
    body(scope, ast.body, false);
    ast.enter = scope.init();
    ast.num_slots = function.num_slots;
  }

 private:
  // -- First pass over a scope: which names it reads and assigns, inner scopes left out. --

  static void analyze(Scope& scope, const Expr* e) {
    for_each_expr(e, [&](const Expr& x) {
      if (x.kind == ExprKind::name) scope.load(x.text);
    });
  }

  static void analyze(Scope& scope, const Target& t, bool as_parameter) {
    for_each_name(t, [&](const Target& n) {
      if (!n.attribute.empty())
        scope.load(n.name);
      else if (as_parameter)
        scope.declare_parameter(n.name);
      else
        scope.store(n.name);
    });
  }

  void analyze(Scope& scope, const Body& body) {
    for (const StmtPtr& s : body) analyze(scope, *s);
  }

  void analyze(Scope& scope, const Stmt& s) {
    if (s.kind == StmtKind::if_) return analyze_if(scope, s);
    if (s.kind == StmtKind::macro) return scope.store(s.text);
    for (const ExprPtr& e : s.exprs) analyze(scope, e.get());
    if (s.kind == StmtKind::set || s.kind == StmtKind::set_block) analyze(scope, s.targets[0], false);
  }

  // A branch and what follows it in an elif chain, as nested ifs.
  void analyze_if(Scope& scope, const Stmt& s) {
    analyze(scope, s.branches[0].test.get());
    std::vector<Scope> ways{copy(scope), copy(scope), copy(scope)};
    analyze(ways[0], s.branches[0].body);
    for (size_t i = 1; i < s.branches.size(); ++i) {
      analyze(ways[1], s.branches[i].test.get());
      std::vector<Scope> inner{copy(ways[1])};
      analyze(inner[0], s.branches[i].body);
      ways[1].merge(inner);
    }
    analyze(ways[2], s.else_body);
    scope.merge(ways);
  }

  Scope copy(const Scope& scope) {
    if ((work_left_ -= scope.size()) < 0) throw Failure{"the template has too many names", Error::too_large};
    return scope;
  }

  // -- Second pass: slots, inner scopes. --

  static void expr(const Scope& scope, Expr* e, bool soft) {
    if (!e) return;
    if (e->kind == ExprKind::name) {
      if (e->text == "self") throw Failure{"'self' is not supported", Error::unsupported, e->line};
      e->slot = scope.slot(e->text);
    }
    soft = soft || e->kind == ExprKind::conditional;
    const bool unknown = (e->kind == ExprKind::filter && !find_filter(e->text)) ||
                         (e->kind == ExprKind::test && !find_test(e->text));
    if (unknown && !soft)
      throw Failure{std::string("there is no ") + (e->kind == ExprKind::filter ? "filter" : "test") +
                        " named '" + e->text + "'",
                    Error::invalid_argument, e->line};
    for (ExprPtr& child : e->children) expr(scope, child.get(), soft);
    for (auto& [name, child] : e->named) expr(scope, child.get(), soft);
    expr(scope, e->star.get(), soft);
    expr(scope, e->star_star.get(), soft);
  }

  static void target(const Scope& scope, Target& t) {
    if (!t.is_tuple) t.slot = scope.slot(t.name);
    for (Target& item : t.items) target(scope, item);
  }

  void body(const Scope& scope, Body& statements, bool soft) {
    for (StmtPtr& s : statements) statement(scope, *s, soft);
  }

  void statement(const Scope& scope, Stmt& s, bool soft) {
    if (s.kind == StmtKind::filter_block) return filter_block(scope, s);
    for (ExprPtr& e : s.exprs) expr(scope, e.get(), soft);
    switch (s.kind) {
      case StmtKind::if_:
        for (Branch& b : s.branches) {
          expr(scope, b.test.get(), true);
          body(scope, b.body, true);
        }
        return body(scope, s.else_body, true);
      case StmtKind::for_:
        return for_loop(scope, s);
      case StmtKind::set:
        return target(scope, s.targets[0]);
      case StmtKind::set_block:
        return set_block(scope, s);
      case StmtKind::macro:
        s.name_slot = scope.slot(s.text);
        return function(scope, s);
      case StmtKind::call_block:
      case StmtKind::generation:
        return function(scope, s);
      case StmtKind::with:
        return with(scope, s);
      default:
        return;
    }
  }

  void filter_block(const Scope& outer, Stmt& s) {
    Scope scope(&outer, &outer.function());
    analyze(scope, s.body);
    analyze(scope, s.exprs[0].get());
    expr(scope, s.exprs[0].get(), false);
    body(scope, s.body, false);
    s.enter = scope.init();
  }

  void set_block(const Scope& outer, Stmt& s) {
    target(outer, s.targets[0]);
    Scope scope(&outer, &outer.function());
    analyze(scope, s.body);
    analyze(scope, s.filter.get());
    expr(scope, s.filter.get(), false);
    body(scope, s.body, false);
    s.enter = scope.init();
  }

  void with(const Scope& outer, Stmt& s) {
    Scope scope(&outer, &outer.function());
    for (const Target& t : s.targets) analyze(scope, t, true);
    analyze(scope, s.body);
    for (Target& t : s.targets) target(scope, t);
    body(scope, s.body, false);
    s.enter = scope.init();
  }

  void for_loop(const Scope& outer, Stmt& s) {
    refuse_loop_targets(s);
    Function own{outer.function().depth + 1};
    Function& function = s.recursive ? own : outer.function();
    Scope loop(&outer, &function), test(&outer, &function), otherwise(&outer, &function);
    if (s.recursive || FreeNames(s.body, {"loop"}).has("loop")) s.loop_slot = loop.declare_parameter("loop");
    analyze(loop, s.targets[0], true);
    analyze(loop, s.body);
    analyze(otherwise, s.else_body);
    if (s.filter) {
      analyze(test, s.targets[0], true);
      analyze(test, s.filter.get());
      s.test_targets.push_back(s.targets[0]);
      target(test, s.test_targets[0]);
      expr(test, s.filter.get(), false);
    }
    target(loop, s.targets[0]);
    body(loop, s.body, false);
    body(otherwise, s.else_body, false);
    s.enter = loop.init();
    s.test_enter = test.init();
    s.else_enter = otherwise.init();
    s.num_slots = own.num_slots;
  }

  static void refuse_loop_target(const Target& t) {
    for_each_name(t, [](const Target& n) {
      if (n.name == "loop" && n.attribute.empty())
        throw Failure{"'loop' cannot be assigned to inside a loop", Error::invalid_argument, n.line};
    });
  }

  static void refuse_loop_targets(const Stmt& s) {
    const bool assigns = s.kind == StmtKind::for_ || s.kind == StmtKind::set || s.kind == StmtKind::set_block;
    if (assigns) refuse_loop_target(s.targets[0]);
    for (const Branch& b : s.branches)
      for (const StmtPtr& inner : b.body) refuse_loop_targets(*inner);
    for (const StmtPtr& inner : s.body) refuse_loop_targets(*inner);
    for (const StmtPtr& inner : s.else_body) refuse_loop_targets(*inner);
  }

  void function(const Scope& outer, Stmt& s) {
    Function own{outer.function().depth + 1};
    Scope scope(&outer, &own);
    const auto is_param = [&](const char* name) {
      return std::any_of(s.params.begin(), s.params.end(), [&](const Target& t) { return t.name == name; });
    };
    const FreeNames free(s.body, {"caller", "kwargs", "varargs"});
    for (const Target& t : s.params) analyze(scope, t, true);
    if (is_param("caller") && free.has("caller")) check_caller_has_default(s);
    if (free.has("caller") && !is_param("caller")) s.caller_slot = scope.declare_parameter("caller");
    if (free.has("kwargs") && !is_param("kwargs")) s.kwargs_slot = scope.declare_parameter("kwargs");
    if (free.has("varargs") && !is_param("varargs")) s.varargs_slot = scope.declare_parameter("varargs");
    for (const ExprPtr& e : s.defaults) analyze(scope, e.get());
    analyze(scope, s.body);
    for (Target& t : s.params) target(scope, t);
    for (ExprPtr& e : s.defaults) expr(scope, e.get(), false);
    body(scope, s.body, false);
    s.enter = scope.init();
    s.num_slots = own.num_slots;
  }

  static void check_caller_has_default(const Stmt& s) {
    const size_t first_default = s.params.size() - s.defaults.size();
    for (size_t i = 0; i < first_default; ++i)
      if (s.params[i].name == "caller")
        throw Failure{"the parameter 'caller' of a macro needs a default", Error::invalid_argument, s.line};
  }

  int64_t work_left_ = kMaxScopeWork;
};

}  // namespace

void resolve_scopes(TemplateAst& ast) { Resolver().run(ast); }

}  // namespace ekv::jinja
