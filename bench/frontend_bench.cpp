// frontend_bench.cpp -- what the HTTP front end costs, with a device that computes nothing: CPU per streamed
// token, time added to the first token, and whether a token waits for somebody else's slow client.
//
//   frontend_bench [STEP_MS [SECONDS [STREAMS...]]]      default: 25 5 1 64 512
//
// STREAMS streams stay open for SECONDS, one token each per step of STEP_MS. Meanwhile probes of eight tokens
// come, 21 a second, out of step with the device. What the front end adds to their TTFT: from sending until the
// request is parsed, tokenised and handed to the engine, plus from the moment when the engine has the first
// token until the client has read it. "token out" is that second part, for every token of every stream. Server
// and client share this machine, so that the client's work is inside the times; it is not inside the CPU
// figures.

#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <map>
#include <memory>

#include "bench/load_client.h"
#include "server/service.h"
#include "tests/support/fakes.h"

namespace ekv {
namespace {

using testing::byte_tokenizer;
using testing::FakeBackend;
using testing::FakeBehaviour;
using testing::kFakeVocab;

constexpr int kShortestPrompt = 16;  // a stream is known by the length of its prompt
constexpr int kProbeTokens = 8;
constexpr int kStalledPrompt = 8;
constexpr int64_t kProbeGapUs = 47'000, kWarmUpUs = 1'000'000;

int64_t cpu_us(const timeval& t) { return int64_t(t.tv_sec) * 1'000'000 + t.tv_usec; }

int64_t process_cpu_us() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return cpu_us(usage.ru_utime) + cpu_us(usage.ru_stime);
}

int64_t thread_cpu_us() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return int64_t(t.tv_sec) * 1'000'000 + t.tv_nsec / 1000;
}

// Stands between engine and server and notes when each token was there.
class Stamps : public EngineListener {
 public:
  struct Stream {
    int64_t handed_over_us = 0;  // to the engine
    std::vector<int64_t> token_us;
  };

  void forward_to(EngineListener& next) { next_ = &next; }
  void on_event(SeqEvent event) override {
    if (event.token) {
      Stream& stream = streams_[event.stats.num_prompt];
      stream.handed_over_us = event.stats.queued_us;
      stream.token_us.push_back(event.stats.last_token_us);
    }
    next_->on_event(std::move(event));
  }
  void on_step(const StepRecord& record) override {
    engine_cpu_us_ = thread_cpu_us();
    next_->on_step(record);
  }

  // Of a stopped front end.
  const Stream& of(int num_prompt) const { return streams_.at(num_prompt); }
  int64_t engine_cpu_us() const { return engine_cpu_us_; }

 private:
  EngineListener* next_ = nullptr;
  std::map<int, Stream> streams_;
  std::atomic<int64_t> engine_cpu_us_{0};
};

EngineConfig engine_config(int streams) {
  EngineConfig config;
  config.max_model_len = 4096;
  config.kv.num_pages = (streams + 64) * 96;
  config.kv.prefix_cache = false;
  config.scheduler.max_step_seqs = streams + 64;
  config.scheduler.max_step_tokens = 1 << 20;
  return config;
}

class FrontEnd {
 public:
  FrontEnd(int streams, int step_ms) : engine_(engine_config(streams)) {
    behaviour_.step_delay_us = step_ms * 1000;
    behaviour_.next_token = [](const SampleRow& row) { return TokenId('a' + row.output_index % 26); };
    ServiceConfig config;
    config.http.host = "127.0.0.1";
    config.http.port = 0;
    config.routes.version = "bench";
    ApiLimits limits;
    limits.model_names = {"fake"};
    limits.max_model_len = engine_.max_model_len;
    limits.vocab_size = kFakeVocab;
    limits.eos_ids = {testing::kFakeEos};
    ServedModel model{
        .limits = limits, .tokenizer = byte_tokenizer(), .render_chat = {}, .created_s = 1, .root = ""};
    service_ = std::make_unique<Service>(
        config, std::move(model), engine_, engine_.kv.num_pages,
        [this](EngineListener& listener) {
          stamps_.forward_to(listener);
          return std::make_unique<Engine>(
              engine_, std::make_unique<FakeBackend>(engine_.kv.num_pages, behaviour_), clock_, stamps_);
        },
        clock_, [] {});
    if (const Status failed = service_->start()) {
      log_error(failed->message);
      std::exit(1);
    }
  }

  int port() const { return service_->port(); }
  void stop() { service_.reset(); }  // joins the engine thread; the stamps are at rest then
  const Stamps& stamps() const { return stamps_; }

 private:
  EngineConfig engine_;
  SteadyClock clock_;
  FakeBehaviour behaviour_;
  Stamps stamps_;  // outlives the engine
  std::unique_ptr<Service> service_;
};

LoadRequest stream_request(int num_prompt, int num_output, int64_t arrival_us) {
  const Json body{{"model", "fake"},    {"prompt", std::vector<int>(size_t(num_prompt), 65)},
                  {"stream", true},     {"max_tokens", num_output},
                  {"ignore_eos", true}, {"stream_options", {{"include_usage", true}}}};
  return {.arrival_us = arrival_us, .body = dump_json(body), .input_tokens = num_prompt};
}

// A client that asks for a long stream with much in every token, and never reads.
class StalledClient {
 public:
  explicit StalledClient(int port) : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    const int little = 2048;
    setsockopt(socket_, SOL_SOCKET, SO_RCVBUF, &little, sizeof(little));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(uint16_t(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const std::string body = dump_json({{"model", "fake"},
                                        {"prompt", std::vector<int>(kStalledPrompt, 65)},
                                        {"stream", true},
                                        {"max_tokens", 4000},
                                        {"logprobs", 5}});
    const std::string bytes = fmt::format(
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
        "{}\r\n\r\n{}",
        body.size(), body);
    const bool sent = ::connect(socket_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0 &&
                      ::send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL) == ssize_t(bytes.size());
    EKV_CHECK(sent, "a client on this machine can connect");
  }
  ~StalledClient() { ::close(socket_); }
  StalledClient(const StalledClient&) = delete;
  StalledClient& operator=(const StalledClient&) = delete;

 private:
  int socket_;
};

struct Load {
  int streams = 0, stalled = 0, step_ms = 25;
  double seconds = 5;
};

std::vector<LoadRequest> make_load(const Load& load) {
  std::vector<LoadRequest> requests;
  const int tokens = int(load.seconds * 1000 / load.step_ms);
  for (int i = 0; i < load.streams; ++i) requests.push_back(stream_request(kShortestPrompt + i, tokens, 0));
  const int num_probes = int((load.seconds * 1e6 - 2 * kWarmUpUs) / kProbeGapUs);
  for (int i = 0; i < num_probes; ++i)
    requests.push_back(
        stream_request(kShortestPrompt + load.streams + i, kProbeTokens, kWarmUpUs + i * kProbeGapUs));
  return requests;
}

struct Times {
  std::vector<double> ttft_added_ms, token_out_ms;
  int64_t tokens = 0, failed = 0;
};

Times compare(const Load& load, const LoadResult& result, const Stamps& stamps) {
  Times times;
  for (size_t i = 0; i < result.replies.size(); ++i) {
    const RequestRecord& record = result.replies[i].record;
    times.tokens += record.output_tokens;
    times.failed += record.failed();
    if (record.failed()) continue;
    const Stamps::Stream& stream = stamps.of(kShortestPrompt + int(i));
    EKV_CHECK(int64_t(stream.token_us.size()) == record.times.count(), "one message per token");
    int64_t at_us = result.start_us + record.times.first_us();
    if (i >= size_t(load.streams)) {
      const int64_t in_us = stream.handed_over_us - (result.start_us + record.start_us);
      times.ttft_added_ms.push_back(double(in_us + at_us - stream.token_us[0]) / 1e3);
    }
    times.token_out_ms.push_back(double(at_us - stream.token_us[0]) / 1e3);
    size_t token = 1;
    record.times.for_each_gap([&](int64_t gap) {
      at_us += gap;
      times.token_out_ms.push_back(double(at_us - stream.token_us[token++]) / 1e3);
    });
  }
  return times;
}

void measure(const Load& load) {
  FrontEnd front_end(load.streams + load.stalled, load.step_ms);
  std::vector<std::unique_ptr<StalledClient>> stalled;
  for (int i = 0; i < load.stalled; ++i) stalled.push_back(std::make_unique<StalledClient>(front_end.port()));
  const std::vector<LoadRequest> requests = make_load(load);
  const HttpTarget target{.port = front_end.port(), .prefix = {}, .headers = {}};
  const int64_t process_us = process_cpu_us(), client_us = thread_cpu_us();
  const int64_t engine_us = front_end.stamps().engine_cpu_us();
  const Result<LoadResult> result = run_load(target, requests, {.on_progress = {}});
  EKV_CHECK(bool(result), "a load on this machine can run");
  const int64_t client_used_us = thread_cpu_us() - client_us;
  const int64_t engine_used_us = front_end.stamps().engine_cpu_us() - engine_us;
  const int64_t http_used_us = process_cpu_us() - process_us - client_used_us - engine_used_us;
  stalled.clear();
  front_end.stop();
  const Times times = compare(load, *result, front_end.stamps());
  const Distribution added(times.ttft_added_ms), out(times.token_out_ms);
  const double tokens = double(times.tokens);
  fmt::print("| {} | {} | {:.1f} | {:.1f} | {:.2f} | {:.2f} | {:.2f} | {:.2f} | {:.2f} | {:.2f} | {} |\n",
             load.streams, load.stalled, double(http_used_us) / tokens, double(engine_used_us) / tokens,
             added.mean().value_or(-1), added.percentile(50).value_or(-1), added.percentile(99).value_or(-1),
             out.percentile(50).value_or(-1), out.percentile(99).value_or(-1), out.percentile(100).value_or(-1),
             times.failed ? fmt::format("{} failed", times.failed) : result->health.bottleneck);
  std::fflush(stdout);
}

}  // namespace
}  // namespace ekv

int main(int argc, char** argv) {
  ekv::Load load;
  if (argc > 1) load.step_ms = std::atoi(argv[1]);
  if (argc > 2) load.seconds = std::atof(argv[2]);
  if (load.step_ms < 1 || load.seconds < 3) {
    fmt::print(stderr, "frontend_bench [STEP_MS >= 1 [SECONDS >= 3 [STREAMS...]]]\n");
    return 2;
  }
  std::vector<int> streams;
  for (int i = 3; i < argc; ++i) streams.push_back(std::max(1, std::atoi(argv[i])));
  if (streams.empty()) streams = {1, 64, 512};
  fmt::print(
      "| open streams | stalled clients | HTTP threads, us/token | engine thread, us/token | TTFT added, ms: "
      "mean | p50 "
      "| p99 | token out, ms: p50 | p99 | max | client |\n|--|--|--|--|--|--|--|--|--|--|--|\n");
  for (const int count : streams) {
    load.streams = count;
    load.stalled = 0;
    ekv::measure(load);
    load.stalled = 8;
    ekv::measure(load);
  }
}
