#pragma once
// jinja/scope.h -- decides before rendering where each variable lives.
//
// Jinja2 compiles templates to Python functions and resolves names by looking at the whole scope first: a name
// that a scope assigns anywhere is a local of that scope, and inner scopes see that local even before it is
// assigned. A look-up along a chain of scopes at run time gives other answers, so the analysis is repeated
// here.

#include "text/jinja/ast.h"

namespace ekv::jinja {

// Fills the slots of every name and the entry lists of every scope. Throws Failure with the line for
// assignments to `loop` inside loops and for filters and tests that do not exist (inside `if`: only when they
// are reached).
void resolve_scopes(TemplateAst& ast);

}  // namespace ekv::jinja
