// The routes that do not generate: models, tokens, state of the server.

#include <fmt/format.h>

#include <algorithm>

#include "server/json_fields.h"
#include "server/routes.h"

namespace ekv {
namespace {

Json model_json(const ServedModel& model, const std::string& name) {
  const Json permission{{"id", "modelperm-" + name},
                        {"object", "model_permission"},
                        {"created", model.created_s},
                        {"allow_create_engine", false},
                        {"allow_sampling", true},
                        {"allow_logprobs", true},
                        {"allow_search_indices", false},
                        {"allow_view", true},
                        {"allow_fine_tuning", false},
                        {"organization", "*"},
                        {"group", nullptr},
                        {"is_blocking", false}};
  return {{"id", name},
          {"object", "model"},
          {"created", model.created_s},
          {"owned_by", "elastickv"},
          {"root", model.root},
          {"parent", nullptr},
          {"max_model_len", model.limits.max_model_len},
          {"permission", Json::array({permission})}};
}

// The text that /tokenize is asked about: `prompt`, or `messages` through the chat template.
Result<std::string> text_of(const Json& body, const ServedModel& model, bool* add_special_tokens) {
  JsonFields fields(body);
  const bool chat = fields.has("messages");
  *add_special_tokens = fields.flag("add_special_tokens", !chat);
  if (fields.error()) return *fields.error();
  if (chat) {
    Result<ChatInput> input = parse_chat_input(body);
    if (!input) return input.error();
    return model.render_chat(*input);
  }
  if (!fields.get("prompt").is_string()) fields.fail("prompt", "must be a string");
  if (fields.error()) return *fields.error();
  return fields.text("prompt");
}

Result<Json> object_body(const HttpRequest& request, const ServedModel& model) {
  Result<Json> body = parse_json(request.body);
  if (!body) return body.error();
  if (!body->is_object()) return Error{Error::invalid_argument, "the body must be a JSON object", {}};
  if (Status unknown = check_model(*body, model.limits)) return *std::move(unknown);
  return body;
}

}  // namespace

HttpResponse Routes::models(const HttpRequest&) {
  Json data = Json::array();
  for (const std::string& name : model_.limits.model_names) data.push_back(model_json(model_, name));
  return json_reply(dump_json({{"object", "list"}, {"data", data}}));
}

HttpResponse Routes::one_model(const HttpRequest& request) {
  const std::string name = request.path.substr(std::string_view("/v1/models/").size());
  const auto& names = model_.limits.model_names;
  if (std::find(names.begin(), names.end(), name) == names.end())
    return error_reply({Error::not_found, fmt::format("The model `{}` does not exist.", name), "model"});
  return json_reply(dump_json(model_json(model_, name)));
}

HttpResponse Routes::tokenize(const HttpRequest& request) {
  const Result<Json> body = object_body(request, model_);
  if (!body) return error_reply(body.error());
  bool add_special_tokens = true;
  const Result<std::string> text = text_of(*body, model_, &add_special_tokens);
  if (!text) return error_reply(text.error());
  if (Status gone = check_client(request)) return error_reply(*gone);
  const Result<bool> want_strings = bool_member(*body, "return_token_strs", false);
  if (!want_strings) return error_reply(want_strings.error());
  const Result<std::vector<TokenId>> tokens = encode_prompt(model_, *text, add_special_tokens);
  if (!tokens) return error_reply(tokens.error());
  Json strings;
  if (*want_strings) {
    strings = Json::array();
    for (const TokenId token : *tokens) strings.push_back(model_.tokenizer.token_text(token));
  }
  return json_reply(dump_json({{"count", tokens->size()},
                               {"max_model_len", model_.limits.max_model_len},
                               {"tokens", *tokens},
                               {"token_strs", strings}}));
}

HttpResponse Routes::detokenize(const HttpRequest& request) {
  const Result<Json> body = object_body(request, model_);
  if (!body) return error_reply(body.error());
  JsonFields fields(*body);
  if (!fields.has("tokens")) fields.fail("tokens", "is required");
  const std::vector<TokenId> tokens = fields.token_ids("tokens", model_.limits.vocab_size);
  if (fields.error()) return error_reply(*fields.error());
  return json_reply(dump_json({{"prompt", model_.tokenizer.decode(tokens, false)}}));
}

HttpResponse Routes::health(const HttpRequest&) {
  if (loop_.failed()) return json_reply(error_body(503, "the engine has stopped"), 503);
  if (!loop_.accepting()) return json_reply(error_body(503, "the server is shutting down"), 503);
  if (!loop_.healthy()) return json_reply(error_body(503, "the current step of the engine hangs"), 503);
  return json_reply("");
}

HttpResponse Routes::version(const HttpRequest&) {
  return json_reply(dump_json({{"version", options_.version}}));
}

HttpResponse Routes::metrics(const HttpRequest&) {
  HttpResponse response = json_reply(metrics_.text());
  response.content_type = "text/plain; version=0.0.4; charset=utf-8";
  return response;
}

HttpResponse Routes::load(const HttpRequest&) {
  return json_reply(dump_json({{"server_load", loop_.num_in_flight()}}));
}

HttpResponse Routes::reset_prefix_cache(const HttpRequest&) {
  loop_.reset_prefix_cache();
  return json_reply("");
}

}  // namespace ekv
