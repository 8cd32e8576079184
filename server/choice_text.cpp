#include "server/choice_text.h"

#include <algorithm>

namespace ekv {

int64_t count_characters(std::string_view utf8) {
  return std::count_if(utf8.begin(), utf8.end(), [](char c) { return (uint8_t(c) & 0xC0) != 0x80; });
}

StopPatterns::StopPatterns(const std::vector<std::string>& stops) {
  for (const std::string& stop : stops) {
    Pattern pattern{.text = stop, .fallback = std::vector<uint32_t>(stop.size(), 0)};
    for (uint32_t i = 1, border = 0; i < stop.size(); ++i) {
      while (border > 0 && stop[i] != stop[border]) border = pattern.fallback[border - 1];
      if (stop[i] == stop[border]) ++border;
      pattern.fallback[i] = border;
    }
    patterns_.push_back(std::move(pattern));
  }
}

StopScanner::StopScanner(std::shared_ptr<const StopPatterns> stops, bool include_stop)
    : stops_(std::move(stops)), states_(patterns().size()), include_stop_(include_stop) {}

// The longest stop string that ends with `c`, which is the next byte of the text.
const StopScanner::Pattern* StopScanner::completed_by(char c) {
  const Pattern* longest = nullptr;
  for (size_t i = 0; i < patterns().size(); ++i) {
    const auto& [text, fallback] = patterns()[i];
    uint32_t state = states_[i] == text.size() ? fallback.back() : states_[i];
    while (state > 0 && text[state] != c) state = fallback[state - 1];
    states_[i] = text[state] == c ? state + 1 : 0;
    if (states_[i] == text.size() && (!longest || text.size() > longest->text.size())) longest = &patterns()[i];
  }
  return longest;
}

std::string StopScanner::push(std::string_view piece, bool may_match) {
  if (matched_) return {};
  if (patterns().empty()) return std::string(piece);
  for (const char c : piece) {
    held_.push_back(c);
    const Pattern* match = completed_by(c);
    if (!match || !may_match) continue;
    matched_ = &match->text;
    if (!include_stop_) held_.resize(held_.size() - match->text.size());
    return std::exchange(held_, {});
  }
  size_t hold = 0;
  for (size_t i = 0; i < patterns().size(); ++i) {
    const auto& [text, fallback] = patterns()[i];
    hold = std::max<size_t>(hold, states_[i] == text.size() ? fallback.back() : states_[i]);
  }
  std::string out = held_.substr(0, held_.size() - hold);
  held_.erase(0, out.size());
  return out;
}

std::string StopScanner::flush() { return std::exchange(held_, {}); }

ChoiceText::ChoiceText(const Tokenizer& tokenizer, std::shared_ptr<const ChoiceRules> rules,
                       int64_t first_text_offset)
    : rules_(std::move(rules)),
      detokenizer_(tokenizer, reply().skip_special_tokens),
      scanner_(std::shared_ptr<const StopPatterns>(rules_, &rules_->stops), reply().include_stop),
      text_chars_(first_text_offset) {}

void ChoiceText::push(const SeqEvent& event) {
  if (done()) return;
  stats_ = event.stats;
  error_ = event.error;
  if (event.token && !reply().score_only) push_token(event);
  stats_.num_output = num_tokens_;
  if (scanner_.matched()) {
    finish_ = FinishReason::stop;
    stop_reason_ = *scanner_.matched();
  } else if (event.finish != FinishReason::none) {
    add_text(detokenizer_.flush(), true);
    pending_.text += scanner_.flush();
    finish_ = scanner_.matched() ? FinishReason::stop : event.finish;
    if (scanner_.matched()) stop_reason_ = *scanner_.matched();
    held_back_ = false;
  }
}

void ChoiceText::push_token(const SeqEvent& event) {
  const TokenId token = *event.token;
  ++num_tokens_;
  if (reply().return_token_ids) pending_.token_ids.push_back(token);
  if (event.logprobs) pending_.details.push_back({token, *event.logprobs, text_chars_});
  const bool ended_it = event.finish == FinishReason::stop;
  const auto& own = reply().stop_token_ids;
  if (ended_it && std::find(own.begin(), own.end(), token) != own.end()) stop_reason_ = token;
  if (ended_it && !reply().include_stop) return;
  add_text(detokenizer_.push(token), num_tokens_ > reply().min_tokens);
}

void ChoiceText::add_text(std::string_view piece, bool may_match) {
  text_chars_ += count_characters(piece);
  const std::string out = scanner_.push(piece, may_match);
  held_back_ = out.empty() && !scanner_.matched();
  pending_.text += out;
}

TextDelta ChoiceText::take() {
  if (held_back_ && !done()) return {};
  return std::exchange(pending_, {});
}

}  // namespace ekv
