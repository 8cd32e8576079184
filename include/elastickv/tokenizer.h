#pragma once
// tokenizer.h -- text to tokens and back, exactly as the model's tokenizer.json says.
//
// Source: the file format and the rules of the Hugging Face `tokenizers` package, which is the reference in the
// tests. Byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM2) and SentencePiece-style BPE with byte fallback (Llama
// 2, Mistral). A part of the file that is not supported is refused at load with its name; nothing is skipped.
//
// Decoding follows the decoder of tokenizer.json and nothing else: `clean_up_tokenization_spaces` of
// tokenizer_config.json is not honoured, in no mode, because it rewrites text that a stream has already sent.
// `truncation` and `padding` of tokenizer.json are not used: the server has its own limits.

#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "elastickv/base.h"

namespace ekv {

struct TokenizerData;

// Immutable once loaded and cheap to copy (copies share the tables). Every function may be called from any
// number of threads at once.
class Tokenizer {
 public:
  // Reads tokenizer.json, and tokenizer_config.json and chat_template.jinja where they exist.
  static Result<Tokenizer> load(const std::filesystem::path& model_folder);
  // The same from texts; `tokenizer_config_json` may be "{}".
  static Result<Tokenizer> from_text(std::string_view tokenizer_json, std::string_view tokenizer_config_json);

  // `add_special_tokens`: with what the post-processor adds, such as BOS; false for text that a chat template
  // has rendered. BOS is added even when the text begins with it, as the reference does: the result then has
  // two. Special tokens written inside the text become their ids. O(n log n) in the length of the text.
  // Errors: the text is not UTF-8, or a pattern of tokenizer.json needs too much backtracking on it.
  Result<std::vector<TokenId>> encode(std::string_view text, bool add_special_tokens) const;

  // Always valid UTF-8: each maximal broken part becomes one U+FFFD. Ids without a token give nothing.
  // In a SentencePiece-style vocabulary this keeps the whole characters next to a broken byte token, where the
  // reference replaces every byte of the run: a stream could not do the latter without holding text back.
  // An added token gives its content as the file writes it, where the reference may give it normalized.
  std::string decode(std::span<const TokenId> tokens, bool skip_special_tokens) const;

  int vocab_size() const;  // largest id + 1; a model may have more rows of logits than that
  std::optional<TokenId> token_id(std::string_view text) const;  // `text` as token_text() writes it
  bool is_token(TokenId id) const;                               // false for holes and out of range
  bool is_special(TokenId id) const;
  // As the vocabulary writes it ("Ġthe"), and the raw bytes that it stands for (" the"), which need not be
  // whole UTF-8 characters. Both empty when there is no such token.
  std::string token_text(TokenId id) const;
  std::string token_bytes(TokenId id) const;

  // From tokenizer_config.json; the texts are empty and the ids absent when the file names none.
  std::optional<TokenId> bos_id() const;
  std::optional<TokenId> eos_id() const;
  std::optional<TokenId> pad_id() const;
  const std::string& bos_text() const;
  const std::string& eos_text() const;
  const std::string& pad_text() const;
  // chat_template.jinja, else `chat_template` of tokenizer_config.json (the one named "default" of a list).
  // Empty when the model has none.
  const std::string& chat_template() const;

 private:
  friend class Detokenizer;
  explicit Tokenizer(std::shared_ptr<const TokenizerData> data) : data_(std::move(data)) {}
  std::shared_ptr<const TokenizerData> data_;
};

// Text of a growing list of tokens. The joined results of push() and the final flush() are byte for byte
// Tokenizer::decode of the same tokens, and each result alone is valid UTF-8. Holds back at most the three
// bytes of an unfinished character. Not for use from two threads at once.
class Detokenizer {
 public:
  Detokenizer(const Tokenizer& tokenizer, bool skip_special_tokens);
  std::string push(TokenId id);  // text that is certain now; often empty in the middle of a character
  std::string flush();           // an unfinished character becomes one U+FFFD; afterwards the state is new

 private:
  void append_token(TokenId id);

  std::shared_ptr<const TokenizerData> data_;
  bool skip_special_tokens_;
  bool first_ = true;    // no token has been taken yet
  int strip_left_ = 0;   // leading characters that the decoder may still remove
  std::string pending_;  // bytes not yet given out
};

}  // namespace ekv
