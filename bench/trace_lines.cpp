// The formats with one request a line: Mooncake's JSON lines and the CSV files.

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "bench/trace_builder.h"
#include "util/json.h"

namespace ekv {
namespace {

constexpr size_t kMaxLineBytes = 1 << 20;  // 16 million tokens have 32,768 ids, far below this
constexpr int kMaxLineDepth = 4;

// Calls body for each line that may hold a request, and counts the others.
template <class Body>
void for_each_record(std::string_view text, TraceBuilder& builder, Body body) {
  for_each_line(text, [&](int64_t number, std::string_view line) {
    builder.count_line();
    if (is_blank(line)) return builder.leave_out(number, "blank line");
    if (line.size() > kMaxLineBytes) {
      return builder.fault(number, "line too long",
                           fmt::format("{} bytes, at most {} are read", line.size(), kMaxLineBytes));
    }
    body(number, line);
  });
}

// ---- Mooncake ----

std::optional<int64_t> length_of(const Json& object, const char* key) {
  const Json& value = member(object, key);
  if (value.is_number_unsigned()) return int64_t(std::min<uint64_t>(value.get<uint64_t>(), INT64_MAX));
  if (value.is_number_integer()) return value.get<int64_t>();
  return std::nullopt;
}

bool read_hash_ids(const Json& ids, std::vector<int64_t>& out) {
  if (ids.is_null()) return true;
  if (!ids.is_array()) return false;
  for (const Json& id : ids) {
    if (!id.is_number_integer() || (!id.is_number_unsigned() && id.get<int64_t>() < 0)) return false;
    const auto value = id.get<uint64_t>();
    if (value > uint64_t(INT64_MAX)) return false;
    out.push_back(int64_t(value));
  }
  return true;
}

void add_mooncake_line(int64_t number, const Json& object, TraceBuilder& builder) {
  RawRequest raw;
  raw.line = number;
  const Json& timestamp = member(object, "timestamp");
  if (!timestamp.is_number()) {
    return builder.fault(number, "no timestamp", "timestamp is missing or no number; it is in milliseconds");
  }
  const auto time_us = ms_to_us(timestamp.get<double>());
  if (!time_us)
    return builder.fault(number, "timestamp out of range", "timestamp is negative or above 30 years");
  raw.time_us = *time_us;
  const auto input = length_of(object, "input_length"), output = length_of(object, "output_length");
  if (!input) return builder.fault(number, "no input_length", "input_length is missing or no integer");
  if (!output) return builder.fault(number, "no output_length", "output_length is missing or no integer");
  raw.input_tokens = *input;
  raw.output_tokens = *output;
  if (!read_hash_ids(member(object, "hash_ids"), raw.hash_ids)) {
    return builder.fault(number, "bad hash_ids", "hash_ids is no list of integers from 0 to 2^63 - 1");
  }
  builder.add(std::move(raw));
}

// ---- CSV ----

struct Columns {
  int time = -1, input = -1, output = -1;
  int needed() const { return std::max({time, input, output}) + 1; }
  bool complete(bool with_time) const { return input >= 0 && output >= 0 && (time >= 0 || !with_time); }
};

bool is_one_of(std::string_view name, std::initializer_list<std::string_view> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

Columns columns_of(const std::vector<std::string_view>& header) {
  Columns c;
  for (int i = 0; i < int(header.size()); ++i) {
    const std::string_view name = header[size_t(i)];
    if (is_one_of(name, {"arrival_ms", "timestamp_ms", "TIMESTAMP"})) c.time = i;
    if (is_one_of(name, {"input", "input_tokens", "input_length", "ContextTokens", "num_prefill_tokens"}))
      c.input = i;
    if (is_one_of(name, {"output", "output_tokens", "output_length", "GeneratedTokens", "num_decode_tokens"}))
      c.output = i;
  }
  return c;
}

// Reads rows of token counts, in the default columns or in those that the first line names.
class RowReader {
 public:
  RowReader(Columns columns, bool with_time, TraceBuilder& builder)
      : columns_(columns), with_time_(with_time), builder_(builder) {}

  // False: the line is a header or broken, and has been counted.
  bool read(int64_t number, std::string_view line, RawRequest& raw) {
    fields_ = split_fields(line);
    const Columns named = columns_of(fields_);
    if (std::exchange(first_, false) && named.needed() > 0) {
      columns_ = named;
      builder_.leave_out(number, "header");
      return false;
    }
    if (!columns_.complete(with_time_)) {
      builder_.fault(number, "header lacks a column",
                     "the header names no column of arrivals, prompts or answers");
      return false;
    }
    if (int(fields_.size()) < columns_.needed()) {
      builder_.fault(number, "too few fields",
                     fmt::format("{} fields, expected {}", fields_.size(), columns_.needed()));
      return false;
    }
    raw.line = number;
    return read_tokens(columns_.input, raw.input_tokens, number) &&
           read_tokens(columns_.output, raw.output_tokens, number);
  }
  std::string_view time() const { return fields_[size_t(columns_.time)]; }

 private:
  bool read_tokens(int column, int64_t& tokens, int64_t number) {
    const std::string_view text = fields_[size_t(column)];
    const auto value = to_integer(text);
    if (value) return tokens = *value, true;
    builder_.fault(number, "token count is no integer",
                   fmt::format("\"{}\" is no number of tokens", text.substr(0, 40)));
    return false;
  }

  Columns columns_;
  bool with_time_, first_ = true;
  TraceBuilder& builder_;
  std::vector<std::string_view> fields_;
};

// Exactly `digits` decimal digits at `at`.
std::optional<int> digits_at(std::string_view text, size_t at, size_t digits) {
  if (at + digits > text.size()) return std::nullopt;
  int value = 0;
  for (const char c : text.substr(at, digits)) {
    if (c < '0' || c > '9') return std::nullopt;
    value = value * 10 + (c - '0');
  }
  return value;
}

// "YYYY-MM-DD HH:MM:SS" with a fraction of any length and an optional offset "+HH:MM", in microseconds since
// 1970.
std::optional<int64_t> wall_clock_us(std::string_view text) {
  const auto year = digits_at(text, 0, 4), month = digits_at(text, 5, 2), day = digits_at(text, 8, 2);
  const auto hour = digits_at(text, 11, 2), minute = digits_at(text, 14, 2), second = digits_at(text, 17, 2);
  if (!year || !month || !day || !hour || !minute || !second) return std::nullopt;
  if (text[4] != '-' || text[7] != '-' || (text[10] != ' ' && text[10] != 'T') || text[13] != ':' ||
      text[16] != ':')
    return std::nullopt;
  const std::chrono::year_month_day date{std::chrono::year(*year), std::chrono::month(unsigned(*month)),
                                         std::chrono::day(unsigned(*day))};
  if (!date.ok() || *hour > 23 || *minute > 59 || *second > 60) return std::nullopt;
  int64_t us = std::chrono::sys_days(date).time_since_epoch().count() * int64_t(86'400'000'000);
  us += ((*hour * 60 + *minute) * 60 + *second) * int64_t(1'000'000);
  std::string_view rest = text.substr(19);
  if (rest.starts_with('.')) {
    const size_t end = std::min(rest.find_first_not_of("0123456789", 1), rest.size());
    const auto fraction = to_number(fmt::format("0{}", rest.substr(0, end)));
    if (!fraction) return std::nullopt;
    us += std::llround(*fraction * 1e6);
    rest.remove_prefix(end);
  }
  if (rest.empty() || rest == "Z") return us;
  const auto offset_hours = digits_at(rest, 1, 2), offset_minutes = digits_at(rest, 4, 2);
  if (rest.size() != 6 || (rest[0] != '+' && rest[0] != '-') || rest[3] != ':' || !offset_hours ||
      !offset_minutes)
    return std::nullopt;
  const int64_t offset = (*offset_hours * 60 + *offset_minutes) * int64_t(60'000'000);
  return rest[0] == '+' ? us - offset : us + offset;
}

}  // namespace

void read_mooncake(std::string_view text, TraceBuilder& builder) {
  for_each_record(text, builder, [&](int64_t number, std::string_view line) {
    const auto object = parse_json(line, kMaxLineDepth);
    if (!object) return builder.fault(number, "no JSON", object.error().message);
    if (!object->is_object()) return builder.fault(number, "no JSON", "the line is no JSON object");
    add_mooncake_line(number, *object, builder);
  });
}

void read_azure(std::string_view text, TraceBuilder& builder) {
  RowReader rows({0, 1, 2}, true, builder);
  std::optional<int64_t> zero_us;
  for_each_record(text, builder, [&](int64_t number, std::string_view line) {
    RawRequest raw;
    if (!rows.read(number, line, raw)) return;
    const auto clock_us = wall_clock_us(rows.time());
    if (!clock_us)
      return builder.fault(number, "no time of day", "TIMESTAMP is not like 2023-11-16 18:15:46.6805900");
    if (!zero_us) zero_us = *clock_us;
    const auto time_us = ms_to_us(double(*clock_us - *zero_us) / 1000);
    if (!time_us)
      return builder.fault(number, "timestamp out of range", "earlier than the first request of the file");
    raw.time_us = *time_us;
    builder.add(std::move(raw));
  });
}

void read_columns(std::string_view text, bool with_time, TraceBuilder& builder) {
  RowReader rows(with_time ? Columns{0, 1, 2} : Columns{-1, 0, 1}, with_time, builder);
  for_each_record(text, builder, [&](int64_t number, std::string_view line) {
    RawRequest raw;
    if (!rows.read(number, line, raw)) return;
    raw.time_us = builder.window_start_us();  // lengths get their arrivals later
    if (with_time) {
      const auto ms = to_number(rows.time());
      const auto time_us = ms ? ms_to_us(*ms) : std::nullopt;
      if (!time_us) {
        return builder.fault(number, "timestamp out of range",
                             "the arrival is no number of milliseconds from 0 on");
      }
      raw.time_us = *time_us;
    }
    builder.add(std::move(raw));
  });
}

// A header names its format; without one the number of columns does.
Result<TraceFormat> detect_format(std::string_view text, const std::string& name) {
  std::optional<std::string_view> first;
  for_each_line(text.substr(0, kMaxLineBytes), [&](int64_t, std::string_view line) {
    if (!first && !is_blank(line)) first = line;
  });
  const auto unknown = [&](const std::string& why) {
    return Error{Error::invalid_argument, fmt::format("{}: {}; name the format (--trace-format)", name, why),
                 "trace"};
  };
  if (!first) return unknown("the file is empty");
  if (first->find_first_not_of(" \t") == first->find('{')) return TraceFormat::mooncake;
  const auto fields = split_fields(*first);
  const Columns c = columns_of(fields);
  if (c.input >= 0 && c.output >= 0) {
    if (c.time < 0) return TraceFormat::lengths;
    return fields[size_t(c.time)] == "TIMESTAMP" ? TraceFormat::azure : TraceFormat::arrivals;
  }
  if (fields.size() == 6 && is_one_of(fields[3], {"Gamma", "Weibull", ""})) return TraceFormat::servegen;
  if (fields.size() == 3 && wall_clock_us(fields[0])) return TraceFormat::azure;
  if (fields.size() == 3 && to_number(fields[0])) return TraceFormat::arrivals;
  if (fields.size() == 2 && to_integer(fields[0])) return TraceFormat::lengths;
  return unknown("the first line is of no known trace format");
}

}  // namespace ekv
