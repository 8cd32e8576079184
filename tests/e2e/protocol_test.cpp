// HTTP itself: routes, methods, bodies, limits, keep-alive, pipelining, CORS, keys, ids.

#include <gtest/gtest.h>

#include <chrono>

#include "tests/support/test_server.h"

namespace ekv::testing {
namespace {

const Json kSmall{{"prompt", "The sea is"}, {"max_tokens", 3}, {"temperature", 0}};

std::string small_post(const RawHeaders& headers = {{"Content-Type", "application/json"}}) {
  return http_request("POST", "/v1/completions", dump_json(kSmall), headers);
}

void expect_error(const RawResponse& response, int status, const std::string& about) {
  EXPECT_EQ(response.status, status) << about << ": " << response.body;
  const Json error = response.error();
  ASSERT_TRUE(error.is_object()) << about << ": " << response.body;
  for (const char* key : {"message", "type", "param", "code"})
    EXPECT_TRUE(error.contains(key)) << about << ": " << key;
  EXPECT_TRUE(error["message"].is_string() && error["type"].is_string()) << about;
}

// PAR-11
TEST(Routes, EveryMistakeIsA4xxWithTheErrorObject) {
  const TestServer server;
  for (const char* body : {"", "null", "[]", "{", "{}", "3", "\"x\"", "{\"prompt\":\"a\"}x"})
    expect_error(server.post("/v1/completions", std::string(body)), 400, body);
  for (const char* messages : {"[]", "\"x\"", "[null]", R"([{"role":"user"}])", R"([{"role":1,"content":"x"}])",
                               R"([{"role":"wizard","content":"x"}])"})
    expect_error(server.post("/v1/chat/completions", "{\"messages\":" + std::string(messages) + "}"), 400,
                 messages);
  for (const char* field : {R"("n":0)", R"("n":-1)", R"("n":1.5)", R"("n":1000000)", R"("stream":"yes")"})
    expect_error(server.post("/v1/completions", R"({"prompt":"a",)" + std::string(field) + "}"), 400, field);
  expect_error(server.post("/v1/completions", std::string(R"({"prompt":"a","model":"nope"})")), 404, "model");
  expect_error(server.send(small_post({{"Content-Type", "text/plain"}})), 415, "text/plain");
  const RawResponse wrong_method = server.get("/v1/completions");
  expect_error(wrong_method, 405, "GET on a POST route");
  EXPECT_EQ(wrong_method.header("Allow"), "POST");
  expect_error(server.send(http_request("DELETE", "/v1/models")), 405, "DELETE");
  expect_error(server.get("/nowhere"), 404, "unknown route");
  expect_error(server.post("/v1/embeddings", std::string("{}")), 404, "absent route");
  expect_error(server.get("/v1/models/nope"), 404, "unknown model");
  EXPECT_EQ(
      server.post("/v1/completions", std::string(R"({"prompt":"a","max_tokens":1,"foo":{"bar":1}})")).status,
      200);
}

TEST(Routes, InformationIsThere) {
  const TestServer server;
  const Json models = server.get("/v1/models").json();
  EXPECT_EQ(models["object"], "list");
  ASSERT_EQ(models["data"].size(), 2u);
  EXPECT_EQ(models["data"][0]["id"], "fake");
  EXPECT_EQ(models["data"][0]["max_model_len"], 512);
  EXPECT_EQ(server.get("/v1/models/alias").json()["id"], "alias");
  EXPECT_EQ(server.get("/health").status, 200);
  EXPECT_EQ(server.get("/ping").status, 200);
  EXPECT_EQ(server.get("/version").json(), Json::parse(R"({"version":"test"})"));
  EXPECT_EQ(server.get("/load").json(), Json::parse(R"({"server_load":0})"));
  EXPECT_EQ(server.post("/reset_prefix_cache", std::string()).status, 200);
  const RawResponse metrics = server.get("/metrics");
  EXPECT_TRUE(metrics.header("Content-Type").starts_with("text/plain; version=0.0.4"));
  RawHttp head(server.port());
  head.send(http_request("HEAD", "/health", {}, {}));
  EXPECT_EQ(head.read_head().status, 200);
}

TEST(Routes, TokensGoBothWays) {
  TestServerOptions options;
  options.adds_bos = true;
  const TestServer server(options);
  const Json plain =
      server.post("/tokenize", std::string(R"({"prompt":"ab","return_token_strs":true})")).json();
  EXPECT_EQ(plain, Json::parse(
                       R"({"count":3,"max_model_len":512,"tokens":[257,97,98],"token_strs":["<s>","a","b"]})"));
  EXPECT_EQ(
      server.post("/tokenize", std::string(R"({"prompt":"ab","add_special_tokens":false})")).json()["count"],
      2);
  const Json chat =
      server.post("/tokenize", std::string(R"({"messages":[{"role":"user","content":"x"}]})")).json();
  EXPECT_EQ(chat["count"], std::string("[user] x\n[assistant] ").size());
  EXPECT_EQ(server.post("/detokenize", std::string(R"({"tokens":[97,98]})")).json(),
            Json::parse(R"({"prompt":"ab"})"));
  for (const char* body : {"{}", R"({"tokens":[260]})", R"({"tokens":"a"})", R"({"tokens":[-1]})", "[]"})
    expect_error(server.post("/detokenize", std::string(body)), 400, body);
  for (const char* body : {"{}", R"({"prompt":3})", R"({"prompt":["a"]})", R"({"messages":[]})"})
    expect_error(server.post("/tokenize", std::string(body)), 400, body);

  // A text beyond the context is counted, one of more bytes than any context of so many tokens is not.
  const auto tokenize = [&](size_t bytes) {
    return server.post("/tokenize", Json{{"prompt", std::string(bytes, 'a')}});
  };
  EXPECT_EQ(tokenize(5000).json()["count"], 5001);
  EXPECT_EQ(tokenize(512 << 10).json()["count"], (512 << 10) + 1);
  const RawResponse refused = tokenize((512 << 10) + 1);
  expect_error(refused, 400, "too many bytes");
  EXPECT_EQ(refused.error()["param"], "prompt");
}

// HTTP-1
TEST(Expect, GoodBodiesAreAskedForAndBadOnesRefusedWithout) {
  TestServerOptions options;
  options.service.http.max_body_bytes = 4 << 20;
  options.service.routes.api_keys = {"key"};
  const TestServer server(options);
  const std::string body = R"({"prompt":"x","max_tokens":1,"pad":")" + std::string(2 << 20, 'p') + "\"}";
  const auto head = [&](const std::string& version, const std::string& key, size_t length) {
    return "POST /v1/completions " + version +
           "\r\nHost: t\r\nContent-Type: application/json\r\nAuthorization: Bearer " + key +
           "\r\nExpect: 100-continue\r\nContent-Length: " + std::to_string(length) + "\r\n\r\n";
  };
  RawHttp good(server.port());
  good.send(head("HTTP/1.1", "key", body.size()));
  EXPECT_EQ(good.read_until("\r\n\r\n"), "HTTP/1.1 100 Continue\r\n\r\n");
  good.send(body);
  EXPECT_EQ(good.read_response().status, 200);
  RawHttp unknown(server.port());
  unknown.send(head("HTTP/1.1", "wrong", body.size()));
  expect_error(unknown.read_response(), 401, "bad key");
  EXPECT_EQ(unknown.read_all(), "");  // and the connection ends
  RawHttp large(server.port());
  large.send(head("HTTP/1.1", "key", 5 << 20));
  expect_error(large.read_response(), 413, "over the limit");
  RawHttp old(server.port());
  old.send(head("HTTP/1.0", "key", body.size()) + body);
  EXPECT_EQ(old.read_response().status, 200);
}

// HTTP-3
TEST(Pipelining, RequestsInOnePacketAreAllAnswered) {
  const TestServer server;
  const std::string get = http_request("GET", "/v1/models", {}, {});
  RawHttp twice(server.port());
  twice.send(get + get);
  EXPECT_EQ(twice.read_response().status, 200);
  EXPECT_EQ(twice.read_response().json()["object"], "list");
  RawHttp mixed(server.port());
  mixed.send(small_post() + get + small_post());
  EXPECT_EQ(mixed.read_response().json()["object"], "text_completion");
  EXPECT_EQ(mixed.read_response().json()["object"], "list");
  EXPECT_EQ(mixed.read_response().json()["object"], "text_completion");
}

TEST(Pipelining, ARequestMayArriveInAnyTwoPieces) {
  const TestServer server;
  const std::string post = small_post();
  RawHttp client(server.port());
  for (size_t at = 1; at < post.size(); ++at) {
    client.send(post.substr(0, at));
    if (at % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));
    client.send(post.substr(at));
    ASSERT_EQ(client.read_response().status, 200) << "split at byte " << at;
  }
}

// HTTP-5
TEST(Bodies, FormsAndJsonOfAnySizeActTheSame) {
  TestServerOptions options;
  options.service.http.max_body_bytes = 100000;
  const TestServer server(options);
  const auto sized = [](size_t size) {
    std::string body = R"({"prompt":"x","max_tokens":1,"pad":")";
    return body + std::string(size - body.size() - 2, 'p') + "\"}";
  };
  const RawHeaders form{{"Content-Type", "application/x-www-form-urlencoded"}};
  for (const size_t size : {100u, 20000u}) {
    const RawResponse refused = server.send(http_request("POST", "/v1/completions", sized(size), form));
    expect_error(refused, 415, "a form");
    EXPECT_NE(refused.body.find("Content-Type"), std::string::npos);
    EXPECT_EQ(server.post("/v1/completions", sized(size)).status, 200);
  }
  EXPECT_EQ(server.send(http_request("POST", "/v1/completions", sized(20000), {})).status,
            200);  // no type at all
  EXPECT_EQ(server.post("/v1/completions", sized(100000)).status, 200);
  expect_error(server.post("/v1/completions", sized(100001)), 413, "one byte over");
  RawHttp liar(server.port());
  liar.send(
      "POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
      "Content-Length: 99999999999\r\n\r\n");
  expect_error(liar.read_response(), 413, "a giant without a body");
}

TEST(Bodies, ChunkedOnesAreLimitedAndTheConnectionStaysInStep) {
  TestServerOptions options;
  options.service.http.max_body_bytes = 100000;
  const TestServer server(options);
  const std::string head =
      "POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nTransfer-Encoding: "
      "chunked\r\n\r\n";
  const std::string body = dump_json(kSmall);
  char size[32];
  std::snprintf(size, sizeof(size), "%zx\r\n", body.size());
  RawHttp good(server.port());
  good.send(head + size + body + "\r\n0\r\n\r\n" + http_request("GET", "/version", {}, {}));
  EXPECT_EQ(good.read_response().status, 200);
  EXPECT_EQ(good.read_response().json()["version"], "test");
  RawHttp bad(server.port());
  bad.send(head);
  for (int i = 0; i < 11; ++i) bad.send("2710\r\n" + std::string(10000, ' ') + "\r\n");
  expect_error(bad.read_response(), 413, "chunked over the limit");
  EXPECT_EQ(bad.read_all(), "");  // closed, not taken for the next request
  RawHttp broken(server.port());
  broken.send(head + "zz\r\n");
  expect_error(broken.read_response(), 400, "not a chunk size");
}

std::string chunked_post(const std::string& chunks) {
  return "POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nTransfer-Encoding: "
         "chunked\r\n\r\n" +
         chunks;
}

// RFC 9112, 7.1: extensions and trailers are read and dropped; what follows is the next request.
TEST(Bodies, ChunksMayHaveExtensionsAndTrailers) {
  const TestServer server;
  const std::string body = dump_json(kSmall), half = body.substr(0, 10), rest = body.substr(10);
  char head[2][32];
  std::snprintf(head[0], sizeof(head[0]), "%zx", half.size());
  std::snprintf(head[1], sizeof(head[1]), "000%zX", rest.size());
  for (const std::string extension : {"", ";a=b", " ; quoted=\"x\""})
    for (const std::string trailers : {"", "X-Sum: 1\r\n", "A: 1\r\nB: \r\nContent-Length: 7\r\n"}) {
      RawHttp client(server.port());
      client.send(chunked_post(head[0] + extension + "\r\n" + half + "\r\n" + head[1] + extension + "\r\n" +
                               rest + "\r\n0" + extension + "\r\n" + trailers + "\r\n") +
                  http_request("GET", "/version", {}, {}));
      EXPECT_EQ(client.read_response().status, 200) << extension << trailers;
      EXPECT_EQ(client.read_response().json()["version"], "test") << extension << trailers;
    }
}

TEST(Bodies, BrokenChunksAreRefusedAtOnce) {
  const TestServer server;
  for (const std::string chunks : {"-5\r\n", "0x\r\n", "0x5\r\n", "+5\r\n", " 5\r\n", "\r\n", "zz\r\n",
                                   "5 5\r\n", "5\nhello\r\n0\r\n\r\n", "5\r\nhello5\r\n", "2\r\n{}\n0\r\n\r\n",
                                   "10000000000000000\r\n", "1\r\n{\r\n0\r\nno trailer\r\n\r\n"}) {
    RawHttp client(server.port());
    client.send(chunked_post(chunks));
    expect_error(client.read_response(), 400, chunks);
  }
  for (const std::string& chunks : {"5;" + std::string(1 << 20, 'e'), "0\r\nA: " + std::string(1 << 20, 't')}) {
    RawHttp client(server.port());
    client.send(chunked_post(chunks));
    const RawResponse refused = client.read_response();
    EXPECT_TRUE(refused.status == 400) << refused.status;
  }
  RawHttp huge(server.port());
  huge.send(chunked_post("ffffffffffffffff\r\n"));
  expect_error(huge.read_response(), 413, "a chunk over the limit is refused by its size");
}

TEST(Bodies, AmbiguousOrCodedLengthsAreRefused) {
  const TestServer server;
  const auto send = [&](const std::string& headers) {
    return server.send("POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n" +
                       headers + "\r\n0\r\n\r\n");
  };
  expect_error(send("Content-Length: 5\r\nTransfer-Encoding: chunked\r\n"), 400, "both lengths");
  expect_error(send("Content-Length: 5\r\nContent-Length: 6\r\n"), 400, "two lengths");
  expect_error(send("Content-Length: -5\r\n"), 400, "negative");
  expect_error(send("Content-Length: 5x\r\n"), 400, "no number");
  expect_error(send("Transfer-Encoding: gzip\r\n"), 400, "unknown coding");
  expect_error(send("Content-Encoding: gzip\r\nContent-Length: 5\r\n"), 415, "compressed");
  expect_error(send(""), 400, "no length is an empty body");
}

TEST(Heads, MalformedAndOversizedOnesAreRefused) {
  const TestServer server;
  expect_error(server.send("NONSENSE\r\n\r\n"), 400, "no request line");
  expect_error(server.send("GET /" + std::string(9000, 'a') + " HTTP/1.1\r\n\r\n"), 414, "long target");
  for (const size_t size : {9000, 70000, 1 << 20})
    expect_error(server.send(http_request("GET", "/v1/models", {}, {{"X-Request-Id", std::string(size, 'i')}})),
                 431, "a long header");
  expect_error(
      server.send(http_request("GET", "/v1/models", {}, RawHeaders(2000, {"X-Many", "of these lines"}))), 431,
      "many headers");
  EXPECT_EQ(server.get("/health").status, 200);
}

// RFC 9112: what two parties could read differently is refused, and the connection ends.
TEST(Heads, StrictWhereItMattersAndNoFurther) {
  const TestServer server;
  const std::pair<std::string, int> heads[] = {
      {"GET /version HTTP/1.1\r\n\r\n", 400},  // 3.2: no Host
      {"GET /version HTTP/1.0\r\n\r\n", 200},
      {"GET /version HTTP/1.1\r\nHost:\r\n\r\n", 200},
      {"GET /version HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", 400},
      {"GET /version HTTP/1.1\r\nHost: a b\r\n\r\n", 400},
      {"GET /version HTTP/1.1\r\nHost: a\r\nX : a\r\n\r\n", 400},  // 5.1: space before the colon
      {"GET /version HTTP/1.1\r\nHost: a\r\nno colon\r\n\r\n", 400},
      {"GET /version HTTP/1.1\r\nHost: a\r\n: a\r\n\r\n", 400},
      {"GET /version HTTP/1.1\r\nHost: a\r\nX: a\r\n b\r\n\r\n", 400},  // 5.2: folded
      {"GET /version HTTP/1.1\r\nHost: a\r\nX: a\nY: b\r\n\r\n", 400},  // 2.2: bare LF and CR
      {"GET /version HTTP/1.1\r\nHost: a\r\nX: a\rY: b\r\n\r\n", 400},
      {"GET /version HTTP/1.1\nHost: a\n\n\r\n\r\n", 400},
      {std::string("GET /version HTTP/1.1\r\nHost: a\r\nX: \0\r\n\r\n", 40), 400},
      {"GET /version HTTP/1.1\r\nHost:a\r\nX:\t a b \t\r\nY:\r\n\r\n", 200},
      {"\r\nGET /version HTTP/1.1\r\nHost: a\r\n\r\n", 200},         // 2.2: an empty line before the request
      {"GET http://a:80/version HTTP/1.1\r\nHost: a\r\n\r\n", 200},  // 3.2.2: absolute form
      {"GET HTTP://a/version?x=1 HTTP/1.1\r\nHost: b\r\n\r\n", 200},
      {"GET http://a HTTP/1.1\r\nHost: a\r\n\r\n", 404},
      {"GET version HTTP/1.1\r\nHost: a\r\n\r\n", 400},
      {"GET  /version HTTP/1.1\r\nHost: a\r\n\r\n", 400},
      {"GET /version HTTP/1.1 \r\nHost: a\r\n\r\n", 400},
      {"GET /version HTTP/2.0\r\nHost: a\r\n\r\n", 505},
      {"GET /version\r\n\r\n", 400},
      {"BREW /version HTTP/1.1\r\nHost: a\r\n\r\n", 501},
  };
  for (const auto& [head, status] : heads) {
    RawHttp client(server.port());
    client.send(head);
    const RawResponse response = client.read_response();
    if (status == 200)
      EXPECT_EQ(response.status, 200) << head;
    else
      expect_error(response, status, head);
    if (status == 505) {
      EXPECT_EQ(response.error()["type"], "invalid_request_error");
    }
    if (status == 400) {
      EXPECT_EQ(client.read_all(), "") << head;  // and the connection ends
    }
  }
}

// RFC 9110, 7.6.1: a list of options, whatever their case.
TEST(Heads, AnyCloseInConnectionCloses) {
  const TestServer server;
  const auto closes = [&](const RawHeaders& headers) {
    RawHttp client(server.port());
    client.send(http_request("GET", "/version", {}, headers) + http_request("GET", "/version", {}, {}));
    EXPECT_EQ(client.read_response().status, 200);
    return client.read_response().status == 0;
  };
  EXPECT_TRUE(closes({{"Connection", "keep-alive, close"}}));
  EXPECT_TRUE(closes({{"Connection", "Close ,x"}}));
  EXPECT_TRUE(closes({{"Connection", "x"}, {"connection", "close"}}));
  EXPECT_FALSE(closes({{"Connection", "keep-alive"}}));
  EXPECT_FALSE(closes({{"Connection", "closed, enclose"}}));
}

TEST(Replies, AreNeverCompressedNorCutIntoRanges) {
  const TestServer server;
  const RawResponse reply = server.send(
      http_request("GET", "/metrics", {}, {{"Accept-Encoding", "gzip, br"}, {"Range", "bytes=0-9"}}));
  EXPECT_EQ(reply.status, 200);
  EXPECT_EQ(reply.header("Content-Encoding"), "");
  EXPECT_TRUE(reply.body.starts_with("# HELP"));
}

// HTTP-7
TEST(Json, BytesThatAreNotUtf8AreRefusedInCleanWords) {
  const TestServer server;
  const auto prompt = [](const std::string& bytes) {
    return "{\"prompt\":\"" + bytes + "\",\"max_tokens\":1}";
  };
  for (const std::string bytes : {"\xFF\xFE", "\xC4\xE3\xBA\xC3", "\xC0\x80", "\xED\xA0\xBD", "\xE4\xBD"}) {
    const RawResponse refused = server.post("/v1/completions", prompt(bytes));
    expect_error(refused, 400, "invalid UTF-8");
    EXPECT_TRUE(is_utf8(refused.body));
  }
  for (const char* escape : {"\\ud83d", "\\ude00\\ud83d"})
    expect_error(server.post("/v1/completions", prompt(escape)), 400, escape);
  EXPECT_EQ(server.post("/v1/completions", "\xEF\xBB\xBF" + prompt("x")).status, 200);  // a byte order mark
  expect_error(server.post("/v1/completions", std::string("\xFF\xFE{\0}\0", 6)), 400, "UTF-16");
  expect_error(server.post("/v1/completions", std::string(10000, '[')), 400, "deep nesting");
  EXPECT_EQ(server.get("/health").status, 200);
}

// HTTP-9
TEST(Cors, PreflightNeedsNoKeyAndNamesAuthorization) {
  TestServerOptions options;
  options.service.routes.api_keys = {"key"};
  const TestServer server(options);
  const RawHeaders ask{{"Origin", "http://app.test"},
                       {"Access-Control-Request-Method", "POST"},
                       {"Access-Control-Request-Headers", "authorization,content-type"}};
  const RawResponse preflight = server.send(http_request("OPTIONS", "/v1/chat/completions", {}, ask));
  EXPECT_EQ(preflight.status, 204);
  EXPECT_EQ(preflight.header("Access-Control-Allow-Origin"), "*");
  EXPECT_NE(preflight.header("Access-Control-Allow-Methods").find("POST"), std::string::npos);
  EXPECT_NE(preflight.header("Access-Control-Allow-Headers").find("authorization"), std::string::npos);
  EXPECT_EQ(preflight.header("Access-Control-Allow-Credentials"), "");
  RawHeaders with_key{
      {"Content-Type", "application/json"}, {"Origin", "http://app.test"}, {"Authorization", "Bearer key"}};
  EXPECT_EQ(server.send(small_post(with_key)).header("Access-Control-Allow-Origin"), "*");
  Json stream = kSmall;
  stream["stream"] = true;
  const RawResponse streamed =
      server.send(http_request("POST", "/v1/completions", dump_json(stream), with_key));
  EXPECT_EQ(streamed.header("Access-Control-Allow-Origin"), "*");
  with_key.back().second = "Bearer wrong";
  const RawResponse refused = server.send(small_post(with_key));
  expect_error(refused, 401, "bad key");
  EXPECT_EQ(refused.header("Access-Control-Allow-Origin"), "*");
}

TEST(Cors, OnlyListedOriginsWhenThereIsAList) {
  TestServerOptions options;
  options.service.routes.allowed_origins = {"http://good.test"};
  const TestServer server(options);
  const auto origin_of = [&](const char* origin) {
    return server.send(http_request("GET", "/v1/models", {}, {{"Origin", origin}}))
        .header("Access-Control-Allow-Origin");
  };
  EXPECT_EQ(origin_of("http://good.test"), "http://good.test");
  EXPECT_EQ(origin_of("http://bad.test"), "");
  options.service.routes.allowed_origins = {};
  const TestServer off(options);
  EXPECT_EQ(off.send(http_request("GET", "/v1/models", {}, {{"Origin", "http://a"}}))
                .header("Access-Control-Allow-Origin"),
            "");
}

TEST(Keys, OpenWhatWorksForTheClient) {
  TestServerOptions options;
  options.service.routes.api_keys = {"first", "second"};
  const TestServer server(options);
  const auto status = [&](const std::string& path, const std::string& authorization) {
    return server.send(http_request("GET", path, {}, {{"Authorization", authorization}})).status;
  };
  EXPECT_EQ(status("/v1/models", "Bearer first"), 200);
  EXPECT_EQ(status("/v1/models", "bearer second"), 200);
  for (const char* wrong :
       {"", "first", "Bearer ", "Bearer firs", "Bearer firstfirst", "Bearer third", "Basic first"})
    EXPECT_EQ(status("/v1/models", wrong), 401) << wrong;
  EXPECT_EQ(status("/v1/nowhere", ""), 401);
  for (const char* path : {"/health", "/ping", "/version", "/metrics", "/load"})
    EXPECT_EQ(status(path, ""), 200) << path;
  for (const char* path : {"/v1/completions", "/tokenize", "/detokenize", "/reset_prefix_cache"})
    expect_error(server.post(path, std::string(R"({"prompt": "a", "tokens": [1]})")), 401, path);
  EXPECT_EQ(server
                .send(http_request("POST", "/tokenize", R"({"prompt": "a"})",
                                   {{"Content-Type", "application/json"}, {"Authorization", "Bearer first"}}))
                .status,
            200);
  expect_error(server.get("/v1/models"), 401, "no key");
}

// PAR-13
TEST(RequestIds, AreLabelsOnly) {
  TestServerOptions options;
  options.service.routes.echo_request_id = true;
  TestServer server(options);
  server.behaviour.step_delay_us = 1000;
  const auto begin = [&](RawHttp& client, const char* prompt) {
    const Json body{{"prompt", prompt}, {"max_tokens", 60}, {"temperature", 0}, {"stream", true}};
    client.send(http_request("POST", "/v1/completions", dump_json(body),
                             {{"Content-Type", "application/json"}, {"X-Request-Id", "same"}}));
    return client.read_head();
  };
  const auto text_of = [](RawHttp& client) {
    std::string text, body;
    for (auto chunk = client.next_chunk(); chunk && !chunk->empty(); chunk = client.next_chunk())
      body += *chunk;
    for (const std::string& event : sse_events(body)) {
      if (event == "[DONE]") continue;
      EXPECT_EQ(Json::parse(event)["id"], "cmpl-same");
      text += Json::parse(event)["choices"][0]["text"].get<std::string>();
    }
    return text;
  };
  RawHttp one(server.port()), two(server.port()), gone(server.port());
  EXPECT_EQ(begin(one, "first").header("X-Request-Id"), "same");
  begin(gone, "gone");
  gone.reset();
  begin(two, "second");
  EXPECT_EQ(text_of(one), server.expected_text("first", 60));
  EXPECT_EQ(text_of(two), server.expected_text("second", 60));
  // The library decodes %XX in header values: what would then be a line break must not get into a header.
  const RawResponse injected =
      server.send(small_post({{"Content-Type", "application/json"}, {"X-Request-Id", "a%0d%0aX-Evil: 1"}}));
  expect_error(injected, 400, "line break in an id");
  EXPECT_EQ(injected.header("X-Evil"), "");
  expect_error(
      server.send(small_post({{"Content-Type", "application/json"}, {"X-Request-Id", std::string(200, 'i')}})),
      400, "long id");
}

}  // namespace
}  // namespace ekv::testing
