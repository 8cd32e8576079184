#pragma once
// tokenizer_added.h -- finding added tokens (such as <|im_end|>) inside a text, before anything else is done.

#include <string>
#include <string_view>
#include <vector>

#include "elastickv/base.h"
#include "text/pretokenizer_regex.h"

namespace ekv {

struct AddedToken {
  TokenId id = 0;
  std::string content;
  bool single_word = false;  // not inside a longer word
  bool lstrip = false;       // takes the white space on its left along, and rstrip that on its right
  bool rstrip = false;
  bool normalized = false;  // looked for in the normalized text instead of the raw one
  bool special = false;
};

// A stretch of text that is an added token, or, with id kNoToken, one that is not.
struct Stretch {
  TokenId id;
  Span span;
};
constexpr TokenId kNoToken = -1;

// Leftmost, then longest match among a set of contents. O(text length x length of the longest content).
class AddedTokenFinder {
 public:
  // Of equal contents the first added one counts.
  void add(AddedToken token);
  // Calls cut the whole text into stretches in order; an empty text gives none. A token's white space may
  // overlap the next token's text, as in the reference; the text between tokens never overlaps.
  std::vector<Stretch> find(std::string_view text) const;

 private:
  struct Node {
    int token = -1;  // index into tokens_
    std::vector<std::pair<unsigned char, int>> children;
  };
  struct Match {
    int token;
    size_t length;
  };
  int child(int node, unsigned char byte) const;
  Match longest_at(std::string_view text) const;

  std::vector<AddedToken> tokens_;
  std::vector<Node> nodes_{1};
  bool starts_[256] = {};
};

}  // namespace ekv
