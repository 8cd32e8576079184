#pragma once
// test_server.h -- the whole server on a free port with the fake device, and the few calls that tests make all
// the time.

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "server/chat_prompt.h"
#include "server/service.h"
#include "tests/support/fakes.h"
#include "tests/support/raw_http.h"

namespace ekv::testing {

inline bool eventually(const std::function<bool()>& holds, int at_most_ms = 30000) {
  for (int waited = 0; waited < at_most_ms; waited += 5) {
    if (holds()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return holds();
}

inline const char* kTestTemplate =
    "{%- for m in messages %}{%- if m.role == 'tool' and not m.tool_call_id is defined %}"
    "{{ raise_exception('tool messages need an id') }}{%- endif %}"
    "{{ '[' + m.role + '] ' + m.content + '\\n' }}{%- endfor %}{% if add_generation_prompt %}{{ '[assistant] ' "
    "}}{% endif %}";

struct TestServerOptions {
  int max_model_len = 512;
  int num_pages = 256;
  int max_step_seqs = 64;
  bool adds_bos = false;
  ServiceConfig service;
  ApiLimits limits;              // names, sizes and end tokens are filled in
  RenderChat render;             // instead of kTestTemplate
  const Clock* clock = nullptr;  // instead of the real one
};

// For requests that end by nothing but their client or the server: a long_request() of 90,000 tokens.
inline TestServerOptions endless() {
  TestServerOptions options;
  options.max_model_len = 100000;
  options.num_pages = 4 * options.max_model_len / kBlockTokens;
  return options;
}

class TestServer {
 public:
  explicit TestServer(TestServerOptions options = {}) {
    const Clock& clock = options.clock ? *options.clock : steady_clock_;
    engine_.max_model_len = options.max_model_len;
    engine_.kv.num_pages = options.num_pages;
    engine_.scheduler.max_step_seqs = options.max_step_seqs;
    options.service.http.host = "127.0.0.1";
    options.service.http.port = 0;
    options.service.routes.version = "test";
    options.limits.model_names = {"fake", "alias"};
    options.limits.max_model_len = options.max_model_len;
    options.limits.vocab_size = kFakeVocab;
    options.limits.eos_ids = {kFakeEos};
    const Tokenizer tokenizer = byte_tokenizer(options.adds_bos);
    ServedModel model{
        .limits = options.limits,
        .tokenizer = tokenizer,
        .render_chat = options.render ? options.render : *make_chat_renderer(kTestTemplate, "test", tokenizer),
        .created_s = 1,
        .root = "fake"};
    service_ = std::make_unique<Service>(
        options.service, std::move(model), engine_, options.num_pages,
        [&](EngineListener& listener) {
          return std::make_unique<Engine>(engine_, std::make_unique<FakeBackend>(options.num_pages, behaviour),
                                          clock, listener);
        },
        clock, [this] { fatal = true; });
    const Status failed = service_->start();
    EXPECT_FALSE(failed) << failed->message;
  }
  ~TestServer() { behaviour.steps_allowed = FakeBehaviour::kEndless; }  // nothing stops within a step

  int port() const { return service_->port(); }
  Service& service() { return *service_; }

  RawResponse send(const std::string& bytes) const {
    RawHttp client(port());
    client.send(bytes);
    return client.read_response();
  }
  RawResponse get(const std::string& path) const { return send(http_request("GET", path, {}, {})); }
  RawResponse post(const std::string& path, const std::string& body) const {
    return send(http_request("POST", path, body));
  }
  RawResponse post(const std::string& path, const Json& body) const { return post(path, dump_json(body)); }
  RawResponse complete(const Json& body) const { return post("/v1/completions", body); }

  // What the fake device answers to a greedy prompt, computed without the server.
  std::string expected_text(const std::string& prompt, int num_tokens) const {
    std::vector<TokenId> tokens;
    for (const char c : prompt) tokens.push_back(uint8_t(c));
    SamplingParams greedy;
    greedy.temperature = 0;
    std::string text;
    for (int i = 0; i < num_tokens; ++i) {
      SampleRow row;
      row.params = &greedy;
      row.tokens = tokens;
      tokens.push_back(fake_token(row));
      text += char(tokens.back());
    }
    return text;
  }

  // The value of a metric line that begins with `name`, labels included; -1: no such line.
  double metric(const std::string& name) const {
    const std::string text = "\n" + get("/metrics").body;
    const size_t at = text.find("\n" + name);
    if (at == std::string::npos) return -1;
    const size_t end = text.find('\n', at + 1);
    return std::stod(text.substr(text.rfind(' ', end) + 1));
  }
  bool wait_until_idle(int at_most_ms = 30000) const {
    return eventually(
        [&] {
          return metric("vllm:num_requests_running") == 0 && metric("vllm:num_requests_waiting") == 0 &&
                 metric("vllm:kv_cache_usage_perc") == 0;
        },
        at_most_ms);
  }

  FakeBehaviour behaviour;
  std::atomic<bool> fatal{false};

 private:
  EngineConfig engine_;
  SteadyClock steady_clock_;
  std::unique_ptr<Service> service_;
};

// The data of each server-sent event of a body; fails the test when a line is anything else.
inline std::vector<std::string> sse_events(const std::string& body) {
  std::vector<std::string> events;
  size_t at = 0;
  while (at < body.size()) {
    const size_t end = body.find("\n\n", at);
    EXPECT_NE(end, std::string::npos) << "an event without its blank line";
    if (end == std::string::npos) break;
    const std::string event = body.substr(at, end - at);
    EXPECT_TRUE(event.starts_with("data: ")) << event;
    events.push_back(event.substr(6));
    at = end + 2;
  }
  return events;
}

}  // namespace ekv::testing
