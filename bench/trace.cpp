#include "bench/trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <numeric>

#include "bench/random.h"
#include "bench/trace_builder.h"
#include "util/files.h"

namespace ekv {
namespace {

constexpr size_t kMaxFileBytes = size_t(2) << 30;
constexpr std::pair<std::string_view, TraceFormat> kFormats[] = {
    {"auto", TraceFormat::detect},       {"mooncake", TraceFormat::mooncake}, {"azure", TraceFormat::azure},
    {"servegen", TraceFormat::servegen}, {"arrivals", TraceFormat::arrivals}, {"lengths", TraceFormat::lengths},
};
constexpr uint64_t kNoHashIds = 0x756e69717565;  // sets blocks of requests without ids apart from recorded ids

Error invalid(const char* param, const std::string& why) { return {Error::invalid_argument, why, param}; }

int64_t sum_skips(const Trace& trace, bool faults_only) {
  int64_t sum = 0;
  for (const TraceSkip& s : trace.skips) sum += s.fault || !faults_only ? s.count : 0;
  return sum;
}

// No other format has folders.
bool looks_like_servegen(const std::filesystem::path& path) {
  std::error_code unreadable;
  return std::filesystem::is_directory(path, unreadable) || servegen_files(path);
}

}  // namespace

int64_t Trace::num_skipped() const { return sum_skips(*this, false); }
int64_t Trace::num_faults() const { return sum_skips(*this, true); }

int64_t Trace::input_tokens() const {
  const auto add = [](int64_t sum, const TraceRequest& r) { return sum + r.input_tokens; };
  return std::accumulate(requests.begin(), requests.end(), int64_t(0), add);
}

int64_t Trace::output_tokens() const {
  const auto add = [](int64_t sum, const TraceRequest& r) { return sum + r.output_tokens; };
  return std::accumulate(requests.begin(), requests.end(), int64_t(0), add);
}

Status validate(const TraceOptions& o) {
  if (!(o.start_s >= 0 && o.start_s <= 1e9)) return invalid("window", "the window must start at 0 s or later");
  if (!(o.end_s > o.start_s)) return invalid("window", "the window must end after its start");
  if (std::isfinite(o.end_s) && o.end_s > 1e9) return invalid("window", "the window must end before 10^9 s");
  if (!(o.dilate >= 1e-3 && o.dilate <= 1e3)) return invalid("dilate", "dilate must be in [0.001, 1000]");
  const bool any_scale = o.ignore_hash_ids && o.length_scale >= 1;
  if (!any_scale && (o.length_scale < 1 || kTraceHashBlock % o.length_scale != 0)) {
    return invalid(
        "length_scale",
        fmt::format(
            "must divide the hash block of {} tokens, got {}; with --ignore-hash-ids it may be any number "
            "from 1 on",
            kTraceHashBlock, o.length_scale));
  }
  if (o.max_tokens < 0 || o.max_tokens == 1) return invalid("max_tokens", "max_tokens must be 0 or at least 2");
  if (o.limit < 0 || o.limit > kMaxTraceRequests) {
    return invalid("limit", fmt::format("the limit must be in [0, {}]", kMaxTraceRequests));
  }
  if (!(o.rate > 0)) return invalid("rate", "the rate must be above 0 requests per second");
  if (!(o.rate >= 1e-6)) return invalid("rate", "the rate must be at least 1e-6 requests per second");
  if (!(o.burstiness >= 1e-3)) return invalid("burstiness", "burstiness must be at least 0.001");
  if (o.filter.min_tokens < 0 || o.filter.max_input < 0 || o.filter.max_total < 0) {
    return invalid("filter", "bounds of the length filter must not be negative");
  }
  return std::nullopt;
}

Result<Trace> parse_trace(std::string_view text, const std::string& name, const TraceOptions& options) {
  if (const Status bad = validate(options)) return *bad;
  TraceFormat format = options.format;
  if (format == TraceFormat::detect) {
    const auto detected = detect_format(text, name);
    if (!detected) return detected.error();
    format = *detected;
  }
  TraceBuilder builder(name, options);
  switch (format) {
    case TraceFormat::mooncake:
      read_mooncake(text, builder);
      break;
    case TraceFormat::azure:
      read_azure(text, builder);
      break;
    case TraceFormat::arrivals:
    case TraceFormat::lengths:
      read_columns(text, format == TraceFormat::arrivals, builder);
      break;
    case TraceFormat::servegen:
    case TraceFormat::detect:
      return invalid("trace", name + ": ServeGen is read from its chunk-N-trace.csv or a folder of them");
  }
  if (format == TraceFormat::lengths) builder.draw_arrivals(true);
  Result<Trace> trace = std::move(builder).finish();
  if (trace) trace->format = format;
  return trace;
}

Result<Trace> load_trace(const std::filesystem::path& path, const TraceOptions& options) {
  if (const Status bad = validate(options)) return *bad;
  const bool by_name = options.format == TraceFormat::detect && looks_like_servegen(path);
  if (options.format == TraceFormat::servegen || by_name) {
    Result<Trace> trace = load_servegen(path, options);
    if (trace) trace->format = TraceFormat::servegen;
    return trace;
  }
  const auto text = read_file(path, kMaxFileBytes);
  if (!text) return text.error();
  return parse_trace(*text, path.filename().string(), options);
}

Result<Trace> random_trace(const RandomLengths& lengths, const TraceOptions& options) {
  if (const Status bad = validate(options)) return *bad;
  if (lengths.num_requests < 1 || lengths.num_requests > kMaxTraceRequests) {
    return invalid("num_prompts", fmt::format("the number of requests must be in [1, {}]", kMaxTraceRequests));
  }
  if (!(lengths.spread >= 0 && lengths.spread < 1))
    return invalid("range_ratio", "the range must be in [0, 1)");
  if (std::min(lengths.input_tokens, lengths.output_tokens) < 1) {
    return invalid("input_len", "prompts and answers have at least one token");
  }
  TraceBuilder builder("synthetic", options);
  Random random(splitmix64(options.seed, 1, 0));
  const auto draw = [&](int middle) {
    const auto low = int64_t(std::floor(middle * (1 - lengths.spread)));
    const auto high = int64_t(std::ceil(middle * (1 + lengths.spread)));
    return std::max<int64_t>(1, low + int64_t(random.below(uint64_t(high - low + 1))));
  };
  for (int64_t i = 0; i < lengths.num_requests; ++i) {
    builder.count_line();
    RawRequest raw;
    raw.time_us = builder.window_start_us();
    raw.input_tokens = draw(lengths.input_tokens);
    raw.output_tokens = draw(lengths.output_tokens);
    builder.add(std::move(raw));
  }
  builder.draw_arrivals(false);
  auto trace = std::move(builder).finish();
  if (trace) trace->closed_loop = !std::isfinite(options.rate);
  return trace;
}

Result<Trace> synthetic_trace(std::string_view spec, const TraceOptions& options) {
  std::vector<int64_t> numbers;
  for (std::string_view rest = spec;;) {
    const size_t colon = rest.find(':');
    const auto number = to_integer(rest.substr(0, colon));
    if (!number || *number < 1 || *number > kMaxTraceTokens) break;
    numbers.push_back(*number);
    if (colon == std::string_view::npos) break;
    rest.remove_prefix(colon + 1);
  }
  const auto parts = size_t(std::count(spec.begin(), spec.end(), ':')) + 1;
  if (numbers.size() != 3 || parts != 3 || numbers[0] > kMaxTraceRequests) {
    return invalid("synthetic", fmt::format("\"{}\" is not N:INPUT:OUTPUT, such as 600:4096:1024, with 1 to {} "
                                            "requests and 1 to {} tokens of prompt and of answer",
                                            spec.substr(0, 60), kMaxTraceRequests, kMaxTraceTokens));
  }
  TraceOptions drawn = options;
  drawn.ignore_hash_ids = true;  // there are none, so any length_scale does
  return random_trace({numbers[0], int(numbers[1]), int(numbers[2]), 0}, drawn);
}

Result<TraceFormat> parse_trace_format(std::string_view name) {
  for (const auto& [known, format] : kFormats)
    if (known == name) return format;
  return invalid("trace_format", fmt::format("trace format \"{}\" is unknown; there are auto, mooncake, azure, "
                                             "servegen, arrivals and lengths",
                                             name.substr(0, 40)));
}

std::string_view name_of(TraceFormat format) {
  for (const auto& [known, value] : kFormats)
    if (value == format) return known;
  EKV_CHECK(false, "every format has a name");
}

Status parse_window(std::string_view text, TraceOptions& options) {
  const auto bad = invalid("window", fmt::format("\"{}\" is not START:END in seconds", text.substr(0, 60)));
  const size_t colon = text.find(':');
  if (colon == std::string_view::npos) return bad;
  const std::string_view start = text.substr(0, colon), end = text.substr(colon + 1);
  const auto start_s = start.empty() ? 0.0 : to_number(start);
  const auto end_s = end.empty() ? std::numeric_limits<double>::infinity() : to_number(end);
  if (!start_s || !end_s) return bad;
  options.start_s = *start_s;
  options.end_s = *end_s;
  return validate(options);
}

std::vector<int64_t> random_arrivals_us(int64_t count, double rate, double burstiness, uint64_t seed) {
  EKV_CHECK(count >= 0 && rate > 0 && burstiness > 0, "validate() the options first");
  std::vector<int64_t> times(size_t(count), 0);
  if (!std::isfinite(rate) || count == 0) return times;
  Random random(seed);
  std::vector<double> sums;
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    sum += std::isfinite(burstiness) ? random.gamma(burstiness) : 1;
    sums.push_back(sum);
  }
  const double last_us = double(count) / rate * 1e6;
  for (size_t i = 0; i < times.size(); ++i)
    times[i] = std::llround(sum > 0 ? sums[i] / sum * last_us : last_us);
  return times;
}

std::vector<TokenId> prompt_tokens(const Trace& trace, const TraceRequest& request, uint64_t seed, int vocab) {
  EKV_CHECK(vocab >= 1, "a vocabulary has tokens");
  const int margin = vocab > 2000 ? 1000 : vocab / 4;
  const auto range = uint64_t(vocab - 2 * margin);
  const int block = trace.hash_block;
  std::vector<TokenId> tokens;
  tokens.reserve(size_t(request.input_tokens));
  for (int first = 0; first < request.input_tokens; first += block) {
    const auto index = size_t(first / block);
    const bool recorded = !request.hash_ids.empty();
    const uint64_t id =
        recorded ? uint64_t(request.hash_ids.at(index)) : splitmix64(kNoHashIds, uint64_t(request.id), index);
    const int end = std::min(block, request.input_tokens - first);
    for (int j = 0; j < end; ++j) tokens.push_back(TokenId(margin + splitmix64(seed, id, uint64_t(j)) % range));
  }
  return tokens;
}

std::string describe(const Trace& trace) {
  std::string text = fmt::format("{}: {} requests, {} prompt tokens, {} answer tokens", trace.name,
                                 trace.requests.size(), trace.input_tokens(), trace.output_tokens());
  if (!trace.requests.empty())
    text += fmt::format(", last arrival {:.3f} s", trace.requests.back().arrival_us / 1e6);
  if (trace.num_repeats) text += fmt::format("; {} rows used again", trace.num_repeats);
  if (trace.num_truncated) text += fmt::format("; {} requests cut to the context", trace.num_truncated);
  const auto shares = [](const TraceRequest& r) { return !r.hash_ids.empty(); };
  const auto sharing = size_t(std::count_if(trace.requests.begin(), trace.requests.end(), shares));
  if (sharing > 0 && sharing < trace.requests.size()) {
    text += fmt::format("; {} requests without hash_ids share nothing", trace.requests.size() - sharing);
  }
  text += '\n';
  for (const TraceSkip& s : trace.skips) {
    text += s.fault ? fmt::format("  broken: {} lines, {} (first: {})\n", s.count, s.reason, s.first)
                    : fmt::format("  left out: {} lines, {}\n", s.count, s.reason);
  }
  return text;
}

}  // namespace ekv
