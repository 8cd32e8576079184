// Statements: the tags between {% and %}.

#include <fmt/format.h>

#include <algorithm>

#include "text/jinja/parser.h"
#include "text/jinja/scope.h"

namespace ekv::jinja {
namespace {

using Names = std::initializer_list<std::string_view>;

class StatementParser : public ExpressionParser {
 public:
  explicit StatementParser(std::vector<Token> tokens) : ExpressionParser(std::move(tokens)) {}

  Body run() {
    Body body = statements_until({});
    if (current().kind != TokenKind::end) error_unexpected("the end of the template");
    return body;
  }

 private:
  static StmtPtr make_stmt(StmtKind kind, int line) {
    auto s = std::make_unique<Stmt>();
    s->kind = kind;
    s->line = line;
    return s;
  }

  bool at_end_tag(Names ends) const {
    return std::any_of(ends.begin(), ends.end(),
                       [&](std::string_view name) { return current().is_name(name); });
  }

  // Stops in front of the name of an end tag, or at the end of the template when `ends` is empty.
  Body statements_until(Names ends) {
    const Nesting nesting(*this);
    Body body;
    while (current().kind != TokenKind::end) {
      if (current().kind == TokenKind::data) {
        const Token& t = next();
        body.push_back(make_stmt(StmtKind::text, t.line));
        body.back()->text = t.text;
      } else if (current().kind == TokenKind::variable_begin) {
        body.push_back(make_stmt(StmtKind::print, next().line));
        body.back()->exprs.push_back(tuple(true, false));
        expect_end(TokenKind::variable_end, "'}}'");
      } else {
        expect_end(TokenKind::block_begin, "'{%'");
        if (at_end_tag(ends)) return body;
        body.push_back(statement());
        expect_end(TokenKind::block_end, "'%}'");
      }
    }
    if (ends.size()) error(fmt::format("the template ends where '{}' is missing", *(ends.end() - 1)));
    return body;
  }

  void expect_end(TokenKind kind, std::string_view what) {
    if (current().kind != kind) error_unexpected(what);
    next();
  }

  // The rest of an opening tag and everything up to one of the end tags, whose name is current afterwards.
  Body block(Names ends) {
    skip_op(":");
    expect_end(TokenKind::block_end, "'%}'");
    return statements_until(ends);
  }

  Body block_and_end(std::string_view end) {
    Body body = block({end});
    next();
    return body;
  }

  StmtPtr statement() {
    if (current().kind != TokenKind::name) error_unexpected("the name of a tag");
    const std::string tag = current().text;
    const int line = next().line;
    if (tag == "if") return if_statement(line);
    if (tag == "for") return for_statement(line);
    if (tag == "set") return set_statement(line);
    if (tag == "macro") return macro_statement(line);
    if (tag == "call") return call_statement(line);
    if (tag == "filter") return filter_statement(line);
    if (tag == "with") return with_statement(line);
    if (tag == "print") return print_statement(line);
    if (tag == "break") return loop_exit(StmtKind::break_, line);
    if (tag == "continue") return loop_exit(StmtKind::continue_, line);
    if (tag == "generation") return generation_statement(line);
    static constexpr std::string_view kKnown[] = {"block",  "extends", "include",
                                                  "import", "from",    "autoescape"};
    if (std::find(std::begin(kKnown), std::end(kKnown), tag) != std::end(kKnown))
      throw Failure{fmt::format("the tag '{}' is not supported in chat templates", tag), Error::unsupported,
                    line};
    error(fmt::format("unknown tag '{}'", tag), line);
  }

  StmtPtr if_statement(int line) {
    StmtPtr s = make_stmt(StmtKind::if_, line);
    for (int at = line;; at = current().line) {
      ExprPtr test = tuple(false, false);
      Body body = block({"elif", "else", "endif"});
      s->branches.push_back({std::move(test), std::move(body), at});
      if (!skip_name("elif")) break;
    }
    if (skip_name("else"))
      s->else_body = block_and_end("endif");
    else
      next();
    return s;
  }

  StmtPtr for_statement(int line) {
    StmtPtr s = make_stmt(StmtKind::for_, line);
    s->targets.push_back(target(false, "in"));
    expect_name("in");
    s->exprs.push_back(tuple(false, false, "recursive"));
    if (skip_name("if")) s->filter = expression();
    s->recursive = skip_name("recursive");
    const int loops_outside = std::exchange(loops_, 1);
    s->body = block({"else", "endfor"});
    loops_ = s->recursive ? 0 : loops_outside;
    if (skip_name("else"))
      s->else_body = block_and_end("endfor");
    else
      next();
    loops_ = loops_outside;
    return s;
  }

  StmtPtr set_statement(int line) {
    StmtPtr s = make_stmt(StmtKind::set, line);
    s->targets.push_back(target(true, {}));
    if (skip_op("=")) {
      s->exprs.push_back(tuple(true, false));
      return s;
    }
    s->kind = StmtKind::set_block;
    if (current().is_op("|")) s->filter = filters(nullptr, false);
    s->body = block_and_end("endset");
    return s;
  }

  // Macros and call blocks become functions: loops around them cannot be left from inside.
  Body function_body(std::string_view end) {
    const int loops_outside = std::exchange(loops_, 0);
    Body body = block_and_end(end);
    loops_ = loops_outside;
    return body;
  }

  void signature(Stmt& s) {
    expect_op("(");
    while (!current().is_op(")")) {
      if (!s.params.empty()) expect_op(",");
      s.params.push_back(name_target());
      if (skip_op("="))
        s.defaults.push_back(expression());
      else if (!s.defaults.empty())
        error("a parameter without a default follows one with a default");
      for (size_t i = 0; i + 1 < s.params.size(); ++i)
        if (s.params[i].name == s.params.back().name) error("a parameter is named twice");
    }
    expect_op(")");
  }

  StmtPtr macro_statement(int line) {
    StmtPtr s = make_stmt(StmtKind::macro, line);
    const Target name = name_target();
    s->text = name.name;
    signature(*s);
    s->body = function_body("endmacro");
    return s;
  }

  StmtPtr call_statement(int line) {
    StmtPtr s = make_stmt(StmtKind::call_block, line);
    if (current().is_op("(")) signature(*s);
    s->exprs.push_back(expression());
    if (s->exprs[0]->kind != ExprKind::call) error("'call' needs a call of a macro", line);
    s->body = function_body("endcall");
    return s;
  }

  StmtPtr generation_statement(int line) {
    StmtPtr s = make_stmt(StmtKind::generation, line);
    s->body = function_body("endgeneration");
    return s;
  }

  StmtPtr filter_statement(int line) {
    StmtPtr s = make_stmt(StmtKind::filter_block, line);
    s->exprs.push_back(filters(nullptr, true));
    s->body = block_and_end("endfilter");
    return s;
  }

  StmtPtr with_statement(int line) {
    StmtPtr s = make_stmt(StmtKind::with, line);
    while (current().kind != TokenKind::block_end) {
      if (!s->targets.empty()) expect_op(",");
      s->targets.push_back(target(false, {}));
      expect_op("=");
      s->exprs.push_back(expression());
    }
    s->body = block_and_end("endwith");
    return s;
  }

  StmtPtr print_statement(int line) {
    StmtPtr s = make_stmt(StmtKind::print, line);
    while (current().kind != TokenKind::block_end) {
      if (!s->exprs.empty()) expect_op(",");
      s->exprs.push_back(expression());
    }
    return s;
  }

  StmtPtr loop_exit(StmtKind kind, int line) {
    if (loops_ == 0) error("'break' and 'continue' belong inside a loop", line);
    return make_stmt(kind, line);
  }

  Target name_target() {
    const Token& t = expect_name();
    static constexpr std::string_view kConstants[] = {"true", "false", "none", "True", "False", "None"};
    if (std::find(std::begin(kConstants), std::end(kConstants), t.text) != std::end(kConstants))
      error(fmt::format("'{}' cannot be assigned to", t.text), t.line);
    Target target;
    target.line = t.line;
    target.name = t.text;
    return target;
  }

  Target primary_target(bool with_namespace) {
    const Nesting nesting(*this);
    if (skip_op("(")) {
      Target inner = target(with_namespace, {}, true);
      expect_op(")");
      return inner;
    }
    Target t = name_target();
    if (with_namespace && skip_op(".")) t.attribute = expect_name().text;
    return t;
  }

  // a, b, c = ...; a trailing comma makes a tuple of one.
  Target target(bool with_namespace, std::string_view end_name, bool in_parentheses = false) {
    Target tuple;
    tuple.line = current().line;
    while (true) {
      if (!tuple.items.empty()) expect_op(",");
      if (at_tuple_end(end_name)) break;
      tuple.items.push_back(primary_target(with_namespace));
      if (!current().is_op(",")) break;
      tuple.is_tuple = true;
    }
    if (tuple.items.empty() && !in_parentheses) error_unexpected("a name to assign to");
    if (!tuple.is_tuple && tuple.items.size() == 1) return std::move(tuple.items[0]);
    tuple.is_tuple = true;
    return tuple;
  }

  int loops_ = 0;  // 1 inside a loop of the same function
};

}  // namespace

TemplateAst parse(std::string_view source) {
  TemplateAst ast;
  ast.body = StatementParser(tokenize(source)).run();
  resolve_scopes(ast);
  return ast;
}

}  // namespace ekv::jinja
