// Cost models as JSON: the format, and where they are found.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "backend/sim/cost_model.h"
#include "backend/sim/shipped_models.h"
#include "elastickv/backend.h"
#include "util/files.h"
#include "util/json.h"

namespace ekv {
namespace {

constexpr size_t kMaxFileBytes = size_t(1) << 20;

// What a kind of figure may be. Each bound is ten times and more from what any machine was measured at: a slip
// of units is refused here and not simulated.
struct Range {
  double least, most;
  const char* unit = "";
};
constexpr Range kTime = {0, 6e7, " us"};                // a minute, of a step, sequence, chunk, pair or copy
constexpr Range kTimePerKey = {0, 10, " us"};           // a chunk has up to 10^14 of them
constexpr Range kBandwidth = {1, 1e12, " bytes/us"};    // 1 MB/s
constexpr Range kTokenBytes = {64, 1 << 26, " bytes"};  // of all layers; 4.7 MB with 96 layers of 96 heads
constexpr Range kFactor = {0.01, 100};
constexpr int kMostTokens = 1 << 24;  // that --max-num-batched-tokens takes

// Reads one section and remembers the first thing that is wrong with it.
class Section {
 public:
  Section(const Json& file, const char* name, Status& error)
      : name_(name), json_(member(file, name)), error_(error) {
    if (!json_.is_object()) {
      fail("must be an object");
      return;
    }
    ++num_used_;
    const Json& source = member(json_, "source");
    if (!source.is_string() || source.get_ref<const std::string&>().empty())
      fail("'source' must say where its figures come from");
  }
  ~Section() {
    if (!error_ && num_used_ != json_.size())
      fail(fmt::format("has a member that is none of: source{}", used_));
  }

  void read(const char* key, double& out, const Range& range) {
    const Json& value = use(key);
    if (error_) return;
    if (!value.is_number()) return fail(fmt::format("'{}' must be a number", key));
    out = value.get<double>();
    if (!in(range, out))
      fail(fmt::format("'{}' must be {} to {}{}, got {}", key, range.least, range.most, range.unit, out));
  }

  void read(const char* key, int& out, int least, int most, const char* meaning) {
    const Json& value = use(key, meaning);
    if (error_) return;
    if (!value.is_number_integer() || value < least || value > most)
      return fail(fmt::format("'{}' must be {} to {}{}, got {}", key, least, most, meaning, shown(value)));
    out = value.get<int>();
  }

  void read(const char* key, std::vector<int>& out) {
    for (const Json& value : list(key)) {
      if (!is_count(value))
        return fail(
            fmt::format("'{}' must hold token counts from 1 to {}, has {}", key, kMostTokens, shown(value)));
      out.push_back(value.get<int>());
      if (out.size() > 1 && out.back() <= out[out.size() - 2])
        return fail(fmt::format("'{}' must ascend", key));
    }
  }

  void read(const char* key, std::vector<TokensPoint>& out) {
    for (const Json& value : list(key)) {
      const bool pair = value.is_array() && value.size() == 2 && is_count(value[0]) && value[1].is_number();
      if (!pair || !in(kTime, value[1].get<double>()))
        return fail(fmt::format("'{}' must hold [tokens from 1 to {}, microseconds from 0 to {}], has {}", key,
                                kMostTokens, kTime.most, shown(value)));
      out.push_back({.tokens = value[0].get<int>(), .us = value[1].get<double>()});
      if (out.size() < 2) continue;
      const TokensPoint& before = out[out.size() - 2];
      if (out.back().tokens <= before.tokens || out.back().us < before.us)
        return fail(fmt::format("'{}' must ascend in tokens and not descend in time", key));
    }
  }

 private:
  static bool is_count(const Json& value) {
    return value.is_number_integer() && value.get<int64_t>() >= 1 && value.get<int64_t>() <= kMostTokens;
  }
  static bool in(const Range& range, double value) { return value >= range.least && value <= range.most; }
  static std::string shown(const Json& value) {
    constexpr size_t kMostBytes = 60;
    const std::string text = dump_json(value);
    return text.size() <= kMostBytes ? text : value.type_name();
  }
  const Json& use(const char* key, const char* meaning = "") {
    used_ += fmt::format(", {}", key);
    if (json_.is_object() && json_.contains(key))
      ++num_used_;
    else
      fail(fmt::format("has no '{}'{}", key, meaning));
    return member(json_, key);
  }
  const Json& list(const char* key) {
    const Json& value = use(key);
    if (!error_ && !value.is_array()) fail(fmt::format("'{}' must be an array", key));
    return error_ ? nothing_ : value;
  }
  void fail(std::string what) {
    if (!error_)
      error_ = Error{Error::invalid_argument, fmt::format("section '{}' {}", name_, what), "cost-model"};
  }

  const char* name_;
  const Json& json_;
  Status& error_;
  size_t num_used_ = 0;
  std::string used_;
  const Json nothing_ = Json::array();
};

void read_kv(const Json& file, CostModel& model, Status& error) {
  Section kv(file, "kv", error);
  kv.read("target_bytes_per_token", model.target_bytes_per_token, kTokenBytes);
  kv.read("base_bytes_per_token", model.base_bytes_per_token, kTokenBytes);
  if (!error && model.base_bytes_per_token >= model.target_bytes_per_token)
    error = Error{Error::invalid_argument,
                  fmt::format("section 'kv' 'base_bytes_per_token' must be less than 'target_bytes_per_token', "
                              "which is {}, got {}: BASE is what is left of TARGET without the low bytes",
                              model.target_bytes_per_token, model.base_bytes_per_token),
                  "cost-model"};
}

void read_step(const Json& file, CostModel& model, Status& error) {
  Section step(file, "step", error);
  step.read("fixed_us", model.step_fixed_us, kTime);
  step.read("per_seq_us", model.step_per_seq_us, kTime);
  step.read("steps_in_flight", model.steps_in_flight, 1, kMostStepsInFlight,
            ": 1, or 2 if its times are of a run with --async-scheduling");
}

void read_forward(const Json& file, CostModel& model, Status& error) {
  Section forward(file, "forward", error);
  forward.read("graph_sizes", model.graph_sizes);
  forward.read("tokens_us", model.forward);
  if (!error && model.forward.empty())
    error = Error{Error::invalid_argument, "section 'forward' needs a point in 'tokens_us'", "cost-model"};
}

void read_attention(const Json& file, CostModel& model, Status& error) {
  Section prefill(file, "prefill_attention", error);
  prefill.read("per_chunk_us", model.prefill_per_chunk_us, kTime);
  prefill.read("per_key_us", model.prefill_per_key_us, kTimePerKey);
  Section decode(file, "decode_attention", error);
  decode.read("fixed_us", model.decode_fixed_us, kTime);
  decode.read("target_factor", model.decode_target_factor, kFactor);
  decode.read("base_factor", model.decode_base_factor, kFactor);
  decode.read("bytes_per_us", model.decode_bytes_per_us, kBandwidth);
}

void read_transitions(const Json& file, CostModel& model, Status& error) {
  Section demotion(file, "demotion", error);
  demotion.read("fixed_us", model.demotion_fixed_us, kTime);
  demotion.read("per_pair_us", model.demotion_per_pair_us, kTime);
  Section promotion(file, "promotion", error);
  promotion.read("fixed_us", model.promotion_fixed_us, kTime);
  promotion.read("per_pair_us", model.promotion_per_pair_us, kTime);
}

void read_links(const Json& file, CostModel& model, Status& error) {
  Section all_reduce(file, "all_reduce", error);
  all_reduce.read("tokens_us", model.all_reduce);
  for (const auto& [name, link] :
       {std::pair("to_host", &model.to_host), std::pair("from_host", &model.from_host)}) {
    Section section(file, name, error);
    section.read("bytes_per_us", link->bytes_per_us, kBandwidth);
    section.read("latency_us", link->latency_us, kTime);
  }
}

Status refuse_unknown_sections(const Json& file) {
  static constexpr std::string_view known[] = {"name",     "description",       "kv",        "step",
                                               "forward",  "prefill_attention", "promotion", "decode_attention",
                                               "demotion", "all_reduce",        "to_host",   "from_host"};
  for (const auto& [key, value] : file.items())
    if (std::ranges::find(known, key) == std::end(known))
      return Error{Error::invalid_argument,
                   fmt::format("'{}' is no part of a cost model; known are: {}", key, fmt::join(known, ", ")),
                   "cost-model"};
  return std::nullopt;
}

}  // namespace

Result<CostModel> parse_cost_model(std::string_view json) {
  Result<Json> file = parse_json(json);
  if (!file) return file.error();
  if (!file->is_object()) return Error{Error::invalid_argument, "a cost model is a JSON object", "cost-model"};
  if (Status unknown = refuse_unknown_sections(*file)) return *unknown;
  CostModel model;
  for (const auto& [key, text] :
       {std::pair("name", &model.name), std::pair("description", &model.description)}) {
    Result<std::string> value = string_member(*file, key, "");
    if (!value) return value.error();
    *text = std::move(*value);
  }
  if (model.name.empty()) return Error{Error::invalid_argument, "a cost model needs a 'name'", "cost-model"};
  Status error;
  for (const auto& read : {read_kv, read_step, read_forward, read_attention, read_transitions, read_links})
    if (!error) read(*file, model, error);
  if (error) return *error;
  return model;
}

std::span<const std::string_view> shipped_cost_models() { return shipped_model_names(); }

Result<CostModel> load_cost_model(const std::string& name_or_file) {
  const auto names = shipped_model_names();
  const auto shipped = std::ranges::find(names, name_or_file);
  if (shipped != names.end()) return parse_cost_model(shipped_model_texts()[size_t(shipped - names.begin())]);
  const bool is_name = name_or_file.find('/') == std::string::npos && !name_or_file.ends_with(".json");
  std::error_code unreadable;
  if (is_name && !std::filesystem::exists(name_or_file, unreadable))
    return Error{Error::not_found,
                 fmt::format("there is no cost model '{}': give the path of a JSON file or one of {}",
                             name_or_file, fmt::join(names, ", ")),
                 "cost-model"};
  Result<std::string> text = read_file(name_or_file, kMaxFileBytes);
  if (!text) return Error{text.error().code, text.error().message, "cost-model"};
  Result<CostModel> model = parse_cost_model(*text);
  if (model) return model;
  return Error{model.error().code, fmt::format("{}: {}", name_or_file, model.error().message), "cost-model"};
}

}  // namespace ekv
