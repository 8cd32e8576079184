#pragma once
// pretokenizer.h -- cuts a normalized text into words; merges never cross the border of a word.

#include <deque>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "text/pretokenizer_regex.h"
#include "text/tokenizer_json.h"

namespace ekv {

enum class SplitBehavior { removed, isolated, merged_with_previous, merged_with_next, contiguous };

// A part of the text under way. `at_start`: it begins where the caller's text begins.
struct Piece {
  std::string_view text;
  bool at_start;
};

// Buffers of one encode call. Steps that change the text keep the new one in `texts`, whose strings never move.
struct SplitScratch {
  RegexScratch regex;
  std::vector<Span> matches;
  std::vector<Piece> next;
  std::deque<std::string> texts;
};

struct SplitStep {
  Regex pattern;
  SplitBehavior behavior;
  bool invert;  // the matches are the words, and what lies between them the delimiters
  Status apply(const Piece& piece, SplitScratch* scratch) const;
};

// The bytes themselves become the model's alphabet: Bpe does that, when byte_level() says so.
struct ByteLevelStep {
  bool add_prefix_space;
  std::optional<SplitStep> split;
  Status apply(const Piece& piece, SplitScratch* scratch) const;
};

struct MetaspaceStep {
  enum class Prefix { first, always, never };
  std::string replacement;  // one character
  Prefix prefix;
  Regex space;
  std::optional<SplitStep> split;
  Status apply(const Piece& piece, SplitScratch* scratch) const;
};

class PreTokenizer {
 public:
  // ByteLevel, Split, Digits, Metaspace, Sequence of these; absent: a text is one word.
  static PreTokenizer from(const Field& field);
  bool byte_level() const { return byte_level_; }
  // Cuts each piece of `*pieces`, step after step. No piece of the result is empty.
  Status split(std::vector<Piece>* pieces, SplitScratch* scratch) const;

 private:
  using Step = std::variant<SplitStep, ByteLevelStep, MetaspaceStep>;
  void add(const Field& field, int depth);
  std::vector<Step> steps_;
  bool byte_level_ = false;
};

}  // namespace ekv
