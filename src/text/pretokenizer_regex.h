#pragma once
// pretokenizer_regex.h -- patterns of tokenizer.json, written for Oniguruma, matched by PCRE2.

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "elastickv/base.h"

namespace ekv {

struct Span {
  size_t begin, end;  // bytes
};

// What one thread needs for matching; one for a whole encode call, whatever the number of patterns.
class RegexScratch {
 public:
  RegexScratch();
  RegexScratch(const RegexScratch&) = delete;
  ~RegexScratch();

 private:
  friend class Regex;
  void* match_data_;     // pcre2_match_data
  void* match_context_;  // pcre2_match_context
};

// An immutable compiled pattern; matching from several threads is safe.
class Regex {
 public:
  // Errors: the pattern is malformed, or uses a construct whose meaning in the two engines differs and that is
  // not translated; the message names it.
  static Result<Regex> compile(std::string_view oniguruma_pattern);
  static Regex literal(std::string_view text);  // `text` must not be empty

  // Replaces `*out` by all matches from left to right, without overlap. `text` must be UTF-8. An Error when the
  // pattern backtracks beyond the limit on this text: a missing match would change the tokens silently.
  Status find_all(std::string_view text, RegexScratch* scratch, std::vector<Span>* out) const;

 private:
  explicit Regex(void* code);
  std::shared_ptr<void> code_;  // pcre2_code
};

// The same language in PCRE2's syntax (UTF and UCP). Exposed for the tests.
Result<std::string> translate_pattern(std::string_view oniguruma_pattern);

}  // namespace ekv
