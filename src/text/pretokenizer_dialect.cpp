// From Oniguruma's Ruby syntax to PCRE2. Only constructs that mean the same in both, or that are rewritten
// here, pass; the rest is refused, because a pattern that compiles with another meaning gives wrong tokens
// silently. Sources: Oniguruma's doc/RE, pcre2pattern(3).

#include <fmt/format.h>

#include <cctype>
#include <cstring>

#include "text/pretokenizer_regex.h"

namespace ekv {
namespace {

// Oniguruma's Unicode \s. PCRE2's own would also take U+180E, which is no space since Unicode 6.3. The property
// stands last, so that a following '-' in a class cannot become a range.
constexpr std::string_view kSpace = "\\t-\\r\\x{85}\\p{Z}";

class Translator {
 public:
  explicit Translator(std::string_view pattern) : in_(pattern) {}

  Result<std::string> run() {
    while (at_ < in_.size() && problem_.empty()) {
      if (in_class_)
        class_item();
      else
        item();
    }
    if (problem_.empty() && in_class_) problem_ = "has an unclosed '['";
    if (!problem_.empty())
      return Error{Error::unsupported, fmt::format("the pattern '{}' {}", in_, problem_), {}};
    return out_;
  }

 private:
  bool starts(std::string_view what) const { return in_.substr(at_).starts_with(what); }
  void copy(size_t n) {
    out_ += in_.substr(at_, n);
    at_ += n;
  }
  void refuse(std::string_view construct) {
    problem_ = fmt::format("uses {}, which is not supported", construct);
  }

  void item() {
    const char c = in_[at_];
    if (c == '\\') return escape();
    if (c == '[') return open_class();
    if (c == '(') return open_group();
    if (c == '^' || c == '$') return refuse("a line anchor");
    if (c == '{') return repetition();
    copy(1);
  }

  void open_group() {
    for (const std::string_view known : {"(?:", "(?i:", "(?=", "(?!", "(?<=", "(?<!", "(?>"})
      if (starts(known)) return copy(known.size());
    if (starts("(?") || starts("(*")) return refuse(fmt::format("the group '{}'", in_.substr(at_, 4)));
    copy(1);
  }

  // {n}, {n,}, {n,m}. Ruby reads {,m} as {0,m} and the suffixes ? and + of a brace otherwise than PCRE2.
  void repetition() {
    const size_t end = in_.find('}', at_);
    const std::string_view body = end == in_.npos ? "" : in_.substr(at_ + 1, end - at_ - 1);
    if (body.empty() || body[0] == ',' || body.find_first_not_of("0123456789,") != body.npos)
      return refuse("a brace that is not a repetition {n}, {n,} or {n,m}");
    copy(body.size() + 2);
    if (starts("?") || starts("+")) refuse("a lazy or possessive {n,m}");
  }

  void open_class() {
    in_class_ = true;
    copy(starts("[^") ? 2 : 1);
    if (starts("]")) refuse("an empty class");
  }

  void class_item() {
    const char c = in_[at_];
    if (c == ']') {
      in_class_ = false;
      return copy(1);
    }
    if (c == '[') return refuse("a class inside a class");
    if (starts("&&")) return refuse("an intersection of classes");
    if (c == '\\') return escape();
    copy(1);
  }

  void escape() {
    if (at_ + 1 >= in_.size()) return refuse("a trailing backslash");
    const char c = in_[at_ + 1];
    if (c == 's' || c == 'S') return space(c);
    if (c == 'p' || c == 'P') return property();
    if (c == 'u') return code_point();
    // Oniguruma reads \xHH from 80 on as a raw byte, PCRE2 as a character.
    if (c == 'x' && !starts("\\x{") && (at_ + 2 >= in_.size() || in_[at_ + 2] > '7'))
      return refuse("a raw byte '\\xHH'");
    if (c == 'v') {  // Ruby: the vertical tab; PCRE2: every vertical space
      out_ += "\\x0B";
      at_ += 2;
      return;
    }
    const bool letter_or_digit = std::isalnum(static_cast<unsigned char>(c)) != 0;
    const bool same_in_both = std::strchr("dDrntfx", c) != nullptr;
    if (letter_or_digit && !same_in_both) return refuse(fmt::format("the escape '\\{}'", c));
    if (static_cast<unsigned char>(c) >= 0x80) return refuse("an escaped character outside ASCII");
    copy(2);
  }

  void space(char c) {
    if (in_class_ && c == 'S') return refuse("'\\S' inside a class");
    at_ += 2;
    if (in_class_)
      out_ += kSpace;
    else
      out_ += fmt::format("[{}{}]", c == 'S' ? "^" : "", kSpace);
  }

  // General categories have the same short names. A longer name is a script, of which PCRE2 would match the
  // extensions unless told otherwise; a name that is no script fails to compile there.
  void property() {
    const size_t end = in_.find('}', at_);
    if (at_ + 2 >= in_.size() || in_[at_ + 2] != '{' || end == in_.npos)
      return refuse("a property without braces");
    std::string_view name = in_.substr(at_ + 3, end - at_ - 3);
    const bool negated = name.starts_with("^");
    if (negated) name.remove_prefix(1);
    if (name.empty() || name.find_first_of("&=:") != name.npos)
      return refuse("a property that is not a plain name");
    out_ += fmt::format("\\{}{{{}{}{}}}", in_[at_ + 1], negated ? "^" : "", name.size() > 2 ? "sc:" : "", name);
    at_ = end + 1;
  }

  void code_point() {
    const std::string_view digits = in_.substr(at_ + 2, 4);
    if (digits.size() < 4 || digits.find_first_not_of("0123456789abcdefABCDEF") != digits.npos)
      return refuse("'\\u' without four digits");
    out_ += fmt::format("\\x{{{}}}", digits);
    at_ += 6;
  }

  std::string_view in_;
  size_t at_ = 0;
  bool in_class_ = false;
  std::string out_, problem_;
};

}  // namespace

Result<std::string> translate_pattern(std::string_view oniguruma_pattern) {
  return Translator(oniguruma_pattern).run();
}

}  // namespace ekv
