// Every format with its faults, and the options.
#include "bench/trace.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <set>

#include "bench/random.h"
#include "tests/support/temp_dir.h"

namespace ekv {
namespace {

TraceOptions with_format(TraceFormat format) {
  TraceOptions options;
  options.format = format;
  return options;
}

TraceOptions with_window(double start_s, double end_s) {
  TraceOptions options;
  options.start_s = start_s;
  options.end_s = end_s;
  return options;
}

Trace parse(std::string_view text, const TraceOptions& options = {}) {
  auto trace = parse_trace(text, "t", options);
  EXPECT_TRUE(trace) << (trace ? "" : trace.error().message);
  return trace ? *std::move(trace) : Trace{};
}

std::string message_of(const Result<Trace>& trace) { return trace ? "no error" : trace.error().message; }

int64_t skipped(const Trace& trace, std::string_view reason) {
  for (const TraceSkip& s : trace.skips) {
    if (s.reason == reason) return s.count;
  }
  return 0;
}

std::vector<int64_t> arrivals_ms(const Trace& trace) {
  std::vector<int64_t> times;
  for (const TraceRequest& r : trace.requests) times.push_back(r.arrival_us / 1000);
  return times;
}

size_t common_prefix(const std::vector<TokenId>& a, const std::vector<TokenId>& b) {
  return size_t(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
}

constexpr std::string_view kThree =
    R"({"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]}
{"timestamp": 2000, "input_length": 700, "output_length": 5, "hash_ids": [1, 3]}
{"timestamp": 2500, "input_length": 700, "output_length": 5, "hash_ids": [1, 3]}
)";

// ---- Mooncake ----

TEST(MooncakeTrace, ReadsMillisecondsAndRefusesLinesWithTheWrongNumberOfIds) {
  const Trace trace =
      parse(std::string(kThree) +
            R"({"timestamp": 3000, "input_length": 20, "output_length": 5, "hash_ids": [1, 2]})");
  EXPECT_EQ(arrivals_ms(trace), (std::vector<int64_t>{0, 2000, 2500}));
  EXPECT_EQ(trace.num_lines, 4);
  EXPECT_EQ(trace.num_faults(), 1);
  ASSERT_EQ(trace.skips.size(), 1u);
  EXPECT_EQ(trace.skips[0].first, "t:4: 2 hash_ids for 20 tokens, expected ceil(20 / 512) = 1");
  EXPECT_NE(describe(trace).find(trace.skips[0].first), std::string::npos);
}

TEST(MooncakeTrace, RequestsWithACommonIdShareExactlyItsBlock) {
  const Trace trace = parse(kThree);
  std::vector<std::vector<TokenId>> prompts;
  for (const TraceRequest& r : trace.requests) prompts.push_back(prompt_tokens(trace, r, 7, 49'152));
  for (const auto& prompt : prompts) {
    ASSERT_EQ(prompt.size(), 700u);
    for (const TokenId token : prompt) ASSERT_TRUE(token >= 1000 && token < 48'152) << token;
  }
  EXPECT_EQ(common_prefix(prompts[0], prompts[1]), 512u);
  EXPECT_EQ(prompts[1], prompts[2]);
  EXPECT_EQ(prompt_tokens(trace, trace.requests[0], 7, 49'152), prompts[0]);
  EXPECT_EQ(common_prefix(prompt_tokens(trace, trace.requests[0], 8, 49'152), prompts[0]), 0u);
  EXPECT_EQ(prompts[0][513], TokenId(1000 + splitmix64(7, 2, 1) % 47'152));
}

TEST(MooncakeTrace, WithoutHashIdsNothingIsShared) {
  TraceOptions options;
  options.ignore_hash_ids = true;
  const Trace trace = parse(kThree, options);
  const auto first = prompt_tokens(trace, trace.requests[0], 0, 49'152);
  const auto second = prompt_tokens(trace, trace.requests[1], 0, 49'152);
  EXPECT_EQ(common_prefix(first, second), 0u);
  int same = 0;
  for (size_t i = 0; i < first.size(); ++i) same += first[i] == second[i];
  EXPECT_LE(same, 3);  // 700 / 47,152 expected
}

TEST(MooncakeTrace, CountsEveryLineThatIsNoRequest) {
  const Trace trace = parse(
      "{\"timestamp\":1,\"input_length\":5,\"output_length\":1}\r\n"
      "\r\n"
      "{\"input_length\":5,\"output_length\":1}\n"
      "{\"timestamp\":1,\"output_length\":1}\n"
      "{\"timestamp\":1,\"input_length\":5}\n"
      "{\"timestamp\":1,\"input_length\":0,\"output_length\":1}\n"
      "{\"timestamp\":1,\"input_length\":5,\"output_length\":0}\n"
      "{\"timestamp\":-1,\"input_length\":5,\"output_length\":1}\n"
      "{\"timestamp\":\"1\",\"input_length\":5,\"output_length\":1}\n"
      "{\"timestamp\":1e300,\"input_length\":5,\"output_length\":1}\n"
      "{\"timestamp\":1,\"input_length\":5.5,\"output_length\":1}\n"
      "{\"timestamp\":1,\"input_length\":18446744073709551615,\"output_length\":1}\n"
      "{\"timestamp\":1,\"input_length\":5,\"output_length\":-9223372036854775808}\n"
      "{\"timestamp\":1,\"input_length\":5,\"output_length\":1,\"hash_ids\":[-1]}\n"
      "{\"timestamp\":1,\"input_length\":5,\"output_length\":1,\"hash_ids\":{\"a\":1}}\n"
      "[1,2,3]\n"
      "{\"timestamp\":1,\"input_length\":5,\"output_length\":1} x\n"
      "{\"timestamp\":0,\"input_length\":6,\"output_length\":1}\n"
      "{\"timestamp\":1,\"input_len");
  ASSERT_EQ(trace.requests.size(), 2u);
  EXPECT_EQ(trace.requests[0].input_tokens, 6);  // in order of arrival
  EXPECT_EQ(trace.requests[0].line, 18);
  EXPECT_EQ(trace.num_lines, 19);
  EXPECT_EQ(trace.num_skipped(), 17);
  EXPECT_EQ(trace.num_faults(), 16);
  EXPECT_EQ(skipped(trace, "blank line"), 1);
  EXPECT_EQ(skipped(trace, "no timestamp"), 2);
  EXPECT_EQ(skipped(trace, "timestamp out of range"), 2);
  EXPECT_EQ(skipped(trace, "no input_length"), 2);
  EXPECT_EQ(skipped(trace, "no output_length"), 1);
  EXPECT_EQ(skipped(trace, "input length below 1"), 1);
  EXPECT_EQ(skipped(trace, "output length below 1"), 2);
  EXPECT_EQ(skipped(trace, "length out of range"), 1);
  EXPECT_EQ(skipped(trace, "bad hash_ids"), 2);
  EXPECT_EQ(skipped(trace, "no JSON"), 3);
}

TEST(MooncakeTrace, SaysHowManyRequestsLackIds) {
  const Trace trace =
      parse(std::string(kThree) + R"({"timestamp": 3000, "input_length": 20, "output_length": 5})");
  EXPECT_EQ(trace.requests.size(), 4u);
  EXPECT_NE(describe(trace).find("1 requests without hash_ids share nothing"), std::string::npos)
      << describe(trace);
  EXPECT_EQ(describe(parse(kThree)).find("without hash_ids"), std::string::npos);
}

TEST(MooncakeTrace, ReplaysEachOfAThousandLines) {
  std::string text;
  for (int i = 0; i < 1000; ++i)
    text += R"({"timestamp":)" + std::to_string(i) +
            R"(,"input_length":3,"output_length":1})"
            "\n";
  const Trace trace = parse(text);
  EXPECT_EQ(trace.requests.size(), 1000u);
  EXPECT_EQ(trace.num_skipped(), 0);
}

TEST(MooncakeTrace, LineThatNeverEndsIsAFault) {
  const std::string text = std::string(kThree) + std::string(2 << 20, '[');
  EXPECT_EQ(skipped(parse(text), "line too long"), 1);
  const std::string deep = std::string(kThree) + std::string(1000, '[');
  EXPECT_EQ(skipped(parse(deep), "no JSON"), 1);
}

TEST(MooncakeTrace, FileWithoutARequestIsAnErrorThatSaysWhy) {
  EXPECT_NE(message_of(parse_trace("{\"timestamp\": 1}\n", "bad.jsonl", {}))
                .find("bad.jsonl:1: input_length is missing"),
            std::string::npos);
  EXPECT_NE(message_of(parse_trace("", "empty.jsonl", {})).find("empty.jsonl: the file is empty"),
            std::string::npos);
  EXPECT_NE(message_of(parse_trace("hello\n", "x", {})).find("no known trace format"), std::string::npos);
}

// ---- Options ----

TEST(TraceOptions, WindowIsHalfOpenAndArrivalsCountFromItsStart) {
  const Trace trace = parse(kThree, with_window(1.5, 2.5));
  EXPECT_EQ(arrivals_ms(trace), (std::vector<int64_t>{500}));
  EXPECT_EQ(skipped(trace, "outside the window"), 2);
  EXPECT_EQ(trace.num_faults(), 0);
  EXPECT_NE(message_of(parse_trace(kThree, "t", with_window(10, 20))).find("outside the window"),
            std::string::npos);
}

TEST(TraceOptions, DilationStretchesTheWindow) {
  TraceOptions options = with_window(1.5, 3);
  options.dilate = 16;
  EXPECT_EQ(arrivals_ms(parse(kThree, options)), (std::vector<int64_t>{8000, 16'000}));
}

TEST(TraceOptions, ScaleDividesLengthsAndHashBlock) {
  TraceOptions options;
  options.length_scale = 32;
  const Trace trace = parse(kThree, options);
  EXPECT_EQ(trace.hash_block, 16);
  EXPECT_EQ(trace.requests[0].input_tokens, 22);  // 700 / 32 = 21.9
  EXPECT_EQ(trace.requests[0].output_tokens, 1);
  EXPECT_EQ(common_prefix(prompt_tokens(trace, trace.requests[0], 0, 5000),
                          prompt_tokens(trace, trace.requests[1], 0, 5000)),
            16u);
  options.length_scale = 3;
  EXPECT_NE(message_of(parse_trace(kThree, "t", options))
                .find("must divide the hash block of 512 tokens, got 3; with --ignore-hash-ids"),
            std::string::npos);
  options.ignore_hash_ids = true;
  EXPECT_EQ(parse(kThree, options).requests[0].input_tokens, 234);
}

TEST(TraceOptions, TooLongRequestsAreLeftOutOrCut) {
  TraceOptions options;
  options.max_tokens = 600;
  const std::string text = std::string(kThree) + R"({"timestamp":9,"input_length":2,"output_length":598})";
  const Trace left = parse(text, options);
  EXPECT_EQ(left.requests.size(), 1u);
  EXPECT_EQ(skipped(left, "longer than the context"), 3);
  options.too_long = TooLong::truncate;
  options.max_tokens = 500;
  const Trace cut = parse(text, options);
  EXPECT_EQ(cut.requests.size(), 4u);
  EXPECT_EQ(cut.num_truncated, 4);
  EXPECT_EQ(cut.requests[0].input_tokens, 495);
  EXPECT_EQ(cut.requests[0].output_tokens, 5);
  EXPECT_EQ(cut.requests[0].hash_ids, std::vector<int64_t>{1});
  EXPECT_EQ(cut.requests[1].input_tokens, 1);  // arrives at 9 ms: 2 + 598
  EXPECT_EQ(cut.requests[1].output_tokens, 499);
}

TEST(TraceOptions, LimitKeepsTheFirstArrivals) {
  TraceOptions options;
  options.limit = 2;
  const Trace trace = parse(kThree, options);
  EXPECT_EQ(arrivals_ms(trace), (std::vector<int64_t>{0, 2000}));
  EXPECT_EQ(skipped(trace, "after the limit"), 1);
}

TEST(TraceOptions, AreReadFromText) {
  TraceOptions options;
  EXPECT_FALSE(parse_window("450:750", options));
  EXPECT_EQ(options.start_s, 450);
  EXPECT_EQ(options.end_s, 750);
  EXPECT_FALSE(parse_window("10:", options));
  EXPECT_TRUE(std::isinf(options.end_s));
  for (const char* bad : {"", "10", "20:10", "10:10", "-1:5", "a:b", "1:2:3", "nan:5", "0:inf"}) {
    TraceOptions scratch;
    EXPECT_TRUE(parse_window(bad, scratch)) << bad;
  }
  EXPECT_EQ(*parse_trace_format("azure"), TraceFormat::azure);
  EXPECT_FALSE(parse_trace_format("vcf"));
}

TEST(TraceOptions, RefusesValuesThatMakeNoSense) {
  const auto refused = [](auto change) {
    TraceOptions options;
    change(options);
    return validate(options).has_value();
  };
  EXPECT_TRUE(refused([](TraceOptions& o) { o.dilate = 0; }));
  EXPECT_TRUE(refused([](TraceOptions& o) { o.dilate = NAN; }));
  EXPECT_TRUE(refused([](TraceOptions& o) { o.length_scale = 0; }));
  EXPECT_TRUE(refused([](TraceOptions& o) { o.max_tokens = 1; }));
  EXPECT_TRUE(refused([](TraceOptions& o) { o.limit = -1; }));
  EXPECT_TRUE(refused([](TraceOptions& o) { o.rate = 0; }));
  EXPECT_TRUE(refused([](TraceOptions& o) { o.burstiness = -1; }));
  EXPECT_TRUE(refused([](TraceOptions& o) { o.filter.max_input = -1; }));
  EXPECT_FALSE(refused([](TraceOptions&) {}));
}

// ---- CSV ----

TEST(AzureTrace, CountsTimeFromTheFirstRequest) {
  const Trace trace = parse(
      "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
      "2023-11-16 23:59:59.5000000,374,44\r\n"
      "2023-11-17 00:00:03.8145001,396,109\r\n"
      "2023-11-17 00:00:04,10,0\r\n"
      "2023-11-31 00:00:04,10,5\r\n"
      "2023-11-17 00:00:05,12\r\n"
      "2023-11-17 00:00:06,x,5\r\n"
      "2023-11-16 23:00:00,1,1\r\n"
      "2023-11-17 00:00:19.5,7,8");
  ASSERT_EQ(trace.requests.size(), 3u);
  EXPECT_EQ(trace.requests[0].arrival_us, 0);
  EXPECT_EQ(trace.requests[1].arrival_us, 4'314'500);
  EXPECT_EQ(trace.requests[2].arrival_us, 20'000'000);
  EXPECT_EQ(trace.requests[2].output_tokens, 8);
  EXPECT_EQ(trace.num_lines, 9);
  EXPECT_EQ(trace.num_faults(), 5);
  EXPECT_EQ(skipped(trace, "header"), 1);
}

TEST(AzureTrace, ReadsOffsetsFromUtc) {
  const Trace trace = parse(
      "TIMESTAMP,ContextTokens,GeneratedTokens\n"
      "2024-05-10 00:00:00.009930+00:00,1,2\n"
      "2024-05-10T02:00:01.009930+02:00,3,4\n");
  EXPECT_EQ(arrivals_ms(trace), (std::vector<int64_t>{0, 1000}));
}

TEST(PlainTrace, ReadsArrivalsWithOrWithoutHeader) {
  const Trace named = parse("output,arrival_ms,input\n5,1.5,100\n6,0.25,200\n");
  ASSERT_EQ(named.requests.size(), 2u);
  EXPECT_EQ(named.requests[0].arrival_us, 250);
  EXPECT_EQ(named.requests[0].input_tokens, 200);
  EXPECT_EQ(named.requests[1].output_tokens, 5);
  const Trace bare = parse(
      "\xef\xbb\xbf"
      "1.5,100,5\n0.25, 200 ,6\n");
  EXPECT_EQ(bare.requests[0].arrival_us, 250);
  EXPECT_EQ(bare.requests[0].output_tokens, 6);
  EXPECT_FALSE(parse_trace("inf,100,5\nnan,1,1\n-1,1,1\n", "t", with_format(TraceFormat::arrivals)));
}

TEST(PlainTrace, HeaderWithoutANeededColumnIsAFaultOfEveryLine) {
  const auto trace = parse_trace("arrival_ms,input\n1,2\n1,2\n", "t.csv", with_format(TraceFormat::arrivals));
  EXPECT_NE(message_of(trace).find("2 lines, header lacks a column"), std::string::npos) << message_of(trace);
}

constexpr std::string_view kLengths = "input_tokens,output_tokens\n10,20\n11,21\n12,22\n2000,5\n3,30\n";

TEST(LengthsTrace, SamplesRowsAndDrawsArrivals) {
  TraceOptions options;
  options.rate = 4;
  options.limit = 2;
  options.seed = 3;
  options.filter = {4, 1024, 2048};
  const Trace trace = parse(kLengths, options);
  ASSERT_EQ(trace.requests.size(), 2u);
  EXPECT_EQ(trace.requests[1].arrival_us, 500'000);  // the last arrival is at 2 / 4 s
  EXPECT_EQ(skipped(trace, "outside the length filter"), 2);
  EXPECT_EQ(skipped(trace, "not in the sample"), 1);
  for (const TraceRequest& r : trace.requests) EXPECT_EQ(r.output_tokens, r.input_tokens + 10);
  EXPECT_NE(trace.requests[0].line, trace.requests[1].line);
}

TEST(LengthsTrace, LargeSampleUsesEveryRowEquallyOften) {
  TraceOptions options;
  options.limit = 10;
  const Trace trace = parse(kLengths, options);
  EXPECT_EQ(trace.requests.size(), 10u);
  EXPECT_EQ(trace.num_repeats, 5);
  std::multiset<int64_t> lines;
  for (const TraceRequest& r : trace.requests) lines.insert(r.line);
  for (int64_t line = 2; line <= 6; ++line) EXPECT_EQ(lines.count(line), 2u) << line;
}

TEST(LengthsTrace, WindowAppliesToTheDrawnArrivals) {
  TraceOptions options = with_window(100, 200);
  options.rate = 10;
  options.limit = 10'000;
  const Trace trace = parse(kLengths, options);
  EXPECT_GT(trace.requests.front().arrival_us, 0);
  EXPECT_LT(trace.requests.back().arrival_us, 100'000'000);
  EXPECT_NEAR(double(trace.requests.size()), 1000, 160);  // five standard deviations of a Poisson count
}

TEST(LengthsTrace, SameSeedSameTrace) {
  TraceOptions options;
  options.rate = 1;
  const auto sample = [&](uint64_t seed) {
    options.seed = seed;
    std::vector<std::pair<int64_t, int>> requests;
    for (const TraceRequest& r : parse(kLengths, options).requests)
      requests.push_back({r.arrival_us, r.input_tokens});
    return requests;
  };
  EXPECT_EQ(sample(1), sample(1));
  EXPECT_NE(sample(1), sample(2));
}

// ---- Drawn ----

TEST(Arrivals, HaveTheRateAndTheBurstinessAskedFor) {
  constexpr int kCount = 20'000;
  for (const double burstiness : {0.25, 1.0, 4.0}) {
    const std::vector<int64_t> times = random_arrivals_us(kCount, 5, burstiness, 11);
    EXPECT_TRUE(std::is_sorted(times.begin(), times.end()));
    EXPECT_EQ(times.back(), int64_t(kCount) * 200'000);
    double squares = 0;
    for (size_t i = 1; i < times.size(); ++i) squares += std::pow(double(times[i] - times[i - 1]) / 2e5 - 1, 2);
    // The variance of a Gamma gap of mean 1 is 1 / shape; its sample variance is within 10 % here (over 4
    // sigma).
    EXPECT_NEAR(squares / kCount * burstiness, 1, 0.1) << burstiness;
  }
  EXPECT_EQ(random_arrivals_us(4, 2, INFINITY, 0),
            (std::vector<int64_t>{500'000, 1'000'000, 1'500'000, 2'000'000}));
  EXPECT_EQ(random_arrivals_us(3, INFINITY, 1, 0), (std::vector<int64_t>{0, 0, 0}));
}

TEST(Random, DrawsHaveTheMomentsOfTheirDistributions) {
  constexpr int kCount = 200'000;
  Random random(5);
  double uniform = 0, normal = 0, normal2 = 0, gamma = 0, small_gamma = 0, weibull = 0;
  for (int i = 0; i < kCount; ++i) {
    const double u = random.uniform(), n = random.normal();
    ASSERT_TRUE(u > 0 && u < 1);
    uniform += u;
    normal += n;
    normal2 += n * n;
    gamma += random.gamma(3);
    small_gamma += random.gamma(0.3);
    weibull += random.weibull(0.7);
  }
  // Bounds: five standard errors, sqrt(variance / count).
  EXPECT_NEAR(uniform / kCount, 0.5, 0.0033);
  EXPECT_NEAR(normal / kCount, 0, 0.0112);
  EXPECT_NEAR(normal2 / kCount, 1, 0.0159);
  EXPECT_NEAR(gamma / kCount, 3, 0.0194);
  EXPECT_NEAR(small_gamma / kCount, 0.3, 0.0062);
  EXPECT_NEAR(weibull / kCount, std::tgamma(1 + 1 / 0.7), 0.021);
}

TEST(SyntheticTrace, IsAClosedLoopOfEqualRequestsWithDifferentPrompts) {
  const auto trace = synthetic_trace("600:4096:1024", {});
  ASSERT_TRUE(trace);
  EXPECT_TRUE(trace->closed_loop);
  EXPECT_EQ(trace->requests.size(), 600u);
  EXPECT_EQ(trace->input_tokens(), 600 * 4096);
  EXPECT_EQ(trace->output_tokens(), 600 * 1024);
  EXPECT_EQ(common_prefix(prompt_tokens(*trace, trace->requests[0], 0, 128),
                          prompt_tokens(*trace, trace->requests[1], 0, 128)) < 8,
            true);
  for (const char* bad :
       {"", "1", "1:2", "1:2:3:4", "0:1:1", "1:0:1", "a:1:1", "1:1:99999999999999999999", "1:1:-1", ":::"}) {
    EXPECT_NE(message_of(synthetic_trace(bad, {})).find("1 to 10000000 requests and 1 to"), std::string::npos)
        << bad;
  }
}

TEST(SyntheticTrace, DrawsLengthsEvenlyAroundTheMiddle) {
  TraceOptions options;
  options.rate = 10;
  const auto trace = random_trace({2000, 100, 10, 0.2}, options);
  ASSERT_TRUE(trace);
  EXPECT_FALSE(trace->closed_loop);
  std::set<int> inputs, outputs;
  for (const TraceRequest& r : trace->requests) inputs.insert(r.input_tokens), outputs.insert(r.output_tokens);
  EXPECT_EQ(*inputs.begin(), 80);
  EXPECT_EQ(*inputs.rbegin(), 120);
  EXPECT_EQ(outputs, (std::set<int>{8, 9, 10, 11, 12}));
}

TEST(PromptTokens, StayInsideAnyVocabulary) {
  const auto trace = synthetic_trace("1:3000:1", {});
  for (const int vocab : {1, 2, 7, 128, 2000, 2001, 2500}) {
    for (const TokenId token : prompt_tokens(*trace, trace->requests[0], 1, vocab)) {
      ASSERT_TRUE(token >= 0 && token < vocab) << vocab;
    }
  }
}

// ---- ServeGen ----

constexpr std::string_view kClient =
    "0,10,1,Gamma,1.0,0.1\n600,0,0,,0,0\n1200,20,2,Weibull,0.5,0.3\n1800,10,1,Gamma,2.0,0.05\n21600,5,1,Gamma,"
    "1.0,0.2\n";
constexpr std::string_view kClientLengths =
    R"({"0": {"input_tokens": "{10: 0.25, 20: 0.75}", "output_tokens": "{7: 1.0}"},
  "21600": {"input_tokens": "{}", "output_tokens": "{}"}})";

TEST(ServeGenTrace, DrawsTheRecordedRatesAndLengths) {
  const auto trace = servegen_trace(kClient, kClientLengths, "c", with_window(0, 1800));
  ASSERT_TRUE(trace) << message_of(trace);
  int64_t first = 0, idle = 0, bursty = 0, tens = 0;
  for (const TraceRequest& r : trace->requests) {
    (r.arrival_us < 600'000'000 ? first : r.arrival_us < 1'200'000'000 ? idle : bursty) += 1;
    tens += r.input_tokens == 10;
    ASSERT_TRUE(r.input_tokens == 10 || r.input_tokens == 20);
    ASSERT_EQ(r.output_tokens, 7);
  }
  EXPECT_NEAR(double(first), 6000, 5 * std::sqrt(6000));
  EXPECT_EQ(idle, 0);
  EXPECT_NEAR(double(bursty), 12'000, 5 * std::sqrt(5 * 12'000));  // Weibull of shape 0.5: squared CV 5
  EXPECT_NEAR(double(tens) / double(trace->requests.size()), 0.25, 0.02);
}

TEST(ServeGenTrace, RequestsDoNotDependOnTheOtherWindows) {
  const auto wide = servegen_trace(kClient, kClientLengths, "c", with_window(0, 1800));
  const auto narrow = servegen_trace(kClient, kClientLengths, "c", with_window(1200, 1800));
  ASSERT_TRUE(wide && narrow);
  std::vector<int64_t> late, alone;
  for (const TraceRequest& r : wide->requests) {
    if (r.arrival_us >= 1'200'000'000) late.push_back(r.arrival_us - 1'200'000'000);
  }
  for (const TraceRequest& r : narrow->requests) alone.push_back(r.arrival_us);
  EXPECT_EQ(late, alone);
}

TEST(ServeGenTrace, TimeWithoutLengthsIsCounted) {
  const auto trace = servegen_trace(kClient, kClientLengths, "c", with_window(20'000, 22'000));
  ASSERT_TRUE(trace) << message_of(trace);
  EXPECT_GT(skipped(*trace, "no table of lengths for this time"), 1000);
  EXPECT_EQ(int64_t(trace->requests.size()) + trace->num_skipped(), trace->num_lines);
}

TEST(ServeGenTrace, RefusesBrokenFilesByLine) {
  const auto refused = [](std::string_view windows, std::string_view lengths = kClientLengths) {
    return message_of(servegen_trace(windows, lengths, "c", {}));
  };
  EXPECT_NE(refused("0,1,1,Gamma,1,1\n600,1,1,Pareto,1,1\n").find("c:2: the arrivals are neither"),
            std::string::npos);
  EXPECT_NE(refused("0,1,1,Gamma,1\n").find("c:1: a window has six fields"), std::string::npos);
  EXPECT_NE(refused("0,1,1,Gamma,1,1\n").find("fewer than two"), std::string::npos);
  EXPECT_NE(refused("600,1,1,Gamma,1,1\n0,1,1,Gamma,1,1\n").find("not in order"), std::string::npos);
  EXPECT_NE(refused("0,nan,1,Gamma,1,1\n600,1,1,Gamma,1,1\n").find("c:1: the rate"), std::string::npos);
  EXPECT_NE(refused("0,1,1,Weibull,1e-9,1\n600,1,1,Gamma,1,1\n").find("c:1: the shape"), std::string::npos);
  EXPECT_NE(refused("0,1000,1,Gamma,1,1\n86400,1,1,Gamma,1,1\n").find("choose a shorter window"),
            std::string::npos);
  EXPECT_NE(refused(kClient, "{}").find("not one request"), std::string::npos);
  EXPECT_NE(refused(kClient, "[").find("c (lengths)"), std::string::npos);
  EXPECT_NE(refused(kClient, R"({"0": {"input_tokens": "{1: x}", "output_tokens": "{}"}})")
                .find("\"1: x\" is no length"),
            std::string::npos);
}

TEST(TraceFile, AFolderWithoutClientsIsToldWhatItMustHold) {
  const test::TempDir folder;
  const std::string message = message_of(load_trace(folder.path().string(), {}));
  EXPECT_NE(message.find("chunk-N-trace.csv"), std::string::npos) << message;
}

TEST(TraceFile, ThatIsMissingIsNamed) {
  EXPECT_NE(message_of(load_trace("/no/such/trace.jsonl", {})).find("/no/such/trace.jsonl"), std::string::npos);
}

}  // namespace
}  // namespace ekv
