// The command line of `elastickv replay`.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <filesystem>

#include "backend/sim/cost_model.h"
#include "bench/command.h"
#include "bench/replay_command.h"
#include "bench/trace_builder.h"
#include "server/engine_flags.h"
#include "server/kv_flags.h"

namespace ekv {
namespace {

// Texts that need a parser of their own, before they become flags.
struct RawFlags {
  std::string format = "auto", rate = "inf", burstiness = "1", filter, max_model_len = "auto",
              too_long = "fail";
  std::vector<std::string> metadata, goodput, headers;
  EngineFlags engine;
  KvFlags kv;
};

void add_load_flags(CLI::App& app, ReplayFlags& flags, RawFlags& raw) {
  TraceOptions& load = flags.load;
  app.add_option("--trace", flags.trace,
                 "file of requests; ServeGen: its chunk-N-trace.csv or a folder of them");
  app.add_option("--trace-format", raw.format, "auto, mooncake, azure, servegen, arrivals, lengths")
      ->capture_default_str();
  app.add_option("--synthetic", flags.synthetic,
                 "N:INPUT:OUTPUT instead of a trace: N equal requests, in tokens");
  app.add_option("--concurrency", flags.concurrency,
                 "closed loop: so many requests are under way all the time, whenever the trace had them")
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--window", flags.window, "START:END of the trace in seconds; START: and :END do too");
  app.add_option("--dilate", load.dilate, "arrival times are multiplied by it")->capture_default_str();
  app.add_option("--length-scale", load.length_scale,
                 "prompts, answers and the hash block are divided by it; a divisor of 512")
      ->capture_default_str();
  app.add_flag("--ignore-hash-ids", load.ignore_hash_ids, "requests share no prefixes");
  app.add_option("--limit", load.limit, "requests at most; of lengths the size of the sample (default: all)")
      ->check(CLI::Range(int64_t(1), kMaxTraceRequests));
  app.add_option("--length-filter", raw.filter,
                 "MIN:MAX_INPUT:MAX_TOTAL in tokens, 0 for no bound; vLLM's for ShareGPT is 4:1024:2048");
  app.add_option("--request-rate", raw.rate,
                 "requests per second of lengths without arrivals; inf: all at the start")
      ->capture_default_str();
  app.add_option("--burstiness", raw.burstiness, "shape of the Gamma gaps: 1 Poisson, below burstier, inf even")
      ->capture_default_str();
  app.add_option("--seed", load.seed, "of everything that is drawn: arrivals, samples, prompts, dummy weights")
      ->capture_default_str();
  app.add_option("--too-long", raw.too_long,
                 "requests above --max-model-len: fail, skip, or truncate (the prompt first)")
      ->check(CLI::IsMember({"fail", "skip", "truncate"}))
      ->capture_default_str();
}

void add_target_flags(CLI::App& app, ReplayFlags& flags, RawFlags& raw) {
  auto* device = app.add_option("--device", flags.device, "sim, cpu or cuda: an engine in this process")
                     ->check(CLI::IsMember({"sim", "cpu", "cuda"}))
                     ->capture_default_str();
  app.add_option(
      "--cost-model", flags.cost_model,
      fmt::format("sim: file, or one of {}. h200-... are fitted to this program, as bench/calibrate.py does "
                  "it from a step log, vllm-... to vLLM 0.26; those of an A100 stand for vLLM 0.15",
                  fmt::join(shipped_cost_models(), ", ")));
  app.add_option("--replicas", flags.replicas,
                 "sim: engines side by side; a request goes to the one with the fewest")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  app.add_option("--model", flags.model.model,
                 fmt::format("cpu, cuda: {}; with --url: model name (default: the first)", model_help()));
  app.add_option("--load-format", flags.model.load_format, "cpu, cuda: auto, or dummy (random weights)")
      ->check(CLI::IsMember({"auto", "dummy"}))
      ->capture_default_str();
  app.add_option("--threads", flags.model.threads, "of the CPU backend; 0: all cores. The simulator needs one")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
  app.add_option("--max-model-len", raw.max_model_len,
                 "tokens of prompt and answer together; auto: what the load needs")
      ->capture_default_str();
  app.add_option("--url", flags.url, "http://host:port of a server, instead of --device")->excludes(device);
  app.add_option("--header", raw.headers,
                 "with --url: KEY=VALUE, sent with every request (\"Authorization=Bearer KEY\"); may be given "
                 "several times");
  app.add_option("--tokenizer", flags.tokenizer, "with --url: folder (default: the server is asked)")
      ->check(CLI::ExistingDirectory);
}

void add_result_flags(CLI::App& app, ReplayFlags& flags, RawFlags& raw) {
  app.add_option("--json", flags.json, "file for the result");
  app.add_option("--time-series", flags.time_series, "file for the result with how things stood over time");
  app.add_option("--series-period", flags.series_period_s, "seconds between two points of it")
      ->check(between(1e-3, 1e6))
      ->capture_default_str();
  app.add_option("--step-log", flags.step_log,
                 "JSONL file with every step and every token (elastickv/step_log.h)");
  app.add_option("--metadata", raw.metadata, "KEY=VALUE for the result; may be given several times");
  app.add_option("--goodput", raw.goodput, "bounds of a good request in ms: ttft:MS tpot:MS e2el:MS itl:MS");
  app.add_flag("--quiet", flags.quiet, "no progress");
}

LengthFilter filter_or_throw(const std::string& text) {
  LengthFilter filter;
  std::vector<int> bounds;
  for (size_t first = 0; first <= text.size();) {
    const size_t end = std::min(text.find(':', first), text.size());
    const auto bound = to_integer(std::string_view(text).substr(first, end - first));
    if (!bound || *bound < 0 || *bound > kMaxTraceTokens) break;
    bounds.push_back(int(*bound));
    first = end + 1;
  }
  if (bounds.size() != 3 || std::ranges::count(text, ':') != 2)
    wrong_flag("--length-filter",
               fmt::format("'{}' is not MIN:MAX_INPUT:MAX_TOTAL, such as 4:1024:2048", text));
  return {bounds[0], bounds[1], bounds[2]};
}

// The flag behind a setting of TraceOptions.
std::string flag_of(std::string param) {
  if (param == "rate") return "--request-rate";
  if (param == "filter") return "--length-filter";
  if (param == "max_tokens") return "--max-model-len";
  std::ranges::replace(param, '_', '-');
  return "--" + param;
}

void finish_load(const RawFlags& raw, ReplayFlags& flags) {
  TraceOptions& load = flags.load;
  if (flags.trace.empty() == flags.synthetic.empty())
    wrong_flag("--trace", "what is sent is either --trace FILE or --synthetic N:INPUT:OUTPUT");
  const Result<TraceFormat> format = parse_trace_format(raw.format);
  if (!format) wrong_flag("--trace-format", format.error().message);
  load.format = *format;
  load.rate = positive_or_inf("--request-rate", raw.rate);
  load.burstiness = positive_or_inf("--burstiness", raw.burstiness);
  if (!raw.filter.empty()) load.filter = filter_or_throw(raw.filter);
  if (raw.max_model_len != "auto")
    flags.max_model_len = int(size_or_throw("--max-model-len", raw.max_model_len, 2, 1 << 24));
  if (raw.too_long != "fail") {
    if (!flags.max_model_len) wrong_flag("--too-long", "needs --max-model-len TOKENS");
    load.max_tokens = *flags.max_model_len;
    load.too_long = raw.too_long == "skip" ? TooLong::skip : TooLong::truncate;
  }
  TraceOptions checked = load;
  checked.ignore_hash_ids |= flags.trace.empty();  // a synthetic load has none
  if (const Status bad = validate(checked)) wrong_flag(flag_of(bad->param), bad->message);
  if (!flags.window.empty())
    if (const Status bad = parse_window(flags.window, load)) wrong_flag("--window", bad->message);
}

void finish_target(const CLI::App& app, const RawFlags& raw, ReplayFlags& flags) {
  if (flags.over_http()) {
    Result<HttpTarget> target = parse_base_url(flags.url);
    if (!target) wrong_flag("--url", target.error().message);
    flags.target = *std::move(target);
    flags.target.headers = key_values("--header", raw.headers);
    if (!flags.step_log.empty()) wrong_flag("--step-log", "the steps are the server's; it has --url only");
    if (!flags.time_series.empty()) wrong_flag("--time-series", "the engine is the server's; see its /metrics");
    for (const char* flag : {"--cost-model", "--replicas", "--load-format"})
      if (app.count(flag)) wrong_flag(flag, "is for an engine in this process, --url names a server");
    return;
  }
  if (!flags.tokenizer.empty()) wrong_flag("--tokenizer", "is for --url only");
  if (!raw.headers.empty()) wrong_flag("--header", "is for --url only");
  finish_cuda_flags(flags.device, flags.model.cuda_launch);
  if (flags.device == "sim" && flags.cost_model.empty())
    wrong_flag("--cost-model", fmt::format("--device sim needs one: a file, or one of {}",
                                           fmt::join(shipped_cost_models(), ", ")));
  if (flags.device == "sim" && !flags.model.model.empty())
    wrong_flag("--model", "the simulator knows its model from --cost-model");
  if (flags.device == "sim" && app.count("--load-format"))
    wrong_flag("--load-format", "the simulator has no weights");
  if (flags.device == "sim") return;
  if (flags.model.model.empty())
    wrong_flag("--model",
               fmt::format("--device {} needs one: a folder, or a built-in config with --load-format dummy",
                           flags.device));
  if (!flags.cost_model.empty()) wrong_flag("--cost-model", "is for --device sim only");
  if (flags.replicas != 1) wrong_flag("--replicas", "are for --device sim only");
}

// Settings of an engine: of ours, or of the server's, which has its own.
void finish_engine(const CLI::App& engine, const RawFlags& raw, ReplayFlags& flags) {
  if (flags.over_http()) {
    for (const CLI::Option* option : engine.get_options())
      if (option->count() > 0)
        wrong_flag(option->get_name(), "is a setting of the server that --url names: give it there");
    return;
  }
  EngineConfig& config = flags.model.engine;
  if (flags.device == "sim" && engine.count("--gpu-memory-utilization"))
    wrong_flag(
        "--gpu-memory-utilization",
        "the simulator's pool has the size of --kv-cache-memory-bytes, or --num-gpu-blocks-override pages");
  finish_engine_flags(raw.engine, config);
  finish_kv_flags(engine, raw.kv, config);
  flags.preset = raw.kv.preset;
  if (const Status bad = validate(config)) throw CLI::ValidationError(bad->message);  // names its flag
}

void finish(const CLI::App& app, const CLI::App& engine, const RawFlags& raw, ReplayFlags& flags) {
  finish_load(raw, flags);
  finish_target(app, raw, flags);
  finish_engine(engine, raw, flags);
  flags.model.seed = flags.load.seed;
  flags.metadata = key_values("--metadata", raw.metadata);
  const Result<Slo> slo = parse_slo(fmt::format("{}", fmt::join(raw.goodput, " ")));
  if (!slo) wrong_flag("--goodput", slo.error().message);
  flags.slo = *slo;
  must_be_writable("--json", flags.json);
  must_be_writable("--time-series", flags.time_series);
  must_be_writable("--step-log", flags.step_log);
}

}  // namespace

std::optional<int> parse_replay_flags(int argc, const char* const* argv, ReplayFlags& flags) {
  CLI::App app{"Replays a trace or a synthetic load: on the simulator, on a device, or against a server.",
               "elastickv replay"};
  RawFlags raw;
  add_load_flags(app, flags, raw);
  add_target_flags(app, flags, raw);
  CLI::App* engine = app.add_option_group("Engine", "Engine, as `elastickv serve` has it; not with --url");
  add_engine_flags(*engine, flags.model.engine, raw.engine);
  add_async_flag(*engine, flags.model.async_scheduling, "on a GPU; sim: as the cost model was measured");
  add_cuda_flags(*engine, flags.model.cuda_launch);
  add_kv_flags(*engine, flags.model.engine, flags.model.base_fill, raw.kv);
  add_result_flags(app, flags, raw);
  return parse_flags(app, argc, argv, [&] { finish(app, *engine, raw, flags); });
}

}  // namespace ekv
