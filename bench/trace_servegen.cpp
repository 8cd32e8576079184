// ServeGen clients: recorded windows of arrival rate and burstiness, recorded tables of lengths.
//
// A window row is: start second, mean rate (requests/s), coefficient of variation, family of the gaps (Gamma,
// Weibull or empty), its shape and its scale. The shape is taken as it is; the scale is not: gaps are scaled to
// the mean 1 / rate, because the fitted scales miss the recorded rate, in one Weibull window out of twenty of
// the published clients by more than a factor of two.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "bench/random.h"
#include "bench/trace_builder.h"
#include "util/files.h"
#include "util/json.h"

namespace ekv {
namespace {

constexpr double kMaxRate = 1e5;  // requests per second and client
// Below these, nearly all gaps are far shorter than their mean and a window would never end.
constexpr double kMinGammaShape = 0.01, kMinWeibullShape = 0.1;
constexpr int64_t kMaxStart = 1'000'000'000;  // seconds
constexpr int64_t kDatasetSeconds = 21'600;   // span of a table of lengths

struct RateWindow {
  int64_t line = 0, start_s = 0, end_s = 0;
  double rate = 0, shape = 1;
  bool weibull = false;
};

// Values with their cumulative probabilities, for drawing by inversion.
class LengthTable {
 public:
  void add(int64_t tokens, double probability) {
    total_ += probability;
    steps_.push_back({total_, tokens});
  }
  bool empty() const { return !(total_ > 0); }
  int64_t draw(Random& random) const {
    const double at = random.uniform() * total_;
    const auto below = [](const Step& step, double value) { return step.cumulative < value; };
    const auto step = std::lower_bound(steps_.begin(), steps_.end(), at, below);
    return step == steps_.end() ? steps_.back().tokens : step->tokens;
  }

 private:
  struct Step {
    double cumulative;
    int64_t tokens;
  };
  std::vector<Step> steps_;
  double total_ = 0;
};

struct LengthTables {
  LengthTable input, output;
};
using Dataset = std::map<int64_t, LengthTables>;  // by start second

Error broken(const std::string& name, const std::string& why) {
  return {Error::invalid_argument, fmt::format("{}: {}", name, why), "trace"};
}

// "{value: probability, ...}": not JSON, because the keys are bare numbers.
Result<LengthTable> parse_table(std::string_view text, const std::string& name) {
  if (!text.starts_with('{') || !text.ends_with('}'))
    return broken(name, "a table of lengths is not inside braces");
  text = text.substr(1, text.size() - 2);
  LengthTable table;
  if (is_blank(text)) return table;
  for (const std::string_view entry : split_fields(text)) {
    const size_t colon = entry.find(':');
    const auto tokens = to_integer(entry.substr(0, colon));
    const size_t value = colon == std::string_view::npos ? colon : entry.find_first_not_of(' ', colon + 1);
    const auto probability = value == std::string_view::npos ? std::nullopt : to_number(entry.substr(value));
    if (!tokens || !probability || *probability < 0 || *probability > 1) {
      return broken(name, fmt::format("\"{}\" is no length with its probability", entry.substr(0, 40)));
    }
    table.add(*tokens, *probability);
  }
  return table;
}

Result<LengthTable> table_member(const SortedJson& window, const char* key, const std::string& name) {
  const auto at = window.find(key);
  if (at == window.end() || !at->is_string())
    return broken(name, fmt::format("{} is missing or no string", key));
  return parse_table(at->get_ref<const std::string&>(), fmt::format("{}: {}", name, key));
}

Result<Dataset> parse_dataset(std::string_view text, const std::string& name) {
  const auto root = parse_sorted_json(text);
  if (!root) return broken(name, root.error().message);
  if (!root->is_object()) return broken(name, "the file is no JSON object");
  Dataset dataset;
  for (const auto& [key, window] : root->items()) {
    const auto start = to_integer(key);
    if (!start || !window.is_object())
      return broken(name, fmt::format("\"{}\" is no window", key.substr(0, 40)));
    const std::string where = fmt::format("{}: window {}", name, *start);
    auto input = table_member(window, "input_tokens", where),
         output = table_member(window, "output_tokens", where);
    if (!input) return input.error();
    if (!output) return output.error();
    dataset[*start] = {std::move(*input), std::move(*output)};
  }
  return dataset;
}

Result<RateWindow> parse_window_row(std::string_view line, int64_t number, const std::string& name) {
  const auto fields = split_fields(line);
  const auto bad = [&](const char* why) { return broken(fmt::format("{}:{}", name, number), why); };
  if (fields.size() != 6) return bad("a window has six fields");
  const auto start = to_integer(fields[0]);
  const auto rate = to_number(fields[1]), shape = to_number(fields[4]);
  if (!start || *start < 0 || *start > kMaxStart) return bad("the start is no number of seconds");
  if (!rate || *rate < 0 || *rate > kMaxRate) return bad("the rate is no number of requests per second");
  RateWindow w{number, *start, 0, *rate, 1, fields[3] == "Weibull"};
  if (w.rate == 0) return w;
  if (fields[3] != "Weibull" && fields[3] != "Gamma") return bad("the arrivals are neither Gamma nor Weibull");
  if (!shape || *shape < (w.weibull ? kMinWeibullShape : kMinGammaShape) || *shape > 1e6)
    return bad("the shape of the gaps is out of range");
  w.shape = *shape;
  return w;
}

// Windows follow each other without a hole; the last is as long as the one before.
Result<std::vector<RateWindow>> parse_windows(std::string_view text, const std::string& name) {
  std::vector<RateWindow> windows;
  Status failed;
  for_each_line(text, [&](int64_t number, std::string_view line) {
    if (failed || is_blank(line)) return;
    auto window = parse_window_row(line, number, name);
    if (!window) return void(failed = window.error());
    if (!windows.empty() && window->start_s <= windows.back().start_s) {
      return void(
          failed = broken(fmt::format("{}:{}", name, number), "the windows are not in order of their start"));
    }
    if (!windows.empty()) windows.back().end_s = window->start_s;
    windows.push_back(*window);
  });
  if (failed) return *failed;
  if (windows.size() < 2) return broken(name, "fewer than two windows");
  windows.back().end_s = 2 * windows.back().start_s - windows[windows.size() - 2].start_s;
  return windows;
}

double mean_gap(const RateWindow& w) { return w.weibull ? std::tgamma(1 + 1 / w.shape) : w.shape; }

// Draws the requests of one window until `end_s`, a renewal process that begins with the window.
void draw_window(const RateWindow& w, double end_s, const LengthTables* tables, uint64_t seed,
                 TraceBuilder& builder) {
  Random random(seed);
  const double scale = 1 / (mean_gap(w) * w.rate);
  double at = double(w.start_s);
  while (true) {
    at += scale * (w.weibull ? random.weibull(w.shape) : random.gamma(w.shape));
    if (!(at < end_s)) return;
    builder.count_line();
    if (!tables || tables->input.empty() || tables->output.empty()) {
      builder.leave_out(w.line, "no table of lengths for this time");
      continue;
    }
    RawRequest raw;
    raw.time_us = std::llround(at * 1e6);
    raw.input_tokens = tables->input.draw(random);
    raw.output_tokens = tables->output.draw(random);
    builder.add(std::move(raw));
  }
}

uint64_t name_hash(std::string_view name) {
  uint64_t hash = 0;
  for (const char c : name) hash = splitmix64(hash ^ uint8_t(c));
  return hash;
}

// Only windows that the wanted span touches are drawn, so that a minute out of two weeks costs a minute.
Status draw_client(std::string_view trace_csv, std::string_view dataset_json, const std::string& name,
                   TraceBuilder& builder) {
  const auto windows = parse_windows(trace_csv, name);
  if (!windows) return windows.error();
  const auto dataset = parse_dataset(dataset_json, name + " (lengths)");
  if (!dataset) return dataset.error();
  const TraceOptions& options = builder.options();
  const auto wanted = [&](const RateWindow& w) {
    return w.rate > 0 && double(w.end_s) > options.start_s && double(w.start_s) < options.end_s;
  };
  const auto end_of = [&](const RateWindow& w) { return std::min(double(w.end_s), options.end_s); };
  double expected = 0;
  for (const RateWindow& w : *windows) expected += wanted(w) ? w.rate * (end_of(w) - double(w.start_s)) : 0;
  if (expected > double(kMaxTraceRequests)) {
    return broken(name,
                  fmt::format("about {:.0f} requests; choose a shorter window (--window START:END)", expected));
  }
  for (const RateWindow& w : *windows) {
    if (!wanted(w)) continue;
    const auto tables = dataset->find(w.start_s / kDatasetSeconds * kDatasetSeconds);
    draw_window(w, end_of(w), tables == dataset->end() ? nullptr : &tables->second,
                splitmix64(options.seed, name_hash(name), uint64_t(w.start_s)), builder);
  }
  return std::nullopt;
}

}  // namespace

Result<Trace> servegen_trace(std::string_view trace_csv, std::string_view dataset_json, const std::string& name,
                             const TraceOptions& options) {
  if (const Status bad = validate(options)) return *bad;
  TraceBuilder builder(name, options);
  if (const Status failed = draw_client(trace_csv, dataset_json, name, builder)) return *failed;
  return std::move(builder).finish();
}

Result<Trace> load_servegen(const std::filesystem::path& path, const TraceOptions& options) {
  const auto files = servegen_files(path);
  if (!files) return files.error();
  TraceBuilder builder(path.filename().string(), options);
  for (const std::filesystem::path& file : *files) {
    std::string dataset_name = file.filename().string();
    dataset_name.replace(dataset_name.rfind("-trace.csv"), std::string::npos, "-dataset.json");
    const auto windows = read_file(file), dataset = read_file(file.parent_path() / dataset_name);
    if (!windows) return windows.error();
    if (!dataset) return dataset.error();
    if (const Status failed = draw_client(*windows, *dataset, file.filename().string(), builder))
      return *failed;
  }
  return std::move(builder).finish();
}

// The file itself, or all clients of a folder in the order of their names.
Result<std::vector<std::filesystem::path>> servegen_files(const std::filesystem::path& path) {
  const auto is_client = [](const std::filesystem::path& p) {
    return p.filename().string().starts_with("chunk-") && p.filename().string().ends_with("-trace.csv");
  };
  std::error_code failed;
  std::vector<std::filesystem::path> files;
  if (std::filesystem::is_directory(path, failed)) {
    for (std::filesystem::directory_iterator at(path, failed), end; !failed && at != end; at.increment(failed))
      if (is_client(at->path())) files.push_back(at->path());
    if (failed) return broken(path.string(), failed.message());
    std::sort(files.begin(), files.end());
  } else if (is_client(path)) {
    files.push_back(path);
  }
  if (!files.empty()) return files;
  return broken(path.string(),
                "neither a ServeGen file chunk-N-trace.csv, with its chunk-N-dataset.json beside it, "
                "nor a folder with such files; traces of other formats are given as files");
}

}  // namespace ekv
