// The command line of `elastickv bench serve`, its table and its result file.

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <filesystem>

#include "bench/bench_serve.h"
#include "bench/command.h"
#include "bench/trace_builder.h"
#include "server/engine_flags.h"

namespace ekv {
namespace {

// Texts that need a parser of their own, before they become flags.
struct RawFlags {
  std::string rate = "inf", burstiness = "1", extra_body, percentiles = "99", metrics = "ttft,tpot,itl";
  std::vector<std::string> goodput, metadata, headers;
};

void add_server_flags(CLI::App& app, ServeBenchFlags& flags, RawFlags& raw) {
  app.add_option("--backend", flags.backend, "openai (completions), openai-chat, or vllm (as openai)")
      ->check(CLI::IsMember({"openai", "openai-chat", "vllm"}))
      ->capture_default_str();
  app.add_option("--base-url", flags.base_url, "http://host:port[/prefix], instead of --host and --port");
  app.add_option("--host", flags.target.host, "server")->capture_default_str();
  app.add_option("--port", flags.target.port, "its TCP port")
      ->check(CLI::Range(1, 65535))
      ->capture_default_str();
  app.add_option("--endpoint", flags.endpoint, "path (default: by the backend)");
  app.add_option(
      "--header", raw.headers,
      "KEY=VALUE, sent with every request (\"Authorization=Bearer KEY\"); may be given several times");
  app.add_option("--model", flags.model, "model name (default: the first of the server)");
  app.add_option("--tokenizer", flags.tokenizer, "folder with tokenizer.json (default: the server is asked)")
      ->check(CLI::ExistingDirectory);
  app.add_option("--ready-check-timeout-sec", flags.ready_timeout_s, "wait so long for the server to answer")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
}

void add_load_flags(CLI::App& app, ServeBenchFlags& flags, RawFlags& raw) {
  DatasetOptions& data = flags.dataset;
  app.add_option("--dataset-name", data.name,
                 "random, lengths (CSV of input,output tokens) or custom (JSON lines)")
      ->check(CLI::IsMember({"random", "lengths", "custom"}))
      ->capture_default_str();
  app.add_option("--dataset-path", data.path, "file of the data set")->check(CLI::ExistingFile);
  app.add_option("--num-prompts", data.num_prompts, "requests")
      ->check(CLI::Range(1, 10'000'000))
      ->capture_default_str();
  app.add_option("--random-input-len,--input-len", data.input_len, "tokens of a prompt")
      ->check(CLI::Range(1, kMaxTraceTokens))
      ->capture_default_str();
  app.add_option("--random-output-len,--output-len", data.output_len, "tokens of an answer")
      ->check(CLI::Range(1, kMaxTraceTokens))
      ->capture_default_str();
  app.add_option("--random-range-ratio", data.range_ratio, "lengths are even in [x (1 - r), x (1 + r)]")
      ->check(between(0, 0.999999))
      ->capture_default_str();
  app.add_option("--custom-output-len", data.custom_output_len,
                 "custom: tokens of an answer, where no line says it")
      ->check(CLI::Range(1, kMaxTraceTokens))
      ->capture_default_str();
  app.add_option("--request-rate", raw.rate, "requests per second; inf: all at once")->capture_default_str();
  app.add_option("--burstiness", raw.burstiness, "shape of the Gamma gaps: 1 Poisson, below burstier, inf even")
      ->capture_default_str();
  app.add_option("--max-concurrency", flags.max_concurrency, "requests in flight at most (default: no limit)")
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--num-warmups", flags.num_warmups, "requests before the measurement")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  app.add_option("--seed", data.seed, "of lengths, prompts and arrivals")->capture_default_str();
}

void add_body_flags(CLI::App& app, ServeBenchFlags& flags, RawFlags& raw) {
  app.add_flag("--ignore-eos", flags.ignore_eos, "answers have exactly the asked length");
  app.add_option("--temperature", flags.temperature, "0: greedy (default: the server's)");
  app.add_option("--extra-body", raw.extra_body, "JSON object whose members go into every request");
}

void add_result_flags(CLI::App& app, ServeBenchFlags& flags, RawFlags& raw) {
  app.add_option("--goodput", raw.goodput, "bounds of a good request in ms: ttft:MS tpot:MS e2el:MS itl:MS");
  app.add_option("--percentile-metrics", raw.metrics, "latencies in the table: ttft,tpot,itl,e2el")
      ->capture_default_str();
  app.add_option("--metric-percentiles", raw.percentiles, "such as 50,90,99.9")->capture_default_str();
  app.add_flag("--save-result", flags.save_result, "write the result as JSON");
  app.add_flag("--save-detailed", flags.save_detailed, "with lists of every request's lengths, times and text");
  app.add_option("--result-dir", flags.result_dir, "folder of the result")->capture_default_str();
  app.add_option("--result-filename", flags.result_filename, "(default: from rate, model and time)");
  app.add_option("--label", flags.label, "name of this run in the result");
  app.add_option("--metadata", raw.metadata, "KEY=VALUE pairs for the result");
  app.add_flag("--disable-tqdm", flags.quiet, "no progress bar");
}

void finish(const RawFlags& raw, ServeBenchFlags& flags) {
  flags.dataset.rate = positive_or_inf("--request-rate", raw.rate);
  flags.dataset.burstiness = positive_or_inf("--burstiness", raw.burstiness);
  flags.percentiles.clear();
  for (const std::string_view text : split_fields(raw.percentiles)) {
    const std::optional<double> value = to_number(text);
    if (!value || *value < 0 || *value > 100)
      wrong_flag("--metric-percentiles", "must be numbers from 0 to 100");
    flags.percentiles.push_back(*value);
  }
  flags.percentile_metrics.clear();
  for (const std::string_view name : split_fields(raw.metrics)) {
    if (name != "ttft" && name != "tpot" && name != "itl" && name != "e2el")
      wrong_flag("--percentile-metrics", fmt::format("'{}' is none of ttft, tpot, itl, e2el", name));
    flags.percentile_metrics.emplace_back(name);
  }
  Result<Slo> slo = parse_slo(fmt::format("{}", fmt::join(raw.goodput, " ")));
  if (!slo) wrong_flag("--goodput", slo.error().message);
  flags.slo = *slo;
  if (!raw.extra_body.empty()) {
    Result<Json> extra = parse_json(raw.extra_body);
    if (!extra || !extra->is_object()) wrong_flag("--extra-body", "must be a JSON object");
    flags.extra_body = *std::move(extra);
  }
  flags.metadata = key_values("--metadata", raw.metadata);
  flags.target.headers = key_values("--header", raw.headers);
  flags.save_result = flags.save_result || flags.save_detailed || !flags.result_filename.empty();
}

std::string metric_lines(const ServeBenchFlags& flags, const Json& result) {
  std::string text;
  for (const std::string& name : flags.percentile_metrics)
    for (const double percent : flags.percentiles) {
      const std::string key = fmt::format("p{:g}_{}_ms", percent, name);
      const Json& value = member(result, key.c_str());
      text += fmt::format("{:<20}{:>12}\n", key,
                          value.is_number() ? fmt::format("{:.2f}", value.get<double>()) : "-");
    }
  return text;
}

// The report without what only an engine in this process could tell.
std::string table(const ServeBenchFlags& flags, const ServeBenchOutcome& outcome) {
  std::string text = report_table(outcome.report);
  const size_t engine = text.find("\nengine ");
  if (engine != std::string::npos) text.resize(engine + 1);
  if (outcome.preemptions) text += fmt::format("engine    {} preemptions\n", *outcome.preemptions);
  return text + metric_lines(flags, outcome.result);
}

std::string file_name(const ServeBenchFlags& flags, const Json& result) {
  if (!flags.result_filename.empty()) return flags.result_filename;
  const std::string model = result["model_id"].get<std::string>();
  const Json& rate = result["request_rate"];
  return fmt::format("{}-{}qps{}-{}-{}.json", flags.label.empty() ? flags.backend : flags.label,
                     rate.is_string() ? rate.get<std::string>() : fmt::format("{:g}", rate.get<double>()),
                     flags.max_concurrency ? fmt::format("-concurrency{}", flags.max_concurrency) : "",
                     model.substr(model.rfind('/') + 1), result["date"].get<std::string>());
}

Status save(const ServeBenchFlags& flags, const Json& result) {
  const std::filesystem::path path = std::filesystem::path(flags.result_dir) / file_name(flags, result);
  std::error_code failed;
  if (path.has_parent_path()) std::filesystem::create_directories(path.parent_path(), failed);
  if (Status error = write_json(path.string(), result)) return error;
  fmt::print("result    {}\n", path.string());
  return std::nullopt;
}

}  // namespace

int bench_serve(int argc, const char* const* argv) {
  CLI::App app{"Load on a running server over HTTP, measured as `vllm bench serve` does.",
               "elastickv bench serve"};
  ServeBenchFlags flags;
  RawFlags raw;
  add_server_flags(app, flags, raw);
  add_load_flags(app, flags, raw);
  add_body_flags(app, flags, raw);
  add_result_flags(app, flags, raw);
  if (const auto code = parse_flags(app, argc, argv, [&] { finish(raw, flags); })) return *code;
  const Result<ServeBenchOutcome> outcome = run_serve_bench(flags);
  if (!outcome) return fail(outcome.error());
  fmt::print("{}", table(flags, *outcome));
  if (!outcome->health.bottleneck.empty())
    log_warn("the client was a bottleneck, the figures are not the server's alone: " +
             outcome->health.bottleneck);
  if (outcome->num_without_usage > 0)
    log_warn(fmt::format("{} replies came without `usage`: their output tokens are a count of messages",
                         outcome->num_without_usage));
  if (flags.save_result)
    if (const Status failed = save(flags, outcome->result)) return fail(*failed);
  if (outcome->report.failed > 0) {
    log_error(fmt::format("{} of {} requests failed; the first: {}", outcome->report.failed,
                          outcome->report.requests, outcome->report.first_error));
    return 1;
  }
  return 0;
}

}  // namespace ekv
