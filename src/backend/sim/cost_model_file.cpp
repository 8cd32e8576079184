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

  void read(const char* key, double& out, bool may_be_zero = true) {
    const Json& value = use(key);
    if (error_) return;
    if (!value.is_number()) return fail(fmt::format("'{}' must be a number", key));
    out = value.get<double>();
    if (!std::isfinite(out) || out < 0 || (out == 0 && !may_be_zero))
      fail(fmt::format("'{}' must be {}, got {}", key, may_be_zero ? ">= 0" : "> 0", out));
  }

  void read(const char* key, int& out, int least, int most, const char* meaning) {
    const Json& value = use(key, meaning);
    if (error_) return;
    if (!value.is_number_integer() || value < least || value > most)
      return fail(fmt::format("'{}' must be {} to {}{}", key, least, most, meaning));
    out = value.get<int>();
  }

  void read(const char* key, std::vector<int>& out) {
    for (const Json& value : list(key)) {
      if (!is_count(value)) return fail(fmt::format("'{}' must hold token counts >= 1", key));
      out.push_back(value.get<int>());
      if (out.size() > 1 && out.back() <= out[out.size() - 2])
        return fail(fmt::format("'{}' must ascend", key));
    }
  }

  void read(const char* key, std::vector<TokensPoint>& out) {
    for (const Json& value : list(key)) {
      const bool pair = value.is_array() && value.size() == 2 && is_count(value[0]) && value[1].is_number();
      if (!pair || !(value[1].get<double>() >= 0))
        return fail(fmt::format("'{}' must hold [tokens >= 1, microseconds >= 0]", key));
      out.push_back({.tokens = value[0].get<int>(), .us = value[1].get<double>()});
      if (out.size() < 2) continue;
      const TokensPoint& before = out[out.size() - 2];
      if (out.back().tokens <= before.tokens || out.back().us < before.us)
        return fail(fmt::format("'{}' must ascend in tokens and not descend in time", key));
    }
  }

 private:
  static bool is_count(const Json& value) {
    return value.is_number_integer() && value.get<int64_t>() >= 1 && value.get<int64_t>() < (int64_t(1) << 30);
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
  kv.read("target_bytes_per_token", model.target_bytes_per_token, false);
  kv.read("base_bytes_per_token", model.base_bytes_per_token, false);
}

void read_step(const Json& file, CostModel& model, Status& error) {
  Section step(file, "step", error);
  step.read("fixed_us", model.step_fixed_us);
  step.read("per_seq_us", model.step_per_seq_us);
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
  prefill.read("per_chunk_us", model.prefill_per_chunk_us);
  prefill.read("per_key_us", model.prefill_per_key_us);
  Section decode(file, "decode_attention", error);
  decode.read("fixed_us", model.decode_fixed_us);
  decode.read("target_factor", model.decode_target_factor, false);
  decode.read("base_factor", model.decode_base_factor, false);
  decode.read("bytes_per_us", model.decode_bytes_per_us, false);
}

void read_transitions(const Json& file, CostModel& model, Status& error) {
  Section demotion(file, "demotion", error);
  demotion.read("fixed_us", model.demotion_fixed_us);
  demotion.read("per_pair_us", model.demotion_per_pair_us);
  Section promotion(file, "promotion", error);
  promotion.read("fixed_us", model.promotion_fixed_us);
  promotion.read("per_pair_us", model.promotion_per_pair_us);
}

void read_links(const Json& file, CostModel& model, Status& error) {
  Section all_reduce(file, "all_reduce", error);
  all_reduce.read("tokens_us", model.all_reduce);
  for (const auto& [name, link] :
       {std::pair("to_host", &model.to_host), std::pair("from_host", &model.from_host)}) {
    Section section(file, name, error);
    section.read("bytes_per_us", link->bytes_per_us, false);
    section.read("latency_us", link->latency_us);
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
  if (is_name && !std::filesystem::exists(name_or_file))
    return Error{Error::not_found,
                 fmt::format("there is no cost model '{}': give the path of a JSON file or one of {}",
                             name_or_file, fmt::join(names, ", ")),
                 "cost-model"};
  Result<std::string> text = read_file(name_or_file, kMaxFileBytes);
  if (!text) return text.error();
  Result<CostModel> model = parse_cost_model(*text);
  if (model) return model;
  return Error{model.error().code, fmt::format("{}: {}", name_or_file, model.error().message), "cost-model"};
}

}  // namespace ekv
