// The published traces against their published totals, read and replayed. Built where EKV_TRACES names their
// folder.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "bench/replay_command.h"
#include "bench/trace.h"
#include "tests/support/temp_dir.h"
#include "util/files.h"

namespace ekv {
namespace {

TraceOptions with_window(double start_s, double end_s) {
  TraceOptions options;
  options.start_s = start_s;
  options.end_s = end_s;
  return options;
}

int64_t skipped(const Trace& trace, std::string_view reason) {
  for (const TraceSkip& s : trace.skips)
    if (s.reason == reason) return s.count;
  return 0;
}

Trace load(const std::string& file, const TraceOptions& options = {}) {
  auto trace = load_trace(std::filesystem::path(EKV_TRACES) / file, options);
  EXPECT_TRUE(trace) << (trace ? "" : trace.error().message);
  return trace ? *std::move(trace) : Trace{};
}

TEST(PublishedTrace, MooncakeWindowsHaveTheirRecordedTotals) {
  std::ifstream windows(std::string(EKV_TRACES) + "/mooncake/windows.csv");
  std::string line;
  ASSERT_TRUE(std::getline(windows, line));
  int num_windows = 0;
  while (std::getline(windows, line)) {
    SCOPED_TRACE(line);
    char name[8];
    long long start, end, first_line, last_line, requests, input, output, ids;
    ASSERT_EQ(std::sscanf(line.c_str(), "%7[^,],%lld,%lld,%lld,%lld,%lld,%lld,%lld,%lld", name, &start, &end,
                          &first_line, &last_line, &requests, &input, &output, &ids),
              9);
    const Trace trace = load("mooncake/conversation_trace.jsonl", with_window(double(start), double(end)));
    EXPECT_EQ(int64_t(trace.requests.size()), requests);
    EXPECT_EQ(trace.input_tokens(), input);
    EXPECT_EQ(trace.output_tokens(), output);
    EXPECT_EQ(trace.requests.front().line, first_line);
    EXPECT_EQ(trace.requests.back().line, last_line);
    EXPECT_EQ(trace.num_faults(), 0);
    EXPECT_EQ(trace.num_lines, 12'031);
    std::set<int64_t> distinct;
    for (const TraceRequest& r : trace.requests) distinct.insert(r.hash_ids.begin(), r.hash_ids.end());
    EXPECT_EQ(int64_t(distinct.size()), ids);
    ++num_windows;
  }
  EXPECT_EQ(num_windows, 6);
}

TEST(PublishedTrace, WholeFilesHaveTheirPublishedTotals) {
  const struct {
    const char* file;
    int64_t requests, input, output, last_ms;
    int longest;
  } kFiles[] = {{"mooncake/conversation_trace.jsonl", 12'031, 144'793'823, 4'122'048, 3'536'999, 126'195},
                {"mooncake/synthetic_trace.jsonl", 3'993, 61'194'628, 595'432, 1'022'025, 191'378}};
  for (const auto& want : kFiles) {
    SCOPED_TRACE(want.file);
    const Trace trace = load(want.file);
    EXPECT_EQ(int64_t(trace.requests.size()), want.requests);
    EXPECT_EQ(trace.input_tokens(), want.input);
    EXPECT_EQ(trace.output_tokens(), want.output);
    EXPECT_EQ(trace.requests.back().arrival_us, want.last_ms * 1000);
    const auto shorter = [](const TraceRequest& a, const TraceRequest& b) {
      return a.input_tokens < b.input_tokens;
    };
    EXPECT_EQ(std::max_element(trace.requests.begin(), trace.requests.end(), shorter)->input_tokens,
              want.longest);
  }
}

TEST(PublishedTrace, AzureFilesAreReadWhole) {
  const Trace chat = load("azure-2023/AzureLLMInferenceTrace_conv.csv");
  EXPECT_EQ(chat.requests.size(), 19'366u);
  EXPECT_EQ(chat.num_faults(), 0);
  EXPECT_EQ(chat.input_tokens() / 19'366, 1154);  // mean 1,154.7
  EXPECT_EQ(chat.output_tokens() / 19'366, 211);
  EXPECT_EQ(chat.requests[1].arrival_us, 4'314'579);
  const Trace code = load("azure-2023/AzureLLMInferenceTrace_code.csv");
  EXPECT_EQ(code.requests.size(), 8'819u);
  EXPECT_EQ(code.requests.back().input_tokens, 549);
}

TEST(PublishedTrace, LengthsAreSampledAtARate) {
  TraceOptions options;
  options.rate = 22;
  options.limit = 5000;
  options.filter = {4, 1024, 2048};
  const Trace share = load("lengths/sharegpt_v3_first_turn_lengths.csv", options);
  EXPECT_EQ(share.requests.size(), 5000u);
  EXPECT_EQ(share.num_lines, 12'001);
  EXPECT_EQ(skipped(share, "not in the sample"), 10'640 - 5000);  // rows left by the filter
  EXPECT_EQ(share.num_faults(), 0);
  EXPECT_EQ(load("lengths/arxiv_summarization_llama2_lengths.csv").num_faults(), 0);
  const Trace timed = load("lengths/sharegpt_llama31_300_lengths.csv");
  EXPECT_EQ(timed.requests.size(), 300u);
  EXPECT_EQ(timed.requests[0].arrival_us, 46'927);
}

TEST(PublishedTrace, ServeGenClientsAndFoldersAreDrawn) {
  const Trace client = load("servegen/reason/deepseek-r1/chunk-35-trace.csv", with_window(1200, 4200));
  EXPECT_NEAR(double(client.requests.size()) / 3000, 11.5, 0.3);
  const Trace folder = load("servegen/reason/deepseek-r1", with_window(7200, 7800));
  EXPECT_GT(folder.requests.size(), 10'000u);
  EXPECT_TRUE(
      std::is_sorted(folder.requests.begin(), folder.requests.end(),
                     [](const TraceRequest& a, const TraceRequest& b) { return a.arrival_us < b.arrival_us; }));
}

std::vector<std::vector<std::string>> windows() {
  std::ifstream file(std::string(EKV_TRACES) + "/mooncake/windows.csv");
  std::vector<std::vector<std::string>> rows;
  for (std::string line; std::getline(file, line);) {
    std::istringstream fields(line);
    rows.emplace_back();
    for (std::string field; std::getline(fields, field, ',');) rows.back().push_back(field);
  }
  return rows;
}

// Window, start_s, end_s_exclusive, first_line, last_line, requests, input_tokens, output_tokens, ids.
TEST(PublishedTrace, AReplayOfAWindowAnswersEveryRequestOfIt) {
  const auto rows = windows();
  ASSERT_EQ(rows.size(), 7u);
  const test::TempDir folder;
  for (size_t i = 1; i < rows.size(); ++i) {
    const auto& f = rows[i];
    SCOPED_TRACE(f[0]);
    const std::string path = folder.file("window_" + f[0] + ".json");
    const std::string trace = std::string(EKV_TRACES) + "/mooncake/conversation_trace.jsonl";
    const std::string window = f[1] + ":" + f[2];
    const char* argv[] = {"replay",
                          "--trace",
                          trace.c_str(),
                          "--window",
                          window.c_str(),
                          "--dilate",
                          "16",
                          "--cost-model",
                          "a100-llama-3.1-8b",
                          "--kv-policy",
                          "elastic",
                          "--preset",
                          "modern",
                          "--kv-cache-memory-bytes",
                          "20G",
                          "--kv-host-bytes",
                          "64G",
                          "--json",
                          path.c_str(),
                          "--quiet"};
    ASSERT_EQ(replay(int(std::size(argv)), argv), 0);
    const Json result = *parse_json(*read_file(path));
    EXPECT_EQ(result["requests"], std::stoll(f[5]));
    EXPECT_EQ(result["completed"], std::stoll(f[5]));
    EXPECT_EQ(result["input_tokens"], std::stoll(f[6]));
    EXPECT_EQ(result["output_tokens"], std::stoll(f[7]));
    EXPECT_EQ(result["preemptions"], 0);
  }
}

}  // namespace
}  // namespace ekv
