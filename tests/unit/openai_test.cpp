// Request text -> ApiRequest or the exact error; tokens -> text with stop strings; results -> JSON.

#include "server/openai.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <random>

#include "server/choice_text.h"
#include "server/openai_reply.h"
#include "tests/support/fakes.h"

namespace ekv {
namespace {

using testing::byte_tokenizer;
using testing::kFakeEos;
using testing::kFakeVocab;

ApiLimits limits() {
  return {.model_names = {"m", "alias"},
          .max_model_len = 100,
          .vocab_size = kFakeVocab,
          .max_logprobs = 20,
          .defaults = {},
          .eos_ids = {kFakeEos}};
}

Json with(Json body, const std::string& key, Json value) {
  body[key] = std::move(value);
  return body;
}

const Json kCompletion{{"prompt", "hi"}};
const Json kChat{{"messages", Json::array({{{"role", "user"}, {"content", "hi"}}})}};

struct BadField {
  const char* key;
  const char* value;  // JSON
};

TEST(Completion, DefaultsAreThoseOfVllm) {
  const Result<ApiRequest> request = parse_completion(kCompletion, limits());
  ASSERT_TRUE(request) << request.error().message;
  EXPECT_EQ(request->model, "m");
  EXPECT_EQ(request->max_tokens, 16);
  EXPECT_EQ(request->n, 1);
  EXPECT_FALSE(request->seed);
  EXPECT_FALSE(request->reply.stream);
  EXPECT_TRUE(request->add_special_tokens);
  EXPECT_TRUE(request->reply.skip_special_tokens);
  EXPECT_EQ(request->sampling.temperature, 1);
  EXPECT_EQ(request->sampling.top_p, 1);
  EXPECT_EQ(request->sampling.top_k, 0);
  EXPECT_EQ(request->sampling.logprobs, -1);
  EXPECT_EQ(request->sampling.stop_token_ids, std::vector<TokenId>{kFakeEos});
  EXPECT_EQ(std::get<std::string>(request->prompts.at(0)), "hi");
}

TEST(Chat, DefaultsAreThoseOfVllm) {
  const Result<ApiRequest> request = parse_chat(kChat, limits());
  ASSERT_TRUE(request) << request.error().message;
  EXPECT_FALSE(request->max_tokens);
  EXPECT_FALSE(request->add_special_tokens);
  EXPECT_TRUE(request->chat.add_generation_prompt);
}

// CFG-3: the model's own defaults apply where the request is silent, and explicit values win.
TEST(Completion, GenerationConfigFillsWhatTheRequestLeavesOut) {
  ApiLimits l = limits();
  l.defaults = {.temperature = 0.25,
                .top_p = 0.5,
                .min_p = {},
                .repetition_penalty = {},
                .top_k = 7,
                .max_new_tokens = {}};
  const Result<ApiRequest> silent = parse_completion(with(kCompletion, "top_p", nullptr), l);
  ASSERT_TRUE(silent);
  EXPECT_EQ(silent->sampling.temperature, 0.25f);
  EXPECT_EQ(silent->sampling.top_p, 0.5f);
  EXPECT_EQ(silent->sampling.top_k, 7);
  const Result<ApiRequest> loud = parse_completion(with(kCompletion, "temperature", 1.5), l);
  ASSERT_TRUE(loud);
  EXPECT_EQ(loud->sampling.temperature, 1.5f);
}

TEST(Completion, FourFormsOfPrompt) {
  const auto prompts = [](Json prompt) {
    Result<ApiRequest> request = parse_completion(Json{{"prompt", std::move(prompt)}}, limits());
    EXPECT_TRUE(request) << request.error().message;
    return request ? request->prompts : std::vector<PromptInput>();
  };
  using Ids = std::vector<TokenId>;
  EXPECT_EQ(prompts("a"), (std::vector<PromptInput>{"a"}));
  EXPECT_EQ(prompts({"a", "b"}), (std::vector<PromptInput>{"a", "b"}));
  EXPECT_EQ(prompts({1, 2}), (std::vector<PromptInput>{Ids{1, 2}}));
  EXPECT_EQ(prompts({{1, 2}, {3}}), (std::vector<PromptInput>{Ids{1, 2}, Ids{3}}));
}

TEST(Completion, BadPromptsNameTheField) {
  for (const char* prompt : {"[]", "3", "true", "{}", "[1, \"a\"]", "[\"a\", 1]", "[-1]", "[260]", "[1e99]",
                             "[[]]", "[1.5]", "[99999999999999999999]", "[18446744073709551615]"}) {
    const Result<ApiRequest> request = parse_completion(Json{{"prompt", Json::parse(prompt)}}, limits());
    ASSERT_FALSE(request) << prompt;
    EXPECT_EQ(request.error().param, "prompt") << prompt;
    EXPECT_EQ(http_status(request.error()), 400) << prompt;
  }
}

TEST(Request, WhatRoundsToZeroIsToldWhatIsTheLeast) {
  for (const char* key : {"top_p", "repetition_penalty"}) {
    const Result<ApiRequest> refused = parse_completion(with(kCompletion, key, 1e-300), limits());
    ASSERT_FALSE(refused) << key;
    EXPECT_NE(refused.error().message.find("must be greater than 0, 1.4013e-45 or more"), std::string::npos)
        << refused.error().message;
    EXPECT_TRUE(parse_completion(with(kCompletion, key, 1.4013e-45), limits())) << key;
  }
}

TEST(Request, EveryBadFieldIsNamed) {
  const BadField both[] = {{"temperature", "-0.1"},
                           {"temperature", "2.1"},
                           {"temperature", "\"hot\""},
                           {"top_p", "0"},
                           {"top_p", "1.1"},
                           {"top_k", "-2"},
                           {"top_k", "1.5"},
                           {"min_p", "-1"},
                           {"min_p", "1.01"},
                           {"seed", "1e30"},
                           {"seed", "\"x\""},
                           {"seed", "9223372036854775808"},
                           {"n", "0"},
                           {"n", "-1"},
                           {"n", "1.5"},
                           {"n", "1000000"},
                           {"max_tokens", "0"},
                           {"max_tokens", "-5"},
                           {"max_tokens", "101"},
                           {"presence_penalty", "2.5"},
                           {"frequency_penalty", "-2.5"},
                           {"repetition_penalty", "0"},
                           {"repetition_penalty", "1e-300"},
                           {"top_p", "1e-320"},
                           {"stop", "[\"a\",\"b\",\"c\",\"d\",\"e\"]"},
                           {"stop", "\"\""},
                           {"stop", "[1]"},
                           {"stop", "{}"},
                           {"stop_token_ids", "[\"a\"]"},
                           {"stop_token_ids", "[260]"},
                           {"min_tokens", "-1"},
                           {"min_tokens", "100"},
                           {"stream", "\"yes\""},
                           {"stream_options", "{\"include_usage\":true}"},
                           {"cache_salt", "\"\""},
                           {"priority", "1.5"},
                           {"truncate_prompt_tokens", "0"},
                           {"truncate_prompt_tokens", "101"},
                           {"truncation_side", "\"top\""},
                           {"prompt_logprobs", "21"},
                           {"best_of", "2"},
                           {"use_beam_search", "true"},
                           {"suffix", "\"x\""},
                           {"response_format", "{\"type\":\"json_object\"}"},
                           {"response_format", "{\"type\":\"json_schema\",\"json_schema\":{}}"},
                           {"structured_outputs", "{\"regex\":\"a\"}"},
                           {"guided_json", "{}"},
                           {"prompt_embeds", "\"AA==\""},
                           {"allowed_token_ids", "[1]"},
                           {"bad_words", "[\"a\"]"},
                           {"kv_fidelity", "\"exact\""}};
  for (const auto& [key, value] : both)
    for (const bool chat : {false, true}) {
      const Json body = with(with(chat ? kChat : kCompletion, "max_tokens", 50), key, Json::parse(value));
      const Result<ApiRequest> request = chat ? parse_chat(body, limits()) : parse_completion(body, limits());
      ASSERT_FALSE(request) << dump_json(body);
      EXPECT_EQ(request.error().param, key) << dump_json(body);
      EXPECT_EQ(http_status(request.error()), 400) << dump_json(body);
    }
}

TEST(Chat, EveryBadFieldIsNamed) {
  const BadField fields[] = {{"messages", "[]"},
                             {"messages", "\"x\""},
                             {"messages", "[null]"},
                             {"messages", "[{\"role\":\"user\"}]"},
                             {"messages", "[{\"role\":1,\"content\":\"x\"}]"},
                             {"messages", "[{\"role\":\"wizard\",\"content\":\"x\"}]"},
                             {"messages", "null"},
                             {"tools", "[]"},
                             {"tools", "{}"},
                             {"tools", R"([{"type":"function","function":{"name":"f"}}])"},
                             {"tool_choice", "\"auto\""},
                             {"tool_choice", "\"required\""},
                             {"chat_template", "\"x\""},
                             {"chat_template_kwargs", "[]"},
                             {"top_logprobs", "3"},
                             {"logprobs", "5"},
                             {"max_completion_tokens", "0"},
                             {"functions", "[]"}};
  for (const auto& [key, value] : fields) {
    const Result<ApiRequest> request = parse_chat(with(kChat, key, Json::parse(value)), limits());
    ASSERT_FALSE(request) << key << " " << value;
    EXPECT_EQ(request.error().param, key) << value;
  }
  Json both = with(kChat, "continue_final_message", true);
  EXPECT_FALSE(parse_chat(with(both, "add_generation_prompt", true), limits()));
  EXPECT_TRUE(parse_chat(both, limits()));
}

// PAR-1
TEST(LogitBias, OnlyIdsOfTheVocabularyAndValuesUpToAHundred) {
  for (const char* bias :
       {R"({"260":5})", R"({"-1":5})", R"({"99999999999":1})", R"({"abc":1})", R"({"5":101})", R"({"5":"x"})",
        R"({"":1})", R"({"5 ":1})", R"({"+5":1})", R"([5])", R"({"5":null})"}) {
    const Result<ApiRequest> request =
        parse_completion(with(kCompletion, "logit_bias", Json::parse(bias)), limits());
    ASSERT_FALSE(request) << bias;
    EXPECT_EQ(request.error().param, "logit_bias") << bias;
  }
  const Result<ApiRequest> good =
      parse_completion(with(kCompletion, "logit_bias", Json::parse(R"({"5":-100,"259":100})")), limits());
  ASSERT_TRUE(good) << good.error().message;
  EXPECT_EQ(good->sampling.logit_bias, (std::vector<std::pair<TokenId, float>>{{5, -100}, {259, 100}}));
}

// PAR-5
TEST(Request, NullIsTheSameAsAbsent) {
  Json body = kChat;
  for (const char* key : {"temperature",
                          "top_p",
                          "n",
                          "max_tokens",
                          "max_completion_tokens",
                          "stop",
                          "seed",
                          "logit_bias",
                          "presence_penalty",
                          "frequency_penalty",
                          "logprobs",
                          "top_logprobs",
                          "stream",
                          "stream_options",
                          "tools",
                          "tool_choice",
                          "response_format",
                          "user",
                          "functions",
                          "min_tokens",
                          "cache_salt",
                          "chat_template_kwargs"})
    body[key] = nullptr;
  const Result<ApiRequest> nulls = parse_chat(body, limits());
  ASSERT_TRUE(nulls) << nulls.error().message;
  const Result<ApiRequest> absent = parse_chat(kChat, limits());
  EXPECT_EQ(nulls->max_tokens, absent->max_tokens);
  EXPECT_EQ(nulls->sampling.temperature, absent->sampling.temperature);
  EXPECT_TRUE(nulls->chat.tools.is_null());
}

// Every list and text that a request may have: as many as are allowed pass, one more is refused with its name,
// what it had and how much it may have.
TEST(Request, ListsThatAreTooLongAreNamedWithTheirLimit) {
  ApiLimits wide = limits();
  wide.vocab_size = 5000;
  const auto ids = [](size_t count) { return Json(std::vector<int>(count, 7)); };
  const auto bias = [](size_t count) {
    Json map = Json::object();
    for (size_t i = 0; i < count; ++i) map[std::to_string(i)] = 1;
    return map;
  };
  const auto strings = [](size_t count) { return Json(std::vector<std::string>(count, "end")); };
  const auto text = [](size_t bytes) { return Json(std::string(bytes, 'x')); };
  struct Case {
    const char* field;
    std::function<Json(size_t)> of_size;
    size_t most;
  };
  for (const auto& [field, of_size, most] : {Case{"stop_token_ids", ids, kMaxStopTokenIds},
                                             {"stop", strings, kMaxStopStrings},
                                             {"stop", text, kMaxStopBytes},
                                             {"cache_salt", text, kMaxSaltBytes},
                                             {"prompt", strings, kMaxPrompts}}) {
    const Result<ApiRequest> good = parse_completion(with(kCompletion, field, of_size(most)), wide);
    EXPECT_TRUE(good) << field << ": " << good.error().message;
    for (const size_t size : {most + 1, 10 * most}) {
      const Result<ApiRequest> refused = parse_completion(with(kCompletion, field, of_size(size)), wide);
      ASSERT_FALSE(refused) << field << " " << size;
      EXPECT_EQ(refused.error().param, field);
      EXPECT_EQ(http_status(refused.error()), 400);
      for (const std::string& part : {fmt::format("'{}'", field), std::to_string(size), std::to_string(most)})
        EXPECT_NE(refused.error().message.find(part), std::string::npos) << refused.error().message;
    }
  }
  // These the reader of JSON counts.
  const Json body = with(kCompletion, "logit_bias", bias(10000));
  const Result<Json> read = parse_json(dump_json(body));
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().param, "logit_bias");
  const Result<Json> full = parse_json(dump_json(with(kCompletion, "logit_bias", bias(kMaxLogitBias))));
  ASSERT_TRUE(full);
  EXPECT_TRUE(parse_completion(*full, wide));
}

TEST(Request, UnknownFieldsAreIgnoredAndUnknownModelsAreNot) {
  EXPECT_TRUE(parse_completion(with(kCompletion, "foo", {{"bar", 1}}), limits()));
  EXPECT_TRUE(parse_completion(with(kCompletion, "model", "alias"), limits()));
  EXPECT_TRUE(parse_completion(with(kCompletion, "model", ""), limits()));
  const Result<ApiRequest> unknown = parse_completion(with(kCompletion, "model", "gpt"), limits());
  ASSERT_FALSE(unknown);
  EXPECT_EQ(http_status(unknown.error()), 404);
  EXPECT_EQ(Json::parse(error_body(unknown.error())),
            Json::parse(R"({"error":{"message":"The model `gpt` does not exist.","type":"not_found_error",
                            "param":"model","code":404}})"));
}

TEST(Request, ManyChoicesNeedRandomness) {
  EXPECT_FALSE(parse_completion(with(with(kCompletion, "n", 2), "temperature", 0), limits()));
  EXPECT_TRUE(parse_completion(with(with(kCompletion, "n", 2), "temperature", 1), limits()));
  EXPECT_FALSE(parse_completion(with(Json{{"prompt", {"a", "b"}}}, "n", kMaxChoices), limits()));
}

TEST(EngineRequests, ChoiceZeroIsTheSingleRequestAndTheOthersHaveTheirOwnSeeds) {
  const Result<ApiRequest> request = parse_completion(with(with(kCompletion, "n", 4), "seed", 42), limits());
  ASSERT_TRUE(request);
  const auto choices = engine_requests(*request, {1, 2}, limits(), 7, 5);
  ASSERT_TRUE(choices);
  std::set<uint64_t> seeds;
  for (const Request& choice : *choices) seeds.insert(choice.sampling.seed);
  EXPECT_EQ(choices->at(0).sampling.seed, 42u);
  EXPECT_EQ(seeds.size(), 4u);
  EXPECT_EQ(choices->at(3).arrival_us, 5);
}

TEST(EngineRequests, KvFidelityReachesEveryChoice) {
  const struct {
    Json field;
    KvTier tier;
    double fraction;
    bool in_usage;
  } cases[] = {{nullptr, KvTier::elastic, 1, false},
               {Json::object(), KvTier::elastic, 1, true},
               {{{"tier", "exact"}}, KvTier::exact, 1, true},
               {{{"tier", "elastic"}, {"max_base_fraction", 0}}, KvTier::elastic, 0, true},
               {{{"tier", "best_effort"}, {"max_base_fraction", 0.25}}, KvTier::best_effort, 0.25, true}};
  for (const auto& c : cases) {
    const Json body = with(with(kCompletion, "n", 2), "kv_fidelity", c.field);
    const Result<ApiRequest> request = parse_completion(body, limits());
    ASSERT_TRUE(request) << dump_json(body);
    EXPECT_EQ(request->reply.kv_fidelity, c.in_usage);
    const auto choices = engine_requests(*request, {1, 2}, limits(), 7, 5);
    ASSERT_TRUE(choices);
    for (const Request& choice : *choices) {
      EXPECT_EQ(choice.tier, c.tier) << dump_json(body);
      EXPECT_EQ(choice.max_base_fraction, c.fraction) << dump_json(body);
    }
  }
}

TEST(Request, BadKvFidelityNamesTheMember) {
  const BadField members[] = {{"tier", "\"best\""},
                              {"tier", "1"},
                              {"tier", "\"\""},
                              {"max_base_fraction", "1.01"},
                              {"max_base_fraction", "-0.1"},
                              {"max_base_fraction", "\"0.5\""},
                              {"teir", "\"exact\""},
                              {"Tier", "null"},
                              {"", "1"}};
  for (const auto& [key, value] : members) {
    const Json body = with(kChat, "kv_fidelity", with(Json::object(), key, Json::parse(value)));
    const Result<ApiRequest> request = parse_chat(body, limits());
    ASSERT_FALSE(request) << dump_json(body);
    EXPECT_EQ(request.error().param, std::string("kv_fidelity.") + key);
    const bool known = std::string_view(key) == "tier" || std::string_view(key) == "max_base_fraction";
    EXPECT_EQ(request.error().message.find(std::string("'kv_fidelity.") + key +
                                           (known ? "' must be " : "' is unknown")),
              0u)
        << request.error().message;
    EXPECT_EQ(http_status(request.error()), 400);
  }
}

// PAR-7, for a context of 100 tokens.
TEST(EngineRequests, PromptsAtTheEdgeOfTheContext) {
  const auto make = [](int prompt, std::optional<int> max_tokens) {
    Json body = with(kChat, "max_tokens", max_tokens ? Json(*max_tokens) : Json());
    const Result<ApiRequest> request = parse_chat(body, limits());
    EXPECT_TRUE(request);
    return engine_requests(*request, std::vector<TokenId>(size_t(prompt), 1), limits(), 0, 0);
  };
  EXPECT_EQ(make(99, 1)->at(0).sampling.max_tokens, 1);
  EXPECT_EQ(make(95, 6)->at(0).sampling.max_tokens, 5);  // cut to what fits
  EXPECT_EQ(make(95, {})->at(0).sampling.max_tokens, 5);
  EXPECT_EQ(make(1, {})->at(0).sampling.max_tokens, 99);
  for (const int prompt : {100, 101, 1000}) {
    const auto refused = make(prompt, 1);
    ASSERT_FALSE(refused) << prompt;
    const Json error = Json::parse(error_body(refused.error()))["error"];
    EXPECT_EQ(error["code"], "context_length_exceeded");
    EXPECT_EQ(error["type"], "invalid_request_error");
    EXPECT_NE(error["message"].get<std::string>().find("100 tokens"), std::string::npos);
    EXPECT_NE(error["message"].get<std::string>().find(std::to_string(prompt)), std::string::npos);
    EXPECT_EQ(http_status(refused.error()), 400);
    // What is wrong is that not one token fits, however many were asked for.
    EXPECT_EQ(make(prompt, 2).error().message, refused.error().message);
    EXPECT_NE(refused.error().message.find("at least 1 in the completion"), std::string::npos);
  }
}

TEST(EngineRequests, TruncationKeepsTheAskedSide) {
  const auto prompt_of = [](int keep, const char* side) {
    const Json body = with(with(kCompletion, "truncate_prompt_tokens", keep), "truncation_side", side);
    return engine_requests(*parse_completion(body, limits()), {1, 2, 3, 4}, limits(), 0, 0)->at(0).prompt;
  };
  EXPECT_EQ(prompt_of(2, "left"), (std::vector<TokenId>{3, 4}));
  EXPECT_EQ(prompt_of(2, "right"), (std::vector<TokenId>{1, 2}));
  EXPECT_EQ(prompt_of(9, "left"), (std::vector<TokenId>{1, 2, 3, 4}));
}

// The specification of stop strings: the text up to the first place where one of them is complete.
std::string cut_at_stop(const std::string& text, const std::vector<std::string>& stops, bool include) {
  for (size_t end = 1; end <= text.size(); ++end) {
    size_t longest = 0;
    for (const std::string& stop : stops)
      if (end >= stop.size() && text.compare(end - stop.size(), stop.size(), stop) == 0)
        longest = std::max(longest, stop.size());
    if (longest) return text.substr(0, include ? end : end - longest);
  }
  return text;
}

TEST(StopScanner, CutsTheSameWhateverThePiecesAndNeverShowsAPartOfAStop) {
  for (unsigned seed = 0; seed < 3000; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 rng(seed);
    const auto word = [&](size_t most) {
      std::string text(1 + rng() % most, ' ');
      for (char& c : text) c = char('a' + rng() % 2);
      return text;
    };
    std::vector<std::string> stops;
    for (size_t i = 0, count = 1 + rng() % 4; i < count; ++i) stops.push_back(word(6));
    const std::string text = word(40);
    const bool include = rng() % 2;
    const std::string expected = cut_at_stop(text, stops, include);
    StopScanner scanner(std::make_shared<const StopPatterns>(stops), include);
    std::string shown;
    for (size_t at = 0; at < text.size();) {
      const size_t size = std::min(text.size() - at, size_t(1 + rng() % 5));
      shown += scanner.push(text.substr(at, size), true);
      ASSERT_TRUE(expected.starts_with(shown)) << "a stop string leaked";
      at += size;
    }
    EXPECT_EQ(scanner.matched() != nullptr, cut_at_stop(text, stops, true) != text || expected != text ||
                                                cut_at_stop(text + "c", stops, true) != text + "c");
    shown += scanner.flush();
    EXPECT_EQ(shown, expected);
  }
}

TEST(StopScanner, HoldsBackNoMoreThanCouldBecomeAStop) {
  StopScanner scanner(std::make_shared<const StopPatterns>(std::vector<std::string>{"xyz"}), false);
  EXPECT_EQ(scanner.push("abx", true), "ab");
  EXPECT_EQ(scanner.push("y", true), "");
  EXPECT_EQ(scanner.push("a", true), "xya");     // the near miss is released at once
  EXPECT_EQ(scanner.push("xyz", false), "xyz");  // not yet allowed to match
  EXPECT_EQ(scanner.push("xyz...", true), "");
  EXPECT_EQ(*scanner.matched(), "xyz");
  EXPECT_EQ(scanner.push("more", true), "");
}

SeqEvent token_event(TokenId token, FinishReason finish = FinishReason::none) {
  SeqEvent event;
  event.token = token;
  event.finish = finish;
  return event;
}

// STR-3 and STR-5: no half characters, and an end inside one shows the same in every mode.
TEST(ChoiceText, CharactersArriveWhole) {
  const Tokenizer tokenizer = byte_tokenizer();
  ChoiceText text(tokenizer, std::make_shared<const ChoiceRules>(ReplyOptions()));
  std::string shown;
  for (const char byte : std::string("é你\xF0\x9D")) {
    text.push(token_event(uint8_t(byte)));
    const std::string piece = text.take().text;
    EXPECT_EQ(piece.find("\xEF\xBF\xBD"), std::string::npos);
    shown += piece;
  }
  EXPECT_EQ(shown, "é你");
  text.push(token_event(uint8_t('\x84'), FinishReason::length));
  EXPECT_EQ(text.take().text, "\xEF\xBF\xBD");
  EXPECT_EQ(text.finish(), FinishReason::length);
}

TEST(ChoiceText, AStopTokenCountsButIsNotShown) {
  const Tokenizer tokenizer = byte_tokenizer();
  for (const bool include : {false, true}) {
    ReplyOptions options{.include_stop = include, .stop_token_ids = {'b'}};
    ChoiceText text(tokenizer, std::make_shared<const ChoiceRules>(options));
    text.push(token_event('a'));
    text.push(token_event('b', FinishReason::stop));
    EXPECT_EQ(text.take().text, include ? "ab" : "a");
    EXPECT_EQ(text.num_tokens(), 2);
    EXPECT_EQ(text.stop_reason(), Json('b'));
  }
}

TEST(ChoiceText, MinTokensHoldForStopStrings) {
  const Tokenizer tokenizer = byte_tokenizer();
  ChoiceText text(tokenizer,
                  std::make_shared<const ChoiceRules>(ReplyOptions{.min_tokens = 3, .stop = {"ab"}}));
  std::string shown;
  for (const char c : std::string("abab")) {
    text.push(token_event(c));
    shown += text.take().text;
  }
  EXPECT_TRUE(text.done());
  EXPECT_EQ(shown, "ab");
  EXPECT_EQ(text.stop_reason(), Json("ab"));
}

TEST(Reply, UsageTellsOfFidelityOnlyWhenAsked) {
  const Tokenizer tokenizer = byte_tokenizer();
  const Usage usage{.prompt = 3,
                    .completion = 2,
                    .pairs_seen = 8,
                    .base_pairs_seen = 2,
                    .peak_base_fraction = 0.5,
                    .tainted = 4,
                    .preemptions = 1};
  for (const bool asked : {false, true}) {
    const ReplyWriter writer(tokenizer, {.include_usage = true, .kv_fidelity = asked}, "id", "m", 1);
    const std::string event = writer.usage_chunk(usage);
    for (const Json& reply :
         {Json::parse(writer.reply(Json::array(), usage)), Json::parse(event.substr(event.find('{')))}) {
      ASSERT_EQ(reply["usage"].contains("kv_fidelity"), asked);
      if (!asked) continue;
      const Json& told = reply["usage"]["kv_fidelity"];
      EXPECT_EQ(told["base_exposure"], 0.25);
      EXPECT_EQ(told["peak_base_fraction"], 0.5);
      EXPECT_EQ(told["tainted_tokens"], 4);
      EXPECT_EQ(told["preemptions"], 1);
    }
  }
}

// LOG-1: a parser that knows no infinity must read every reply.
TEST(Reply, MinusInfinityIsWrittenAsTheFloor) {
  const Tokenizer tokenizer = byte_tokenizer();
  const float impossible = -std::numeric_limits<float>::infinity();
  for (const bool chat : {false, true}) {
    ReplyOptions options{.chat = chat, .logprobs = 2};
    const ReplyWriter writer(tokenizer, options, "id", "m", 1);
    TextDelta delta{.text = "a", .token_ids = {}, .details = {}};
    delta.details.push_back({'a', {.chosen = {'a', -0.5f}, .top = {{'a', -0.5f}, {0xF0, impossible}}}, 0});
    const std::string reply =
        writer.reply(Json::array({writer.choice(0, delta, {FinishReason::stop, {}}, nullptr)}), {});
    const Json logprobs = Json::parse(reply)["choices"][0]["logprobs"];
    if (chat) {
      EXPECT_EQ(logprobs["content"][0]["logprob"], -0.5);
      EXPECT_EQ(logprobs["content"][0]["top_logprobs"][1]["logprob"], -9999.0);
      EXPECT_EQ(logprobs["content"][0]["top_logprobs"][1]["bytes"], Json::array({0xF0}));
    } else {
      EXPECT_EQ(logprobs["token_logprobs"], Json::array({-0.5}));
      EXPECT_EQ(logprobs["top_logprobs"][0], Json::parse(R"({"a":-0.5,"bytes:\\xf0":-9999.0})"));
    }
  }
}

}  // namespace
}  // namespace ekv
