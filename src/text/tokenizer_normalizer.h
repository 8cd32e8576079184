#pragma once
// tokenizer_normalizer.h -- what happens to the characters of a text before it is split.

#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "text/pretokenizer_regex.h"
#include "text/tokenizer_json.h"

namespace ekv {

// Normalization forms of Unicode Standard Annex 15. Linear but for the sorting of combining marks, which is
// O(n log n) for any input.
struct UnicodeForm {
  bool compose, compatibility;
  std::string apply(std::string_view text) const;
};

// Lowercase of each character by itself; a final sigma is not treated apart.
struct Lowercase {
  std::string apply(std::string_view text) const;
};

struct Prepend {  // only to a text that is not empty
  std::string prefix;
};

struct Replace {
  Regex pattern;
  std::string content;
};

class Normalizer {
 public:
  // NFC, NFD, NFKC, NFKD, Lowercase, Prepend, Replace, Sequence of these; absent: nothing to do.
  static Normalizer from(const Field& field);
  bool empty() const { return steps_.empty(); }
  // Replaces `*text`, which must be UTF-8.
  Status apply(std::string* text, RegexScratch* scratch) const;

 private:
  using Step = std::variant<UnicodeForm, Lowercase, Prepend, Replace>;
  void add(const Field& field, int depth);
  std::vector<Step> steps_;
};

// {"String": "..."} or {"Regex": "..."}, as Split and Replace write it. Nullopt after a mistake.
std::optional<Regex> pattern_from(const Field& field);

}  // namespace ekv
