#include "bench/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <numeric>
#include <unordered_map>

namespace ekv {
namespace {

constexpr size_t kTbtDivisor = 10;  // TBT is over the largest tenth of a request's gaps, rounded up

// Index of the second since `begin_us`; `time_us` is not before it.
int64_t second_of(int64_t time_us, int64_t begin_us) { return (time_us - begin_us) / 1'000'000; }

double largest(const std::unordered_map<int64_t, double>& seconds) {
  double most = 0;
  for (const auto& [second, amount] : seconds) most = std::max(most, amount);
  return most;
}

// Of spans of seconds, first and last included: how many have one second in common. The seconds themselves are
// not gone through: a request may last for years of them.
int64_t most_that_overlap(std::span<const std::pair<int64_t, int64_t>> spans) {
  std::map<int64_t, int64_t> changes;
  for (const auto& [first, last] : spans) ++changes[first], --changes[last + 1];
  int64_t now = 0, most = 0;
  for (const auto& [second, change] : changes) most = std::max(most, now += change);
  return most;
}

void count_per_second(std::span<const RequestRecord> records, int64_t begin_us, Report& report) {
  std::unordered_map<int64_t, double> tokens;
  std::vector<std::pair<int64_t, int64_t>> spans;
  for (const RequestRecord& r : records) {
    if (!r.completed()) continue;
    const double tokens_per_message = double(r.output_tokens) / double(r.times.count());
    int64_t at_us = r.times.first_us();
    tokens[second_of(at_us, begin_us)] += tokens_per_message;
    r.times.for_each_gap([&](int64_t gap) {
      at_us += gap;
      tokens[second_of(at_us, begin_us)] += tokens_per_message;
    });
    spans.push_back({second_of(r.start_us, begin_us), second_of(r.times.last_us(), begin_us)});
  }
  report.max_output_tokens_per_s = std::llround(largest(tokens));
  report.max_concurrent_requests = most_that_overlap(spans);
}

int64_t peak_in_flight(std::span<const RequestRecord> records) {
  std::vector<std::pair<int64_t, int>> changes;
  for (const RequestRecord& r : records) {
    changes.push_back({r.start_us, 1});
    changes.push_back({std::max(r.end_us, r.start_us), r.end_us > r.start_us ? -1 : 2});
  }
  // At one moment ends (-1) come before starts (1); a request of no duration (1, then 2 = its end) still
  // counts.
  std::sort(changes.begin(), changes.end());
  int64_t now = 0, peak = 0;
  for (const auto& [time_us, change] : changes) {
    now += change == 2 ? -1 : change;
    peak = std::max(peak, now);
  }
  return peak;
}

void collect_latencies(std::span<const RequestRecord> records, Report& report) {
  std::vector<double> ttft, tpot, tbt, itl, e2e, exposure;
  for (const RequestRecord& r : records) {
    if (r.pairs_seen > 0) exposure.push_back(double(r.base_pairs_seen) / double(r.pairs_seen));
    if (!r.completed()) continue;
    ttft.push_back(r.ttft_ms());
    e2e.push_back(r.e2e_ms());
    if (const auto value = r.tpot_ms()) tpot.push_back(*value);
    if (const auto value = r.tbt_ms()) tbt.push_back(*value);
    r.times.for_each_gap([&](int64_t gap) { itl.push_back(double(gap) / 1e3); });
  }
  report.ttft_ms = Distribution(std::move(ttft));
  report.tpot_ms = Distribution(std::move(tpot));
  report.tbt_ms = Distribution(std::move(tbt));
  report.itl_ms = Distribution(std::move(itl));
  report.e2e_ms = Distribution(std::move(e2e));
  report.request_exposure = Distribution(std::move(exposure));
}

bool effective(const RequestRecord& r, const ReportOptions& options) {
  return r.completed() && r.ttft_ms() < options.eff_ttft_ms && r.tbt_ms().value_or(0) < options.eff_tau_ms;
}

void count_requests(std::span<const RequestRecord> records, Report& report) {
  report.requests = int64_t(records.size());
  int64_t base_pairs = 0, pairs = 0;
  std::optional<int64_t> preemptions;
  for (const RequestRecord& r : records) {
    if (r.preemptions) preemptions = preemptions.value_or(0) + *r.preemptions;
    base_pairs += r.base_pairs_seen;
    pairs += r.pairs_seen;
    report.failed += r.failed();
    report.empty += r.empty();
    if (r.failed() && report.first_error.empty()) report.first_error = r.error;
    if (!r.completed()) continue;
    ++report.completed;
    report.input_tokens += r.input_tokens;
    report.output_tokens += r.output_tokens;
    report.effective += effective(r, report.options);
    report.good += report.options.slo.met_by(r);
  }
  if (!report.engine.preemptions) report.engine.preemptions = preemptions;
  if (!report.engine.base_exposure && pairs > 0)
    report.engine.base_exposure = double(base_pairs) / double(pairs);
}

}  // namespace

void TokenTimes::add(int64_t time_us) {
  if (count_++ == 0) {
    first_us_ = last_us_ = time_us;
    return;
  }
  EKV_CHECK(time_us >= last_us_, "a token came before the one before it");
  auto gap = uint64_t(time_us - last_us_);
  for (; gap >= 0x80; gap >>= 7) gaps_.push_back(uint8_t(gap | 0x80));
  gaps_.push_back(uint8_t(gap));
  last_us_ = time_us;
}

std::optional<double> RequestRecord::tpot_ms() const {
  if (!completed() || output_tokens < 2) return std::nullopt;
  return double(times.last_us() - times.first_us()) / 1e3 / (output_tokens - 1);
}

std::optional<double> RequestRecord::tbt_ms() const {
  if (times.count() < 2) return std::nullopt;
  std::vector<int64_t> gaps;
  times.for_each_gap([&](int64_t gap) { gaps.push_back(gap); });
  const size_t k = (gaps.size() + kTbtDivisor - 1) / kTbtDivisor;
  std::partial_sort(gaps.begin(), gaps.begin() + std::ptrdiff_t(k), gaps.end(), std::greater<>());
  const int64_t sum = std::accumulate(gaps.begin(), gaps.begin() + std::ptrdiff_t(k), int64_t(0));
  return double(sum) / 1e3 / double(k);
}

std::optional<double> RequestRecord::largest_gap_ms() const {
  if (times.count() < 2) return std::nullopt;
  int64_t most = 0;
  times.for_each_gap([&](int64_t gap) { most = std::max(most, gap); });
  return double(most) / 1e3;
}

Distribution::Distribution(std::vector<double> values) : sorted_(std::move(values)) {
  std::sort(sorted_.begin(), sorted_.end());
}

std::optional<double> Distribution::mean() const {
  if (sorted_.empty()) return std::nullopt;
  return std::accumulate(sorted_.begin(), sorted_.end(), 0.0) / double(sorted_.size());
}

std::optional<double> Distribution::stddev() const {
  const auto middle = mean();
  if (!middle) return std::nullopt;
  double squares = 0;
  for (const double value : sorted_) squares += (value - *middle) * (value - *middle);
  return std::sqrt(squares / double(sorted_.size()));
}

std::optional<double> Distribution::percentile(double percent) const {
  EKV_CHECK(percent >= 0 && percent <= 100, "a percentile is from 0 to 100");
  if (sorted_.empty()) return std::nullopt;
  const double at = percent / 100 * double(sorted_.size() - 1);
  const auto below = size_t(at);
  const size_t above = std::min(below + 1, sorted_.size() - 1);
  return sorted_[below] + (at - double(below)) * (sorted_[above] - sorted_[below]);
}

bool Slo::named() const {
  return std::isfinite(ttft_ms) || std::isfinite(tpot_ms) || std::isfinite(e2el_ms) || std::isfinite(itl_ms);
}

bool Slo::met_by(const RequestRecord& r) const {
  return r.completed() && r.ttft_ms() <= ttft_ms && r.tpot_ms().value_or(0) <= tpot_ms &&
         r.e2e_ms() <= e2el_ms && r.largest_gap_ms().value_or(0) <= itl_ms;
}

std::optional<double> Report::per_second(double amount) const {
  if (!(duration_s > 0)) return std::nullopt;
  return amount / duration_s;
}

std::optional<double> Report::eff() const {
  if (requests == 0) return std::nullopt;
  return double(effective) / double(requests);
}

Report make_report(std::span<const RequestRecord> records, const ReportOptions& options, EngineTotals engine) {
  Report report;
  report.options = options;
  report.engine = std::move(engine);
  count_requests(records, report);
  if (records.empty()) return report;
  int64_t begin_us = records[0].start_us, last_start_us = begin_us, end_us = begin_us;
  for (const RequestRecord& r : records) {
    begin_us = std::min(begin_us, r.start_us);
    last_start_us = std::max(last_start_us, r.start_us);
    end_us = std::max(end_us, r.end_us);
  }
  report.duration_s = double(end_us - begin_us) / 1e6;
  report.drain_s = double(std::max<int64_t>(0, end_us - last_start_us)) / 1e6;
  report.peak_in_flight = peak_in_flight(records);
  collect_latencies(records, report);
  count_per_second(records, begin_us, report);
  return report;
}

SeriesPoint& SeriesPoint::operator+=(const SeriesPoint& other) {
  time_us = other.time_us;
  running += other.running, waiting += other.waiting, free_pages += other.free_pages;
  base_pairs += other.base_pairs, live_pairs += other.live_pairs;
  offered_tokens += other.offered_tokens;
  return *this;
}

}  // namespace ekv
