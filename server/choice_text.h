#pragma once
// choice_text.h -- tokens of one choice in, pieces of text out: detokenizing, stop strings, logprobs in step
// with the text. Streaming and plain replies use the same object, so they cannot differ.

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "elastickv/request.h"
#include "elastickv/tokenizer.h"
#include "server/openai.h"

namespace ekv {

// Stop strings prepared for the search. Immutable: all choices of a request share one.
class StopPatterns {
 public:
  explicit StopPatterns(const std::vector<std::string>& stops);

 private:
  friend class StopScanner;
  struct Pattern {
    std::string text;
    std::vector<uint32_t> fallback;  // [i]: longest proper border of the first i + 1 bytes
  };
  std::vector<Pattern> patterns_;
};

// Finds the first end of any stop string, byte by byte, however the text is cut into pieces. Holds back exactly
// the text that may still become a stop string.
class StopScanner {
 public:
  StopScanner(std::shared_ptr<const StopPatterns> stops, bool include_stop);
  // Text that may go out. Matches that end in this piece count only with `may_match`. After a match nothing
  // more comes out.
  std::string push(std::string_view piece, bool may_match);
  std::string flush();                                     // what was held back; it is no stop string now
  const std::string* matched() const { return matched_; }  // null: none yet

 private:
  using Pattern = StopPatterns::Pattern;
  const std::vector<Pattern>& patterns() const { return stops_->patterns_; }
  const Pattern* completed_by(char c);

  std::shared_ptr<const StopPatterns> stops_;
  std::vector<uint32_t> states_;  // [pattern] bytes of its text that the input ends with
  bool include_stop_;
  std::string held_;
  const std::string* matched_ = nullptr;
};

// What holds for every choice of a request, which may have thousands.
struct ChoiceRules {
  explicit ChoiceRules(const ReplyOptions& options) : reply(options), stops(options.stop) {}
  ReplyOptions reply;
  StopPatterns stops;
};

struct TokenDetail {
  TokenId token = 0;
  TokenLogprobs logprobs;
  int64_t text_offset = 0;  // characters of the text before this token
};

// What a choice has to say since the last take.
struct TextDelta {
  std::string text;
  std::vector<TokenId> token_ids;
  std::vector<TokenDetail> details;  // one per token, when logprobs were asked for
  bool empty() const { return text.empty() && token_ids.empty() && details.empty(); }
};

class ChoiceText {
 public:
  ChoiceText(const Tokenizer& tokenizer, std::shared_ptr<const ChoiceRules> rules,
             int64_t first_text_offset = 0);

  // After a call with a finish reason, or when a stop string is complete, the choice is done and takes no more.
  void push(const SeqEvent& event);
  // Everything that may go out now. Details of tokens whose text is held back wait for that text.
  TextDelta take();

  bool started() const { return num_tokens_ > 0 || done(); }
  bool done() const { return finish_ != FinishReason::none; }
  FinishReason finish() const { return finish_; }
  Json stop_reason() const { return stop_reason_; }  // the stop string or token id; null: neither
  const SeqStats& stats() const { return stats_; }
  int num_tokens() const { return num_tokens_; }  // completion tokens, a stop token among them
  const std::string& error() const { return error_; }

 private:
  void push_token(const SeqEvent& event);
  void add_text(std::string_view piece, bool may_match);

  const ReplyOptions& reply() const { return rules_->reply; }

  std::shared_ptr<const ChoiceRules> rules_;
  Detokenizer detokenizer_;
  StopScanner scanner_;
  TextDelta pending_;
  bool held_back_ = false;
  int64_t text_chars_ = 0;  // characters that the detokenizer has given so far
  int num_tokens_ = 0;
  FinishReason finish_ = FinishReason::none;
  Json stop_reason_;
  SeqStats stats_;
  std::string error_;
};

int64_t count_characters(std::string_view utf8);

}  // namespace ekv
