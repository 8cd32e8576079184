#include "text/jinja/lexer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>

#include "text/jinja/unicode.h"

namespace ekv::jinja {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_name_char(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || is_digit(c);
}

int digit_value(char c) {
  if (is_digit(c)) return c - '0';
  const char low = char(c | 0x20);
  return low >= 'a' && low <= 'z' ? low - 'a' + 10 : 99;
}

// \r\n and \r count as \n everywhere; one line end at the end of the source is dropped.
std::string normalise_newlines(std::string_view source) {
  std::string out;
  out.reserve(source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] == '\r') {
      if (i + 1 < source.size() && source[i + 1] == '\n') continue;
      out += '\n';
    } else {
      out += source[i];
    }
  }
  if (!out.empty() && out.back() == '\n') out.pop_back();
  return out;
}

size_t skip_space(std::string_view s, size_t at) {
  while (at < s.size()) {
    size_t next = at;
    if (!is_space(next_code_point(s, next))) break;
    at = next;
  }
  return at;
}

class Lexer {
 public:
  explicit Lexer(std::string source) : source_(std::move(source)) {}

  std::vector<Token> run() {
    while (at_ < source_.size()) root();
    add(TokenKind::end, "");
    return std::move(tokens_);
  }

 private:
  [[noreturn]] void error(std::string what) const {
    throw Failure{std::move(what), Error::invalid_argument, line_};
  }

  bool at(std::string_view s) const { return std::string_view(source_).substr(at_, s.size()) == s; }

  void add(TokenKind kind, std::string text) { tokens_.push_back({kind, line_, std::move(text)}); }

  void advance_to(size_t to) {
    line_ += int(std::count(source_.begin() + at_, source_.begin() + to, '\n'));
    line_starting_ = to > at_ && source_[to - 1] == '\n';
    at_ = to;
  }

  // Text up to the next tag, then the tag.
  void root() {
    size_t tag = at_;
    while ((tag = source_.find('{', tag)) != std::string::npos) {
      const char next = tag + 1 < source_.size() ? source_[tag + 1] : ' ';
      if (next == '{' || next == '%' || next == '#') break;
      ++tag;
    }
    if (tag == std::string::npos) {
      add(TokenKind::data, source_.substr(at_));
      advance_to(source_.size());
      return;
    }
    const char type = source_[tag + 1];
    const char sign = tag + 2 < source_.size() ? source_[tag + 2] : ' ';
    text_before(tag, sign, type != '{');
    if (type == '%' && raw(tag)) return;
    advance_to(tag + 2 + (sign == '-' || sign == '+'));
    if (type == '#') return comment();
    add(type == '%' ? TokenKind::block_begin : TokenKind::variable_begin, "");
    expression(type == '%' ? "%}" : "}}");
  }

  // Emits the text in front of a tag; `sign` and lstrip_blocks decide how much of its white space goes.
  void text_before(size_t tag, char sign, bool may_lstrip) {
    std::string_view text = std::string_view(source_).substr(at_, tag - at_);
    if (sign == '-') {
      text = strip(text, nullptr, false, true);
    } else if (sign != '+' && may_lstrip) {
      const size_t newline = text.rfind('\n');
      const size_t start = newline == text.npos ? 0 : newline + 1;
      if ((start > 0 || line_starting_) && skip_space(text, start) == text.size()) text = text.substr(0, start);
    }
    if (!text.empty()) add(TokenKind::data, std::string(text));
    line_ += int(std::count(source_.begin() + at_, source_.begin() + tag, '\n'));
    at_ = tag;
  }

  void comment() {
    const size_t close = source_.find("#}", at_);
    if (at_ == source_.size()) return;  // Jinja2 accepts an opening tag as the last thing of a template
    if (close == std::string::npos) error("a comment is not closed: '#}' is missing");
    const char before = close > at_ ? source_[close - 1] : ' ';
    advance_past_close(close, before);
  }

  // After a closing tag at `close`: '-' takes all white space, nothing takes one line end, '+' takes none.
  void advance_past_close(size_t close, char sign) {
    size_t to = close + 2;
    if (sign == '-') to = skip_space(source_, to);
    if (sign != '-' && sign != '+' && to < source_.size() && source_[to] == '\n') ++to;
    advance_to(to);
  }

  // `{% raw %}`: everything up to `{% endraw %}` is text.
  bool raw(size_t tag) {
    size_t i = tag + 2;
    if (i < source_.size() && (source_[i] == '-' || source_[i] == '+')) ++i;
    i = skip_space(source_, i);
    if (source_.compare(i, 3, "raw") != 0) return false;
    i = skip_space(source_, i + 3);
    const bool minus = i < source_.size() && source_[i] == '-';
    if (source_.compare(i + minus, 2, "%}") != 0) return false;
    i += minus + 2;
    advance_to(minus ? skip_space(source_, i) : i);
    for (size_t open = at_; (open = source_.find("{%", open)) != std::string::npos; open += 2)
      if (end_raw(open)) return true;
    if (at_ == source_.size()) return true;
    error("a raw block is not closed: '{% endraw %}' is missing");
  }

  bool end_raw(size_t open) {
    size_t i = open + 2;
    const char sign = i < source_.size() ? source_[i] : ' ';
    if (sign == '-' || sign == '+') ++i;
    i = skip_space(source_, i);
    if (source_.compare(i, 6, "endraw") != 0) return false;
    i = skip_space(source_, i + 6);
    const char close_sign = i < source_.size() ? source_[i] : ' ';
    if (close_sign == '-' || close_sign == '+') ++i;
    if (source_.compare(i, 2, "%}") != 0) return false;
    text_before(open, sign, true);
    advance_past_close(i, close_sign);
    return true;
  }

  // Tokens of a tag up to `close`, which counts only outside brackets.
  void expression(std::string_view close) {
    std::string brackets;
    while (true) {
      if (brackets.empty() && closes(close)) return;
      if (at_ >= source_.size()) return;  // the parser reports the missing end with what it was waiting for
      const size_t after_space = skip_space(source_, at_);
      if (after_space != at_) {
        advance_to(after_space);
      } else if (is_digit(source_[at_])) {
        number();
      } else if (is_name_char(source_[at_])) {
        name();
      } else if (source_[at_] == '\'' || source_[at_] == '"') {
        string();
      } else {
        operation(brackets);
      }
    }
  }

  bool closes(std::string_view close) {
    const bool block = close == "%}";
    const char sign = at_ < source_.size() ? source_[at_] : ' ';
    const bool has_sign = sign == '-' || (block && sign == '+');
    if (source_.compare(at_ + has_sign, 2, close) != 0) return false;
    add(block ? TokenKind::block_end : TokenKind::variable_end, "");
    const char effective = has_sign ? sign : block ? ' ' : '+';  // trim_blocks is about blocks only
    advance_past_close(at_ + has_sign, effective);
    return true;
  }

  void name() {
    size_t end = at_;
    while (end < source_.size() && is_name_char(source_[end])) ++end;
    if (end < source_.size() && (source_[end] & 0x80)) error("only ASCII names are supported");
    add(TokenKind::name, source_.substr(at_, end - at_));
    advance_to(end);
  }

  size_t skip_digits(size_t i, int base) const {
    while (i < source_.size()) {
      const size_t next = source_[i] == '_' ? i + 1 : i;
      if (next >= source_.size() || digit_value(source_[next]) >= base) break;
      i = next + 1;
    }
    return i;
  }

  // End of a float literal that starts at at_, or at_ when there is none.
  size_t real_end() const {
    const auto digit_at = [&](size_t i) { return i < source_.size() && is_digit(source_[i]); };
    if (at_ > 0 && source_[at_ - 1] == '.') return at_;
    size_t i = skip_digits(at_, 10), end = at_;
    if (i < source_.size() && source_[i] == '.' && digit_at(i + 1)) end = i = skip_digits(i + 1, 10);
    if (i < source_.size() && (source_[i] | 0x20) == 'e') {
      const size_t sign = i + 1 < source_.size() && (source_[i + 1] == '+' || source_[i + 1] == '-');
      if (digit_at(i + 1 + sign)) end = skip_digits(i + 1 + sign, 10);
    }
    return end;
  }

  std::string without_underscores(size_t end) const {
    std::string digits = source_.substr(at_, end - at_);
    std::erase(digits, '_');
    return digits;
  }

  void number() {
    if (const size_t end = real_end(); end != at_) {
      add(TokenKind::real, "");
      tokens_.back().real = std::strtod(without_underscores(end).c_str(), nullptr);
      return advance_to(end);
    }
    int base = 10;
    size_t start = at_, end = at_;
    if (source_[at_] == '0') {
      const char mark = at_ + 1 < source_.size() ? char(source_[at_ + 1] | 0x20) : ' ';
      const int marked = mark == 'b' ? 2 : mark == 'o' ? 8 : mark == 'x' ? 16 : 0;
      end = marked ? skip_digits(at_ + 2, marked) : at_;
      if (marked && end > at_ + 2)
        base = marked, start = at_ + 2;
      else
        end = skip_digits(at_ + 1, 1);  // 0, 00, 0_0: any other digit starts a new token
    } else {
      end = skip_digits(at_, 10);
    }
    Int value = 0;
    for (size_t i = start; i < end; ++i) {
      if (source_[i] == '_') continue;
      value = value * base + digit_value(source_[i]);
      if (value > kMaxInt) error("an integer does not fit in 64 bits");
    }
    add(TokenKind::integer, source_.substr(at_, end - at_));
    tokens_.back().integer = value;
    advance_to(end);
  }

  void string() {
    const char quote = source_[at_];
    std::string out;
    size_t i = at_ + 1;
    while (i < source_.size() && source_[i] != quote) {
      if (source_[i] == '\\')
        escape(out, i);
      else
        out += source_[i++];
    }
    if (i >= source_.size()) error("a string is not closed");
    add(TokenKind::string, std::move(out));
    advance_to(i + 1);
  }

  // Python's escapes; an unknown one keeps its backslash.
  void escape(std::string& out, size_t& i) {
    if (i + 1 >= source_.size()) error("a string is not closed");
    const char c = source_[i + 1];
    static constexpr std::string_view kNames = "\\'\"abfnrtv", kValues = "\\'\"\a\b\f\n\r\t\v";
    if (const size_t k = kNames.find(c); k != kNames.npos) {
      out += kValues[k];
      i += 2;
    } else if (c == '\n') {
      i += 2;
    } else if (c == 'x' || c == 'u' || c == 'U') {
      i = code_point(out, i + 2, c == 'x' ? 2 : c == 'u' ? 4 : 8, 16);
    } else if (c >= '0' && c <= '7') {
      size_t n = 1;
      while (n < 3 && i + 1 + n < source_.size() && digit_value(source_[i + 1 + n]) < 8) ++n;
      i = code_point(out, i + 1, n, 8);
    } else if (c == 'N') {
      error("the escape \\N{...} is not supported");
    } else {
      out += '\\';
      ++i;
    }
  }

  size_t code_point(std::string& out, size_t i, size_t digits, int base) {
    uint64_t value = 0;
    for (size_t k = 0; k < digits; ++k, ++i) {
      if (i >= source_.size() || digit_value(source_[i]) >= base) error("a string escape is cut short");
      value = value * base + digit_value(source_[i]);
    }
    if (value > 0x10FFFF || (value >= 0xD800 && value < 0xE000))
      error("a string escape is not a Unicode character");
    append_utf8(out, char32_t(value));
    return i;
  }

  void operation(std::string& brackets) {
    static constexpr std::string_view kDouble[] = {"**", "//", "==", "!=", ">=", "<="};
    static constexpr std::string_view kSingle = "+-/*%~[](){}><=.:|,;";
    std::string text;
    for (const auto op : kDouble)
      if (at(op)) text = op;
    if (text.empty() && kSingle.find(source_[at_]) != kSingle.npos) text = source_.substr(at_, 1);
    if (text.empty()) error(fmt::format("unexpected character '{}'", one_character()));
    const char c = text[0];
    if (c == '(' || c == '[' || c == '{') brackets += c == '(' ? ')' : c == '[' ? ']' : '}';
    if (c == ')' || c == ']' || c == '}') {
      if (brackets.empty() || brackets.back() != c) error(fmt::format("unexpected '{}'", c));
      brackets.pop_back();
    }
    add(TokenKind::op, text);
    advance_to(at_ + text.size());
  }

  std::string one_character() const {
    size_t end = at_;
    next_code_point(source_, end);
    return source_.substr(at_, end - at_);
  }

  std::string source_;
  size_t at_ = 0;
  int line_ = 1;
  bool line_starting_ = true;
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> tokenize(std::string_view source) { return Lexer(normalise_newlines(source)).run(); }

}  // namespace ekv::jinja
