// JSON -> ApiRequest. One function per group of fields; the order of the checks decides which error a body with
// several faults gets.

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include "elastickv/sampling_rule.h"
#include "server/json_fields.h"
#include "server/openai.h"

namespace ekv {
namespace {

constexpr double kHuge = 1e9;
constexpr double kLeastPositive = std::numeric_limits<float>::denorm_min();  // less is 0 where it is used
static_assert(kMaxLogitBias == size_t(kMaxJsonMembers),
              "a longer logit_bias is refused, by its name, where the body is read; see parse_json");

// Known to vLLM or to OpenAI, and they would change the output: ignoring them would be a wrong answer.
void refuse_unsupported(JsonFields& fields) {
  for (const char* key :
       {"structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "prompt_embeds",
        "logits_processors", "allowed_token_ids", "bad_words", "logprob_token_ids", "thinking_token_budget",
        "kv_transfer_params", "ec_transfer_params", "vllm_xargs", "repetition_detection", "suffix", "functions",
        "function_call", "audio"})
    fields.refuse(key, Json());
  for (const char* key : {"use_beam_search", "return_tokens_as_token_ids", "return_prompt_text"})
    fields.refuse(key, false);
  for (const char* key : {"best_of", "stream_interval"}) fields.refuse(key, 1);
  const Json& format = fields.get("response_format");
  if (!format.is_null() && member(format, "type") != "text")
    fields.fail("response_format", "is only supported with {\"type\": \"text\"}");
}

void parse_sampling(JsonFields& fields, const ApiLimits& limits, SamplingParams& s) {
  const GenerationDefaults& d = limits.defaults;
  s.temperature = float(fields.number("temperature", d.temperature.value_or(1), 0, 2));
  s.top_p = float(fields.number("top_p", d.top_p.value_or(1), 0, 1));
  if (s.top_p <= 0)
    fields.fail("top_p", fmt::format("must be greater than 0, {:g} or more, and at most 1", kLeastPositive));
  s.top_k = std::max(0, int(fields.integer("top_k", d.top_k.value_or(0), -1, INT32_MAX)));
  s.min_p = float(fields.number("min_p", d.min_p.value_or(0), 0, 1));
  s.repetition_penalty = float(fields.number("repetition_penalty", d.repetition_penalty.value_or(1), 0, kHuge));
  if (s.repetition_penalty <= 0)
    fields.fail("repetition_penalty", fmt::format("must be greater than 0, {:g} or more", kLeastPositive));
  s.presence_penalty = float(fields.number("presence_penalty", 0, -2, 2));
  s.frequency_penalty = float(fields.number("frequency_penalty", 0, -2, 2));
}

void parse_logit_bias(JsonFields& fields, const ApiLimits& limits, SamplingParams& s) {
  const Json& bias = fields.get("logit_bias");
  if (bias.is_null()) return;
  if (!bias.is_object()) return fields.fail("logit_bias", "must be a map from token ids to numbers");
  for (const auto& [key, value] : bias.items()) {
    TokenId id = -1;
    const auto [end, fault] = std::from_chars(key.data(), key.data() + key.size(), id);
    if (fault != std::errc() || end != key.data() + key.size() || id < 0 || id >= limits.vocab_size)
      return fields.fail("logit_bias", fmt::format("has the key '{}', which is not a token id from 0 to {}",
                                                   key, limits.vocab_size - 1));
    if (!value.is_number() || !(std::abs(value.get<double>()) <= 100))
      return fields.fail("logit_bias", fmt::format("of token {} must be a number from -100 to 100", id));
    s.logit_bias.emplace_back(id, value.get<float>());
  }
}

void parse_stop(JsonFields& fields, const ApiLimits& limits, ReplyOptions& reply, SamplingParams& s) {
  const Json& stop = fields.get("stop");
  const Json list = stop.is_string() ? Json::array({stop}) : stop;
  if (!list.is_null() && !list.is_array()) fields.fail("stop", "must be a string or a list of strings");
  if (list.is_array() && list.size() > size_t(kMaxStopStrings))
    fields.fail("stop", fmt::format("has {} strings, at most {} are allowed", list.size(), kMaxStopStrings));
  for (const Json& text : list.is_array() ? list : Json::array()) {
    if (!text.is_string() || text.get_ref<const std::string&>().empty())
      return fields.fail("stop", "must hold strings that are not empty");
    if (text.get_ref<const std::string&>().size() > kMaxStopBytes)
      return fields.fail("stop", fmt::format("has a string of {} bytes, at most {} are allowed",
                                             text.get_ref<const std::string&>().size(), kMaxStopBytes));
    reply.stop.push_back(text.get<std::string>());
  }
  reply.include_stop = fields.flag("include_stop_str_in_output", false);
  reply.stop_token_ids = fields.token_ids("stop_token_ids", limits.vocab_size);
  if (reply.stop_token_ids.size() > kMaxStopTokenIds)
    return fields.fail("stop_token_ids", fmt::format("has {} ids, at most {} are allowed",
                                                     reply.stop_token_ids.size(), kMaxStopTokenIds));
  s.stop_token_ids = reply.stop_token_ids;
  if (!fields.flag("ignore_eos", false))
    s.stop_token_ids.insert(s.stop_token_ids.end(), limits.eos_ids.begin(), limits.eos_ids.end());
}

void parse_lengths(JsonFields& fields, const ApiLimits& limits, ApiRequest& request) {
  const bool chat = request.reply.chat;
  const int64_t least = !chat && request.reply.echo ? 0 : 1;
  std::optional<int64_t> most = fields.optional_integer("max_tokens", least, limits.max_model_len);
  if (chat && fields.has("max_completion_tokens"))
    most = fields.optional_integer("max_completion_tokens", 1, limits.max_model_len);
  if (!most && !chat) most = 16;
  if (!most && limits.defaults.max_new_tokens) most = *limits.defaults.max_new_tokens;
  if (most) request.max_tokens = int(*most);
  const int64_t cap = most ? std::max<int64_t>(*most, 1) : limits.max_model_len;
  request.sampling.min_tokens = int(fields.integer("min_tokens", 0, 0, cap));
  request.reply.min_tokens = request.sampling.min_tokens;
  request.reply.score_only = most && *most == 0;
}

void parse_streaming(JsonFields& fields, ReplyOptions& reply) {
  reply.stream = fields.flag("stream", false);
  const Json& options = fields.get("stream_options");
  if (options.is_null()) return;
  if (!reply.stream) return fields.fail("stream_options", "is only allowed with \"stream\": true");
  if (!options.is_object()) return fields.fail("stream_options", "must be an object");
  JsonFields inner(options);
  reply.include_usage = inner.flag("include_usage", false);
  reply.continuous_usage = reply.include_usage && inner.flag("continuous_usage_stats", false);
  if (inner.error()) fields.fail("stream_options", inner.error()->message);
}

void parse_logprobs(JsonFields& fields, const ApiLimits& limits, ReplyOptions& reply, SamplingParams& s) {
  if (reply.chat) {
    const bool wanted = fields.flag("logprobs", false);
    const int64_t top = fields.integer("top_logprobs", 0, 0, limits.max_logprobs);
    if (top > 0 && !wanted) fields.fail("top_logprobs", "needs \"logprobs\": true");
    if (wanted) reply.logprobs = int(top);
  } else if (fields.has("logprobs")) {
    reply.logprobs = int(fields.integer("logprobs", 0, 0, limits.max_logprobs));
  }
  if (fields.has("prompt_logprobs")) {
    reply.prompt_logprobs = int(fields.integer("prompt_logprobs", 0, 0, limits.max_logprobs));
    if (reply.stream) fields.fail("prompt_logprobs", "is not allowed with \"stream\": true");
  }
  s.logprobs = reply.logprobs;
  s.prompt_logprobs = reply.prompt_logprobs;
  if (!reply.chat && reply.echo && reply.logprobs >= 0)
    s.prompt_logprobs = std::max(s.prompt_logprobs, reply.logprobs);
}

void parse_choices(JsonFields& fields, ApiRequest& request) {
  request.n = int(fields.integer("n", 1, 1, kMaxChoices));
  if (request.n > 1 && request.sampling.temperature < sampling::kGreedyTemperature)
    fields.fail("n", "must be 1 with temperature 0: all choices would be the same");
  if (const auto seed = fields.optional_integer("seed", INT64_MIN, INT64_MAX); seed && *seed != -1)
    request.seed = uint64_t(*seed);
}

void parse_rest(JsonFields& fields, const ApiLimits& limits, ApiRequest& request) {
  ReplyOptions& reply = request.reply;
  reply.return_token_ids = fields.flag("return_token_ids", false);
  reply.skip_special_tokens = fields.flag("skip_special_tokens", true);
  reply.cached_tokens = limits.cached_tokens_in_usage;
  request.add_special_tokens = fields.flag("add_special_tokens", !reply.chat);
  request.priority = fields.integer("priority", 0, INT64_MIN, INT64_MAX);
  request.cache_salt = fields.text("cache_salt");
  if (fields.has("cache_salt") && (request.cache_salt.empty() || request.cache_salt.size() > kMaxSaltBytes))
    fields.fail("cache_salt",
                fmt::format("has {} bytes, 1 to {} are allowed", request.cache_salt.size(), kMaxSaltBytes));
  if (const auto keep = fields.optional_integer("truncate_prompt_tokens", -1, limits.max_model_len)) {
    request.truncate_prompt_tokens = int(*keep);
    if (*keep == 0) fields.fail("truncate_prompt_tokens", "must be -1 or at least 1");
  }
  const std::string side = fields.text("truncation_side", "left");
  request.truncate_left = side == "left";
  if (side != "left" && side != "right") fields.fail("truncation_side", "must be 'left' or 'right'");
}

void parse_kv_fidelity(JsonFields& fields, ApiRequest& request) {
  const Json& given = fields.get("kv_fidelity");
  if (given.is_null()) return;
  if (!given.is_object()) return fields.fail("kv_fidelity", "must be an object");
  JsonFields inner(given);
  const std::string tier = inner.text("tier", "elastic");
  if (tier == "exact")
    request.tier = KvTier::exact;
  else if (tier == "best_effort")
    request.tier = KvTier::best_effort;
  else if (tier != "elastic")
    inner.fail("tier", "must be 'exact', 'elastic' or 'best_effort'");
  request.max_base_fraction = inner.number("max_base_fraction", 1, 0, 1);
  for (const auto& [key, value] : given.items())
    if (key != "tier" && key != "max_base_fraction")
      inner.fail(key.size() <= kMostNameBytes ? key.c_str() : "a member with a long name",
                 "is unknown: the members are 'tier' and 'max_base_fraction'");
  request.reply.kv_fidelity = true;
  if (const Status& wrong = inner.error()) fields.fail_inside("kv_fidelity", *wrong);
}

// Everything but the prompt. `request.reply.chat` is set.
void parse_common(JsonFields& fields, const ApiLimits& limits, ApiRequest& request) {
  request.model = limits.model_names.front();
  request.reply.echo = fields.flag("echo", false);
  parse_streaming(fields, request.reply);
  parse_sampling(fields, limits, request.sampling);
  parse_choices(fields, request);
  parse_lengths(fields, limits, request);
  parse_logit_bias(fields, limits, request.sampling);
  parse_stop(fields, limits, request.reply, request.sampling);
  parse_logprobs(fields, limits, request.reply, request.sampling);
  parse_rest(fields, limits, request);
  parse_kv_fidelity(fields, request);
  refuse_unsupported(fields);
}

Result<std::vector<PromptInput>> parse_prompts(const Json& value, int vocab_size) {
  const bool many = value.is_array() && !value.empty() && (value[0].is_string() || value[0].is_array());
  std::vector<PromptInput> prompts;
  if (!many) {
    Result<PromptInput> one = parse_prompt(value, vocab_size);
    if (!one) return one.error();
    prompts.push_back(*std::move(one));
    return prompts;
  }
  if (value.size() > size_t(kMaxPrompts))
    return Error{Error::invalid_argument,
                 fmt::format("'prompt' holds {} prompts, at most {} are allowed", value.size(), kMaxPrompts),
                 "prompt"};
  for (const Json& item : value) {
    Result<PromptInput> one = parse_prompt(item, vocab_size);
    if (!one) return one.error();
    prompts.push_back(*std::move(one));
  }
  return prompts;
}

Status check_object(const Json& body) {
  if (body.is_object()) return std::nullopt;
  return Error{
      Error::invalid_argument, fmt::format("the body must be a JSON object, got {}", body.type_name()), {}};
}

// What the chat template must be able to rely on; kinds of content are its own business (normalise_messages).
void check_messages(JsonFields& fields) {
  const Json& messages = fields.get("messages");
  if (!messages.is_array() || messages.empty())
    return fields.fail("messages", "must be a list with a message in it");
  for (size_t i = 0; i < messages.size(); ++i) {
    const Json& role = member(messages[i], "role");
    const bool known = role == "system" || role == "user" || role == "assistant" || role == "tool" ||
                       role == "developer" || role == "custom";
    if (!known)
      return fields.fail("messages",
                         fmt::format("[{}] must be an object whose role is system, user, assistant, tool, "
                                     "developer or custom",
                                     i));
    if (member(messages[i], "content").is_null() && role != "assistant")
      return fields.fail("messages", fmt::format("[{}] has no content", i));
  }
}

}  // namespace

Status check_model(const Json& body, const ApiLimits& limits) {
  Result<std::string> name = string_member(body, "model", {});
  if (!name) return name.error();
  const auto& names = limits.model_names;
  if (name->empty() || std::find(names.begin(), names.end(), *name) != names.end()) return std::nullopt;
  return Error{Error::not_found, fmt::format("The model `{}` does not exist.", *name), "model"};
}

Result<PromptInput> parse_prompt(const Json& value, int vocab_size) {
  if (value.is_string()) return PromptInput(value.get<std::string>());
  if (!value.is_array())
    return Error{Error::invalid_argument,
                 "'prompt' must be a string, a list of strings, a list of token ids or a "
                 "list of lists of token ids",
                 "prompt"};
  if (value.empty()) return Error{Error::invalid_argument, "'prompt' is empty", "prompt"};
  const Json wrapped{{"prompt", value}};
  JsonFields fields(wrapped);
  PromptInput tokens = fields.token_ids("prompt", vocab_size);
  if (fields.error()) return *fields.error();
  return tokens;
}

Result<ApiRequest> parse_completion(const Json& body, const ApiLimits& limits) {
  if (Status wrong = check_object(body)) return *std::move(wrong);
  if (Status unknown = check_model(body, limits)) return *std::move(unknown);
  if (member(body, "prompt").is_null() && member(body, "prompt_embeds").is_null())
    return Error{Error::invalid_argument, "'prompt' is required", "prompt"};
  ApiRequest request;
  JsonFields fields(body);
  parse_common(fields, limits, request);
  if (fields.error()) return *fields.error();
  Result<std::vector<PromptInput>> prompts = parse_prompts(member(body, "prompt"), limits.vocab_size);
  if (!prompts) return prompts.error();
  request.prompts = *std::move(prompts);
  if (int64_t(request.prompts.size()) * request.n > kMaxChoices)
    return Error{Error::invalid_argument,
                 fmt::format("'n' times the number of prompts must be at most {}", kMaxChoices), "n"};
  return request;
}

Result<ChatInput> parse_chat_input(const Json& body) {
  if (Status wrong = check_object(body)) return *std::move(wrong);
  JsonFields fields(body);
  ChatInput chat;
  chat.messages = fields.get("messages");
  check_messages(fields);
  chat.tools = fields.get("tools");
  if (!chat.tools.is_null() && !chat.tools.is_array()) fields.fail("tools", "must be a list");
  if (chat.tools.is_array() && chat.tools.empty()) fields.fail("tools", "must not be an empty list");
  fields.refuse("chat_template", Json(), "in a request is not allowed; start the server with --chat-template");
  if (fields.has("chat_template_kwargs")) chat.template_kwargs = fields.get("chat_template_kwargs");
  if (!chat.template_kwargs.is_object()) fields.fail("chat_template_kwargs", "must be an object");
  for (const char* key : {"documents", "reasoning_effort"})
    if (fields.has(key) && chat.template_kwargs.is_object()) chat.template_kwargs[key] = fields.get(key);
  chat.add_generation_prompt = fields.flag("add_generation_prompt", true);
  chat.continue_final_message = fields.flag("continue_final_message", false);
  if (chat.continue_final_message && fields.has("add_generation_prompt") && chat.add_generation_prompt)
    fields.fail("continue_final_message", "excludes add_generation_prompt");
  if (chat.continue_final_message) chat.add_generation_prompt = false;
  if (fields.error()) return *fields.error();
  return chat;
}

Result<ApiRequest> parse_chat(const Json& body, const ApiLimits& limits) {
  if (Status wrong = check_object(body)) return *std::move(wrong);
  if (Status unknown = check_model(body, limits)) return *std::move(unknown);
  Result<ChatInput> chat = parse_chat_input(body);
  if (!chat) return chat.error();
  ApiRequest request;
  request.reply.chat = true;
  request.chat = *std::move(chat);
  JsonFields fields(body);
  fields.refuse("tool_choice", "none",
                "other than 'none' is not supported: this server does not parse tool calls");
  if (!request.chat.tools.is_null() && !fields.has("tool_choice"))
    fields.fail("tools", "needs \"tool_choice\": \"none\": this server does not parse tool calls");
  parse_common(fields, limits, request);
  if (fields.error()) return *fields.error();
  return request;
}

}  // namespace ekv
