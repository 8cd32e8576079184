#pragma once
// jinja/parser.h -- tokens to syntax tree. Grammar and precedence are those of Jinja2 3.1.

#include <initializer_list>
#include <string_view>
#include <vector>

#include "text/jinja/ast.h"
#include "text/jinja/lexer.h"

namespace ekv::jinja {

// Throws Failure with the line. `source` is valid UTF-8.
TemplateAst parse(std::string_view source);

// Expressions; the statement parser derives from it.
class ExpressionParser {
 protected:
  explicit ExpressionParser(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}

  const Token& current() const { return tokens_[at_]; }
  const Token& look() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  const Token& next();
  bool skip_name(std::string_view name);
  bool skip_op(std::string_view op);
  void expect_op(std::string_view op);
  const Token& expect_name();
  void expect_name(std::string_view name);
  [[noreturn]] void error(std::string what, int line = 0) const;
  [[noreturn]] void error_unexpected(std::string_view wanted) const;

  ExprPtr expression(bool with_conditional = true);
  // One expression, or a tuple when there are commas. `end_name`: a name that ends it, such as "recursive".
  ExprPtr tuple(bool with_conditional, bool in_parentheses, std::string_view end_name = {});
  ExprPtr filters(ExprPtr base, bool first_is_inline);
  bool at_tuple_end(std::string_view end_name) const;
  ExprPtr make(ExprKind kind, int line) const;

  // Bounds recursion of the parser, and with it of everything that walks the tree.
  class Nesting {
   public:
    explicit Nesting(ExpressionParser& p);
    ~Nesting() { --parser_.depth_; }

   private:
    ExpressionParser& parser_;
  };

 private:
  ExprPtr disjunction();
  ExprPtr conjunction();
  ExprPtr negation();
  ExprPtr comparison();
  ExprPtr sum();
  ExprPtr concatenation();
  ExprPtr product();
  ExprPtr power();
  ExprPtr unary(bool with_filters);
  ExprPtr primary();
  ExprPtr name_or_constant();
  ExprPtr list();
  ExprPtr dict();
  ExprPtr postfix(ExprPtr base);
  ExprPtr postfix_and_filters(ExprPtr base);
  ExprPtr subscript(ExprPtr base);
  ExprPtr subscribed();
  ExprPtr call(ExprPtr base);
  ExprPtr test(ExprPtr base);
  void arguments(Expr& into);
  void argument(Expr& into);
  ExprPtr join(ExprKind kind, Op op, int line, ExprPtr left, ExprPtr right) const;
  ExprPtr finish(ExprPtr e) const;  // computes the height and bounds it

  std::vector<Token> tokens_;
  size_t at_ = 0;
  int depth_ = 0;
};

}  // namespace ekv::jinja
