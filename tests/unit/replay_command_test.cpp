// `elastickv replay` from its command line to its result files, on the simulator.

#include "bench/replay_command.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "backend/sim/shipped_models.h"
#include "bench/command.h"
#include "tests/support/temp_dir.h"
#include "tests/support/test_data.h"
#include "util/files.h"

namespace ekv {
namespace {

const std::string kSmall = test::test_data() / "traces/small.jsonl";

std::string temp_file(const std::string& name) {
  static const test::TempDir folder;
  return folder.file(name);
}

int run(const std::vector<std::string>& arguments) {
  std::vector<const char*> argv{"replay"};
  for (const std::string& argument : arguments) argv.push_back(argument.c_str());
  return replay(int(argv.size()), argv.data());
}

std::vector<std::string> operator+(std::vector<std::string> a, const std::vector<std::string>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

const std::vector<std::string> kSim{"--cost-model", "a100-llama-3.1-8b", "--quiet"};
const std::vector<std::string> kTrace = kSim + std::vector<std::string>{"--trace", kSmall};
const std::vector<std::string> kTight{"--num-gpu-blocks-override", "1000", "--preset", "paper015"};

struct Ran {
  int code = 0;
  Json result;
  std::string out, err;
};

// With --json; the result is null when there is no file.
Ran run_json(const std::vector<std::string>& arguments) {
  const std::string path = temp_file("result.json");
  std::filesystem::remove(path);
  testing::internal::CaptureStdout(), testing::internal::CaptureStderr();
  Ran ran{.code = run(arguments + std::vector<std::string>{"--json", path})};
  ran.out = testing::internal::GetCapturedStdout(), ran.err = testing::internal::GetCapturedStderr();
  if (const Result<std::string> text = read_file(path)) {
    const Result<Json> json = parse_json(*text);
    if (json) ran.result = *json;
  }
  return ran;
}

std::string write_trace(const std::string& name, const std::string& text) {
  const std::string path = temp_file(name);
  std::ofstream(path) << text;
  return path;
}

TEST(Replay, ResultHasEveryFieldAndTheTotalsOfTheTrace) {
  const Ran ran =
      run_json(kTrace + kTight + std::vector<std::string>{"--kv-policy", "elastic", "--metadata", "window=A"});
  ASSERT_EQ(ran.code, 0) << ran.err;
  for (const char* key :
       {"requests", "ttft_ms", "tpot_ms", "tbt_ms", "output_tokens_per_s", "preemptions", "recomputed_tokens",
        "base_exposure", "eff300", "max_waiting", "drain_s", "steps", "simulated_s", "wall_s", "log_hash"})
    EXPECT_FALSE(member(ran.result, key).is_null()) << key;
  for (const char* of : {"ttft_ms", "tpot_ms", "tbt_ms"})
    for (const char* key : {"mean", "p50", "p90", "p99"})
      EXPECT_TRUE(ran.result[of][key].is_number()) << of << key;
  EXPECT_EQ(ran.result["policy"], "elastic");
  EXPECT_EQ(ran.result["preset"], "paper015");
  EXPECT_EQ(ran.result["window"], "A");
  EXPECT_GT(ran.result["base_exposure"].get<double>(), 0) << "the run must be under pressure to mean something";
  EXPECT_NE(ran.out.find("TTFT"), std::string::npos);
}

TEST(Replay, WindowsHaveTheirRecordedTotals) {
  std::ifstream windows(test::test_data() / "traces/windows.csv");
  std::string line;
  ASSERT_TRUE(std::getline(windows, line));
  int num_windows = 0;
  for (; std::getline(windows, line); ++num_windows) {
    SCOPED_TRACE(line);
    std::istringstream fields(line);
    std::vector<std::string> f;
    for (std::string field; std::getline(fields, field, ',');) f.push_back(field);
    ASSERT_EQ(f.size(), 6u);
    const Ran ran = run_json(
        kTrace + std::vector<std::string>{"--window", f[1] + ":" + f[2], "--kv-cache-memory-bytes", "20G"});
    ASSERT_EQ(ran.code, 0) << ran.err;
    EXPECT_EQ(ran.result["requests"], std::stoll(f[3]));
    EXPECT_EQ(ran.result["completed"], std::stoll(f[3]));
    EXPECT_EQ(ran.result["input_tokens"], std::stoll(f[4]));
    EXPECT_EQ(ran.result["output_tokens"], std::stoll(f[5]));
  }
  EXPECT_EQ(num_windows, 4);
}

// The simulator runs on one thread; nothing that other threads of the process do may show in its log.
TEST(Replay, RunsAndThreadCountsGiveTheSameLogHash) {
  const auto arguments = kTrace + kTight + std::vector<std::string>{"--kv-policy", "elastic"};
  const auto hash = [&](int threads, int number) {
    const std::string path = temp_file("hash" + std::to_string(number) + ".json");
    EXPECT_EQ(run(arguments + std::vector<std::string>{"--threads", std::to_string(threads), "--json", path}),
              0);
    const Result<std::string> text = read_file(path);
    EXPECT_TRUE(text);
    return (*parse_json(*text))["log_hash"].get<std::string>();
  };
  testing::internal::CaptureStdout();
  const std::string first = hash(1, 0);
  EXPECT_EQ(hash(1, 0), first);
  EXPECT_EQ(hash(2, 0), first);
  std::vector<std::string> hashes(3);
  std::vector<std::jthread> threads;
  for (int i = 0; i < 3; ++i) threads.emplace_back([&, i] { hashes[size_t(i)] = hash(i, i); });
  threads.clear();
  for (const std::string& other : hashes) EXPECT_EQ(other, first);
  testing::internal::GetCapturedStdout();
}

TEST(Replay, PoliciesDoWhatTheyAreFor) {
  const Ran target_only = run_json(kTrace + kTight);
  const Ran elastic = run_json(kTrace + kTight + std::vector<std::string>{"--kv-policy", "elastic"});
  EXPECT_GT(target_only.result["preemptions"], 0);
  EXPECT_EQ(target_only.result["base_exposure"], 0.0);
  EXPECT_LT(elastic.result["preemptions"], target_only.result["preemptions"]);
  // Preempted requests come back from the host instead of being computed again.
  const Ran offload = run_json(kTrace + kTight + std::vector<std::string>{"--kv-policy", "exact-offload"});
  EXPECT_GT(offload.result["preemptions"], 0);
  EXPECT_LT(offload.result["recomputed_tokens"].get<int64_t>(),
            target_only.result["recomputed_tokens"].get<int64_t>() / 2);
  // The host budget binds: without room for low bytes nothing is demoted, and the run is the other's, step by
  // step.
  const Ran no_host =
      run_json(kTrace + kTight + std::vector<std::string>{"--kv-policy", "elastic", "--kv-host-bytes", "0"});
  EXPECT_EQ(no_host.result["base_exposure"], 0.0);
  EXPECT_NE(no_host.err.find("--kv-policy elastic has no room on the host"), std::string::npos) << no_host.err;
  EXPECT_EQ(elastic.err.find("no room"), std::string::npos) << elastic.err;
  EXPECT_EQ(no_host.result["log_hash"], target_only.result["log_hash"]);
}

TEST(Replay, TheResultSaysWhetherStepsWerePlannedAhead) {
  const std::vector<std::string> load{"--quiet", "--synthetic", "2:20:4", "--concurrency", "2"};
  const auto cpu =
      load + std::vector<std::string>{"--device", "cpu", "--model", EKV_TEST_DATA "/golden/tiny-llama"};
  EXPECT_EQ(run_json(cpu).result["async_scheduling"], false);
  EXPECT_EQ(run_json(cpu + std::vector<std::string>{"--async-scheduling"}).result["async_scheduling"], true);
  EXPECT_EQ(run_json(load + kSim).result["async_scheduling"], false);
}

TEST(Replay, SyntheticLoadsAndLengthsNeedAnArrivalProcess) {
  const std::vector<std::string> synthetic =
      kSim + std::vector<std::string>{"--synthetic", "12:100:10", "--kv-cache-memory-bytes", "4G"};
  EXPECT_EQ(run_json(synthetic).code, 1);
  const Ran closed = run_json(synthetic + std::vector<std::string>{"--concurrency", "3"});
  EXPECT_EQ(closed.code, 0) << closed.err;
  EXPECT_EQ(closed.result["peak_in_flight"], 3);
  EXPECT_EQ(closed.result["output_tokens"], 120);
  const Ran open = run_json(synthetic + std::vector<std::string>{"--request-rate", "2"});
  EXPECT_EQ(open.code, 0) << open.err;
  EXPECT_NEAR(open.result["duration_s"].get<double>(), 6, 1.0);
  const std::string lengths = write_trace("lengths.csv", "input_tokens,output_tokens\n100,5\n50,7\n3,9\n");
  const Ran sampled =
      run_json(kSim + std::vector<std::string>{"--trace", lengths, "--request-rate", "5", "--limit", "30",
                                               "--length-filter", "4:1024:2048"});
  EXPECT_EQ(sampled.code, 0) << sampled.err;
  EXPECT_EQ(sampled.result["requests"], 30);
  EXPECT_EQ(sampled.result["input_tokens"].get<int>(), 15 * 100 + 15 * 50)
      << "the row of 3 tokens is filtered out";
}

TEST(Replay, TimesAreMillisecondsAndPromptsShareTheirBlocks) {
  const std::string trace =
      write_trace("trc1.jsonl", R"({"timestamp":0,"input_length":700,"output_length":5,"hash_ids":[1,2]}
{"timestamp":2000,"input_length":700,"output_length":5,"hash_ids":[1,3]}
{"timestamp":2500,"input_length":700,"output_length":5,"hash_ids":[1,3]}
{"timestamp":3000,"input_length":20,"output_length":5,"hash_ids":[1,2]}
)");
  const std::string log = temp_file("trc1.log");
  const Ran ran = run_json(kSim + std::vector<std::string>{"--trace", trace, "--step-log", log});
  EXPECT_EQ(ran.code, 1) << "a broken line shows in the exit code";
  EXPECT_NE(ran.err.find("1 lines"), std::string::npos) << ran.err;
  EXPECT_NE(ran.out.find("expected ceil(20 / 512) = 1"), std::string::npos) << ran.out;
  EXPECT_EQ(ran.result["requests"], 3);
  EXPECT_EQ(ran.result["broken_lines"], 1);
  EXPECT_EQ(ran.result["input_tokens"], 2100);
  std::ifstream file(log);
  std::vector<std::pair<int64_t, int64_t>> arrivals;  // us, cached tokens
  for (std::string line; std::getline(file, line);) {
    const Json json = *parse_json(line);
    if (json["kind"] == "request")
      arrivals.push_back({json["arrival_us"].get<int64_t>(), json["cached_tokens"].get<int64_t>()});
  }
  // The second shares 512 tokens with the first, the third all but its last token with the second.
  EXPECT_EQ(arrivals, (std::vector<std::pair<int64_t, int64_t>>{{0, 0}, {2'000'000, 512}, {2'500'000, 672}}));
  const Ran alone = run_json(kSim + std::vector<std::string>{"--trace", trace, "--ignore-hash-ids"});
  EXPECT_EQ(alone.result["prefix_hit_tokens"], 0);
}

TEST(Replay, EveryLineIsReplayedOrCounted) {
  std::string text = "\r\n{\"input_length\":5,\"output_length\":1}\r\n{\"timestamp\":1,\"input_length\":5}\n";
  text +=
      "{\"timestamp\":1,\"input_length\":0,\"output_length\":1}\n{\"timestamp\":1,\"input_length\":9,\"output_"
      "length\":0}\n";
  for (int i = 0; i < 1000; ++i)
    text += "{\"timestamp\":" + std::to_string(2 * i) + ",\"input_length\":30,\"output_length\":1}\n";
  text += "{\"timestamp\":2000,\"input_length\":6000,\"output_length\":1}\n{\"timestamp\":3000,\"inp";
  const std::vector<std::string> trace =
      kSim + std::vector<std::string>{"--trace", write_trace("trc3.jsonl", text), "--max-model-len", "4096"};
  const Ran ran = run_json(trace);
  EXPECT_EQ(ran.code, 1);
  EXPECT_EQ(ran.result["lines"], 1007);
  EXPECT_EQ(ran.result["requests"], 1001);
  EXPECT_EQ(ran.result["skipped_lines"], 6);
  EXPECT_EQ(ran.result["broken_lines"], 5);
  EXPECT_EQ(ran.result["failed"], 1);
  EXPECT_NE(ran.result["first_error"].get<std::string>().find("6001"), std::string::npos);
  const Ran skipped = run_json(trace + std::vector<std::string>{"--too-long", "skip"});
  EXPECT_EQ(skipped.result["requests"], 1000);
  EXPECT_EQ(skipped.result["skipped_lines"], 7);
  const Ran cut = run_json(trace + std::vector<std::string>{"--too-long", "truncate"});
  EXPECT_EQ(cut.result["failed"], 0);
  EXPECT_EQ(cut.result["input_tokens"], 1000 * 30 + 4095);
}

TEST(Replay, TheSeriesShowsWhatHeldAtEachPoint) {
  const std::string path = temp_file("series.json");
  const Ran ran = run_json(
      kTrace + kTight +
      std::vector<std::string>{"--kv-policy", "elastic", "--time-series", path, "--series-period", "2"});
  ASSERT_EQ(ran.code, 0) << ran.err;
  const Json series = (*parse_json(*read_file(path)))["series"];
  const size_t count = series["t_s"].size();
  EXPECT_NEAR(double(count), ran.result["simulated_s"].get<double>() / 2, 2);
  for (size_t i = 0; i < count; ++i) EXPECT_EQ(series["t_s"][i].get<double>(), 2.0 * double(i));
  int64_t waiting = 0, base = 0;
  for (size_t i = 0; i < count; ++i) {
    waiting = std::max(waiting, series["waiting"][i].get<int64_t>());
    base += series["base_pairs"][i].get<int64_t>();
    EXPECT_LE(series["base_pairs"][i], series["live_pairs"][i]);
  }
  EXPECT_GT(base, 0);
  EXPECT_LE(waiting, ran.result["max_waiting"].get<int64_t>());
  EXPECT_EQ(series["offered_tokens"][count - 1], ran.result["input_tokens"]);
}

TEST(Replay, StepsInFlightAreThoseOfTheCostModelUnlessTheFlagIsGiven) {
  const std::vector<std::string> load{"--synthetic", "12:300:40", "--concurrency", "4", "--quiet"};
  ASSERT_EQ(shipped_model_names()[0], "a100-llama-3.1-8b");
  Json file = *parse_json(shipped_model_texts()[0]);
  file["step"]["steps_in_flight"] = 2;
  const std::string two = write_trace("two.json", file.dump());
  const struct {
    std::string model;
    std::vector<std::string> flags;
    bool async;
  } cases[] = {{"a100-llama-3.1-8b", {}, false},
               {"a100-llama-3.1-8b", {"--async-scheduling"}, true},
               {two, {}, true},
               {two, {"--no-async-scheduling"}, false}};
  std::string hashes[2];
  for (const auto& c : cases) {
    const Ran ran = run_json(load + std::vector<std::string>{"--cost-model", c.model} + c.flags);
    ASSERT_EQ(ran.code, 0) << ran.err;
    EXPECT_EQ(ran.result["async_scheduling"], c.async);
    std::string& hash = hashes[c.async];
    if (hash.empty()) hash = ran.result["log_hash"];
    EXPECT_EQ(ran.result["log_hash"], hash);
  }
  EXPECT_NE(hashes[0], hashes[1]);
}

TEST(Replay, ASyntheticLoadIsScaledByAnyNumber) {
  const Ran scaled = run_json(
      kSim + std::vector<std::string>{"--synthetic", "4:10:7", "--concurrency", "2", "--length-scale", "3"});
  EXPECT_EQ(scaled.code, 0) << scaled.err;
  EXPECT_EQ(scaled.result["input_tokens"], 4 * 4);
  EXPECT_EQ(scaled.result["output_tokens"], 4 * 3);
}

TEST(Replay, BadInputIsNamedByItsFlag) {
  const std::string broken_model = write_trace("model.json", "{}"),
                    cut_trace = write_trace("cut.jsonl", "{\"timest");
  const std::vector<std::string> synthetic = kSim + std::vector<std::string>{"--synthetic", "4:10:2"};
  const std::vector<std::string> closed = synthetic + std::vector<std::string>{"--concurrency", "2"};
  const struct {
    std::vector<std::string> arguments;
    std::string named;
  } mistakes[] = {
      {kSim, "--trace"},
      {closed + std::vector<std::string>{"--trace", kSmall}, "--trace"},
      {kSim + std::vector<std::string>{"--trace", "/no/such/file"}, "/no/such/file"},
      {kSim + std::vector<std::string>{"--trace", cut_trace}, "cut.jsonl:1"},
      {kTrace + std::vector<std::string>{"--trace-format", "csv"}, "--trace-format"},
      {kTrace + std::vector<std::string>{"--request-rate", "3"}, "--request-rate"},
      {kTrace + std::vector<std::string>{"--request-rate", "-3"}, "--request-rate"},
      {kTrace + std::vector<std::string>{"--burstiness", "0"}, "--burstiness"},
      {kTrace + std::vector<std::string>{"--window", "30"}, "--window"},
      {kTrace + std::vector<std::string>{"--window", "30:20"}, "--window"},
      {kTrace + std::vector<std::string>{"--window", "5000:6000"}, "not one request"},
      {kTrace + std::vector<std::string>{"--dilate", "0"}, "--dilate"},
      {kTrace + std::vector<std::string>{"--length-scale", "3"}, "--length-scale"},
      {kTrace + std::vector<std::string>{"--length-filter", "4:5"}, "--length-filter"},
      {kTrace + std::vector<std::string>{"--limit", "0"}, "--limit"},
      {kTrace + std::vector<std::string>{"--too-long", "skip"}, "--too-long"},
      {kTrace + std::vector<std::string>{"--max-model-len", "1"}, "--max-model-len"},
      {kSim + std::vector<std::string>{"--synthetic", "4:10"}, "--synthetic"},
      {kSim + std::vector<std::string>{"--synthetic", "4:0:8", "--concurrency", "2"},
       "--synthetic: \"4:0:8\" is not N:INPUT:OUTPUT, such as 600:4096:1024, with 1 to 10000000 requests and 1 "
       "to"},
      {kSim + std::vector<std::string>{"--synthetic", "10000001:1:1", "--concurrency", "2"},
       "--synthetic: \"10000001:1:1\" is not"},
      {closed + std::vector<std::string>{"--length-scale", "0"}, "--length-scale"},
      {kTrace + std::vector<std::string>{"--length-scale", "3"}, "--length-scale: must divide the hash block"},
      {closed + std::vector<std::string>{"--load-format", "dummy"},
       "--load-format: the simulator has no weights"},
      {closed + std::vector<std::string>{"--gpu-memory-utilization", "0.5"},
       "--gpu-memory-utilization: the simu"},
      {closed + std::vector<std::string>{"--url", "http://127.0.0.1:1"},
       "--cost-model: is for an engine in this"},
      {{"--synthetic", "4:10:2", "--url", "http://127.0.0.1:1", "--load-format", "auto"},
       "--load-format: is for"},
      {{"--synthetic", "4:10:2", "--url", "http://127.0.0.1:1", "--replicas", "2"}, "--replicas: is for"},
      {{"--synthetic", "4:10:2", "--url", "http://127.0.0.1:1", "--header", "x"}, "--header"},
      {closed + std::vector<std::string>{"--header", "x=y"}, "--header: is for --url only"},
      {{"--synthetic", "4:10:2", "--concurrency", "2", "--cost-model", "/tmp"},
       "--cost-model: /tmp: not a regular"},
      {synthetic, "--concurrency"},
      {synthetic + std::vector<std::string>{"--concurrency", "0"}, "--concurrency"},
      {closed + std::vector<std::string>{"--replicas", "0"}, "--replicas"},
      {{"--synthetic", "4:10:2"}, "--cost-model"},
      {closed + std::vector<std::string>{"--cost-model", "a100"}, "--cost-model"},
      {closed + std::vector<std::string>{"--cost-model", broken_model}, "--cost-model"},
      {closed + std::vector<std::string>{"--device", "tpu"}, "--device"},
      {closed + std::vector<std::string>{"--device", "cuda"}, "--model"},
      {closed + std::vector<std::string>{"--device", "cpu"}, "--model"},
      {closed + std::vector<std::string>{"--model", "tiny"}, "--model"},
      {closed + std::vector<std::string>{"--dtype", "bfloat16"}, "--dtype: is for --device cuda"},
      {{"--synthetic", "4:10:2", "--concurrency", "2", "--device", "cpu", "--model", "/no/such/model",
        "--dtype", "half"},
       "--dtype: is for --device cuda"},
      {{"--synthetic", "4:10:2", "--url", "http://127.0.0.1:1", "--dtype", "float16"}, "--dtype"},
      {closed + std::vector<std::string>{"--device", "sim", "--url", "http://127.0.0.1:1"}, "--url"},
      {{"--synthetic", "4:10:2", "--url", "ftp://x"}, "--url"},
      {{"--synthetic", "4:10:2", "--url", "http://127.0.0.1:1", "--kv-policy", "elastic"}, "--kv-policy"},
      {{"--synthetic", "4:10:2", "--url", "http://127.0.0.1:1", "--step-log", "x"}, "--step-log"},
      {closed + std::vector<std::string>{"--kv-policy", "none"}, "--kv-policy"},
      {closed + std::vector<std::string>{"--preset", "paper"}, "--preset"},
      {closed + std::vector<std::string>{"--kv-host-bytes", "-1"}, "--kv-host-bytes"},
      {closed + std::vector<std::string>{"--max-base-fraction", "2"}, "--max-base-fraction"},
      {closed + std::vector<std::string>{"--watermark", "1"}, "--watermark"},
      {closed + std::vector<std::string>{"--max-num-seqs", "0"}, "--max-num-seqs"},
      {closed + std::vector<std::string>{"--max-num-batched-tokens", "2"}, "--max-num-batched-tokens"},
      {closed + std::vector<std::string>{"--kv-cache-memory-bytes", "5"}, "--kv-cache-memory-bytes"},
      {closed + std::vector<std::string>{"--goodput", "speed:3"}, "--goodput"},
      {closed + std::vector<std::string>{"--metadata", "x"}, "--metadata"},
      {closed + std::vector<std::string>{"--json", "/no/such/folder/x.json"}, "--json"},
      {closed + std::vector<std::string>{"--step-log", "/no/such/folder/x"}, "--step-log"},
      {closed + std::vector<std::string>{"--series-period", "0"}, "--series-period"},
      {closed + std::vector<std::string>{"--no-such-flag"}, "--no-such-flag"},
  };
  for (const auto& mistake : mistakes) {
    SCOPED_TRACE(::testing::PrintToString(mistake.arguments));
    testing::internal::CaptureStdout(), testing::internal::CaptureStderr();
    EXPECT_NE(run(mistake.arguments), 0);
    testing::internal::GetCapturedStdout();
    const std::string told = testing::internal::GetCapturedStderr();
    EXPECT_NE(told.find(mistake.named), std::string::npos) << told;
  }
}

}  // namespace
}  // namespace ekv
