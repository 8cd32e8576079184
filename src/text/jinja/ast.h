#pragma once
// jinja/ast.h -- a parsed template. Immutable after compile, so any number of threads may render it.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "text/jinja/value.h"

namespace ekv::jinja {

enum class Op : uint8_t {
  none,
  add,
  sub,
  mul,
  div,
  floordiv,
  mod,
  pow,  // binary
  pos,
  neg,
  not_,
  and_,
  or_,  // unary and lazy
  eq,
  ne,
  lt,
  le,
  gt,
  ge,
  in,
  not_in,  // comparison
};

// Where a variable lives: `hops` activations outwards, then a slot there.
struct SlotRef {
  int hops = 0;
  int slot = -1;
};

enum class ExprKind : uint8_t {
  literal,
  name,
  list,
  tuple,
  dict,  // dict: children are key, value, key, value ...
  unary,
  binary,
  logic,
  compare,
  concat,
  conditional,
  attribute,
  item,
  slice,  // slice: three children, absent ones null
  call,
  filter,
  test,  // first child: what it applies to; null in a filter block
};

struct Expr;
using ExprPtr = std::unique_ptr<Expr>;

struct Expr {
  ExprKind kind;
  Op op = Op::none;
  int line = 0;
  int height = 1;    // of this tree; bounded by the parser, because evaluation recurses
  Value value;       // literal; a string points into `text`
  std::string text;  // name, attribute, filter or test name, literal string
  SlotRef slot;      // name
  std::vector<ExprPtr> children;
  std::vector<Op> ops;                                 // compare: one per child after the first
  std::vector<std::pair<std::string, ExprPtr>> named;  // keyword arguments
  ExprPtr star, star_star;                             // *args, **kwargs
};

// Left side of an assignment: a name, an attribute of a namespace, or a tuple of those.
struct Target {
  int line = 0;
  std::string name, attribute;  // attribute is empty for a plain name
  SlotRef slot;
  bool is_tuple = false;
  std::vector<Target> items;
};

// How a slot gets its first value when a scope is entered.
struct SlotInit {
  enum Action : uint8_t { resolve, alias, clear } action;
  int slot;
  SlotRef source;    // alias
  std::string name;  // resolve: looked up in the context, then among the globals
};
using ScopeInit = std::vector<SlotInit>;

enum class StmtKind : uint8_t {
  text,
  print,
  if_,
  for_,
  set,
  set_block,
  macro,
  call_block,
  filter_block,
  with,
  generation,
  break_,
  continue_,
};

struct Stmt;
using StmtPtr = std::unique_ptr<Stmt>;
using Body = std::vector<StmtPtr>;

struct Branch {
  ExprPtr test;
  Body body;
  int line;
};

struct Stmt {
  StmtKind kind;
  int line = 0;
  std::string text;  // text; name of a macro
  std::vector<ExprPtr>
      exprs;  // print; for: iterable; set: value; call: the call; filter block: the filter; with: values
  std::vector<Target> targets;   // for, set, set_block: one; with: one per value
  std::vector<Branch> branches;  // if, elif
  Body body, else_body;
  ExprPtr filter;          // for: the `if` part; set_block: filter to apply
  bool recursive = false;  // for

  // macro, call_block
  std::vector<Target> params;
  std::vector<ExprPtr> defaults;  // of the last parameters

  // Filled by the scope pass.
  ScopeInit enter, test_enter, else_enter;
  std::vector<Target> test_targets;  // for: the target once more, with the slots of the `if` part
  SlotRef name_slot;                 // macro: where it is stored
  int loop_slot = -1;                // for: slot of `loop`, -1 when the body does not use it
  int caller_slot = -1, kwargs_slot = -1, varargs_slot = -1;
  int num_slots = 0;  // of the function that the statement starts (macro, call_block, recursive for)
};

struct TemplateAst {
  Body body;
  ScopeInit enter;
  int num_slots = 0;
};

}  // namespace ekv::jinja
