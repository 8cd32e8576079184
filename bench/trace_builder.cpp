#include "bench/trace_builder.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "bench/random.h"

namespace ekv {
namespace {

constexpr int64_t kMaxTimeUs = int64_t(1e15);  // 30 years; times the largest dilation it still fits in 64 bits

constexpr const char* kOutsideFilter = "outside the length filter";

int64_t window_us(double seconds) {
  return std::isfinite(seconds) ? std::llround(seconds * 1e6) : std::numeric_limits<int64_t>::max();
}

int divide_up(int64_t tokens, int scale) { return int((tokens + scale - 1) / scale); }

// For checks, before the scale: does 512-token block arithmetic hold for the line as it was recorded?
int64_t ids_expected(int64_t input_tokens) { return (input_tokens + kTraceHashBlock - 1) / kTraceHashBlock; }

}  // namespace

TraceBuilder::TraceBuilder(std::string name, const TraceOptions& options)
    : options_(options), start_us_(window_us(options.start_s)), end_us_(window_us(options.end_s)) {
  trace_.name = std::move(name);
  trace_.hash_block = std::max(1, kTraceHashBlock / options.length_scale);
}

void TraceBuilder::skip(int64_t line, const char* reason, bool fault, const std::string& detail) {
  const auto same = [&](const TraceSkip& s) { return s.reason == reason; };
  auto at = std::find_if(trace_.skips.begin(), trace_.skips.end(), same);
  if (at == trace_.skips.end()) {
    const std::string where = line ? fmt::format("{}:{}", trace_.name, line) : trace_.name;
    at = trace_.skips.insert(
        at, {reason, fault, 0, fmt::format("{}: {}", where, detail.empty() ? reason : detail)});
  }
  ++at->count;
}

void TraceBuilder::fault(int64_t line, const char* reason, const std::string& detail) {
  skip(line, reason, true, detail);
}

void TraceBuilder::leave_out(int64_t line, const char* reason) { skip(line, reason, false, ""); }

bool TraceBuilder::lengths_are_sane(const RawRequest& raw) {
  const auto shortest = std::min(raw.input_tokens, raw.output_tokens);
  if (shortest == 0 && options_.filter.min_tokens > 0) {
    leave_out(raw.line, kOutsideFilter);
    return false;
  }
  if (shortest < 1) {
    fault(raw.line, raw.input_tokens < 1 ? "input length below 1" : "output length below 1",
          fmt::format("{} tokens of prompt, {} of answer: a request has at least one of each", raw.input_tokens,
                      raw.output_tokens));
    return false;
  }
  if (std::max(raw.input_tokens, raw.output_tokens) > kMaxTraceTokens) {
    fault(raw.line, "length out of range",
          fmt::format("{} tokens of prompt, {} of answer: at most {} are believed", raw.input_tokens,
                      raw.output_tokens, kMaxTraceTokens));
    return false;
  }
  const auto num_ids = int64_t(raw.hash_ids.size());
  if (num_ids == 0 || num_ids == ids_expected(raw.input_tokens)) return true;
  fault(raw.line, "number of hash_ids does not fit input_length",
        fmt::format("{} hash_ids for {} tokens, expected ceil({} / {}) = {}", num_ids, raw.input_tokens,
                    raw.input_tokens, kTraceHashBlock, ids_expected(raw.input_tokens)));
  return false;
}

// Applies the filter and the longest allowed total; cuts the prompt first, because the answer is what is
// measured.
bool TraceBuilder::fits(const RawRequest& raw, TraceRequest& r) {
  const LengthFilter& f = options_.filter;
  const int64_t total = int64_t(r.input_tokens) + r.output_tokens;
  if (std::min(r.input_tokens, r.output_tokens) < f.min_tokens ||
      (f.max_input && r.input_tokens > f.max_input) || (f.max_total && total > f.max_total)) {
    leave_out(raw.line, kOutsideFilter);
    return false;
  }
  if (!options_.max_tokens || total <= options_.max_tokens) return true;
  if (options_.too_long == TooLong::skip) {
    leave_out(raw.line, "longer than the context");
    return false;
  }
  r.output_tokens = std::min(r.output_tokens, options_.max_tokens - 1);
  r.input_tokens = std::min(r.input_tokens, options_.max_tokens - r.output_tokens);
  if (!r.hash_ids.empty()) r.hash_ids.resize(size_t(ceil_div(r.input_tokens, trace_.hash_block)));
  ++trace_.num_truncated;
  return true;
}

void TraceBuilder::add(RawRequest raw) {
  if (!lengths_are_sane(raw)) return;
  if (raw.time_us < start_us_ || raw.time_us >= end_us_) return leave_out(raw.line, "outside the window");
  TraceRequest r;
  r.arrival_us = std::llround(double(raw.time_us - start_us_) * options_.dilate);
  r.input_tokens = divide_up(raw.input_tokens, options_.length_scale);
  r.output_tokens = divide_up(raw.output_tokens, options_.length_scale);
  r.line = raw.line;
  if (!options_.ignore_hash_ids) r.hash_ids = std::move(raw.hash_ids);
  if (fits(raw, r)) trace_.requests.push_back(std::move(r));
}

// A sample larger than the rows goes through all of them again, in a new order.
void TraceBuilder::sample(int64_t wanted) {
  std::vector<TraceRequest> rows = std::move(trace_.requests);
  trace_.requests.clear();
  if (rows.empty()) return;
  Random random(options_.seed);
  for (size_t left = size_t(wanted); left > 0;) {
    for (size_t i = rows.size() - 1; i > 0; --i) std::swap(rows[i], rows[random.below(i + 1)]);
    const size_t take = std::min(rows.size(), left);
    trace_.requests.insert(trace_.requests.end(), rows.begin(), rows.begin() + std::ptrdiff_t(take));
    left -= take;
  }
  for (size_t i = size_t(wanted); i < rows.size(); ++i) leave_out(rows[i].line, "not in the sample");
  trace_.num_repeats = std::max<int64_t>(0, wanted - int64_t(rows.size()));
}

void TraceBuilder::draw_arrivals(bool shuffle) {
  drawn_ = true;
  const auto all = int64_t(trace_.requests.size());
  if (shuffle) sample(options_.limit ? options_.limit : all);
  const auto count = int64_t(trace_.requests.size());
  const std::vector<int64_t> times =
      random_arrivals_us(count, options_.rate, options_.burstiness, splitmix64(options_.seed));
  std::vector<TraceRequest> drawn = std::move(trace_.requests);
  trace_.requests.clear();
  for (size_t i = 0; i < drawn.size(); ++i) {
    if (times[i] < start_us_ || times[i] >= end_us_) {
      leave_out(drawn[i].line, "outside the window");
      continue;
    }
    drawn[i].arrival_us = std::llround(double(times[i] - start_us_) * options_.dilate);
    trace_.requests.push_back(std::move(drawn[i]));
  }
}

Result<Trace> TraceBuilder::finish() && {
  const auto earlier = [](const TraceRequest& a, const TraceRequest& b) { return a.arrival_us < b.arrival_us; };
  std::stable_sort(trace_.requests.begin(), trace_.requests.end(), earlier);
  if (options_.limit && !drawn_) {
    for (auto i = size_t(options_.limit); i < trace_.requests.size(); ++i) {
      leave_out(trace_.requests[i].line, "after the limit");
    }
    if (trace_.requests.size() > size_t(options_.limit)) trace_.requests.resize(size_t(options_.limit));
  }
  for (size_t i = 0; i < trace_.requests.size(); ++i) trace_.requests[i].id = int64_t(i);
  EKV_CHECK(int64_t(trace_.requests.size()) + trace_.num_skipped() == trace_.num_lines + trace_.num_repeats,
            "a line of the trace is neither a request nor counted as skipped");
  if (trace_.requests.empty()) {
    return Error{Error::invalid_argument, fmt::format("not one request to send\n{}", describe(trace_)),
                 "trace"};
  }
  return std::move(trace_);
}

bool is_blank(std::string_view line) { return line.find_first_not_of(" \t\r") == std::string_view::npos; }

std::vector<std::string_view> split_fields(std::string_view line) {
  std::vector<std::string_view> fields;
  while (true) {
    const size_t comma = line.find(',');
    std::string_view field = line.substr(0, comma);
    const size_t first = field.find_first_not_of(" \t");
    field =
        first == std::string_view::npos ? "" : field.substr(first, field.find_last_not_of(" \t") - first + 1);
    fields.push_back(field);
    if (comma == std::string_view::npos) return fields;
    line.remove_prefix(comma + 1);
  }
}

std::optional<double> to_number(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value)) return std::nullopt;
  return value;
}

std::optional<int64_t> to_integer(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::optional<int64_t> ms_to_us(double ms) {
  if (!(ms >= 0 && ms * 1000 <= double(kMaxTimeUs))) return std::nullopt;
  return std::llround(ms * 1000);
}

}  // namespace ekv
