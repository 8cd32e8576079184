// What clients of the two generating routes see: text, streams, stop strings, choices, logprobs, errors.

#include <gtest/gtest.h>

#include <future>
#include <set>

#include "tests/support/test_server.h"

namespace ekv::testing {
namespace {

// The server's answer to `body` with and without streaming must be one; returns the text of choice 0.
struct Both {
  std::string text, finish;
  Json stop_reason, usage;
};

Both run_both_ways(const TestServer& server, Json body) {
  const Json plain = server.complete(body).json();
  body["stream"] = true;
  body["stream_options"] = {{"include_usage", true}};
  const RawResponse streamed = server.complete(body);
  Both both;
  std::vector<std::string> events = sse_events(streamed.body);
  EXPECT_GE(events.size(), 3u) << streamed.body;
  EXPECT_EQ(events.back(), "[DONE]");
  events.pop_back();
  for (const std::string& text : events) {
    const Json event = Json::parse(text);
    if (event["choices"].empty()) {
      both.usage = event["usage"];
      continue;
    }
    EXPECT_TRUE(event["usage"].is_null());
    EXPECT_EQ(both.finish, "") << "a chunk after the finish chunk";
    both.text += event["choices"][0]["text"].get<std::string>();
    if (event["choices"][0]["finish_reason"].is_string()) both.finish = event["choices"][0]["finish_reason"];
    both.stop_reason = event["choices"][0]["stop_reason"];
  }
  EXPECT_EQ(both.text, plain["choices"][0]["text"]);
  EXPECT_EQ(both.finish, plain["choices"][0]["finish_reason"]);
  EXPECT_EQ(both.stop_reason, plain["choices"][0]["stop_reason"]);
  EXPECT_EQ(both.usage, plain["usage"]);
  return both;
}

const Json kGreedy{{"prompt", "Count: one two three"}, {"max_tokens", 24}, {"temperature", 0}};

Json greedy(const char* key, Json value) {
  Json body = kGreedy;
  body[key] = std::move(value);
  return body;
}

TEST(Completions, StreamedAndPlainAreTheExpectedText) {
  const TestServer server;
  const Both both = run_both_ways(server, kGreedy);
  EXPECT_EQ(both.text, server.expected_text("Count: one two three", 24));
  EXPECT_EQ(both.finish, "length");
  EXPECT_EQ(both.usage, Json::parse(R"({"prompt_tokens":20,"completion_tokens":24,"total_tokens":44})"));
}

// STR-1
TEST(Completions, AStopStringOverSeveralTokensNeverLeaks) {
  const TestServer server;
  const std::string text = server.expected_text("Count: one two three", 24);
  for (const size_t at : {0u, 1u, 7u, 18u}) {
    const std::string stop = text.substr(at, 4);
    const Both cut = run_both_ways(server, greedy("stop", stop));
    EXPECT_EQ(cut.text, text.substr(0, text.find(stop)));
    EXPECT_EQ(cut.finish, "stop");
    EXPECT_EQ(cut.stop_reason, stop);
    EXPECT_EQ(cut.usage["completion_tokens"], text.find(stop) + 4);
    Json included = greedy("stop", Json::array({stop}));
    included["include_stop_str_in_output"] = true;
    EXPECT_EQ(run_both_ways(server, included).text, text.substr(0, text.find(stop) + 4));
    const std::string near_miss = stop.substr(0, 3) + (stop[3] == 'Q' ? 'R' : 'Q');
    const Both whole = run_both_ways(server, greedy("stop", near_miss));
    EXPECT_EQ(whole.text, text);
    EXPECT_EQ(whole.finish, "length");
  }
}

TEST(Completions, AHeldBackTailIsFlushedBeforeTheFinish) {
  const TestServer server;
  const std::string text = server.expected_text("Count: one two three", 24);
  const Both both = run_both_ways(server, greedy("stop", text.substr(20, 4) + "\x01"));
  EXPECT_EQ(both.text, text);
  EXPECT_EQ(both.finish, "length");
}

// STR-5
TEST(Completions, ALimitInTheMiddleOfACharacterIsOneReplacementCharacter) {
  const TestServer server;
  for (const bool logprobs : {false, true}) {
    Json body{{"prompt", "x"}, {"max_tokens", 1}, {"logit_bias", {{"240", 100}}}};
    if (logprobs) body["logprobs"] = 1;
    const Both both = run_both_ways(server, body);
    EXPECT_EQ(both.text, "\xEF\xBF\xBD");
    EXPECT_EQ(both.finish, "length");
  }
}

// STR-3: a model that repeats a text of many-byte characters.
TEST(Completions, CharactersOfSeveralTokensAreNeverSplit) {
  TestServer server;
  const std::string text = "👩‍🚀 🇫🇷 é 你 한 𝄞";
  server.behaviour.next_token = [&](const SampleRow& row) {
    return TokenId(uint8_t(text[size_t(row.output_index) % text.size()]));
  };
  const Both both = run_both_ways(server, {{"prompt", "x"}, {"max_tokens", text.size()}});
  EXPECT_EQ(both.text, text);
}

// STR-6
TEST(Completions, UsageComesOnlyWhenAskedFor) {
  const TestServer server;
  for (const char* options : {"null", R"({"include_usage":false})"}) {
    Json body = greedy("stream", true);
    body["stream_options"] = Json::parse(options);
    EXPECT_EQ(server.complete(body).body.find("usage"), std::string::npos);
  }
  const RawResponse refused = server.complete(greedy("stream_options", {{"include_usage", true}}));
  EXPECT_EQ(refused.status, 400);
  EXPECT_EQ(refused.error()["param"], "stream_options");
  Json body = greedy("stream", true);
  body["stream_options"] = {{"include_usage", true}, {"continuous_usage_stats", true}};
  int64_t last = 0;
  std::vector<std::string> events = sse_events(server.complete(body).body);
  events.pop_back();
  for (const std::string& event : events) {
    const int64_t completion = Json::parse(event)["usage"]["completion_tokens"];
    EXPECT_GE(completion, last);
    last = completion;
  }
  EXPECT_EQ(last, 24);
}

TEST(Chat, TheRoleComesFirstAndTheFinishLast) {
  const TestServer server;
  const Json body{{"messages", Json::array({{{"role", "user"}, {"content", "hi"}}})},
                  {"stream", true},
                  {"temperature", 0},
                  {"max_tokens", 5}};
  const RawResponse response = server.post("/v1/chat/completions", body);
  EXPECT_EQ(response.header("Content-Type"), "text/event-stream");
  const std::vector<std::string> events = sse_events(response.body);
  ASSERT_EQ(events.size(), 1 + 5 + 1u);
  const Json first = Json::parse(events[0]);
  EXPECT_EQ(first["object"], "chat.completion.chunk");
  EXPECT_TRUE(first["id"].get<std::string>().starts_with("chatcmpl-"));
  EXPECT_EQ(first["choices"][0]["delta"], Json::parse(R"({"role":"assistant","content":""})"));
  std::string text;
  for (size_t i = 1; i + 1 < events.size(); ++i) {
    const Json choice = Json::parse(events[i])["choices"][0];
    text += choice["delta"]["content"].get<std::string>();
    EXPECT_EQ(choice["finish_reason"], i == 5 ? Json("length") : Json());
  }
  EXPECT_EQ(text, server.expected_text("[user] hi\n[assistant] ", 5));
  EXPECT_EQ(events.back(), "[DONE]");
}

// TPL-1 and TPL-6: what the prompt becomes, seen through its token count.
TEST(Chat, ContentOfAllShapesIsNormalisedAndOneBosIsWritten) {
  TestServerOptions options;
  options.adds_bos = true;
  const TestServer server(options);
  const auto prompt_tokens = [&](Json messages) {
    const RawResponse reply =
        server.post("/v1/chat/completions", Json{{"messages", std::move(messages)}, {"max_tokens", 1}});
    EXPECT_EQ(reply.status, 200) << reply.body;
    return reply.json()["usage"]["prompt_tokens"].get<int>();
  };
  const Json call{
      {"id", "c1"}, {"type", "function"}, {"function", {{"name", "f"}, {"arguments", "{\"x\":1}"}}}};
  const auto chat_with = [&](Json assistant) {
    return Json::array({{{"role", "user"}, {"content", "a"}},
                        assistant,
                        {{"role", "tool"}, {"tool_call_id", "c1"}, {"content", "42"}}});
  };
  const int expected = int(std::string("[user] a\n[assistant] \n[tool] 42\n[assistant] ").size());
  EXPECT_EQ(prompt_tokens(chat_with({{"role", "assistant"}, {"content", nullptr}, {"tool_calls", {call}}})),
            expected);
  EXPECT_EQ(prompt_tokens(chat_with({{"role", "assistant"}, {"tool_calls", {call}}})), expected);
  EXPECT_EQ(prompt_tokens(chat_with({{"role", "assistant"}, {"content", Json::array()}})), expected);
  const Json parts = Json::parse(R"([{"type":"text","text":"a"},{"type":"text","text":"b"}])");
  EXPECT_EQ(prompt_tokens(chat_with({{"role", "assistant"}, {"content", parts}})), expected + 3);
  const Json image =
      Json::parse(R"([{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://x/y.png"}}]}])");
  EXPECT_EQ(server.post("/v1/chat/completions", Json{{"messages", image}}).status, 400);
  EXPECT_EQ(server.complete({{"prompt", "Hi"}, {"max_tokens", 1}}).json()["usage"]["prompt_tokens"], 3);
  EXPECT_EQ(server.complete({{"prompt", "<s>Hi"}, {"max_tokens", 1}}).json()["usage"]["prompt_tokens"], 4);
}

// TPL-4
TEST(Chat, WhatTheTemplateRaisesIsTheCallersFault) {
  const TestServer server;
  const RawResponse bad = server.post("/v1/chat/completions",
                                      Json{{"messages", Json::array({{{"role", "tool"}, {"content", "42"}}})}});
  EXPECT_EQ(bad.status, 400);
  EXPECT_EQ(bad.error()["type"], "invalid_request_error");
  EXPECT_NE(bad.error()["message"].get<std::string>().find("tool messages need an id"), std::string::npos);
}

// An answer that the client has begun, `content`, which the prompt shows as `text`.
void expect_continued(const TestServer& server, const Json& content, const std::string& text) {
  const Json messages = {{{"role", "user"}, {"content", "a"}}, {{"role", "assistant"}, {"content", content}}};
  const Json reply = server
                         .post("/v1/chat/completions", Json{{"messages", messages},
                                                            {"continue_final_message", true},
                                                            {"echo", true},
                                                            {"temperature", 0},
                                                            {"max_tokens", 3}})
                         .json();
  EXPECT_EQ(reply["choices"][0]["message"]["content"],
            text + server.expected_text("[user] a\n[assistant] " + text, 3));
}

TEST(Chat, AFinalMessageIsContinued) {
  const TestServer server;
  // The template writes a line end behind each message, and names the speaker before it.
  for (const std::string content : {"Well ", "[", "assistant", "\n", "a\n\n", "] "}) {
    expect_continued(server, content, content);
  }
}

// Each choice holds a copy of its prompt: what one request may make the server hold has a bound.
TEST(Choices, CopiesOfAllPromptsTogetherAreBounded) {
  const TestServer server;
  const Json prompts(size_t(16), std::vector<int>(500, 65));
  const auto reply = server.post("/v1/completions", Json{{"prompt", prompts}, {"n", 1000}, {"max_tokens", 1}});
  EXPECT_EQ(reply.status, 400);
  EXPECT_EQ(reply.error()["param"], "n");
}

// SAM-3
TEST(Choices, ASeedFixesEachChoiceUnderLoadToo) {
  const TestServer server;
  const auto texts = [&](Json body) {
    const Json reply = server.complete(body).json();
    std::vector<std::string> out;
    for (const Json& choice : reply["choices"]) {
      EXPECT_EQ(choice["index"], out.size());
      out.push_back(choice["text"]);
    }
    return out;
  };
  for (const int64_t seed : {int64_t(42), int64_t(0), INT64_MAX}) {
    const Json body{{"prompt", "Once"}, {"temperature", 1}, {"seed", seed}, {"n", 4}, {"max_tokens", 20}};
    const std::vector<std::string> alone = texts(body);
    ASSERT_EQ(alone.size(), 4u);
    EXPECT_EQ(std::set(alone.begin(), alone.end()).size(), 4u);
    std::vector<std::future<std::vector<std::string>>> load;
    for (int i = 0; i < 8; ++i) load.push_back(std::async(std::launch::async, [&] { return texts(body); }));
    for (auto& one : load) EXPECT_EQ(one.get(), alone);
    Json single = body;
    single["n"] = 1;
    EXPECT_EQ(texts(single).at(0), alone[0]);
  }
  Json unseeded{{"prompt", "Once"}, {"temperature", 1}, {"max_tokens", 20}};
  EXPECT_NE(texts(unseeded), texts(unseeded));
  unseeded["seed"] = -1;
  EXPECT_NE(texts(unseeded), texts(unseeded));
}

TEST(Choices, PromptsAndChoicesAreNumberedAndStreamsCarryOneEach) {
  const TestServer server;
  Json body{{"prompt", {"a", "bb"}}, {"n", 3}, {"seed", 5}, {"max_tokens", 4}};
  const Json plain = server.complete(body).json();
  ASSERT_EQ(plain["choices"].size(), 6u);
  EXPECT_EQ(plain["usage"], Json::parse(R"({"prompt_tokens":3,"completion_tokens":24,"total_tokens":27})"));
  body["stream"] = true;
  std::vector<std::string> texts(6), events = sse_events(server.complete(body).body);
  events.pop_back();
  for (const std::string& event : events) {
    const Json chunk = Json::parse(event);
    ASSERT_EQ(chunk["choices"].size(), 1u);
    texts.at(chunk["choices"][0]["index"].get<size_t>()) += chunk["choices"][0]["text"].get<std::string>();
  }
  for (size_t i = 0; i < 6; ++i) EXPECT_EQ(texts[i], plain["choices"][i]["text"]);
}

TEST(Echo, ThePromptComesFirstAndCanBeScoredAlone) {
  const TestServer server;
  const std::string text = server.expected_text("ab", 2);
  EXPECT_EQ(
      run_both_ways(server, {{"prompt", "ab"}, {"echo", true}, {"temperature", 0}, {"max_tokens", 2}}).text,
      "ab" + text);
  EXPECT_EQ(server.complete({{"prompt", {97, 98}}, {"echo", true}, {"max_tokens", 1}, {"temperature", 0}})
                .json()["choices"][0]["text"],
            "ab" + text.substr(0, 1));
  const Json scored =
      server.complete({{"prompt", "abc"}, {"echo", true}, {"max_tokens", 0}, {"logprobs", 2}}).json();
  EXPECT_EQ(scored["choices"][0]["text"], "abc");
  EXPECT_EQ(scored["usage"]["completion_tokens"], 0);
  const Json logprobs = scored["choices"][0]["logprobs"];
  EXPECT_EQ(logprobs["tokens"], Json::parse(R"(["a","b","c"])"));
  EXPECT_EQ(logprobs["text_offset"], Json::parse("[0,1,2]"));
  EXPECT_EQ(logprobs["token_logprobs"], Json::parse("[null,-0.5,-0.5]"));
  EXPECT_TRUE(logprobs["top_logprobs"][0].is_null());
}

// The echo, the token ids and the offsets are of the prompt that the model saw.
TEST(Echo, ATruncatedPromptIsEchoedAsItIsTruncated) {
  const TestServer server;
  for (const bool left : {true, false}) {
    const Json body{{"prompt", "abcdef"},
                    {"truncate_prompt_tokens", 3},
                    {"truncation_side", left ? "left" : "right"},
                    {"echo", true},
                    {"logprobs", 0},
                    {"temperature", 0},
                    {"max_tokens", 2}};
    const std::string seen = left ? "def" : "abc";
    const Json choice = server.complete(body).json()["choices"][0];
    EXPECT_EQ(choice["text"], seen + server.expected_text(seen, 2));
    EXPECT_EQ(choice["logprobs"]["text_offset"], Json::parse("[0,1,2,3,4]"));
  }
}

TEST(Echo, AContinuedMessageIsEchoedWhateverItsShape) {
  const TestServer server;
  const std::pair<Json, std::string> contents[] = {
      {"Well", "Well"},
      {Json::parse(R"([{"type":"text","text":"Well"}])"), "Well"},
      {Json::parse(R"([{"type":"text","text":"Well"},{"type":"text","text":"now"}])"), "Well\nnow"}};
  for (const auto& [content, text] : contents) {
    expect_continued(server, content, text);
  }
}

// LOG-1 over the wire: impossible alternatives, strict JSON, complete arrays.
TEST(Logprobs, EveryTokenHasItsEntry) {
  const TestServer server;
  Json body{{"prompt", "correct horse"}, {"echo", true}, {"logprobs", 5}, {"max_tokens", 4}};
  const RawResponse response = server.complete(body);
  ASSERT_FALSE(response.json().is_discarded()) << response.body;
  const Json logprobs = response.json()["choices"][0]["logprobs"];
  EXPECT_EQ(logprobs["tokens"].size(), 13 + 4u);
  EXPECT_EQ(logprobs["top_logprobs"].size(), 17u);
  EXPECT_NE(response.body.find("-9999.0"), std::string::npos);
  const Json chat =
      server
          .post("/v1/chat/completions", Json{{"messages", Json::array({{{"role", "user"}, {"content", "hi"}}})},
                                             {"logprobs", true},
                                             {"top_logprobs", 20},
                                             {"max_tokens", 4}})
          .json();
  const Json content = chat["choices"][0]["logprobs"]["content"];
  ASSERT_EQ(content.size(), 4u);
  EXPECT_EQ(content[0]["top_logprobs"].size(), 20u);
  EXPECT_EQ(content[0]["top_logprobs"][19]["logprob"], -9999.0);
}

TEST(Logprobs, PromptLogprobsStandBesideTheReply) {
  const TestServer server;
  const Json reply = server.complete({{"prompt", "abc"}, {"prompt_logprobs", 1}, {"max_tokens", 1}}).json();
  const Json list = reply["choices"][0]["prompt_logprobs"];
  ASSERT_EQ(list.size(), 3u);
  EXPECT_TRUE(list[0].is_null());
  EXPECT_EQ(list[1]["98"]["logprob"], -0.5);
  EXPECT_EQ(list[1]["98"]["decoded_token"], "b");
  EXPECT_EQ(list[1]["98"]["rank"], 1);
  const Json alone = server.complete({{"prompt", "abc"}, {"prompt_logprobs", 0}, {"max_tokens", 1}}).json();
  EXPECT_EQ(alone["choices"][0]["prompt_logprobs"][1]["98"]["rank"], kFakeRank);  // outside the list
}

TEST(Tokens, IdsComeBackWhenAskedFor) {
  const TestServer server;
  const Json reply = server.complete(greedy("return_token_ids", true)).json();
  EXPECT_EQ(reply["choices"][0]["token_ids"].size(), 24u);
  EXPECT_EQ(reply["choices"][0]["prompt_token_ids"].size(), 20u);
}

// CFG-3
TEST(StopTokens, EndOfTextEndsUnlessItIsIgnored) {
  const TestServer server;
  Json body{{"prompt", "x"}, {"max_tokens", 3}, {"logit_bias", {{"256", 100}}}};
  const Both ended = run_both_ways(server, body);
  EXPECT_EQ(ended.text, "");
  EXPECT_EQ(ended.finish, "stop");
  EXPECT_TRUE(ended.stop_reason.is_null());
  EXPECT_EQ(ended.usage["completion_tokens"], 1);
  body["ignore_eos"] = true;
  EXPECT_EQ(run_both_ways(server, body).usage["completion_tokens"], 3);
  const Both own =
      run_both_ways(server, {{"prompt", "x"}, {"logit_bias", {{"65", 100}}}, {"stop_token_ids", {65}}});
  EXPECT_EQ(own.text, "");
  EXPECT_EQ(own.stop_reason, 65);
}

// Lists that no device has room for, and the largest that are allowed.
TEST(Errors, AListThatIsTooLongIsNamed) {
  const TestServer server;
  Json bias = Json::object();
  for (int i = 0; i < 10000; ++i) bias[std::to_string(i)] = 0.5;
  const std::vector<std::string> stops(100, std::string(5000, 'x'));
  const std::vector<std::pair<const char*, Json>> lists = {{"logit_bias", bias},
                                                           {"stop", stops},
                                                           {"stop", stops[0]},
                                                           {"stop_token_ids", std::vector<int>(10000, 7)}};
  for (const auto& [field, value] : lists) {
    const RawResponse bad = server.complete({{"prompt", "x"}, {field, value}});
    EXPECT_EQ(bad.status, 400) << field;
    EXPECT_EQ(bad.error()["param"], field);
    const std::string message = bad.error()["message"];
    EXPECT_NE(message.find(fmt::format("'{}'", field)), std::string::npos) << message;
    EXPECT_NE(message.find("allowed"), std::string::npos) << message;
  }
  Json full = Json::object();
  for (int i = 0; i < 260; ++i) full[std::to_string(i)] = 0.5;
  const std::vector<std::string> four(4, std::string(4096, 'x'));
  const RawResponse good = server.complete(
      {{"prompt", "x"}, {"logit_bias", full}, {"stop", four}, {"stop_token_ids", std::vector<int>(1024, 7)}});
  EXPECT_EQ(good.status, 200) << good.body;
}

// PAR-1 over the wire, with a control request before and after.
TEST(Errors, ABadTokenIdHurtsNobody) {
  const TestServer server;
  const Json control{{"prompt", "The sea is"}, {"max_tokens", 8}, {"temperature", 0}};
  const std::string before = server.complete(control).json()["choices"][0]["text"];
  for (const char* bias : {R"({"260":5})", R"({"-1":5})", R"({"99999999999":1})", R"({"abc":1})",
                           R"({"5":101})", R"({"5":"x"})"}) {
    const RawResponse bad = server.complete({{"prompt", "x"}, {"logit_bias", Json::parse(bias)}});
    EXPECT_EQ(bad.status, 400) << bias;
    EXPECT_EQ(bad.error()["type"], "invalid_request_error");
    EXPECT_EQ(bad.error()["param"], "logit_bias");
    EXPECT_EQ(bad.error()["code"], 400);
  }
  EXPECT_EQ(server.complete({{"prompt", "x"}, {"logit_bias", {{"259", 100}}}}).status, 200);  // padding
  const std::string banned = std::to_string(int(uint8_t(before[0])));
  Json ban = control;
  ban["logit_bias"] = {{banned, -100}};
  EXPECT_NE(server.complete(ban).json()["choices"][0]["text"].get<std::string>()[0], before[0]);
  EXPECT_EQ(server.complete(control).json()["choices"][0]["text"], before);
}

// PAR-3
TEST(Errors, AnEmptyPromptNeedsABos) {
  const TestServer without;
  TestServerOptions options;
  options.adds_bos = true;
  const TestServer with(options);
  for (const char* prompt : {R"("")", R"([""])", R"(["","hi"])", "[]"}) {
    const Json body{{"prompt", Json::parse(prompt)}, {"max_tokens", 1}};
    EXPECT_EQ(without.complete(body).status, 400) << prompt;
    EXPECT_EQ(with.complete(body).status, std::string(prompt) == "[]" ? 400 : 200) << prompt;
  }
  EXPECT_EQ(with.complete({{"prompt", ""}, {"max_tokens", 1}}).json()["usage"]["prompt_tokens"], 1);
  const Json chat{{"messages", Json::array({{{"role", "user"}, {"content", ""}}})}, {"max_tokens", 1}};
  EXPECT_EQ(without.post("/v1/chat/completions", chat).status, 200);
}

// PAR-7 over the wire, for a context of 512 tokens.
TEST(Errors, PromptsAtTheEdgeOfTheContext) {
  const TestServer server;
  const auto run = [&](int length, Json max_tokens) {
    const Json body{
        {"prompt", std::vector<int>(size_t(length), 65)}, {"max_tokens", max_tokens}, {"ignore_eos", true}};
    return server.complete(body);
  };
  EXPECT_EQ(run(511, 1).json()["usage"]["completion_tokens"], 1);
  EXPECT_EQ(run(507, 6).json()["usage"]["completion_tokens"], 5);  // documented: cut to what fits
  EXPECT_EQ(run(507, nullptr).json()["choices"][0]["finish_reason"], "length");
  for (const int length : {512, 513, 5120}) {
    const RawResponse refused = run(length, 1);
    EXPECT_EQ(refused.status, 400);
    EXPECT_EQ(refused.error()["code"], "context_length_exceeded");
    EXPECT_EQ(refused.error()["param"], "prompt");
  }
}

// SCH-1: inside the context but over the pool.
TEST(Errors, WhatCanNeverFitIsRefusedAtOnce) {
  TestServerOptions options;
  options.num_pages = 8;
  const TestServer server(options);
  const RawResponse refused = server.complete({{"prompt", std::string(200, 'a')}, {"max_tokens", 1}});
  EXPECT_EQ(refused.status, 400);
  EXPECT_EQ(server.complete({{"prompt", "small"}, {"max_tokens", 1}}).status, 200);
}

TEST(Errors, BrokenLogitsFailTheirRequestOnly) {
  TestServer server;
  server.behaviour.poison = true;
  const RawResponse plain = server.complete(kGreedy);
  EXPECT_EQ(plain.status, 500);
  EXPECT_EQ(plain.error()["type"], "server_error");
  EXPECT_EQ(server.complete(greedy("stream", true)).status, 500);  // nothing was sent yet: a real status
  server.behaviour.poison = false;
  EXPECT_EQ(server.complete(kGreedy).status, 200);
}

TEST(Errors, AFailureInsideAStreamIsToldInTheStream) {
  TestServer server;
  server.behaviour.steps_allowed = 3;
  RawHttp client(server.port());
  Json body = greedy("stream", true);
  body["max_tokens"] = 400;
  client.send(http_request("POST", "/v1/completions", dump_json(body)));
  EXPECT_EQ(client.read_head().status, 200);
  ASSERT_TRUE(client.next_chunk());
  server.behaviour.poison = true;
  server.behaviour.steps_allowed = FakeBehaviour::kEndless;
  std::string rest;
  for (auto chunk = client.next_chunk(); chunk && !chunk->empty(); chunk = client.next_chunk()) rest += *chunk;
  const std::vector<std::string> events = sse_events(rest);
  ASSERT_GE(events.size(), 2u);
  EXPECT_EQ(events.back(), "[DONE]");
  EXPECT_EQ(Json::parse(events[events.size() - 2])["error"]["code"], 500);
}

}  // namespace
}  // namespace ekv::testing
