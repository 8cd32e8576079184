#pragma once
// jinja/names.h -- which names a piece of a template mentions.

#include <set>
#include <string>

#include "text/jinja/ast.h"

namespace ekv::jinja {

// Visits every expression below `e`, itself included, null ones left out.
template <class F>
void for_each_expr(const Expr* e, const F& f) {
  if (!e) return;
  f(*e);
  for (const ExprPtr& child : e->children) for_each_expr(child.get(), f);
  for (const auto& [name, child] : e->named) for_each_expr(child.get(), f);
  for_each_expr(e->star.get(), f);
  for_each_expr(e->star_star.get(), f);
}

template <class F>
void for_each_name(const Target& t, const F& f) {
  if (!t.is_tuple) f(t);
  for (const Target& item : t.items) for_each_name(item, f);
}

// Which of `wanted` a body reads before it assigns them, nested bodies included.
class FreeNames {
 public:
  FreeNames(const Body& body, std::set<std::string> wanted) : wanted_(std::move(wanted)) { walk(body); }
  bool has(const std::string& name) const { return free_.count(name) != 0; }

 private:
  void read(const Expr* e) {
    for_each_expr(e, [&](const Expr& x) {
      if (x.kind == ExprKind::name && wanted_.count(x.text)) free_.insert(x.text);
    });
  }
  void assign(const Target& t) {
    for_each_name(t, [&](const Target& n) {
      if (n.attribute.empty()) wanted_.erase(n.name);
    });
  }
  void walk(const Body& body) {
    for (const StmtPtr& s : body) walk(*s);
  }
  void walk(const Stmt& s) {
    const bool reads_last = s.kind == StmtKind::filter_block;
    const bool reads_first = s.kind == StmtKind::print || s.kind == StmtKind::call_block;
    if (reads_first)
      for (const ExprPtr& e : s.exprs) read(e.get());
    for (const Target& t : s.targets) assign(t);
    for (const Target& t : s.params) assign(t);
    for (const ExprPtr& e : s.defaults) read(e.get());
    if (!reads_first && !reads_last)
      for (const ExprPtr& e : s.exprs) read(e.get());
    if (s.kind == StmtKind::set_block) read(s.filter.get());
    for (const Branch& b : s.branches) {
      read(b.test.get());
      walk(b.body);
    }
    walk(s.body);
    walk(s.else_body);
    if (s.kind == StmtKind::for_) read(s.filter.get());
    if (reads_last)
      for (const ExprPtr& e : s.exprs) read(e.get());
  }

  std::set<std::string> wanted_, free_;
};

}  // namespace ekv::jinja
