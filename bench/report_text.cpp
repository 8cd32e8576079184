// The report as JSON, as a table, and the bounds of good requests as text.

#include <fmt/format.h>

#include <charconv>
#include <cmath>

#include "bench/report.h"

namespace ekv {
namespace {

template <class T>
Json or_null(const std::optional<T>& value) {
  return value ? Json(*value) : Json(nullptr);
}

std::string or_dash(const std::optional<double>& value, int digits = 2) {
  return value ? fmt::format("{:.{}f}", *value, digits) : "-";
}

std::string or_dash(const std::optional<int64_t>& value) { return value ? fmt::format("{}", *value) : "-"; }

Json spread(const Distribution& d) {
  return {{"mean", or_null(d.mean())},
          {"p50", or_null(d.percentile(50))},
          {"p90", or_null(d.percentile(90))},
          {"p99", or_null(d.percentile(99))}};
}

// "99", "99.9"
std::string percent_name(double percent) { return fmt::format("{:g}", percent); }

std::string eff_name(const Report& r) { return fmt::format("{:g}", r.options.eff_tau_ms); }

std::string latency_lines(const Report& r) {
  const std::pair<const char*, const Distribution*> rows[] = {
      {"TTFT", &r.ttft_ms}, {"TPOT", &r.tpot_ms}, {"TBT", &r.tbt_ms}, {"ITL", &r.itl_ms}, {"E2E", &r.e2e_ms}};
  std::string text =
      fmt::format("{:<10}{:>12}{:>12}{:>12}{:>12}{:>10}\n", "ms", "mean", "p50", "p90", "p99", "count");
  for (const auto& [name, d] : rows) {
    text += fmt::format("{:<10}{:>12}{:>12}{:>12}{:>12}{:>10}\n", name, or_dash(d->mean()),
                        or_dash(d->percentile(50)), or_dash(d->percentile(90)), or_dash(d->percentile(99)),
                        d->count());
  }
  return text;
}

std::string percent_or_dash(const std::optional<double>& share) {
  return share ? fmt::format("{:.2f} %", 100 * *share) : "-";
}

std::string engine_lines(const Report& r) {
  const EngineTotals& e = r.engine;
  std::string text = fmt::format(
      "engine    {} preemptions, {} tokens recomputed, BASE exposure {}, waiting {} at most, {} on "
      "average\n",
      or_dash(e.preemptions), or_dash(e.recomputed_tokens), percent_or_dash(e.base_exposure),
      or_dash(e.max_waiting), or_dash(e.mean_waiting));
  if (e.demoted_pairs.value_or(0) > 0)
    text += fmt::format("fidelity  {} pairs demoted in {} steps, {} promoted, sent for in {} steps\n",
                        *e.demoted_pairs, or_dash(e.demotion_steps), or_dash(e.promoted_pairs),
                        or_dash(e.promotion_steps));
  if (e.steps) text += fmt::format("steps     {}", *e.steps);
  if (e.steps && e.simulated_s && e.wall_s && *e.wall_s > 0) {
    text += fmt::format(", {:.1f} s simulated in {:.2f} s ({:.0f}x)", *e.simulated_s, *e.wall_s,
                        *e.simulated_s / *e.wall_s);
  }
  if (e.steps && e.log_hash) text += fmt::format(", log hash {:016x}", *e.log_hash);
  return e.steps ? text + "\n" : text;
}

void add_vllm_spread(Json& json, const char* name, const Distribution& d, std::span<const double> percentiles) {
  json[fmt::format("mean_{}_ms", name)] = or_null(d.mean());
  json[fmt::format("median_{}_ms", name)] = or_null(d.percentile(50));
  json[fmt::format("std_{}_ms", name)] = or_null(d.stddev());
  for (const double percent : percentiles) {
    json[fmt::format("p{}_{}_ms", percent_name(percent), name)] = or_null(d.percentile(percent));
  }
}

}  // namespace

Result<Slo> parse_slo(std::string_view text) {
  Slo slo;
  while (true) {
    const size_t first = text.find_first_not_of(" ,");
    if (first == std::string_view::npos) return slo;
    const size_t end = std::min(text.find_first_of(" ,", first), text.size());
    const std::string_view item = text.substr(first, end - first);
    text.remove_prefix(end);
    const size_t colon = std::min(item.find(':'), item.size());
    const std::string_view key = item.substr(0, colon), number = item.substr(std::min(colon + 1, item.size()));
    double* bound = key == "ttft"   ? &slo.ttft_ms
                    : key == "tpot" ? &slo.tpot_ms
                    : key == "e2el" ? &slo.e2el_ms
                    : key == "itl"  ? &slo.itl_ms
                                    : nullptr;
    double value = 0;
    const auto [stop, error] = std::from_chars(number.data(), number.data() + number.size(), value);
    const bool whole = error == std::errc() && stop == number.data() + number.size() && std::isfinite(value);
    if (!bound || !whole || value < 0) {
      return Error{
          Error::invalid_argument,
          fmt::format("\"{}\" is no bound; write ttft:MS, tpot:MS, e2el:MS or itl:MS", item.substr(0, 40)),
          "goodput"};
    }
    *bound = value;
  }
}

Json series_json(std::span<const SeriesPoint> points, int64_t period_us) {
  const std::pair<const char*, int64_t SeriesPoint::*> columns[] = {
      {"running", &SeriesPoint::running},       {"waiting", &SeriesPoint::waiting},
      {"free_pages", &SeriesPoint::free_pages}, {"base_pairs", &SeriesPoint::base_pairs},
      {"live_pairs", &SeriesPoint::live_pairs}, {"offered_tokens", &SeriesPoint::offered_tokens}};
  Json json{{"period_s", double(period_us) / 1e6}, {"t_s", Json::array()}};
  for (const SeriesPoint& p : points) json["t_s"].push_back(double(p.time_us) / 1e6);
  for (const auto& [name, field] : columns) {
    json[name] = Json::array();
    for (const SeriesPoint& p : points) json[name].push_back(p.*field);
  }
  return json;
}

Json report_json(const Report& r, const Json& labels) {
  Json json = labels;
  const EngineTotals& e = r.engine;
  json.update({{"requests", r.requests},
               {"completed", r.completed},
               {"failed", r.failed},
               {"empty", r.empty},
               {"input_tokens", r.input_tokens},
               {"output_tokens", r.output_tokens},
               {"duration_s", r.duration_s},
               {"ttft_ms", spread(r.ttft_ms)},
               {"tpot_ms", spread(r.tpot_ms)},
               {"tbt_ms", spread(r.tbt_ms)},
               {"itl_ms", spread(r.itl_ms)},
               {"e2e_ms", spread(r.e2e_ms)},
               {"output_tokens_per_s", or_null(r.per_second(double(r.output_tokens)))},
               {"requests_per_s", or_null(r.per_second(double(r.completed)))},
               {"goodput_rps", r.options.slo.named() ? or_null(r.per_second(double(r.good))) : Json(nullptr)},
               {"preemptions", or_null(e.preemptions)},
               {"recomputed_tokens", or_null(e.recomputed_tokens)},
               {"base_exposure", or_null(e.base_exposure)},
               {"base_exposure_query_weighted", or_null(e.base_exposure_query_weighted)},
               {"request_base_exposure", spread(r.request_exposure)},
               {"preemptions_avoided", or_null(e.preemptions_avoided)},
               {"to_host_bytes", or_null(e.to_host_bytes)},
               {"from_host_bytes", or_null(e.from_host_bytes)},
               {"demoted_pairs", or_null(e.demoted_pairs)},
               {"promoted_pairs", or_null(e.promoted_pairs)},
               {"demotion_steps", or_null(e.demotion_steps)},
               {"promotion_steps", or_null(e.promotion_steps)},
               {"prefix_hit_tokens", or_null(e.prefix_hit_tokens)},
               {"eff" + eff_name(r), or_null(r.eff())},
               {"max_waiting", or_null(e.max_waiting)},
               {"mean_waiting", or_null(e.mean_waiting)},
               {"peak_in_flight", r.peak_in_flight},
               {"drain_s", r.drain_s},
               {"steps", or_null(e.steps)},
               {"simulated_s", or_null(e.simulated_s)},
               {"wall_s", or_null(e.wall_s)},
               {"log_hash", e.log_hash ? Json(fmt::format("{:016x}", *e.log_hash)) : Json(nullptr)}});
  if (!r.first_error.empty()) json["first_error"] = r.first_error;
  return json;
}

Json vllm_result_json(const Report& r, std::span<const double> percentiles) {
  Json json{{"duration", r.duration_s},
            {"completed", r.completed},
            {"failed", r.failed},
            {"empty", r.empty},
            {"total_input_tokens", r.input_tokens},
            {"total_output_tokens", r.output_tokens},
            {"request_throughput", or_null(r.per_second(double(r.completed)))},
            {"request_goodput", r.options.slo.named() ? or_null(r.per_second(double(r.good))) : Json(nullptr)},
            {"output_throughput", or_null(r.per_second(double(r.output_tokens)))},
            {"total_token_throughput", or_null(r.per_second(double(r.input_tokens + r.output_tokens)))}};
  add_vllm_spread(json, "ttft", r.ttft_ms, percentiles);
  add_vllm_spread(json, "tpot", r.tpot_ms, percentiles);
  add_vllm_spread(json, "itl", r.itl_ms, percentiles);
  add_vllm_spread(json, "e2el", r.e2e_ms, percentiles);
  json["max_output_tokens_per_s"] = r.max_output_tokens_per_s;
  json["max_concurrent_requests"] = r.max_concurrent_requests;
  return json;
}

Json vllm_detail_json(std::span<const RequestRecord> records) {
  Json json;
  for (const char* key : {"input_lens", "output_lens", "ttfts", "itls", "start_times", "errors"}) {
    json[key] = Json::array();
  }
  for (const RequestRecord& r : records) {
    json["input_lens"].push_back(r.input_tokens);
    json["output_lens"].push_back(r.completed() ? r.output_tokens : 0);
    json["ttfts"].push_back(r.completed() ? r.ttft_ms() / 1e3 : 0.0);
    Json gaps = Json::array();
    r.times.for_each_gap([&](int64_t gap) { gaps.push_back(double(gap) / 1e6); });
    json["itls"].push_back(std::move(gaps));
    json["start_times"].push_back(double(r.start_us) / 1e6);
    json["errors"].push_back(r.error);
  }
  return json;
}

std::string report_table(const Report& r) {
  std::string text =
      fmt::format("requests  {}: {} completed, {} failed, {} without a token; {:.1f} s, drain {:.1f} s\n",
                  r.requests, r.completed, r.failed, r.empty, r.duration_s, r.drain_s);
  if (r.failed)
    text += fmt::format("FAILED    {} of {} requests; the first: {}\n", r.failed, r.requests, r.first_error);
  text += fmt::format("tokens    {} in, {} out; {} output tokens/s, {} requests/s, {} in flight at most\n",
                      r.input_tokens, r.output_tokens, or_dash(r.per_second(double(r.output_tokens)), 1),
                      or_dash(r.per_second(double(r.completed)), 3), r.peak_in_flight);
  text += latency_lines(r);
  text += fmt::format("Eff@{:<6}{}\n", eff_name(r), percent_or_dash(r.eff()));
  if (r.options.slo.named()) {
    text += fmt::format("goodput   {} requests/s ({} of {})\n", or_dash(r.per_second(double(r.good)), 3),
                        r.good, r.requests);
  }
  return text + engine_lines(r);
}

}  // namespace ekv
