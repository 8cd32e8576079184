// Every published figure against values worked out by hand, and the absence of figures that do not exist.
#include "bench/report.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace ekv {
namespace {

RequestRecord reply(int64_t start_us, std::vector<int64_t> times_us, int input_tokens = 10) {
  RequestRecord r;
  r.start_us = start_us;
  r.end_us = times_us.empty() ? start_us : times_us.back();
  r.input_tokens = input_tokens;
  r.output_tokens = int(times_us.size());
  for (const int64_t time : times_us) r.times.add(time);
  return r;
}

RequestRecord failure(int64_t start_us, int64_t end_us) {
  RequestRecord r = reply(start_us, {});
  r.end_us = end_us;
  r.error = "HTTP 500";
  return r;
}

std::vector<int64_t> every(int64_t first_us, int64_t gap_us, int count) {
  std::vector<int64_t> times;
  for (int i = 0; i < count; ++i) times.push_back(first_us + i * gap_us);
  return times;
}

// Walks all of a JSON value: numbers must be finite.
void expect_finite(const Json& value) {
  EXPECT_TRUE(!value.is_number() || std::isfinite(value.get<double>())) << value;
  if (value.is_structured()) {
    for (const Json& inner : value) expect_finite(inner);
  }
}

TEST(TokenTimes, KeepsEveryGapWhateverItsSize) {
  const unsigned seed = 20'240'607;
  SCOPED_TRACE(seed);
  std::mt19937_64 rng(seed);
  std::vector<int64_t> gaps{0, 1, 127, 128, 16'383, 16'384, int64_t(1) << 40};
  for (int i = 0; i < 1000; ++i) gaps.push_back(int64_t(rng() >> (20 + rng() % 43)));
  TokenTimes times;
  int64_t now = -5;
  times.add(now);
  for (const int64_t gap : gaps) times.add(now += gap);
  std::vector<int64_t> read;
  times.for_each_gap([&](int64_t gap) { read.push_back(gap); });
  EXPECT_EQ(read, gaps);
  EXPECT_EQ(times.count(), int64_t(gaps.size()) + 1);
  EXPECT_EQ(times.first_us(), -5);
  EXPECT_EQ(times.last_us(), now);
}

TEST(TokenTimes, TakesThreeBytesForAnOrdinaryGap) {
  TokenTimes times;
  for (int i = 0; i < 1001; ++i) times.add(int64_t(i) * 35'000);
  EXPECT_EQ(times.bytes(), 3000u);
}

TEST(TokenTimesDeathTest, RefusesTimesThatGoBack) {
  TokenTimes times;
  times.add(10);
  EXPECT_DEATH(times.add(9), "before");
}

TEST(Distribution, InterpolatesBetweenNeighbours) {
  const Distribution d({40, 10, 30, 20});
  EXPECT_DOUBLE_EQ(*d.mean(), 25);
  EXPECT_DOUBLE_EQ(*d.percentile(0), 10);
  EXPECT_DOUBLE_EQ(*d.percentile(50), 25);    // halfway between 20 and 30
  EXPECT_DOUBLE_EQ(*d.percentile(90), 37);    // position 2.7: 30 + 0.7 * 10
  EXPECT_DOUBLE_EQ(*d.percentile(99), 39.7);  // position 2.97
  EXPECT_DOUBLE_EQ(*d.percentile(100), 40);
  EXPECT_DOUBLE_EQ(*d.stddev(), std::sqrt(125));  // squares 225, 25, 25, 225; mean of four
}

TEST(Distribution, OfNothingHasNoFigures) {
  const Distribution d;
  EXPECT_FALSE(d.mean() || d.stddev() || d.percentile(50));
  const Distribution one({7});
  EXPECT_DOUBLE_EQ(*one.percentile(99), 7);
  EXPECT_DOUBLE_EQ(*one.stddev(), 0);
}

TEST(RequestRecord, LatenciesOfOneReply) {
  // Start 1.0 s; tokens at 1.5, 1.6, 1.7, 2.0 s.
  const RequestRecord r = reply(1'000'000, {1'500'000, 1'600'000, 1'700'000, 2'000'000});
  EXPECT_DOUBLE_EQ(r.ttft_ms(), 500);
  EXPECT_DOUBLE_EQ(r.e2e_ms(), 1000);
  EXPECT_DOUBLE_EQ(*r.tpot_ms(), 500.0 / 3);
  EXPECT_DOUBLE_EQ(*r.tbt_ms(), 300);  // one gap of three
  EXPECT_DOUBLE_EQ(*r.largest_gap_ms(), 300);
}

TEST(RequestRecord, TbtAveragesTheLargestTenthOfTheGaps) {
  const auto with_gaps = [](std::vector<int64_t> gaps) {
    std::vector<int64_t> times{0};
    for (const int64_t gap : gaps) times.push_back(times.back() + gap * 1000);
    return *reply(0, times).tbt_ms();
  };
  std::vector<int64_t> gaps(8, 10);
  gaps.insert(gaps.end(), {50, 90});
  EXPECT_DOUBLE_EQ(with_gaps(gaps), 90);  // 10 gaps: 1
  gaps.push_back(10);
  EXPECT_DOUBLE_EQ(with_gaps(gaps), 70);  // 11 gaps: 2
  gaps.resize(30, 10);
  EXPECT_DOUBLE_EQ(with_gaps(gaps), 50);  // 30 gaps: 3, not 4: 90, 50, 10
  gaps.resize(31, 10);
  EXPECT_DOUBLE_EQ(with_gaps(gaps), 40);
}

TEST(RequestRecord, SeveralTokensInOneMessageCountForTpotOnly) {
  RequestRecord r = reply(0, {100'000, 300'000});
  r.output_tokens = 5;
  EXPECT_DOUBLE_EQ(*r.tpot_ms(), 50);
  EXPECT_DOUBLE_EQ(*r.tbt_ms(), 200);
  RequestRecord one_message = reply(0, {100'000});
  one_message.output_tokens = 3;
  EXPECT_DOUBLE_EQ(*one_message.tpot_ms(), 0);
  EXPECT_FALSE(one_message.tbt_ms());
}

// A quarter ends without a token, a quarter has one, a quarter fails, a quarter has ten tokens 100 ms apart.
TEST(Report, KeepsEmptyAndShortAndFailedRepliesOutOfTheLatencies) {
  std::vector<RequestRecord> records;
  for (int i = 0; i < 4; ++i) {
    records.push_back(reply(0, {}));
    records.push_back(reply(0, {50'000}));
    records.push_back(failure(0, 1000));
    records.push_back(reply(0, every(100'000, 100'000, 10)));
  }
  const Report report = make_report(records, {});
  EXPECT_EQ(report.requests, 16);
  EXPECT_EQ(report.completed, 8);
  EXPECT_EQ(report.failed, 4);
  EXPECT_EQ(report.empty, 4);
  EXPECT_EQ(report.ttft_ms.count(), 8u);
  EXPECT_DOUBLE_EQ(*report.ttft_ms.percentile(0), 50);
  EXPECT_EQ(report.tpot_ms.count(), 4u);
  EXPECT_DOUBLE_EQ(*report.tpot_ms.mean(), 100);
  EXPECT_DOUBLE_EQ(*report.tpot_ms.percentile(0), 100);
  EXPECT_EQ(report.itl_ms.count(), 36u);
  EXPECT_DOUBLE_EQ(*report.itl_ms.percentile(0), 100);
  EXPECT_EQ(report.input_tokens, 80);
  EXPECT_EQ(report.output_tokens, 44);
  const std::string table = report_table(report);
  EXPECT_NE(table.find("FAILED    4 of 16"), std::string::npos) << table;
  EXPECT_NE(table.find("HTTP 500"), std::string::npos) << table;
  EXPECT_EQ(table.find("nan"), std::string::npos) << table;
}

TEST(Report, OfNothingOrOfFailuresOnlyHasNullsAndNoNan) {
  const std::vector<RequestRecord> failures{failure(0, 0), failure(0, 0)};
  for (const std::vector<RequestRecord>& records : {std::vector<RequestRecord>{}, failures}) {
    const Report report = make_report(records, {});
    const Json json = report_json(report);
    expect_finite(json);
    expect_finite(vllm_result_json(report, std::array{99.0}));
    EXPECT_TRUE(json["ttft_ms"]["mean"].is_null());
    EXPECT_TRUE(json["tpot_ms"]["p99"].is_null());
    EXPECT_TRUE(json["output_tokens_per_s"].is_null());
    EXPECT_EQ(json["failed"], records.size());
    EXPECT_EQ(report_table(report).find("nan"), std::string::npos);
  }
}

TEST(Report, ThroughputRunsFromTheFirstStartToTheLastEnd) {
  // 2 s .. 7 s: five seconds, 6 tokens, 2 requests; last start at 3 s.
  const std::vector<RequestRecord> records{reply(3'000'000, {4'000'000, 5'000'000, 7'000'000}, 100),
                                           reply(2'000'000, {4'000'000, 5'000'000, 6'000'000}, 20)};
  const Report report = make_report(records, {});
  EXPECT_DOUBLE_EQ(report.duration_s, 5);
  EXPECT_DOUBLE_EQ(report.drain_s, 4);
  const Json json = report_json(report, {{"policy", "elastic"}});
  EXPECT_EQ(json.begin().key(), "policy");
  EXPECT_DOUBLE_EQ(json["output_tokens_per_s"], 1.2);
  EXPECT_DOUBLE_EQ(json["requests_per_s"], 0.4);
  const Json vllm = vllm_result_json(report, std::array{50.0, 99.9});
  EXPECT_DOUBLE_EQ(vllm["total_token_throughput"], 25.2);
  EXPECT_DOUBLE_EQ(vllm["median_ttft_ms"], 1500);
  EXPECT_DOUBLE_EQ(vllm["std_ttft_ms"], 500);
  EXPECT_DOUBLE_EQ(vllm["mean_e2el_ms"], 4000);
  EXPECT_TRUE(vllm.contains("p99.9_itl_ms"));
  EXPECT_TRUE(vllm["request_goodput"].is_null());
}

TEST(Report, CountsPeaksPerSecondAsVllmDoes) {
  // Seconds since the first start (10.5 s): tokens in second 0: 2, 1: 2 + 3 = 5, 2: 1.
  const std::vector<RequestRecord> records{
      reply(10'500'000, {10'600'000, 11'000'000, 11'600'000, 12'400'000, 12'600'000}),
      reply(11'600'000, {11'700'000, 11'800'000, 12'000'000})};
  const Report report = make_report(records, {});
  EXPECT_EQ(report.max_output_tokens_per_s, 5);
  EXPECT_EQ(report.max_concurrent_requests, 2);
  EXPECT_EQ(report.peak_in_flight, 2);
}

// As the definition says, second by second, for spans that touch, enclose and leave each other.
TEST(Report, RequestsOfASecondAreThoseThatTouchIt) {
  for (unsigned seed = 0; seed < 100; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 rng(seed);
    std::vector<RequestRecord> records{reply(0, {1})};
    for (int i = int(rng() % 20); i > 0; --i) {
      const int64_t start_us = int64_t(rng() % 30) * 500'000;
      records.push_back(reply(start_us, {start_us + int64_t(rng() % 12) * 500'000}));
    }
    int64_t most = 0;
    for (int64_t second = 0; second < 30; ++second)
      most = std::max(most, int64_t(std::ranges::count_if(records, [&](const RequestRecord& r) {
                        return r.start_us / 1'000'000 <= second && second <= r.times.last_us() / 1'000'000;
                      })));
    EXPECT_EQ(make_report(records, {}).max_concurrent_requests, most);
  }
}

TEST(Report, ARequestOfManyYearsIsCountedAtOnce) {
  const int64_t years_us = 4'000'000'000'000'000'000;
  const Report report = make_report(std::vector{reply(0, {years_us, years_us + 1}), reply(5, {7})}, {});
  EXPECT_EQ(report.max_concurrent_requests, 2);
  EXPECT_EQ(report.max_output_tokens_per_s, 2);
}

TEST(Report, PeakInFlightOfAClosedLoopIsItsConcurrency) {
  std::vector<RequestRecord> records;
  for (int i = 0; i < 30; ++i) records.push_back(reply(i / 3 * 100'000, {i / 3 * 100'000 + 100'000}));
  const Report report = make_report(records, {});
  EXPECT_EQ(report.peak_in_flight, 3);
  EXPECT_EQ(report.max_concurrent_requests, 30);  // all of them touch the first second
}

TEST(Report, EffectiveNeedsBothBoundsStrictlyAndAToken) {
  std::vector<RequestRecord> records{
      reply(0, {29'999'999, 30'299'998}),  // TTFT just below 30 s, gap just below 300 ms: effective
      reply(0, {30'000'000, 30'000'001}),  // TTFT is the bound
      reply(0, {1'000'000, 1'300'000}),    // gap is the bound
      reply(0, {1'000'000}),               // one token: no gap to miss: effective
      reply(0, {}),                        // no token
      failure(0, 1'000'000),
      reply(0, every(0, 20'000, 12)),   // effective
      reply(0, every(0, 299'999, 12)),  // effective
  };
  RequestRecord broken = reply(0, every(0, 20'000, 12));
  broken.error = "connection lost after 12 tokens";
  records.push_back(broken);
  const Report report = make_report(records, {});
  EXPECT_EQ(report.effective, 4);
  EXPECT_DOUBLE_EQ(report_json(report)["eff300"], 4.0 / 9);
  ReportOptions strict;
  strict.eff_tau_ms = 50;
  EXPECT_EQ(make_report(records, strict).effective, 2);
  EXPECT_TRUE(report_json(make_report(records, strict)).contains("eff50"));
}

TEST(Report, GoodputCountsRepliesThatMeetEveryBound) {
  const std::vector<RequestRecord> records{
      reply(0, {500'000, 600'000, 700'000}),  // TTFT 500, TPOT 100, E2E 700, largest gap 100
      reply(0, {200'000, 300'000, 600'000}),  // TTFT 200, TPOT 200, E2E 600, largest gap 300
      reply(0, {1'000'000}),                  // TTFT 1000, no second token
      failure(0, 2'000'000),
  };
  const auto good = [&](const char* text) {
    ReportOptions options;
    options.slo = *parse_slo(text);
    return make_report(records, options).good;
  };
  EXPECT_EQ(good("ttft:500"), 2);  // the bound itself is good
  EXPECT_EQ(good("ttft:499.9"), 1);
  EXPECT_EQ(good("tpot:100"), 2);  // the reply of one token counts with TPOT 0
  EXPECT_EQ(good("itl:299"), 2);
  EXPECT_EQ(good("itl:300 e2el:700"), 2);
  EXPECT_EQ(good("ttft:500,tpot:100"), 1);
  ReportOptions options;
  options.slo = *parse_slo("ttft:500");
  EXPECT_DOUBLE_EQ(report_json(make_report(records, options))["goodput_rps"], 1.0);  // 2 in 2 s
}

TEST(Report, RefusesBoundsThatItDoesNotKnow) {
  for (const char* text : {"ttft", "ttft:", "ttft:x", "ttft:nan", "ttft:-1", "latency:5", ":5", "ttft:5ms"}) {
    const auto slo = parse_slo(text);
    ASSERT_FALSE(slo) << text;
    EXPECT_EQ(slo.error().param, "goodput");
  }
  EXPECT_FALSE(parse_slo("")->named());
}

TEST(Report, SumsExposureAndPreemptionsOverRequests) {
  std::vector<RequestRecord> records{reply(0, {1000, 2000}), reply(0, {1000}), failure(0, 10)};
  records[0].base_pairs_seen = 30;
  records[0].pairs_seen = 100;
  records[1].pairs_seen = 50;
  EXPECT_TRUE(report_json(make_report(records, {}))["preemptions"].is_null());
  EXPECT_NE(report_table(make_report(records, {})).find("- preemptions"), std::string::npos);
  records[0].preemptions = 2;
  records[2].preemptions = 1;
  const Json json = report_json(make_report(records, {}));
  EXPECT_DOUBLE_EQ(json["base_exposure"], 0.2);
  EXPECT_EQ(json["preemptions"], 3);
  EXPECT_TRUE(json["recomputed_tokens"].is_null());
  EngineTotals totals;
  totals.preemptions = 7;
  totals.max_waiting = 12;
  totals.log_hash = 0xabc;
  const Json told = report_json(make_report(records, {}, totals));
  EXPECT_EQ(told["preemptions"], 7);
  EXPECT_EQ(told["max_waiting"], 12);
  EXPECT_EQ(told["log_hash"], "0000000000000abc");
}

TEST(Report, HasEveryFieldOfTheReplayResult) {
  const Json json = report_json(make_report(std::vector{reply(0, {1000, 2000})}, {}));
  for (const char* key :
       {"requests", "ttft_ms", "tpot_ms", "tbt_ms", "output_tokens_per_s", "preemptions", "recomputed_tokens",
        "base_exposure", "eff300", "max_waiting", "drain_s", "steps", "simulated_s", "wall_s", "log_hash"}) {
    EXPECT_TRUE(json.contains(key)) << key;
  }
  for (const char* key : {"mean", "p50", "p90", "p99"}) EXPECT_TRUE(json["tbt_ms"].contains(key)) << key;
}

TEST(Report, DetailHasOneEntryPerRequest) {
  const std::vector<RequestRecord> records{reply(1'000'000, {1'500'000, 1'750'000}), failure(0, 10)};
  const Json json = vllm_detail_json(records);
  EXPECT_EQ(json["ttfts"], Json({0.5, 0.0}));
  EXPECT_EQ(json["itls"], Json({{0.25}, Json::array()}));
  EXPECT_EQ(json["output_lens"], Json({2, 0}));
  EXPECT_EQ(json["errors"], Json({"", "HTTP 500"}));
}

TEST(Series, AddsEnginesAndHasAColumnForEachFigure) {
  SeriesPoint sum{.time_us = 5'000'000, .running = 1, .waiting = 2, .base_pairs = 3, .live_pairs = 40};
  sum += SeriesPoint{.time_us = 5'000'000, .running = 10, .free_pages = 7, .base_pairs = 1, .live_pairs = 4};
  const Json json = series_json(std::vector{SeriesPoint{}, sum}, 5'000'000);
  EXPECT_EQ(json["period_s"], 5.0);
  EXPECT_EQ(json["t_s"], Json({0.0, 5.0}));
  EXPECT_EQ(json["running"], Json({0, 11}));
  EXPECT_EQ(json["waiting"], Json({0, 2}));
  EXPECT_EQ(json["free_pages"], Json({0, 7}));
  EXPECT_EQ(json["base_pairs"], Json({0, 4}));
  EXPECT_EQ(json["live_pairs"], Json({0, 44}));
}

}  // namespace
}  // namespace ekv
