#pragma once
// report.h -- from what happened to each request to the numbers that are published. The definitions, once:
//
//   TTFT   start to first token.  TPOT  (last token - first token) / (output tokens - 1).  E2E  start to last
//   token. ITL    each gap between two messages of one reply; all gaps of all replies together are one
//   distribution. TBT    of a request with n tokens: mean of its max(1, ceil((n - 1) / 10)) largest gaps. Eff@t
//   requests with TTFT < 30 s and TBT < t, over all requests injected. Failed and empty ones do not count
//          as effective; a one-token reply has no gap and needs the TTFT only.
//   goodput  requests with every named bound met (value <= bound), per second. The TPOT of a one-token reply
//          counts as 0; the ITL bound is for the largest gap of a reply.
//   drain  last end - last start.  exposure  BASE pairs seen / pairs seen, summed over steps and sequences.
//
// A reply without a token has no TTFT, one with a single token no TPOT, TBT or ITL: they are left out of those
// distributions, never counted as 0. Failed requests are in no distribution and in no throughput. A figure that
// does not exist (a mean of nothing, a rate over no time) is null in JSON and "-" in the table; there is no
// NaN.

#include <array>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "elastickv/base.h"
#include "util/json.h"

namespace ekv {

// When the messages of one reply came, at about three bytes each: a replay has millions. Gaps are kept as
// LEB128.
class TokenTimes {
 public:
  void add(int64_t time_us);  // must not be before the one added last
  int64_t count() const { return count_; }
  int64_t first_us() const { return first_us_; }  // of count() > 0
  int64_t last_us() const { return last_us_; }
  size_t bytes() const { return gaps_.size(); }

  template <class Body>
  void for_each_gap(Body body) const {
    for (size_t at = 0; at < gaps_.size();) {
      int64_t gap = 0;
      for (int shift = 0;; shift += 7) {
        const uint8_t byte = gaps_[at++];
        gap |= int64_t(byte & 0x7f) << shift;
        if (!(byte & 0x80)) break;
      }
      body(gap);
    }
  }

 private:
  int64_t count_ = 0, first_us_ = 0, last_us_ = 0;
  std::vector<uint8_t> gaps_;
};

struct RequestRecord {
  // Latencies count from here. Open loop: the scheduled arrival, however late the request was really sent.
  // Closed loop and behind a concurrency limit: the moment of sending.
  int64_t start_us = 0;
  int64_t end_us = 0;  // last message, or failure
  int input_tokens = 0;
  int output_tokens = 0;                        // as counted by the server; a message may carry several tokens
  TokenTimes times;                             // of each message with a token
  std::string error;                            // not empty: the request failed
  std::optional<int> preemptions;               // nullopt: not known
  int64_t base_pairs_seen = 0, pairs_seen = 0;  // summed over the steps that ran the request; 0, 0: not known

  bool failed() const { return !error.empty(); }
  bool empty() const { return !failed() && times.count() == 0; }
  bool completed() const { return !failed() && times.count() > 0; }

  // All of completed() requests; TPOT, TBT and the largest gap only where there are two tokens or messages.
  double ttft_ms() const { return double(times.first_us() - start_us) / 1e3; }
  double e2e_ms() const { return double(times.last_us() - start_us) / 1e3; }
  std::optional<double> tpot_ms() const;
  std::optional<double> tbt_ms() const;
  std::optional<double> largest_gap_ms() const;
};

// Values in order. Every figure is nullopt when there is no value.
class Distribution {
 public:
  Distribution() = default;
  explicit Distribution(std::vector<double> values);
  size_t count() const { return sorted_.size(); }
  std::optional<double> mean() const;
  std::optional<double> stddev() const;  // of the values as a population
  // 0 <= percent <= 100, linear between the two neighbours, as numpy's default.
  std::optional<double> percentile(double percent) const;

 private:
  std::vector<double> sorted_;
};

// Bounds that a good request meets; infinite: not named.
struct Slo {
  double ttft_ms = std::numeric_limits<double>::infinity(), tpot_ms = ttft_ms, e2el_ms = ttft_ms,
         itl_ms = ttft_ms;
  bool named() const;
  bool met_by(const RequestRecord& record) const;
};

// "ttft:500 tpot:50" in ms, separated by blanks or commas; the keys are ttft, tpot, e2el and itl.
Result<Slo> parse_slo(std::string_view text);

struct ReportOptions {
  Slo slo;
  double eff_tau_ms = 300, eff_ttft_ms = 30'000;
};

// What only the engine can tell; nullopt stays null in the report.
struct EngineTotals {
  std::optional<int64_t> preemptions;  // scheduler events; nullopt: the sum over requests that know theirs
  std::optional<int64_t> recomputed_tokens, steps, max_waiting, prefix_hit_tokens;
  std::optional<int64_t> preemptions_avoided, to_host_bytes, from_host_bytes;  // bytes: of all copies of KV
  // Pairs that changed fidelity, and in how many steps: those that demoted, those that sent for low bytes.
  std::optional<int64_t> demoted_pairs, promoted_pairs, demotion_steps, promotion_steps;
  std::optional<double> mean_waiting;  // over time, from the first start to the last end
  std::optional<double> base_exposure, base_exposure_query_weighted;  // nullopt: from the requests; not known
  std::optional<double> simulated_s, wall_s;
  std::optional<uint64_t> log_hash;
};

struct Report {
  ReportOptions options;
  EngineTotals engine;  // with preemptions and exposure filled in where the requests tell them
  int64_t requests = 0, completed = 0, failed = 0, empty = 0;
  int64_t input_tokens = 0, output_tokens = 0;  // of completed requests
  Distribution ttft_ms, tpot_ms, tbt_ms, itl_ms, e2e_ms;
  Distribution request_exposure;  // of each request for itself, where it is known
  double duration_s = 0;          // first start to last end
  double drain_s = 0;
  int64_t good = 0, effective = 0;
  int64_t peak_in_flight = 0;  // at one moment; a request that ends makes room for one that starts
  // As `vllm bench serve` counts them, per second since the first start: tokens; requests that touch it.
  int64_t max_output_tokens_per_s = 0, max_concurrent_requests = 0;
  std::string first_error;

  std::optional<double> per_second(double amount) const;  // nullopt when the run took no time
  std::optional<double> eff() const;                      // share of the requests; nullopt when there was none
};

Report make_report(std::span<const RequestRecord> records, const ReportOptions& options,
                   EngineTotals engine = {});

// State of the engines at one moment, for plots. Pages are physical; pairs are those of sequences and of the
// prefix cache.
struct SeriesPoint {
  int64_t time_us = 0;
  int64_t running = 0, waiting = 0, free_pages = 0, base_pairs = 0, live_pairs = 0;
  int64_t offered_tokens = 0;  // prompt tokens of all requests that have arrived, whether admitted or not

  SeriesPoint& operator+=(const SeriesPoint& other);  // another engine at the same moment
};

// Columns: {"period_s", "t_s": [...], "running": [...], "waiting", "free_pages", "base_pairs", "live_pairs",
// "offered_tokens"}; put it into the result as "series", where scripts/plot.py looks for it.
Json series_json(std::span<const SeriesPoint> points, int64_t period_us);

// The result of a replay: requests, ttft_ms {mean, p50, p90, p99}, ..., eff300, log_hash. `labels` (policy,
// preset, concurrency, rate, ...) come first; scripts/plot.py groups by them.
Json report_json(const Report& report, const Json& labels = Json::object());

// The result fields of `vllm bench serve` beside those of its settings, which the caller adds: completed ...
// output_throughput, then mean, median, std and the wanted percentiles of ttft, tpot, itl and e2el in ms.
Json vllm_result_json(const Report& report, std::span<const double> percentiles);

// Arrays of --save-detailed: input_lens, output_lens, ttfts, itls (s), start_times (s), errors. 0 stands for
// the TTFT of a reply without a token, as there.
Json vllm_detail_json(std::span<const RequestRecord> records);

// For people; several lines.
std::string report_table(const Report& report);

}  // namespace ekv
