#pragma once
// trace_builder.h -- what all readers of traces have in common: lines, faults, and the options that leave out,
// scale or cut requests. Internal to bench/trace*.cpp.

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bench/trace.h"

namespace ekv {

// A request as a line gave it, before any option.
struct RawRequest {
  int64_t line = 0;
  int64_t time_us = 0;
  int64_t input_tokens = 0, output_tokens = 0;
  std::vector<int64_t> hash_ids;
};

class TraceBuilder {
 public:
  TraceBuilder(std::string name, const TraceOptions& options);

  // A line that becomes no request. `reason` groups, `detail` explains this one.
  void fault(int64_t line, const char* reason, const std::string& detail);
  void leave_out(int64_t line, const char* reason);
  void count_line() { ++trace_.num_lines; }

  // Checks and transforms one request; counts it as skipped when a check or an option says so.
  void add(RawRequest raw);
  // Replaces the requests by a shuffled sample of `limit` of them with random arrivals; for lengths and
  // synthetic.
  void draw_arrivals(bool shuffle);
  // Sorts, applies the limit, numbers. Error when nothing is left.
  Result<Trace> finish() &&;

  const TraceOptions& options() const { return options_; }
  int64_t window_start_us() const { return start_us_; }

 private:
  void skip(int64_t line, const char* reason, bool fault, const std::string& detail);
  bool lengths_are_sane(const RawRequest& raw);
  bool fits(const RawRequest& raw, TraceRequest& request);
  void sample(int64_t wanted);

  TraceOptions options_;
  int64_t start_us_, end_us_;
  bool drawn_ = false;  // the limit has been applied by draw_arrivals
  Trace trace_;
};

// Lines without their line ends (LF or CR LF); a last line without one counts too. Calls body(number, line).
template <class Body>
void for_each_line(std::string_view text, Body body) {
  if (text.starts_with("\xef\xbb\xbf")) text.remove_prefix(3);
  for (int64_t number = 1; !text.empty(); ++number) {
    const size_t end = text.find('\n');
    std::string_view line = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    if (line.ends_with('\r')) line.remove_suffix(1);
    body(number, line);
  }
}

bool is_blank(std::string_view line);
// Fields between commas without the blanks around them. Quotes mean nothing: no format here uses them.
std::vector<std::string_view> split_fields(std::string_view line);
// The whole text must be one finite number.
std::optional<double> to_number(std::string_view text);
std::optional<int64_t> to_integer(std::string_view text);
// Milliseconds to microseconds; nothing below 0 or above 30 years.
std::optional<int64_t> ms_to_us(double ms);

void read_mooncake(std::string_view text, TraceBuilder& builder);
void read_azure(std::string_view text, TraceBuilder& builder);
// With a time column, or without one (lengths).
void read_columns(std::string_view text, bool with_time, TraceBuilder& builder);

// Clients of ServeGen: one file, or all those of a folder.
Result<std::vector<std::filesystem::path>> servegen_files(const std::filesystem::path& path);
Result<Trace> load_servegen(const std::filesystem::path& path, const TraceOptions& options);

// What the first line that is not blank looks like.
Result<TraceFormat> detect_format(std::string_view text, const std::string& name);

}  // namespace ekv
