#include "bench/load_client.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <functional>
#include <mutex>

#include "bench/bench_offline.h"
#include "bench/bench_serve.h"
#include "bench/stream_reply.h"
#include "tests/support/load_server.h"
#include "tests/support/temp_dir.h"
#include "util/files.h"

namespace ekv::testing {
namespace {

void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

HttpTarget target_of(const LoadServer& server) { return {.port = server.port(), .prefix = {}, .headers = {}}; }

LoadResult load(const LoadServer& server, size_t count, const LoadOptions& options, size_t body_bytes = 2) {
  const std::vector<LoadRequest> requests(
      count, {.arrival_us = 0, .body = fmt::format("\"{:x>{}}\"", "", body_bytes - 2), .input_tokens = 3});
  Result<LoadResult> result = run_load(target_of(server), requests, options);
  EXPECT_TRUE(bool(result)) << (result ? "" : result.error().message);
  return result ? *std::move(result) : LoadResult();
}

void answer_at_once(StreamWriter& out, int, const std::string&) {
  out.begin();
  out.token("a");
  out.usage(3, 1);
  out.end();
}

// Every number of the report: nothing that is not a number, nothing negative.
void expect_sane(const Json& json, const std::string& where) {
  if (json.is_structured()) {
    for (const auto& [key, value] : json.items()) expect_sane(value, where + "/" + key);
  } else if (json.is_number()) {
    EXPECT_TRUE(std::isfinite(json.get<double>())) << where;
    EXPECT_GE(json.get<double>(), 0) << where;
  }
}

// --- BEN-1
// -----------------------------------------------------------------------------------------------------
// Which replies count in which figure. What the figures are is held in report_test, on times that are given:
// how far apart this process sees two messages is up to the machine.

void mixed_answer(StreamWriter& out, int index, const std::string&) {
  if (index % 4 == 2) return out.reply(500, R"({"error":{"message":"broken on purpose","code":500}})");
  out.begin();
  for (int i = 0; index % 4 == 3 && i < 10; ++i) out.token("t");
  if (index % 4 == 1) out.token("t");
  out.stop();
  out.usage(3, index % 4 == 3 ? 10 : index % 4);
  out.end();
}

ServeBenchFlags serve_flags(const LoadServer& server, int num_prompts) {
  ServeBenchFlags flags;
  flags.base_url = "http://127.0.0.1:" + std::to_string(server.port());
  flags.dataset = {.num_prompts = num_prompts, .input_len = 3, .output_len = 10};
  flags.quiet = true;
  return flags;
}

TEST(Ben1, EmptyOneTokenAndFailedRepliesDoNotSpoilTheLatencies) {
  LoadServer server(mixed_answer);
  ServeBenchFlags flags = serve_flags(server, 40);
  flags.slo.tpot_ms = 1000;
  const auto outcome = run_serve_bench(flags);
  ASSERT_TRUE(bool(outcome)) << outcome.error().message;
  const Report& report = outcome->report;
  EXPECT_EQ(report.requests, 40);
  EXPECT_EQ(report.completed, 20);
  EXPECT_EQ(report.failed, 10);
  EXPECT_EQ(report.empty, 10);
  EXPECT_EQ(report.ttft_ms.count(), 20u) << "only replies with a token";
  EXPECT_EQ(report.tpot_ms.count(), 10u) << "only replies with two";
  EXPECT_EQ(report.itl_ms.count(), 90u);
  EXPECT_GT(*report.ttft_ms.percentile(0), 0);
  EXPECT_EQ(report.output_tokens, 10 + 100);
  EXPECT_EQ(report.good, 20);
  EXPECT_NE(report.first_error.find("broken on purpose"), std::string::npos) << report.first_error;
  expect_sane(outcome->result, "result");
}

TEST(Ben1, WithoutUsageMessagesAreCountedAndThatIsSaid) {
  LoadServer server([](StreamWriter& out, int, const std::string&) {
    out.begin();
    out.token("a");
    out.token("b");
    out.stop();
    out.end();
  });
  const auto outcome = run_serve_bench(serve_flags(server, 3));
  ASSERT_TRUE(bool(outcome)) << outcome.error().message;
  EXPECT_EQ(outcome->num_without_usage, 3);
  EXPECT_EQ(outcome->report.output_tokens, 6);
}

TEST(Ben1, FailuresGiveANonZeroExit) {
  LoadServer server(mixed_answer);
  const std::string port = std::to_string(server.port());
  const auto exit_code = [&](const char* prompts) {
    const char* argv[] = {"serve",
                          "--port",
                          port.c_str(),
                          "--num-prompts",
                          prompts,
                          "--disable-tqdm",
                          "--random-input-len",
                          "3",
                          "--random-output-len",
                          "10"};
    return bench_serve(int(std::size(argv)), argv);
  };
  EXPECT_EQ(exit_code("2"), 0) << "one empty and one one-token reply";
  EXPECT_EQ(exit_code("2"), 1) << "one of them failed";
}

TEST(Ben1, AServerThatIsNotThereIsAnError) {
  const char* argv[] = {"serve", "--port", "1", "--num-prompts", "1"};
  EXPECT_EQ(bench_serve(int(std::size(argv)), argv), 1);
  const char* bad[] = {"serve", "--request-rate", "-1"};
  EXPECT_EQ(bench_serve(int(std::size(bad)), bad), 2);
}

// --- BEN-3
// -----------------------------------------------------------------------------------------------------

// Answers nobody before as many are there as were asked for, so that the peak does not depend on how fast they
// come. Who waits for a minute is answered too: then the test fails instead of waiting.
class HoldUntilAllAreThere {
 public:
  explicit HoldUntilAllAreThere(int count) : count_(count) {}
  void operator()(StreamWriter& out, int index, const std::string&) {
    {
      std::unique_lock lock(mutex_);
      if (++arrived_ >= count_) all_there_.notify_all();
      all_there_.wait_for(lock, std::chrono::minutes(1), [&] { return arrived_ >= count_; });
    }
    answer_at_once(out, index, {});
  }

 private:
  const int count_;
  std::mutex mutex_;
  std::condition_variable all_there_;
  int arrived_ = 0;
};

TEST(Ben3, PeakInFlightIsTheAskedConcurrencyAndConnectionsAreReused) {
  constexpr int kConcurrency = 256;
  HoldUntilAllAreThere hold(kConcurrency);
  LoadServer server(std::ref(hold));
  const LoadResult result =
      load(server, 2 * kConcurrency, {.max_concurrency = kConcurrency, .on_progress = {}}, 100'000);
  for (const LoadReply& reply : result.replies) EXPECT_EQ(reply.record.error, "");
  EXPECT_EQ(server.peak_in_flight(), kConcurrency);
  EXPECT_EQ(result.health.peak_in_flight, kConcurrency);
  EXPECT_EQ(server.connections(), kConcurrency) << "the second wave uses the connections of the first";
  EXPECT_EQ(result.health.connections_opened, kConcurrency);
}

TEST(Ben3, AThousandConnectionsAtOnce) {
  constexpr int kConcurrency = 1024;
  HoldUntilAllAreThere hold(kConcurrency);
  LoadServer server(std::ref(hold));
  const LoadResult result = load(server, kConcurrency, {.on_progress = {}}, 1000);
  for (const LoadReply& reply : result.replies) EXPECT_EQ(reply.record.error, "");
  EXPECT_EQ(server.peak_in_flight(), kConcurrency);
}

TEST(Ben3, ABusyClientSaysThatItWasTheBottleneck) {
  LoadServer server(answer_at_once);
  const LoadResult result = load(server, 4, {.max_concurrency = 1, .on_progress = [](auto&) { sleep_ms(50); }});
  EXPECT_GE(result.health.worst_round_us, 50'000);
  EXPECT_NE(result.health.bottleneck, "");
}

// --- Connections
// -----------------------------------------------------------------------------------------------

TEST(LoadClient, ARequestOnAConnectionThatTheServerJustClosedIsSentAgain) {
  LoadServer server([](StreamWriter& out, int index, const std::string&) {
    if (index % 2 == 1) return out.hang_up();  // without a byte, on a used connection
    answer_at_once(out, index, {});
  });
  const LoadResult result = load(server, 5, {.max_concurrency = 1, .on_progress = {}});
  for (const LoadReply& reply : result.replies) EXPECT_EQ(reply.record.error, "");
  EXPECT_EQ(server.connections(), 5);
}

TEST(LoadClient, AConnectionCutInsideAReplyFailsThatRequestOnly) {
  LoadServer server([](StreamWriter& out, int index, const std::string&) {
    if (index != 1) return answer_at_once(out, index, {});
    out.begin();
    out.token("a");
    out.hang_up();
  });
  const LoadResult result = load(server, 3, {.max_concurrency = 1, .on_progress = {}});
  EXPECT_EQ(result.replies[0].record.error, "");
  EXPECT_NE(result.replies[1].record.error.find("in the middle"), std::string::npos);
  EXPECT_EQ(result.replies[2].record.error, "");
}

TEST(LoadClient, AReplyThatNeverEndsRunsIntoTheTimeout) {
  LoadServer server([](StreamWriter& out, int, const std::string&) {
    out.begin();
    out.token("a");
  });
  const LoadResult result = load(server, 1, {.timeout_us = 200'000, .on_progress = {}});
  EXPECT_NE(result.replies[0].record.error.find("no complete reply"), std::string::npos);
}

TEST(LoadClient, OpenLoopLatenciesCountFromTheArrival) {
  LoadServer server(answer_at_once);
  std::vector<LoadRequest> requests{{.arrival_us = 100'000, .body = "1"}, {.arrival_us = 150'000, .body = "2"}};
  const auto result = run_load(target_of(server), requests, {.from_arrival = true, .on_progress = {}});
  ASSERT_TRUE(bool(result));
  EXPECT_EQ(result->replies[0].record.start_us, 100'000);
  EXPECT_EQ(result->replies[1].record.start_us, 150'000);
  for (const LoadReply& reply : result->replies) EXPECT_GT(reply.record.ttft_ms(), 0);
}

TEST(LoadClient, BaseUrls) {
  EXPECT_EQ(parse_base_url("http://h:81/api/")->host, "h");
  EXPECT_EQ(parse_base_url("http://h:81/api/")->port, 81);
  EXPECT_EQ(parse_base_url("http://h:81/api/")->prefix, "/api");
  EXPECT_EQ(parse_base_url("http://h")->port, 80);
  EXPECT_EQ(parse_base_url("http://[::1]:8000")->host, "::1");
  for (const char* bad : {"https://h", "h:80", "http://", "http://h:0", "http://h:x", "http://h:99999"})
    EXPECT_FALSE(bool(parse_base_url(bad))) << bad;
}

// --- Replies
// ---------------------------------------------------------------------------------------------------

std::string chunked(const std::string& data) { return fmt::format("{:x}\r\n{}\r\n", data.size(), data); }
const char* const kStreamHead =
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n";

StreamReply read(const std::string& bytes, size_t piece = std::string::npos) {
  StreamReply reply;
  int64_t time_us = 0;
  for (size_t at = 0; at < bytes.size(); at += std::min(piece, bytes.size()))
    reply.receive(bytes.substr(at, piece), ++time_us);
  return reply;
}

TEST(StreamReply, IsTheSameInPiecesOfAnySize) {
  const std::string bytes =
      kStreamHead + chunked("data: {\"choices\":[{\"text\":\"caf") +
      chunked("\u00e9\"}]}\r\n\r\n: a comment\n\ndata:{\"choices\":[{\"text\":\"!\"}]}\n\n") +
      chunked("data: {\"choices\":[],\"usage\":{\"prompt_tokens\":4,\"completion_tokens\":7}}\n\n") +
      chunked("data: [DONE]\n\n") + "0\r\nX-Trailer: 1\r\n\r\n";
  for (size_t piece = 1; piece <= bytes.size(); ++piece) {
    const StreamReply reply = read(bytes, piece);
    ASSERT_TRUE(reply.complete()) << piece;
    ASSERT_EQ(reply.error(), "") << piece;
    ASSERT_TRUE(reply.reusable());
    ASSERT_EQ(reply.text(), "caf\u00e9!");
    ASSERT_EQ(reply.times().count(), 2);
    ASSERT_EQ(reply.output_tokens(), 7);
    ASSERT_EQ(reply.prompt_tokens(), 4);
  }
}

TEST(StreamReply, TheRoleChunkAndTheEmptyLastMessageAreNoTokens) {
  StreamReply reply;
  reply.receive(kStreamHead, 1);
  reply.receive(chunked("data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n"), 10);
  reply.receive(chunked("data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n"), 2000);
  reply.receive(chunked("data: {\"choices\":[{\"delta\":{\"content\":\"\"},\"finish_reason\":null}]}\n\n"),
                3000);
  reply.receive(chunked("data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n"), 4000);
  reply.receive(chunked("data: [DONE]\n\n") + "0\r\n\r\n", 5000);
  ASSERT_TRUE(reply.complete());
  EXPECT_EQ(reply.times().first_us(), 2000);
  EXPECT_EQ(reply.times().last_us(), 3000) << "a token whose text is held back is a token";
  EXPECT_EQ(reply.times().count(), 2);
}

TEST(StreamReply, SaysWhatWentWrong) {
  const std::pair<std::string, const char*> cases[] = {
      {"HTTP/1.1 503 Busy\r\nContent-Length: 34\r\n\r\n{\"error\":{\"message\":\"queue full\"}} ",
       "HTTP 503: queue full"},
      {"HTTP/1.1 404 No\r\nContent-Length: 4\r\n\r\ngone", "HTTP 404: gone"},
      {"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "no event stream"},
      {"SSH-2.0-OpenSSH\r\n", "not an HTTP reply"},
      {kStreamHead + std::string("zz\r\n"), "chunk without a size"},
      {kStreamHead + chunked("data: {\"choices\"\n\n"), "no JSON object"},
      {kStreamHead + chunked("data: {\"error\":{\"message\":\"out of pages\"}}\n\n"),
       "in the stream: out of pages"},
      {kStreamHead + chunked("data: {\"choices\":[{\"text\":\"a\"}]}\n\n") + "0\r\n\r\n",
       "without a finish reason"},
  };
  for (const auto& [bytes, words] : cases) {
    const StreamReply reply = read(bytes);
    EXPECT_TRUE(reply.complete()) << bytes;
    EXPECT_NE(reply.error().find(words), std::string::npos) << reply.error();
  }
}

// --- Results
// ---------------------------------------------------------------------------------------------------

TEST(ServeBench, WritesTheFieldsOfVllmsResult) {
  LoadServer server(answer_at_once);
  const test::TempDir folder;
  const std::string file = folder.file("bench.json");
  const std::string port = std::to_string(server.port());
  const char* argv[] = {"serve",
                        "--port",
                        port.c_str(),
                        "--num-prompts",
                        "6",
                        "--request-rate",
                        "100",
                        "--save-detailed",
                        "--disable-tqdm",
                        "--result-filename",
                        file.c_str(),
                        "--metadata",
                        "version=7",
                        "--goodput",
                        "ttft:5000",
                        "itl:5000",
                        "--metric-percentiles",
                        "50,99.9",
                        "--max-concurrency",
                        "3"};
  ASSERT_EQ(bench_serve(int(std::size(argv)), argv), 0);
  const Json result = *parse_json(*read_file(file));
  for (const char* key : {"date",
                          "endpoint_type",
                          "backend",
                          "label",
                          "model_id",
                          "tokenizer_id",
                          "num_prompts",
                          "request_rate",
                          "burstiness",
                          "max_concurrency",
                          "duration",
                          "completed",
                          "failed",
                          "total_input_tokens",
                          "total_output_tokens",
                          "request_throughput",
                          "request_goodput",
                          "output_throughput",
                          "total_token_throughput",
                          "mean_ttft_ms",
                          "median_ttft_ms",
                          "std_ttft_ms",
                          "p50_ttft_ms",
                          "p99.9_ttft_ms",
                          "mean_tpot_ms",
                          "mean_itl_ms",
                          "mean_e2el_ms",
                          "p99.9_e2el_ms",
                          "max_output_tokens_per_s",
                          "max_concurrent_requests",
                          "input_lens",
                          "output_lens",
                          "ttfts",
                          "itls",
                          "start_times",
                          "generated_texts",
                          "errors",
                          "version"})
    EXPECT_TRUE(result.contains(key)) << key;
  EXPECT_EQ(result["completed"], 6);
  EXPECT_EQ(result["preemptions"], 4) << "5 after the run, 1 before";
  EXPECT_EQ(result["model_id"], "fake");
  EXPECT_EQ(result["max_concurrency"], 3);
  EXPECT_EQ(result["total_input_tokens"], 6 * 1024);
  EXPECT_EQ(result["generated_texts"], Json::array({"a", "a", "a", "a", "a", "a"}));
  EXPECT_GT(result["request_goodput"].get<double>(), 0);
}

TEST(OfflineBench, TheCpuReadsWeightsAsTheyAreStored) {
  for (const auto& [dtype, code] : {std::pair{"auto", 0}, {"float16", 2}, {"half", 2}, {"bfloat16", 2}}) {
    const char* model = code == 0 ? "tiny" : "/no/such/model";  // is not looked for
    const char* latency[] = {
        "latency", "--model",      model, "--load-format", "dummy", "--input-len",        "4", "--device",
        "cpu",     "--output-len", "2",   "--batch-size",  "1",     "--num-iters-warmup", "0", "--num-iters",
        "1",       "--threads",    "1",   "--dtype",       dtype};
    ::testing::internal::CaptureStderr();
    const int got = bench_latency(int(std::size(latency)), latency);
    const std::string text = ::testing::internal::GetCapturedStderr();
    EXPECT_EQ(got, code) << text;
    EXPECT_EQ(text.find("--dtype") != std::string::npos, code != 0) << text;
  }
}

TEST(OfflineBench, LatencyAndThroughputOfATinyModel) {
  const test::TempDir folder;
  const std::string file = folder.file("offline.json");
  const char* latency[] = {"latency",   "--model",      "tiny", "--load-format", "dummy", "--input-len",
                           "8",         "--output-len", "4",    "--batch-size",  "2",     "--num-iters-warmup",
                           "1",         "--num-iters",  "3",    "--threads",     "1",     "--output-json",
                           file.c_str()};
  ASSERT_EQ(bench_latency(int(std::size(latency)), latency), 0);
  Json result = *parse_json(*read_file(file));
  ASSERT_EQ(result["latencies"].size(), 3u);
  const std::vector<double> values = result["latencies"].get<std::vector<double>>();
  EXPECT_NEAR(result["avg_latency"].get<double>(), (values[0] + values[1] + values[2]) / 3, 1e-9);
  EXPECT_EQ(result["percentiles"].size(), 6u);
  // A request's first token and the three after it lie within its batch.
  const double ttft = result["ttft"]["mean"].get<double>(), tpot = result["tpot"]["mean"].get<double>();
  EXPECT_GT(ttft, 0);
  EXPECT_GT(tpot, 0);
  EXPECT_LE(ttft + 3 * tpot, result["avg_latency"].get<double>());
  const char* throughput[] = {"throughput", "--model",      "tiny", "--load-format", "dummy",     "--input-len",
                              "8",          "--output-len", "4",    "--num-prompts", "5",         "--n",
                              "2",          "--threads",    "1",    "--output-json", file.c_str()};
  ASSERT_EQ(bench_throughput(int(std::size(throughput)), throughput), 0);
  result = *parse_json(*read_file(file));
  EXPECT_EQ(result["num_requests"], 5);
  EXPECT_EQ(result["total_num_tokens"], 5 * 8 + 5 * 2 * 4) << "a prompt counts once, each answer for itself";
  EXPECT_NEAR(result["tokens_per_second"].get<double>(), 80 / result["elapsed_time"].get<double>(), 1e-6);
}

}  // namespace
}  // namespace ekv::testing
