#include "server/openai_reply.h"

#include <fmt/format.h>

#include <cmath>

#include "text/tokenizer_utf8.h"

namespace ekv {
namespace {

constexpr double kLogprobFloor = -9999.0;  // JSON has no infinity; OpenAI's own value for "very unlikely"

double finite(float logprob) {
  return std::isfinite(logprob) ? std::max(double(logprob), kLogprobFloor) : kLogprobFloor;
}

// Tokens need not be whole characters, and all such tokens would look alike as U+FFFD: as the key of a map they
// are written like OpenAI's first models did.
std::string token_key(const std::string& bytes) {
  if (is_utf8(bytes)) return bytes;
  std::string key = "bytes:";
  for (const char byte : bytes) key += fmt::format("\\x{:02x}", uint8_t(byte));
  return key;
}

Json finish_json(const ChoiceEnd* end) {
  if (!end) return Json();
  return end->reason == FinishReason::length ? "length" : "stop";
}

}  // namespace

ReplyWriter::ReplyWriter(const Tokenizer& tokenizer, const ReplyOptions& options, std::string id,
                         std::string model, int64_t created_s)
    : tokenizer_(tokenizer),
      options_(options),
      id_(std::move(id)),
      model_(std::move(model)),
      created_s_(created_s) {}

Json ReplyWriter::choice(int index, const TextDelta& text, const ChoiceEnd& end,
                         const PromptReport* prompt) const {
  Json choice{{"index", index}};
  const std::string whole = (prompt ? prompt->echo : std::string()) + text.text;
  if (options_.chat)
    choice["message"] = {{"role", "assistant"}, {"content", whole}, {"refusal", nullptr}};
  else
    choice["text"] = whole;
  choice["logprobs"] = logprobs(text, prompt);
  choice["finish_reason"] = finish_json(&end);
  choice["stop_reason"] = end.stop_reason;
  if (options_.return_token_ids) {
    choice["token_ids"] = text.token_ids;
    if (prompt) choice["prompt_token_ids"] = prompt->token_ids;
  }
  if (options_.prompt_logprobs >= 0 && prompt) choice["prompt_logprobs"] = prompt_logprobs(*prompt);
  return choice;
}

std::string ReplyWriter::reply(Json choices, const Usage& usage) const {
  Json reply{{"id", id_},
             {"object", options_.chat ? "chat.completion" : "text_completion"},
             {"created", created_s_},
             {"model", model_}};
  if (options_.chat && options_.prompt_logprobs >= 0) reply["prompt_logprobs"] = choices[0]["prompt_logprobs"];
  reply["choices"] = std::move(choices);
  reply["usage"] = usage_json(usage);
  return dump_json(reply);
}

std::string ReplyWriter::role_chunk(int index, const Usage& so_far, const PromptReport* prompt) const {
  Json choice{{"index", index},
              {"delta", {{"role", "assistant"}, {"content", prompt ? prompt->echo : std::string()}}},
              {"logprobs", nullptr},
              {"finish_reason", nullptr}};
  if (options_.return_token_ids && prompt) choice["prompt_token_ids"] = prompt->token_ids;
  return event(Json::array({choice}), so_far);
}

std::string ReplyWriter::chunk(int index, const TextDelta& text, const ChoiceEnd* end, const Usage& so_far,
                               const PromptReport* prompt) const {
  Json choice{{"index", index}};
  if (options_.chat)
    choice["delta"] = text.text.empty() ? Json::object() : Json{{"content", text.text}};
  else
    choice["text"] = (prompt ? prompt->echo : std::string()) + text.text;
  choice["logprobs"] = logprobs(text, prompt);
  choice["finish_reason"] = finish_json(end);
  choice["stop_reason"] = end ? end->stop_reason : Json();
  if (options_.return_token_ids) {
    choice["token_ids"] = text.token_ids;
    if (prompt && !options_.chat) choice["prompt_token_ids"] = prompt->token_ids;
  }
  return event(Json::array({choice}), so_far);
}

std::string ReplyWriter::usage_chunk(const Usage& usage) const {
  Json chunk{{"id", id_},
             {"object", options_.chat ? "chat.completion.chunk" : "text_completion"},
             {"created", created_s_},
             {"model", model_},
             {"choices", Json::array()},
             {"usage", usage_json(usage)}};
  return server_sent_event(dump_json(chunk));
}

std::string ReplyWriter::event(Json choices, const Usage& so_far) const {
  Json chunk{{"id", id_},
             {"object", options_.chat ? "chat.completion.chunk" : "text_completion"},
             {"created", created_s_},
             {"model", model_},
             {"choices", std::move(choices)}};
  if (options_.include_usage) chunk["usage"] = options_.continuous_usage ? usage_json(so_far) : Json();
  return server_sent_event(dump_json(chunk));
}

Json ReplyWriter::usage_json(const Usage& usage) const {
  Json json{{"prompt_tokens", usage.prompt},
            {"completion_tokens", usage.completion},
            {"total_tokens", usage.prompt + usage.completion}};
  if (options_.cached_tokens) json["prompt_tokens_details"] = {{"cached_tokens", usage.cached}};
  if (options_.kv_fidelity)
    json["kv_fidelity"] = {
        {"base_exposure", usage.pairs_seen ? double(usage.base_pairs_seen) / double(usage.pairs_seen) : 0.0},
        {"peak_base_fraction", usage.peak_base_fraction},
        {"tainted_tokens", usage.tainted},
        {"preemptions", usage.preemptions}};
  return json;
}

Json ReplyWriter::logprobs(const TextDelta& text, const PromptReport* prompt) const {
  if (options_.logprobs < 0) return Json();
  if (options_.chat) return text.details.empty() ? Json() : chat_logprobs(text.details);
  return completion_logprobs(prompt ? prompt->details : std::vector<TokenDetail>(), text.details);
}

// Four parallel lists. The sampled token is always among the alternatives, so there may be one more of them.
Json ReplyWriter::completion_logprobs(const std::vector<TokenDetail>& before,
                                      const std::vector<TokenDetail>& details) const {
  Json offsets = Json::array(), values = Json::array(), tokens = Json::array(), tops = Json::array();
  const auto add = [&](const TokenDetail& detail, bool known) {
    offsets.push_back(detail.text_offset);
    tokens.push_back(tokenizer_.token_bytes(detail.token));
    if (!known) {
      values.push_back(nullptr);
      tops.push_back(nullptr);
      return;
    }
    values.push_back(finite(detail.logprobs.chosen.logprob));
    Json top = Json::object();
    for (int i = 0; i < int(detail.logprobs.top.size()) && i < options_.logprobs; ++i) {
      const TokenLogprob& entry = detail.logprobs.top[size_t(i)];
      top.emplace(token_key(tokenizer_.token_bytes(entry.token)), finite(entry.logprob));
    }
    top.emplace(token_key(tokenizer_.token_bytes(detail.token)), finite(detail.logprobs.chosen.logprob));
    tops.push_back(std::move(top));
  };
  for (size_t i = 0; i < before.size(); ++i) add(before[i], i > 0);
  for (const TokenDetail& detail : details) add(detail, true);
  return {{"text_offset", offsets}, {"token_logprobs", values}, {"tokens", tokens}, {"top_logprobs", tops}};
}

Json ReplyWriter::token_logprob(const TokenLogprob& entry) const {
  const std::string bytes = tokenizer_.token_bytes(entry.token);
  Json list = Json::array();
  for (const char byte : bytes) list.push_back(int(uint8_t(byte)));
  return {{"token", bytes}, {"logprob", finite(entry.logprob)}, {"bytes", list}};
}

Json ReplyWriter::chat_logprobs(const std::vector<TokenDetail>& details) const {
  Json content = Json::array();
  for (const TokenDetail& detail : details) {
    Json entry = token_logprob(detail.logprobs.chosen);
    Json top = Json::array();
    for (int i = 0; i < int(detail.logprobs.top.size()) && i < options_.logprobs; ++i)
      top.push_back(token_logprob(detail.logprobs.top[size_t(i)]));
    entry["top_logprobs"] = std::move(top);
    content.push_back(std::move(entry));
  }
  return {{"content", content}, {"refusal", nullptr}};
}

// One map per prompt token, from token id to its logprob; the first token has none.
Json ReplyWriter::prompt_logprobs(const PromptReport& prompt) const {
  Json list = Json::array({nullptr});
  for (const TokenLogprobs& logprobs : prompt.logprobs) {
    Json entry = Json::object();
    const auto add = [&](const TokenLogprob& token, Json rank) {
      entry.emplace(std::to_string(token.token), Json{{"logprob", finite(token.logprob)},
                                                      {"rank", std::move(rank)},
                                                      {"decoded_token", tokenizer_.token_bytes(token.token)}});
    };
    for (int i = 0; i < int(logprobs.top.size()) && i < options_.prompt_logprobs; ++i)
      add(logprobs.top[size_t(i)], i + 1);
    add(logprobs.chosen, logprobs.rank > 0 ? Json(logprobs.rank) : Json());
    list.push_back(std::move(entry));
  }
  return list;
}

std::string server_sent_event(const std::string& json) { return "data: " + json + "\n\n"; }

const std::string& end_of_stream() {
  static const std::string text = "data: [DONE]\n\n";
  return text;
}

}  // namespace ekv
