#pragma once
// detokenizer.h -- the decoder of tokenizer.json, as a table of bytes per token and two rules for the borders.

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/tokenizer_json.h"

namespace ekv {

// What tokens stand for. The bytes of a text are the bytes of its tokens in a row, but for `first` and `glue`.
class Decoder {
 public:
  // ByteLevel, Metaspace, or Replace, ByteFallback, Fuse and Strip in the order of SentencePiece models, alone
  // or in a Sequence; absent: tokens stand apart with a space between them, as in the reference.
  static Decoder from(const Field& field);

  // Bytes of a token whose vocabulary text is `text`; an `added` token's own characters are never lost.
  std::string bytes(std::string_view text, bool added) const;
  // The same for the first token of a text: Metaspace drops the mark of a word's start there.
  std::string first_bytes(std::string_view text, std::string_view bytes) const;
  std::string_view glue() const { return glue_; }  // between two tokens
  int strip_left() const { return strip_left_; }   // at most so many `strip_char` at the start of a text go
  char strip_char() const { return strip_char_; }

 private:
  void add(const Field& field, int depth);
  void add_strip(const Field& field);

  bool byte_level_ = false;
  bool byte_fallback_ = false;
  bool fused_ = false;
  bool drop_first_marks_ = false;
  std::string mark_;                                           // Metaspace: what stands for a space
  std::vector<std::pair<std::string, std::string>> replaces_;  // in each token, in this order
  std::string_view glue_ = " ";
  int strip_left_ = 0;
  char strip_char_ = ' ';
};

// Moves what is certain from the front of `*bytes` into the result: whole characters, and U+FFFD for each
// maximal broken part. What stays is the start of a character that more bytes may complete, at most three.
std::string take_text(std::string* bytes);

}  // namespace ekv
