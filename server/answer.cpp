#include "server/answer.h"

#include <algorithm>

namespace ekv {

Answer::Answer(const Tokenizer& tokenizer, const ApiRequest& request, std::vector<AnswerPrompt> prompts,
               std::string id, int64_t created_s, std::shared_ptr<Generation> generation)
    : tokenizer_(tokenizer),
      options_(request.reply),
      per_prompt_(request.n),
      prompts_(std::move(prompts)),
      writer_(tokenizer, request.reply, std::move(id), request.model, created_s),
      generation_(std::move(generation)),
      reports_(size_t(generation_->num_choices())),
      opened_(size_t(generation_->num_choices())) {
  wholes_.resize(reports_.size());
  const auto rules = std::make_shared<const ChoiceRules>(options_);
  for (int i = 0; i < generation_->num_choices(); ++i) {
    AnswerPrompt& prompt = prompts_[size_t(i / per_prompt_)];
    PromptReport& report = reports_[size_t(i)];
    if (options_.echo) {
      if (prompt.text.empty() && !options_.chat)
        prompt.text = tokenizer.decode(prompt.tokens, options_.skip_special_tokens);
      report.echo = prompt.text;
    }
    if (options_.return_token_ids) report.token_ids = prompt.tokens;
    texts_.emplace_back(tokenizer, rules, count_characters(report.echo));
  }
}

Answer::~Answer() {
  if (watcher_) watcher_->unwatch(watch_);
}

void Answer::watch(DisconnectWatcher& watcher, int socket) {
  watcher_ = &watcher;
  watch_ = watcher.watch(socket, [weak = std::weak_ptr(generation_)] {
    if (const auto generation = weak.lock()) generation->abandon();
  });
}

Result<std::string> Answer::whole_reply() {
  while (num_done_ < int(texts_.size()))
    if (Status failed = advance()) return *std::move(failed);
  Json choices = Json::array();
  for (size_t i = 0; i < texts_.size(); ++i)
    choices.push_back(
        writer_.choice(int(i), wholes_[i], {texts_[i].finish(), texts_[i].stop_reason()}, &reports_[i]));
  return writer_.reply(std::move(choices), usage());
}

Result<bool> Answer::next_events(std::string& out) {
  while (out_.empty()) {
    if (num_done_ == int(texts_.size())) {
      if (options_.include_usage) out_ += writer_.usage_chunk(usage());
      out_ += end_of_stream();
      out += std::exchange(out_, {});
      return false;
    }
    if (Status failed = advance()) return *std::move(failed);
  }
  out += std::exchange(out_, {});
  return true;
}

Status Answer::advance() {
  if (!generation_->wait(events_)) return Error{Error::unavailable, "the client has closed the connection", {}};
  for (const ChoiceEvent& arrived : events_)
    if (Status failed = take(arrived)) return failed;
  return std::nullopt;
}

Status Answer::take(const ChoiceEvent& arrived) {
  ChoiceText& text = texts_[size_t(arrived.choice)];
  if (text.done()) return std::nullopt;
  generation_->count(arrived, !options_.score_only);
  if (!text.started()) fill_report(arrived.choice, arrived.event);
  text.push(arrived.event);
  if (text.done()) {
    ++num_done_;
    generation_->finish_choice(arrived.choice, text.finish(), text.stats());
  }
  if (text.finish() == FinishReason::error) return Error{Error::internal, text.error(), {}};
  if (text.finish() == FinishReason::cancelled)
    return Error{Error::unavailable, "the server is shutting down; the request was cancelled", {}};
  if (options_.stream) {
    stream_choice(arrived.choice);
    return std::nullopt;
  }
  TextDelta delta = text.take();
  TextDelta& whole = wholes_[size_t(arrived.choice)];
  whole.text += delta.text;
  whole.token_ids.insert(whole.token_ids.end(), delta.token_ids.begin(), delta.token_ids.end());
  std::move(delta.details.begin(), delta.details.end(), std::back_inserter(whole.details));
  return std::nullopt;
}

// The role chunk leaves with the first token, held back text or not: its time is the client's time to first
// token.
void Answer::stream_choice(int index) {
  const size_t i = size_t(index);
  const PromptReport* report = &reports_[i];
  if (options_.chat && !opened_[i]) {
    out_ += writer_.role_chunk(index, usage_so_far(), report);
    opened_[i] = true;
  }
  const TextDelta delta = texts_[i].take();
  const bool done = texts_[i].done();
  if (delta.empty() && !done) return;
  const ChoiceEnd end{texts_[i].finish(), texts_[i].stop_reason()};
  out_ += writer_.chunk(index, delta, done ? &end : nullptr, usage_so_far(), opened_[i] ? nullptr : report);
  opened_[i] = true;
}

void Answer::fill_report(int index, const SeqEvent& first) {
  PromptReport& report = reports_[size_t(index)];
  if (options_.prompt_logprobs >= 0) report.logprobs = first.prompt_logprobs;
  if (!options_.echo || options_.chat || options_.logprobs < 0) return;
  const std::vector<TokenId>& tokens = prompts_[size_t(index / per_prompt_)].tokens;
  Detokenizer offsets(tokenizer_, options_.skip_special_tokens);
  int64_t offset = 0;
  for (size_t i = 0; i < tokens.size(); ++i) {
    TokenDetail detail{.token = tokens[i], .logprobs = {}, .text_offset = offset};
    if (i > 0 && i <= first.prompt_logprobs.size()) detail.logprobs = first.prompt_logprobs[i - 1];
    offset += count_characters(offsets.push(tokens[i]));
    report.details.push_back(std::move(detail));
  }
}

// Summing costs time for every choice, so only where it is shown.
Usage Answer::usage_so_far() const { return options_.continuous_usage ? usage() : Usage(); }

Usage Answer::usage() const {
  Usage usage;
  for (const AnswerPrompt& prompt : prompts_) usage.prompt += int64_t(prompt.tokens.size());
  for (const ChoiceText& text : texts_) {
    const SeqStats& stats = text.stats();
    usage.completion += text.num_tokens();
    usage.pairs_seen += stats.pairs_seen;
    usage.base_pairs_seen += stats.base_pairs_seen;
    usage.peak_base_fraction = std::max(usage.peak_base_fraction, stats.peak_base_fraction);
    usage.tainted += stats.num_tainted;
    usage.preemptions += stats.num_preemptions;
  }
  for (size_t i = 0; i < texts_.size(); i += size_t(per_prompt_)) usage.cached += texts_[i].stats().num_cached;
  return usage;
}

}  // namespace ekv
