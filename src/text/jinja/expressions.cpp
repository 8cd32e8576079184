#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "text/jinja/parser.h"

namespace ekv::jinja {
namespace {

constexpr int kMaxNesting = 150;  // brackets and statements
constexpr int kMaxHeight = 300;   // of an expression tree; chains such as a.b.c count too

std::string describe(const Token& t) {
  switch (t.kind) {
    case TokenKind::end:
      return "the end of the template";
    case TokenKind::block_end:
      return "'%}'";
    case TokenKind::variable_end:
      return "'}}'";
    case TokenKind::block_begin:
      return "'{%'";
    case TokenKind::variable_begin:
      return "'{{'";
    case TokenKind::data:
      return "text";
    case TokenKind::string:
      return "a string";
    case TokenKind::real:
      return "a number";
    default:
      return "'" + t.text + "'";
  }
}

std::optional<Op> comparison_op(const Token& t) {
  static constexpr std::pair<std::string_view, Op> kOps[] = {{"==", Op::eq}, {"!=", Op::ne}, {"<", Op::lt},
                                                             {"<=", Op::le}, {">", Op::gt},  {">=", Op::ge}};
  for (const auto& [text, op] : kOps)
    if (t.is_op(text)) return op;
  return std::nullopt;
}

}  // namespace

ExpressionParser::Nesting::Nesting(ExpressionParser& p) : parser_(p) {
  if (++p.depth_ > kMaxNesting) {
    --p.depth_;
    p.error("the template is nested too deeply");
  }
}

const Token& ExpressionParser::next() {
  const Token& t = tokens_[at_];
  if (at_ + 1 < tokens_.size()) ++at_;
  return t;
}

bool ExpressionParser::skip_name(std::string_view name) {
  if (!current().is_name(name)) return false;
  next();
  return true;
}

bool ExpressionParser::skip_op(std::string_view op) {
  if (!current().is_op(op)) return false;
  next();
  return true;
}

void ExpressionParser::expect_op(std::string_view op) {
  if (!skip_op(op)) error_unexpected(fmt::format("'{}'", op));
}

const Token& ExpressionParser::expect_name() {
  if (current().kind != TokenKind::name) error_unexpected("a name");
  return next();
}

void ExpressionParser::expect_name(std::string_view name) {
  if (!skip_name(name)) error_unexpected(fmt::format("'{}'", name));
}

void ExpressionParser::error(std::string what, int line) const {
  throw Failure{std::move(what), Error::invalid_argument, line ? line : current().line};
}

void ExpressionParser::error_unexpected(std::string_view wanted) const {
  error(fmt::format("expected {}, found {}", wanted, describe(current())));
}

ExprPtr ExpressionParser::make(ExprKind kind, int line) const {
  auto e = std::make_unique<Expr>();
  e->kind = kind;
  e->line = line;
  return e;
}

ExprPtr ExpressionParser::finish(ExprPtr e) const {
  const auto raise = [&](const ExprPtr& child) {
    if (child) e->height = std::max(e->height, child->height + 1);
  };
  for (const ExprPtr& child : e->children) raise(child);
  for (const auto& [name, child] : e->named) raise(child);
  raise(e->star);
  raise(e->star_star);
  if (e->height > kMaxHeight) error("an expression is nested too deeply", e->line);
  return e;
}

ExprPtr ExpressionParser::join(ExprKind kind, Op op, int line, ExprPtr left, ExprPtr right) const {
  ExprPtr e = make(kind, line);
  e->op = op;
  e->children.push_back(std::move(left));
  if (right) e->children.push_back(std::move(right));
  return finish(std::move(e));
}

ExprPtr ExpressionParser::expression(bool with_conditional) {
  const Nesting nesting(*this);
  if (!with_conditional) return disjunction();
  const int line = current().line;
  ExprPtr e = disjunction();
  while (skip_name("if")) {
    ExprPtr conditional = make(ExprKind::conditional, line);
    ExprPtr condition = disjunction();
    ExprPtr otherwise = skip_name("else") ? expression() : nullptr;
    conditional->children.push_back(std::move(condition));
    conditional->children.push_back(std::move(e));
    conditional->children.push_back(std::move(otherwise));
    e = finish(std::move(conditional));
  }
  return e;
}

ExprPtr ExpressionParser::disjunction() {
  ExprPtr left = conjunction();
  for (int line = current().line; skip_name("or"); line = current().line)
    left = join(ExprKind::logic, Op::or_, line, std::move(left), conjunction());
  return left;
}

ExprPtr ExpressionParser::conjunction() {
  ExprPtr left = negation();
  for (int line = current().line; skip_name("and"); line = current().line)
    left = join(ExprKind::logic, Op::and_, line, std::move(left), negation());
  return left;
}

ExprPtr ExpressionParser::negation() {
  const int line = current().line;
  if (!skip_name("not")) return comparison();
  const Nesting nesting(*this);
  return join(ExprKind::unary, Op::not_, line, negation(), nullptr);
}

ExprPtr ExpressionParser::comparison() {
  const int line = current().line;
  ExprPtr first = sum();
  ExprPtr e = make(ExprKind::compare, line);
  while (true) {
    const auto op = comparison_op(current());
    if (op) {
      next();
      e->ops.push_back(*op);
    } else if (skip_name("in")) {
      e->ops.push_back(Op::in);
    } else if (current().is_name("not") && look().is_name("in")) {
      next();
      next();
      e->ops.push_back(Op::not_in);
    } else {
      break;
    }
    e->children.push_back(sum());
  }
  if (e->ops.empty()) return first;
  e->children.insert(e->children.begin(), std::move(first));
  return finish(std::move(e));
}

ExprPtr ExpressionParser::sum() {
  ExprPtr left = concatenation();
  while (current().is_op("+") || current().is_op("-")) {
    const Token& t = next();
    left = join(ExprKind::binary, t.text == "+" ? Op::add : Op::sub, t.line, std::move(left), concatenation());
  }
  return left;
}

ExprPtr ExpressionParser::concatenation() {
  const int line = current().line;
  ExprPtr first = product();
  if (!current().is_op("~")) return first;
  ExprPtr e = make(ExprKind::concat, line);
  e->children.push_back(std::move(first));
  while (skip_op("~")) e->children.push_back(product());
  return finish(std::move(e));
}

ExprPtr ExpressionParser::product() {
  ExprPtr left = power();
  while (true) {
    const Op op = current().is_op("*")    ? Op::mul
                  : current().is_op("/")  ? Op::div
                  : current().is_op("//") ? Op::floordiv
                  : current().is_op("%")  ? Op::mod
                                          : Op::none;
    if (op == Op::none) return left;
    const int line = next().line;
    left = join(ExprKind::binary, op, line, std::move(left), power());
  }
}

ExprPtr ExpressionParser::power() {
  ExprPtr left = unary(true);
  for (int line = current().line; skip_op("**"); line = current().line)
    left = join(ExprKind::binary, Op::pow, line, std::move(left), unary(true));
  return left;
}

ExprPtr ExpressionParser::unary(bool with_filters) {
  const Nesting nesting(*this);
  const int line = current().line;
  ExprPtr e;
  if (current().is_op("-") || current().is_op("+")) {
    const Op op = next().text == "-" ? Op::neg : Op::pos;
    e = join(ExprKind::unary, op, line, unary(false), nullptr);
  } else {
    e = primary();
  }
  e = postfix(std::move(e));
  return with_filters ? postfix_and_filters(std::move(e)) : std::move(e);
}

ExprPtr ExpressionParser::name_or_constant() {
  const Token& t = next();
  const bool is_true = t.text == "true" || t.text == "True", is_false = t.text == "false" || t.text == "False";
  ExprPtr e = make(ExprKind::literal, t.line);
  if (is_true || is_false) {
    e->value = make_bool(is_true);
  } else if (t.text == "none" || t.text == "None") {
    e->value = make_none();
  } else {
    e->kind = ExprKind::name;
    e->text = t.text;
  }
  return e;
}

ExprPtr ExpressionParser::primary() {
  const int line = current().line;
  switch (current().kind) {
    case TokenKind::name:
      return name_or_constant();
    case TokenKind::string: {
      ExprPtr e = make(ExprKind::literal, line);
      while (current().kind == TokenKind::string) e->text += next().text;
      e->value = make_str(e->text);
      return e;
    }
    case TokenKind::integer: {
      ExprPtr e = make(ExprKind::literal, line);
      e->value = make_int(next().integer);
      return e;
    }
    case TokenKind::real: {
      ExprPtr e = make(ExprKind::literal, line);
      e->value = make_real(next().real);
      return e;
    }
    default:
      break;
  }
  if (skip_op("(")) {
    ExprPtr e = tuple(true, true);
    expect_op(")");
    return e;
  }
  if (current().is_op("[")) return list();
  if (current().is_op("{")) return dict();
  error("unexpected " + describe(current()));
}

bool ExpressionParser::at_tuple_end(std::string_view end_name) const {
  const TokenKind k = current().kind;
  return k == TokenKind::variable_end || k == TokenKind::block_end || current().is_op(")") ||
         (!end_name.empty() && current().is_name(end_name));
}

ExprPtr ExpressionParser::tuple(bool with_conditional, bool in_parentheses, std::string_view end_name) {
  ExprPtr e = make(ExprKind::tuple, current().line);
  bool has_comma = false;
  while (true) {
    if (!e->children.empty()) expect_op(",");
    if (at_tuple_end(end_name)) break;
    e->children.push_back(expression(with_conditional));
    if (!current().is_op(",")) break;
    has_comma = true;
  }
  if (has_comma) return finish(std::move(e));
  if (!e->children.empty()) return std::move(e->children[0]);
  if (!in_parentheses) error_unexpected("an expression");
  return e;
}

ExprPtr ExpressionParser::list() {
  ExprPtr e = make(ExprKind::list, next().line);
  while (!current().is_op("]")) {
    if (!e->children.empty()) expect_op(",");
    if (current().is_op("]")) break;
    e->children.push_back(expression());
  }
  expect_op("]");
  return finish(std::move(e));
}

ExprPtr ExpressionParser::dict() {
  ExprPtr e = make(ExprKind::dict, next().line);
  while (!current().is_op("}")) {
    if (!e->children.empty()) expect_op(",");
    if (current().is_op("}")) break;
    e->children.push_back(expression());
    expect_op(":");
    e->children.push_back(expression());
  }
  expect_op("}");
  return finish(std::move(e));
}

}  // namespace ekv::jinja
