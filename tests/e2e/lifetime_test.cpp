// Who may leave, who must wait, how it ends: cancellation, slow clients, overload, shutdown, a hung or lost
// device. What must not end before the test has seen it waits for the test (FakeBehaviour::steps_allowed) or is
// endless: no sleep is long enough on a machine with too much to do.

#include <gtest/gtest.h>

#include <future>
#include <random>

#include "tests/support/test_server.h"

namespace ekv::testing {
namespace {

using std::chrono::milliseconds;

Json long_request(bool stream, int max_tokens = 400) {
  return {{"prompt", "go"},
          {"max_tokens", max_tokens},
          {"temperature", 0},
          {"stream", stream},
          {"ignore_eos", true}};
}

void begin(RawHttp& client, const Json& body) {
  client.send(http_request("POST", "/v1/completions", dump_json(body)));
}

constexpr int kEndlessTokens = 90000;  // of a server with endless() options

const char* kAborted = "vllm:request_success_total{engine=\"0\",model_name=\"fake\",finished_reason=\"abort\"}";

// CAN-1: streaming or not, by FIN or by RST, before and after the first token.
TEST(Cancellation, ClientsThatLeaveFreeTheirPages) {
  TestServerOptions options;
  options.max_model_len = 4096;
  options.num_pages = 4096;
  TestServer server(options);
  const Json control{{"prompt", "The sea is"}, {"max_tokens", 8}, {"temperature", 0}};
  const std::string before = server.complete(control).json()["choices"][0]["text"];
  std::atomic<int64_t>&steps = server.behaviour.steps, &allowed = server.behaviour.steps_allowed;
  server.behaviour.step_delay_us = 1000;
  double aborted = 0;
  for (int round = 0; round < 3; ++round) {
    {
      allowed = steps.load();
      std::vector<std::unique_ptr<RawHttp>> clients;
      for (int i = 0; i < 200; ++i) {
        clients.push_back(std::make_unique<RawHttp>(server.port()));
        ASSERT_TRUE(clients.back()->connected());
        begin(*clients.back(), long_request(i % 2, 4000));
      }
      ASSERT_TRUE(eventually([&] { return server.service().loop().num_in_flight() == 200; }));
      // In these steps they leave; nobody ends in them.
      const int64_t first = steps;
      allowed = first + 1000;
      ASSERT_TRUE(eventually([&] { return steps >= first + 50; }));
      for (size_t i = 0; i < clients.size(); ++i) i % 4 < 2 ? clients[i]->close() : clients[i]->reset();
    }
    EXPECT_TRUE(eventually([&] { return server.metric(kAborted) == aborted + 200; })) << "round " << round;
    allowed = FakeBehaviour::kEndless;
    EXPECT_TRUE(server.wait_until_idle()) << "round " << round;
    aborted += 200;
  }
  EXPECT_EQ(server.complete(control).json()["choices"][0]["text"], before);
}

// DESIGN: within one step. The client leaves in the second, and there is no third.
TEST(Cancellation, TakesOneStep) {
  TestServer server;
  server.behaviour.steps_allowed = 1;
  RawHttp client(server.port());
  begin(client, long_request(false));
  ASSERT_TRUE(eventually([&] { return server.behaviour.steps == 2; }));
  client.close();
  ASSERT_TRUE(eventually([&] { return server.metric(kAborted) == 1; })) << "it is seen while the step runs";
  server.behaviour.steps_allowed = FakeBehaviour::kEndless;
  ASSERT_TRUE(server.wait_until_idle());
  EXPECT_EQ(server.behaviour.steps, 2);
}

TEST(Clients, ASlowReaderHoldsUpNobody) {
  TestServerOptions options;
  options.max_model_len = 8000;
  options.num_pages = 1024;
  TestServer server(options);
  RawHttp slow(server.port());
  Json body = long_request(true, 7000);
  body["logprobs"] = 20;  // about 9 MB of events, which no socket buffer holds
  server.behaviour.steps_allowed = 3;
  begin(slow, body);
  ASSERT_TRUE(eventually([&] { return server.metric("vllm:num_requests_running") == 1; }));
  server.behaviour.steps_allowed = FakeBehaviour::kEndless;
  for (int i = 0; i < 20; ++i) EXPECT_EQ(server.complete({{"prompt", "quick"}, {"max_tokens", 5}}).status, 200);
  EXPECT_TRUE(eventually([&] { return server.metric("vllm:num_requests_running") == 0; }, 120000))
      << "the engine waits for a client";
  std::string events;
  RawResponse head = slow.read_head();
  for (auto chunk = slow.next_chunk(); chunk && !chunk->empty(); chunk = slow.next_chunk()) events += *chunk;
  EXPECT_EQ(sse_events(events).back(), "[DONE]");
}

TEST(Clients, AThousandIdleConnectionsAndAFullHouse) {
  TestServerOptions options;
  options.service.http.max_connections = 200;
  const TestServer server(options);
  std::vector<std::unique_ptr<RawHttp>> idle;
  for (int i = 0; i < 199; ++i) idle.push_back(std::make_unique<RawHttp>(server.port()));
  for (auto& client : idle) client->send(http_request("GET", "/version", {}, {}));
  for (auto& client : idle) EXPECT_EQ(client->read_response().status, 200);
  {
    RawHttp last(server.port());
    last.send(http_request("GET", "/version", {}, {}));
    EXPECT_EQ(last.read_response().status, 200);
    RawHttp refused(server.port());
    const RawResponse response = refused.read_response();
    EXPECT_EQ(response.status, 503);
    EXPECT_EQ(response.header("Retry-After"), "1");
    EXPECT_EQ(response.error()["code"], 503);
  }
  EXPECT_TRUE(eventually([&] { return server.get("/version").status == 200; }));
}

TEST(Overload, AFullQueueIsA503WithRetryAfter) {
  TestServerOptions options;
  options.max_step_seqs = 2;
  options.service.loop.max_queued = 3;
  TestServer server(options);
  server.behaviour.steps_allowed = 0;
  std::vector<std::unique_ptr<RawHttp>> clients;
  for (int i = 0; i < 5; ++i) {
    clients.push_back(std::make_unique<RawHttp>(server.port()));
    begin(*clients.back(), long_request(i % 2, 100));
    ASSERT_TRUE(eventually([&] { return server.service().loop().num_in_flight() == i + 1; }));
  }
  EXPECT_EQ(server.get("/load").json()["server_load"], 5);
  for (const int steps : {0, 3}) {  // before anybody runs, and while two do and three are seen waiting
    server.behaviour.steps_allowed = steps;
    ASSERT_TRUE(eventually([&] { return server.behaviour.steps == steps + 1; }));
    for (const bool stream : {false, true}) {
      const RawResponse refused = server.complete(long_request(stream, 10));
      EXPECT_EQ(refused.status, 503);
      EXPECT_EQ(refused.header("Retry-After"), "1");
      EXPECT_EQ(refused.error()["type"], "unavailable_error");
    }
  }
  server.behaviour.steps_allowed = FakeBehaviour::kEndless;
  for (auto& client : clients) EXPECT_EQ(client->read_response().status, 200);
  EXPECT_EQ(server.complete(long_request(false, 10)).status, 200);
  Json larger = long_request(false, 10);  // than the queue will ever be: trying again is of no use
  larger["temperature"] = 1;
  larger["n"] = 6;
  const RawResponse never = server.complete(larger);
  EXPECT_EQ(never.status, 400);
  EXPECT_EQ(never.error()["param"], "n");
  larger["n"] = 5;
  EXPECT_EQ(server.complete(larger).status, 200);
}

TEST(Shutdown, RunningRequestsFinishAndNewOnesAreRefused) {
  TestServer server;
  server.behaviour.steps_allowed = 3;
  RawHttp streaming(server.port()), plain(server.port()), later(server.port());
  begin(streaming, long_request(true, 100));
  begin(plain, long_request(false, 100));
  ASSERT_TRUE(eventually([&] { return server.service().loop().num_in_flight() == 2; }));
  auto done = std::async(std::launch::async,
                         [&] { server.service().shut_down(milliseconds(60000), [] { return false; }); });
  ASSERT_TRUE(eventually([&] { return !server.service().loop().accepting(); }));
  later.send(http_request("POST", "/v1/completions", dump_json(long_request(false))));
  EXPECT_EQ(later.read_response().status, 503);
  EXPECT_EQ(server.get("/health").status, 503);
  server.behaviour.steps_allowed = FakeBehaviour::kEndless;
  const RawResponse stream = streaming.read_response();
  EXPECT_EQ(sse_events(stream.body).back(), "[DONE]");
  EXPECT_EQ(stream.body.find("error"), std::string::npos);
  EXPECT_EQ(plain.read_response().json()["choices"][0]["text"], server.expected_text("go", 100));
  done.get();
  EXPECT_FALSE(RawHttp(server.port()).connected());
}

TEST(Shutdown, WhatDoesNotFinishInTimeIsToldSo) {
  for (const bool hurry : {false, true}) {
    TestServer server(endless());
    server.behaviour.step_delay_us = 20000;
    RawHttp streaming(server.port()), plain(server.port());
    begin(streaming, long_request(true, kEndlessTokens));
    begin(plain, long_request(false, kEndlessTokens));
    ASSERT_TRUE(eventually([&] { return server.service().loop().num_in_flight() == 2; }));
    ASSERT_EQ(streaming.read_head().status, 200);
    server.service().shut_down(milliseconds(hurry ? 60000 : 100), [&] { return hurry; });
    std::string events;
    for (auto chunk = streaming.next_chunk(); chunk && !chunk->empty(); chunk = streaming.next_chunk())
      events += *chunk;
    const std::vector<std::string> list = sse_events(events);
    ASSERT_GE(list.size(), 2u);
    EXPECT_EQ(list.back(), "[DONE]");
    EXPECT_EQ(Json::parse(list[list.size() - 2])["error"]["code"], 503);
    EXPECT_EQ(plain.read_response().status, 503);
  }
}

// A chat request inside a template that takes as long as the test wants; a minute at most, so that a failure
// ends.
struct BusyTemplate {
  std::atomic<bool> entered{false}, released{false}, left{false};
  RenderChat render() {
    return [this](const ChatInput&) -> Result<std::string> {
      entered = true;
      for (int i = 0; i < 12000 && !released; ++i) std::this_thread::sleep_for(milliseconds(5));
      left = true;
      return std::string("a prompt");
    };
  }
};

void begin_chat(RawHttp& client) {
  client.send(http_request("POST", "/v1/chat/completions", R"({"messages":[{"role":"user","content":"x"}]})"));
}

TEST(Shutdown, AThreadThatIsBusyDoesNotHoldItUp) {
  for (const bool hurry : {false, true}) {
    BusyTemplate busy;
    TestServerOptions options;
    options.render = busy.render();
    options.service.flush_grace = milliseconds(hurry ? 60000 : 300);
    TestServer server(options);
    RawHttp client(server.port());
    begin_chat(client);
    ASSERT_TRUE(eventually([&] { return busy.entered.load(); }));
    EXPECT_FALSE(server.service().shut_down(milliseconds(100), [&] { return hurry; }));
    EXPECT_FALSE(busy.left) << "it waited for the thread";
    busy.released = true;
  }
}

// Nothing is tokenised and run for a client that left while its prompt was made.
TEST(Cancellation, AClientThatLeavesBeforeItsPromptIsReadyReachesNoEngine) {
  BusyTemplate busy;
  TestServerOptions options;
  options.render = busy.render();
  TestServer server(options);
  {
    RawHttp client(server.port());
    begin_chat(client);
    ASSERT_TRUE(eventually([&] { return busy.entered.load(); }));
  }
  std::this_thread::sleep_for(milliseconds(20));
  busy.released = true;
  EXPECT_FALSE(eventually([&] { return server.metric(kAborted) > 0 || server.behaviour.steps > 0; }, 500));
  busy.entered = false;
  RawHttp stays(server.port());
  begin_chat(stays);
  EXPECT_EQ(stays.read_response().status, 200);
}

TEST(Health, SaysWhenAStepHangs) {
  FakeClock clock;
  TestServerOptions options;
  options.clock = &clock;
  TestServer server(options);
  const int64_t late_us = options.service.loop.hang_us + 1;
  EXPECT_EQ(server.get("/health").status, 200);
  clock.advance(late_us);
  EXPECT_TRUE(eventually([&] { return server.get("/health").status == 200; })) << "idle is not hung";
  server.behaviour.steps_allowed = 0;
  RawHttp client(server.port());
  begin(client, long_request(false, 3));
  ASSERT_TRUE(eventually([&] { return server.behaviour.steps == 1; }));
  EXPECT_EQ(server.get("/health").status, 200) << "a step may take a while";
  clock.advance(late_us);
  EXPECT_EQ(server.get("/health").status, 503);
  server.behaviour.steps_allowed = FakeBehaviour::kEndless;
  EXPECT_EQ(client.read_response().status, 200);
  EXPECT_TRUE(eventually([&] { return server.get("/health").status == 200; }));
}

TEST(Fatal, ALostDeviceEndsEveryRequestAndTurnsHealthOff) {
  TestServer server(endless());
  server.behaviour.step_delay_us = 2000;
  RawHttp streaming(server.port()), plain(server.port());
  begin(streaming, long_request(true, kEndlessTokens));
  begin(plain, long_request(false, kEndlessTokens));
  ASSERT_EQ(streaming.read_head().status, 200);
  ASSERT_TRUE(eventually([&] { return server.service().loop().num_in_flight() == 2; }));
  server.behaviour.fail = true;
  EXPECT_EQ(plain.read_response().status, 500);
  std::string events;
  for (auto chunk = streaming.next_chunk(); chunk && !chunk->empty(); chunk = streaming.next_chunk())
    events += *chunk;
  EXPECT_NE(events.find("\"code\":500"), std::string::npos);
  EXPECT_EQ(sse_events(events).back(), "[DONE]");
  EXPECT_TRUE(eventually([&] { return server.fatal.load(); }));
  EXPECT_EQ(server.get("/health").status, 503);
  const RawResponse refused = server.complete(long_request(false));
  EXPECT_EQ(refused.status, 503);
  EXPECT_EQ(refused.header("Retry-After"), "1");
  EXPECT_NE(refused.body.find("the engine has stopped"), std::string::npos) << refused.body;
}

// MET-1: with two scrapers running, nothing that counts ever goes down, and the totals are those of the
// clients.
struct ClientTotals {
  std::atomic<int64_t> prompt{0}, completion{0}, stop{0}, length{0};
};

void run_one(const TestServer& server, unsigned seed, ClientTotals& totals) {
  std::mt19937 rng(seed);
  const Json kinds = Json::parse(R"([{"max_tokens":20,"temperature":0},{"max_tokens":9,"n":4},
      {"max_tokens":60,"stop":["a","e","Q"]},{"max_tokens":5,"temperature":9},
      {"max_tokens":40,"logit_bias":{"256":100}},{"max_tokens":0,"echo":true,"logprobs":1},
      {"max_tokens":0,"echo":true,"n":2}])");
  Json body = kinds[rng() % kinds.size()];
  body["prompt"] = "shared beginning of many prompts, long enough for a block, " + std::to_string(rng() % 5);
  const RawResponse response = server.complete(body);
  if (response.status != 200) return;
  const Json reply = response.json();
  totals.prompt += reply["usage"]["prompt_tokens"].get<int64_t>();
  totals.completion += reply["usage"]["completion_tokens"].get<int64_t>();
  for (const Json& choice : reply["choices"])
    ++(choice["finish_reason"] == "stop" ? totals.stop : totals.length);
}

std::map<std::string, double> counters(const TestServer& server) {
  std::map<std::string, double> values;
  std::istringstream lines(server.get("/metrics").body);
  for (std::string line; std::getline(lines, line);) {
    const std::string name = line.substr(0, line.find('{'));
    if (name.ends_with("_total") || name.ends_with("_count") || name.ends_with("_bucket"))
      values[line.substr(0, line.rfind(' '))] = std::stod(line.substr(line.rfind(' ')));
  }
  return values;
}

TEST(Metrics, ClampedKvValuesAreCounted) {
  TestServer server;
  server.behaviour.clamped_values = 3;
  EXPECT_EQ(server.complete(long_request(false, 5)).status, 200);
  server.behaviour.clamped_values = 0;
  EXPECT_EQ(server.complete(long_request(false, 5)).status, 200);
  EXPECT_TRUE(server.wait_until_idle());
  EXPECT_EQ(server.metric("elastickv:kv_clamped_values_total"), 15);
}

TEST(Metrics, CountersOnlyGrowAndTotalsAreThoseOfTheClients) {
  TestServerOptions options;
  options.num_pages = 40;  // forces waiting and preemptions
  TestServer server(options);
  server.behaviour.step_delay_us = 200;
  ClientTotals totals;
  std::atomic<bool> running{true};
  std::vector<std::future<void>> scrapers, clients;
  for (int i = 0; i < 2; ++i)
    scrapers.push_back(std::async(std::launch::async, [&] {
      std::map<std::string, double> last;
      while (running) {
        for (const auto& [name, value] : counters(server)) {
          EXPECT_GE(value, last[name]) << name;
          last[name] = value;
        }
        EXPECT_EQ(server.get("/health").status, 200);
        std::this_thread::sleep_for(milliseconds(10));
      }
    }));
  for (unsigned c = 0; c < 8; ++c)
    clients.push_back(std::async(std::launch::async, [&, c] {
      for (unsigned i = 0; i < 25; ++i) run_one(server, c * 1000 + i, totals);
    }));
  for (auto& client : clients) client.get();
  running = false;
  for (auto& scraper : scrapers) scraper.get();
  EXPECT_TRUE(server.wait_until_idle());
  const std::string labels = "{engine=\"0\",model_name=\"fake\"";
  EXPECT_EQ(server.metric("vllm:prompt_tokens_total" + labels), totals.prompt);
  EXPECT_EQ(server.metric("vllm:generation_tokens_total" + labels), totals.completion);
  EXPECT_EQ(server.metric("vllm:request_success_total" + labels + ",finished_reason=\"stop\""), totals.stop);
  EXPECT_EQ(server.metric("vllm:request_success_total" + labels + ",finished_reason=\"length\""),
            totals.length);
  EXPECT_GT(totals.stop, 0);
  EXPECT_GT(totals.length, 0);
}

}  // namespace
}  // namespace ekv::testing
