#include "bench/replay_command.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>

#include "bench/command.h"
#include "bench/sim_replay.h"

namespace ekv {
namespace {

constexpr int kSimVocab = 128'256;  // of the prompts of simulated models: that of Llama 3

Result<Trace> load_of(const ReplayFlags& flags) {
  Result<Trace> trace =
      flags.trace.empty() ? synthetic_trace(flags.synthetic, flags.load) : load_trace(flags.trace, flags.load);
  if (!trace) return trace;
  const bool drawn = flags.trace.empty() || trace->format == TraceFormat::lengths;
  if (!drawn && std::isfinite(flags.load.rate))
    return Error{Error::invalid_argument,
                 fmt::format("{} has arrival times of its own; use --dilate to change them", trace->name),
                 "request-rate"};
  if (trace->closed_loop && flags.concurrency == 0)
    return Error{Error::invalid_argument,
                 "a synthetic load needs --concurrency C, or --request-rate R that is a number: for all "
                 "requests at once let C be their number",
                 "concurrency"};
  return trace;
}

int longest_of(const Trace& trace) {
  int longest = 2;
  for (const TraceRequest& r : trace.requests) longest = std::max(longest, r.input_tokens + r.output_tokens);
  return longest;
}

// `trace` outlives the load.
ReplayLoad replay_load(const Trace& trace, uint64_t seed, int vocab) {
  ReplayLoad load;
  for (const TraceRequest& r : trace.requests)
    load.requests.push_back(
        {.arrival_us = r.arrival_us, .num_prompt = r.input_tokens, .num_output = r.output_tokens});
  load.prompt = [&trace, seed, vocab](size_t index) {
    return prompt_tokens(trace, trace.requests[index], seed, vocab);
  };
  return load;
}

ReplayOptions replay_options(const ReplayFlags& flags, const EngineConfig& engine, size_t num_requests) {
  ReplayOptions options{.engine = engine, .concurrency = flags.concurrency, .step_log = flags.step_log};
  if (!flags.time_series.empty()) options.series_period_us = std::llround(flags.series_period_s * 1e6);
  options.on_progress = [bar = Progress(flags.quiet), num_requests](int64_t ended, int64_t time_us) mutable {
    bar.show(ended, int64_t(num_requests),
             [&] { return fmt::format("requests, {:.0f} s of the replay", double(time_us) * 1e-6); });
  };
  return options;
}

ReplayOutcome outcome_of(const ReplayFlags& flags, const EngineConfig& engine, ReplayResult result) {
  return {.report = make_report(request_records(result), {.slo = flags.slo}, engine_totals(result)),
          .series = std::move(result.series),
          .async_scheduling = engine.async_scheduling};
}

class RealReplayClock : public ReplayClock {
 public:
  int64_t now_us() const override { return clock_.now_us() - start_us_; }
  void wait_until(int64_t time_us) override {
    std::this_thread::sleep_for(std::chrono::microseconds(std::max<int64_t>(0, time_us - now_us())));
  }

 private:
  SteadyClock clock_;
  int64_t start_us_ = clock_.now_us();
};

template <class T>
Json known_or_null(bool known, T value) {
  return known ? Json(value) : Json(nullptr);
}

Json load_labels(const ReplayFlags& flags, const Trace& trace) {
  const TraceOptions& load = flags.load;
  return {{"trace", trace.name},
          {"synthetic", known_or_null(flags.trace.empty(), flags.synthetic)},
          {"trace_format", known_or_null(trace.format != TraceFormat::detect, name_of(trace.format))},
          {"window", known_or_null(!flags.window.empty(), flags.window)},
          {"dilate", load.dilate},
          {"length_scale", load.length_scale},
          {"ignore_hash_ids", load.ignore_hash_ids},
          {"concurrency", known_or_null(flags.concurrency > 0, flags.concurrency)},
          {"rate", known_or_null(std::isfinite(load.rate), load.rate)},
          {"burstiness", known_or_null(std::isfinite(load.rate), load.burstiness)},
          {"seed", load.seed},
          {"lines", trace.num_lines},
          {"broken_lines", trace.num_faults()},
          {"skipped_lines", trace.num_skipped()},
          {"truncated", trace.num_truncated}};
}

Json engine_labels(const ReplayFlags& flags, const ReplayOutcome& outcome) {
  const EngineConfig& e = flags.model.engine;
  const FidelityConfig& f = e.fidelity;
  return {{"device", flags.device},
          {"model", flags.device == "sim" ? flags.cost_model : flags.model.model},
          {"policy", name_of(f.policy)},
          {"preset", known_or_null(!flags.preset.empty(), flags.preset)},
          {"replicas", flags.replicas},
          {"kv_cache_memory_bytes", e.kv.pool_bytes},
          {"num_gpu_blocks_override", e.kv.num_pages},
          {"kv_host_bytes", f.host_bytes},
          {"max_num_batched_tokens", e.scheduler.max_step_tokens},
          {"max_num_seqs", e.scheduler.max_step_seqs},
          {"long_prefill_token_threshold", e.scheduler.max_chunk_tokens},
          {"target_step_us", e.scheduler.target_step_us},
          {"reserve_full_prompt", e.scheduler.reserve_full_prompt},
          {"watermark", e.scheduler.watermark},
          {"prefix_cache", e.kv.prefix_cache},
          {"async_scheduling", outcome.async_scheduling},
          {"admission", name_of(e.scheduler.admission)},
          {"demotion", name_of(f.demotion)},
          {"promotion", name_of(f.promotion)},
          {"kv_backing", name_of(f.backing)},
          {"attention_path", name_of(f.attention_path)},
          {"max_base_fraction", f.max_base_fraction},
          {"min_demote_pairs", f.min_demote_pairs}};
}

Json labels_of(const ReplayFlags& flags, const Trace& trace, const ReplayOutcome& outcome) {
  Json labels = flags.over_http() ? Json{{"device", "url"}, {"url", flags.url}, {"model", flags.model.model}}
                                  : engine_labels(flags, outcome);
  labels.update(load_labels(flags, trace));
  for (const auto& [key, value] : flags.metadata) labels[key] = value;
  return labels;
}

Status write_results(const ReplayFlags& flags, const Trace& trace, const ReplayOutcome& outcome) {
  Json result = report_json(outcome.report, labels_of(flags, trace, outcome));
  if (flags.over_http()) result["client_bottleneck"] = outcome.health.bottleneck;
  if (Status failed = write_json(flags.json, result)) return failed;
  if (flags.time_series.empty()) return std::nullopt;
  result["series"] = series_json(outcome.series, std::llround(flags.series_period_s * 1e6));
  return write_json(flags.time_series, result);
}

Result<ReplayOutcome> run(const ReplayFlags& flags, const Trace& trace) {
  if (flags.over_http()) return replay_over_http(flags, trace);
  return flags.device == "sim" ? replay_on_sim(flags, trace) : replay_on_device(flags, trace);
}

}  // namespace

Result<ReplayOutcome> replay_on_sim(const ReplayFlags& flags, const Trace& trace) {
  const Result<CostModel> model = load_cost_model(flags.cost_model);
  if (!model) return model.error();
  EngineConfig engine = flags.model.engine;
  engine.max_model_len = flags.max_model_len.value_or(longest_of(trace));
  engine.async_scheduling = flags.model.async_scheduling.value_or(model->steps_in_flight > 1);
  const ReplayLoad load = replay_load(trace, flags.load.seed, kSimVocab);
  Result<ReplayResult> result =
      run_sim(load, *model, flags.replicas, replay_options(flags, engine, load.requests.size()));
  if (!result) return result.error();
  return outcome_of(flags, engine, *std::move(result));
}

Result<ReplayOutcome> replay_on_device(const ReplayFlags& flags, const Trace& trace) {
  ModelFlags on_device = flags.model;
  on_device.device = flags.device;
  const Result<Start> start =
      prepare_start(on_device, {.asked = flags.max_model_len, .at_most = longest_of(trace)});
  if (!start) return start.error();
  Result<std::unique_ptr<Backend>> backend = load_backend(on_device, *start);
  if (!backend) return backend.error();
  const EngineConfig& engine = start->engine;
  const ReplayLoad load = replay_load(trace, flags.load.seed, start->model.vocab);
  std::vector<ReplayDevice> devices;
  devices.push_back({std::make_unique<RealReplayClock>(), *std::move(backend)});
  Result<ReplayResult> result =
      run_replay(load, std::move(devices), replay_options(flags, engine, load.requests.size()));
  if (!result) return result.error();
  ReplayOutcome outcome = outcome_of(flags, engine, *std::move(result));
  outcome.report.engine.simulated_s = std::nullopt;
  return outcome;
}

int replay(int argc, const char* const* argv) {
  ReplayFlags flags;
  if (const auto code = parse_replay_flags(argc, argv, flags)) return *code;
  const Result<Trace> trace = load_of(flags);
  if (!trace) return fail(trace.error());
  fmt::print("{}", describe(*trace));
  const Result<ReplayOutcome> outcome = run(flags, *trace);
  if (!outcome) return fail(outcome.error());
  const Report& report = outcome->report;
  fmt::print("{}", report_table(report));
  if (!outcome->health.bottleneck.empty())
    log_warn("the client was a bottleneck, the figures are not the server's alone: " +
             outcome->health.bottleneck);
  if (const Status failed = write_results(flags, *trace, *outcome)) return fail(*failed);
  if (report.failed > 0)
    return fail({Error::internal,
                 fmt::format("{} of {} requests failed; the first: {}", report.failed, report.requests,
                             report.first_error),
                 {}});
  if (trace->num_faults() > 0)
    return fail(
        {Error::invalid_argument,
         fmt::format("{} lines of {} are broken and were not replayed", trace->num_faults(), trace->name),
         {}});
  return 0;
}

}  // namespace ekv
