// What follows a primary expression: subscripts, calls, filters, tests.

#include "text/jinja/parser.h"

namespace ekv::jinja {

ExprPtr ExpressionParser::postfix(ExprPtr base) {
  while (true) {
    if (current().is_op(".") || current().is_op("["))
      base = subscript(std::move(base));
    else if (current().is_op("("))
      base = call(std::move(base));
    else
      return base;
  }
}

ExprPtr ExpressionParser::postfix_and_filters(ExprPtr base) {
  while (true) {
    if (current().is_op("|"))
      base = filters(std::move(base), false);
    else if (current().is_name("is"))
      base = test(std::move(base));
    else if (current().is_op("("))
      base = call(std::move(base));
    else
      return base;
  }
}

ExprPtr ExpressionParser::subscript(ExprPtr base) {
  const Token& t = next();
  ExprPtr e = make(ExprKind::item, t.line);
  e->children.push_back(std::move(base));
  if (t.text == ".") {
    const Token& attribute = next();
    if (attribute.kind == TokenKind::name) {
      e->kind = ExprKind::attribute;
      e->text = attribute.text;
      return finish(std::move(e));
    }
    if (attribute.kind != TokenKind::integer) error("expected a name or a number after '.'", attribute.line);
    ExprPtr index = make(ExprKind::literal, attribute.line);
    index->value = make_int(attribute.integer);
    e->children.push_back(std::move(index));
    return finish(std::move(e));
  }
  ExprPtr keys = make(ExprKind::tuple, t.line);
  while (!current().is_op("]")) {
    if (!keys->children.empty()) expect_op(",");
    keys->children.push_back(subscribed());
  }
  expect_op("]");
  const bool single = keys->children.size() == 1;
  if (!single)
    for (const ExprPtr& key : keys->children)
      if (key->kind == ExprKind::slice) error("a slice among several subscripts is not supported", t.line);
  e->children.push_back(single ? std::move(keys->children[0]) : finish(std::move(keys)));
  return finish(std::move(e));
}

// An index, or start:stop:step with any part left out.
ExprPtr ExpressionParser::subscribed() {
  ExprPtr e = make(ExprKind::slice, current().line);
  const auto at_end = [&] { return current().is_op("]") || current().is_op(","); };
  ExprPtr start = current().is_op(":") ? nullptr : expression();
  if (!skip_op(":")) return start;
  e->children.push_back(std::move(start));
  e->children.push_back(current().is_op(":") || at_end() ? nullptr : expression());
  e->children.push_back(!skip_op(":") || at_end() ? nullptr : expression());
  return finish(std::move(e));
}

ExprPtr ExpressionParser::call(ExprPtr base) {
  ExprPtr e = make(ExprKind::call, current().line);
  e->children.push_back(std::move(base));
  arguments(*e);
  return finish(std::move(e));
}

void ExpressionParser::arguments(Expr& into) {
  expect_op("(");
  for (bool first = true; !current().is_op(")"); first = false) {
    if (!first) {
      expect_op(",");
      if (current().is_op(")")) break;
    }
    argument(into);
  }
  expect_op(")");
}

void ExpressionParser::argument(Expr& into) {
  const bool closed = bool(into.star) || bool(into.star_star);
  if (skip_op("*")) {
    if (closed) error("an argument list has a second '*' or one after '**'");
    into.star = expression();
  } else if (skip_op("**")) {
    if (into.star_star) error("an argument list has a second '**'");
    into.star_star = expression();
  } else if (current().kind == TokenKind::name && look().is_op("=")) {
    if (into.star_star) error("a keyword argument follows '**'");
    std::string name = next().text;
    next();
    for (const auto& [known, value] : into.named)
      if (known == name) error("the keyword argument '" + name + "' is given twice");
    into.named.emplace_back(std::move(name), expression());
  } else {
    if (closed || !into.named.empty()) error("a positional argument follows keyword arguments");
    into.children.push_back(expression());
  }
}

ExprPtr ExpressionParser::filters(ExprPtr base, bool first_is_inline) {
  bool is_inline = first_is_inline;
  while (is_inline || current().is_op("|")) {
    if (!is_inline) next();
    is_inline = false;
    const Token& t = expect_name();
    ExprPtr e = make(ExprKind::filter, t.line);
    e->text = t.text;
    while (skip_op(".")) e->text += "." + expect_name().text;
    e->children.push_back(std::move(base));
    if (current().is_op("(")) arguments(*e);
    base = finish(std::move(e));
  }
  return base;
}

ExprPtr ExpressionParser::test(ExprPtr base) {
  const int line = next().line;
  const bool negated = skip_name("not");
  ExprPtr e = make(ExprKind::test, line);
  e->text = expect_name().text;
  while (skip_op(".")) e->text += "." + expect_name().text;
  e->children.push_back(std::move(base));
  const Token& t = current();
  const bool starts_value = t.kind == TokenKind::name || t.kind == TokenKind::string ||
                            t.kind == TokenKind::integer || t.kind == TokenKind::real || t.is_op("[") ||
                            t.is_op("{");
  if (t.is_op("(")) {
    arguments(*e);
  } else if (starts_value && !t.is_name("else") && !t.is_name("or") && !t.is_name("and")) {
    if (t.is_name("is")) error("tests cannot be chained with 'is'");
    e->children.push_back(postfix(primary()));
  }
  e = finish(std::move(e));
  return negated ? join(ExprKind::unary, Op::not_, line, std::move(e), nullptr) : std::move(e);
}

}  // namespace ekv::jinja
