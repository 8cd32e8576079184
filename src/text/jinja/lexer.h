#pragma once
// jinja/lexer.h -- template source to tokens, with the white-space rules of trim_blocks and lstrip_blocks.

#include <string>
#include <string_view>
#include <vector>

#include "text/jinja/value.h"

namespace ekv::jinja {

enum class TokenKind : uint8_t {
  data,
  block_begin,
  block_end,
  variable_begin,
  variable_end,
  name,
  string,
  integer,
  real,
  op,
  end,
};

struct Token {
  TokenKind kind;
  int line;
  std::string text;  // data, name, string; the operator's characters
  Int integer = 0;
  double real = 0;

  bool is_name(std::string_view s) const { return kind == TokenKind::name && text == s; }
  bool is_op(std::string_view s) const { return kind == TokenKind::op && text == s; }
};

// Throws Failure with the line. `source` is valid UTF-8. The last token has kind `end`.
std::vector<Token> tokenize(std::string_view source);

}  // namespace ekv::jinja
