#pragma once
// jinja/operators.h -- arithmetic and comparison with the rules of Python 3.

#include "text/jinja/ast.h"
#include "text/jinja/runtime.h"

namespace ekv::jinja {

Value binary(Runtime& rt, Op op, const Value& a, const Value& b);
Value negate(const Value& a);
Value plus(const Value& a);
bool compare_with(Runtime& rt, Op op, const Value& a, const Value& b);
bool contains(Runtime& rt, const Value& container, const Value& item);
Value concat(Runtime& rt, const Value& a, const Value& b);  // ~

// "%s" % values, as far as templates use it: %s %r %d %i %u %f %F %e %g %x %X %o %c %% with flags, width,
// precision.
Value format_percent(Runtime& rt, std::string_view pattern, const Value& values);

std::string escape_html(std::string_view text);

}  // namespace ekv::jinja
