#include "bench/bench_offline.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <random>

#include "bench/command.h"
#include "server/engine_flags.h"
#include "server/kv_flags.h"

namespace ekv {
namespace {

constexpr double kLatencyPercentiles[] = {10, 25, 50, 75, 90, 99};

// Texts that become settings when all flags are known.
struct RawFlags {
  EngineFlags engine;
  KvFlags kv;
};

void add_model_flags(CLI::App& app, ModelFlags& flags, RawFlags& raw) {
  app.add_option("--model", flags.model, model_help())->required();
  app.add_option("--load-format", flags.load_format, "auto, or dummy (random weights)")
      ->check(CLI::IsMember({"auto", "dummy"}))
      ->capture_default_str();
  flags.device = "cpu";
  app.add_option("--device", flags.device, "auto, cpu or cuda")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
  app.add_option("--threads", flags.threads, "of the CPU backend; 0: all cores")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
  app.add_option("--seed", flags.seed, "of prompts and of dummy weights")->capture_default_str();
  add_engine_flags(app, flags.engine, raw.engine);
  add_async_flag(app, flags.async_scheduling);
  add_cuda_flags(app, flags.cuda_launch);
  add_kv_flags(app, flags.engine, flags.base_fill, raw.kv);
}

void finish_model_flags(const CLI::App& app, const RawFlags& raw, ModelFlags& flags) {
  finish_engine_flags(raw.engine, flags.engine);
  finish_cuda_flags(flags.device, flags.cuda_launch);
  finish_kv_flags(app, raw.kv, flags.engine);
}

struct LatencyFlags {
  ModelFlags model;
  int input_len = 32, output_len = 128, batch_size = 8, n = 1, warmups = 10, iterations = 30;
  std::string output_json;
};

// The counted batches.
Result<std::vector<OfflineEngine::Totals>> measure_latency(const LatencyFlags& flags, OfflineEngine& engine) {
  std::vector<OfflineEngine::Totals> batches;
  Progress progress;
  for (int i = -flags.warmups; i < flags.iterations; ++i) {
    std::vector<Request> requests;
    for (Request& prompt :
         random_requests(flags.batch_size, flags.input_len, flags.output_len, engine.vocab(), flags.model.seed))
      for (int copy = 0; copy < flags.n; ++copy) {
        prompt.sampling.seed = uint64_t(requests.size());
        requests.push_back(prompt);
      }
    Result<OfflineEngine::Totals> totals = engine.run(std::move(requests));
    if (!totals) return totals.error();
    if (i >= 0) batches.push_back(*std::move(totals));
    progress.show(i + flags.warmups + 1, flags.warmups + flags.iterations,
                  [&] { return i < 0 ? "batches, warming up" : "batches"; });
  }
  return batches;
}

// {avg_latency, latencies, percentiles}, all in seconds; and, which vLLM does not have, ttft and tpot with mean
// and percentiles over all requests.
Json latency_json(const std::vector<OfflineEngine::Totals>& batches) {
  std::vector<double> latencies, ttft, tpot;
  for (const OfflineEngine::Totals& batch : batches) {
    latencies.push_back(batch.elapsed_s);
    ttft.insert(ttft.end(), batch.ttft_s.begin(), batch.ttft_s.end());
    tpot.insert(tpot.end(), batch.tpot_s.begin(), batch.tpot_s.end());
  }
  const auto percentiles = [](const Distribution& spread) {
    Json json = Json::object();
    for (const double percent : kLatencyPercentiles)
      json[fmt::format("{:g}", percent)] = spread.percentile(percent).value_or(0);
    return json;
  };
  const auto summary = [&](const std::vector<double>& values) {
    const Distribution spread(values);
    return Json{{"mean", spread.mean().value_or(0)}, {"percentiles", percentiles(spread)}};
  };
  const Distribution spread(latencies);
  return {{"avg_latency", spread.mean().value_or(0)},
          {"latencies", latencies},
          {"percentiles", percentiles(spread)},
          {"ttft", summary(ttft)},
          {"tpot", summary(tpot)}};
}

void print_latency(const Json& json) {
  fmt::print("Avg latency: {:.6f} s\n", json["avg_latency"].get<double>());
  for (const auto& [percent, value] : json["percentiles"].items())
    fmt::print("{}% percentile latency: {:.6f} s\n", percent, value.get<double>());
  for (const char* name : {"ttft", "tpot"})
    fmt::print("{}: mean {:.3f} ms, median {:.3f}, 99% percentile {:.3f}\n",
               name == std::string_view("ttft") ? "TTFT" : "TPOT", 1e3 * json[name]["mean"].get<double>(),
               1e3 * json[name]["percentiles"]["50"].get<double>(),
               1e3 * json[name]["percentiles"]["99"].get<double>());
}

struct ThroughputFlags {
  ModelFlags model;
  DatasetOptions dataset;
  int n = 1;
  std::string output_json;
};

Result<Trace> throughput_lengths(const DatasetOptions& data) {
  const TraceOptions options{.format = TraceFormat::lengths, .limit = data.num_prompts, .seed = data.seed};
  if (data.name == "lengths") return load_trace(data.path, options);
  return random_trace({data.num_prompts, data.input_len, data.output_len, data.range_ratio},
                      {.seed = data.seed});
}

Json throughput_json(const OfflineEngine::Totals& totals, int64_t requests, int64_t input_tokens) {
  const double tokens = double(input_tokens + totals.output_tokens);
  return {{"elapsed_time", totals.elapsed_s},
          {"num_requests", requests},
          {"total_num_tokens", int64_t(tokens)},
          {"requests_per_second", double(requests) / totals.elapsed_s},
          {"tokens_per_second", tokens / totals.elapsed_s},
          {"output_tokens_per_second", double(totals.output_tokens) / totals.elapsed_s},
          {"preemptions", totals.preemptions}};
}

void add_throughput_flags(CLI::App& app, ThroughputFlags& flags) {
  DatasetOptions& data = flags.dataset;
  app.add_option("--dataset-name", data.name, "random, or lengths (CSV of input,output tokens)")
      ->check(CLI::IsMember({"random", "lengths"}))
      ->capture_default_str();
  app.add_option("--dataset-path", data.path, "file of the data set")->check(CLI::ExistingFile);
  app.add_option("--num-prompts", data.num_prompts, "requests")
      ->check(CLI::Range(1, 10'000'000))
      ->capture_default_str();
  app.add_option("--input-len,--random-input-len", data.input_len, "tokens of a prompt")
      ->check(CLI::Range(1, kMaxTraceTokens))
      ->capture_default_str();
  app.add_option("--output-len,--random-output-len", data.output_len, "tokens of an answer")
      ->check(CLI::Range(1, kMaxTraceTokens))
      ->capture_default_str();
  app.add_option("--random-range-ratio", data.range_ratio, "lengths are even in [x (1 - r), x (1 + r)]")
      ->check(between(0, 0.999999))
      ->capture_default_str();
  app.add_option("--n", flags.n, "answers per prompt")->check(CLI::Range(1, 1024))->capture_default_str();
  app.add_option("--output-json", flags.output_json, "file for the result");
}

Request fixed_request(std::vector<TokenId> prompt, int output_tokens, uint64_t seed) {
  Request request{.prompt = std::move(prompt)};
  request.sampling.max_tokens = output_tokens;
  request.sampling.seed = seed;
  return request;
}

int run_throughput(const ThroughputFlags& flags) {
  const Result<Trace> trace = throughput_lengths(flags.dataset);
  if (!trace) return fail(trace.error());
  int longest = 0;
  for (const TraceRequest& r : trace->requests) longest = std::max(longest, r.input_tokens + r.output_tokens);
  const auto engine = OfflineEngine::make(
      flags.model, {.asked = longest, .flag = flags.dataset.path.empty() ? "input-len" : "dataset-path"});
  if (!engine) return fail(engine.error());
  std::vector<Request> requests;
  int64_t input_tokens = 0;
  for (const TraceRequest& r : trace->requests)
    for (int copy = 0; copy < flags.n; ++copy) {
      requests.push_back(fixed_request(prompt_tokens(*trace, r, flags.dataset.seed, (*engine)->vocab()),
                                       r.output_tokens, uint64_t(requests.size())));
      input_tokens += copy == 0 ? r.input_tokens : 0;
    }
  const Result<OfflineEngine::Totals> totals = (*engine)->run(std::move(requests));
  if (!totals) return fail(totals.error());
  const Json json = throughput_json(*totals, int64_t(trace->requests.size()), input_tokens);
  fmt::print("Throughput: {:.2f} requests/s, {:.2f} total tokens/s, {:.2f} output tokens/s; {} preemptions\n",
             json["requests_per_second"].get<double>(), json["tokens_per_second"].get<double>(),
             json["output_tokens_per_second"].get<double>(), totals->preemptions);
  if (const Status failed = write_json(flags.output_json, json)) return fail(*failed);
  return 0;
}

}  // namespace

Result<std::unique_ptr<OfflineEngine>> OfflineEngine::make(const ModelFlags& flags,
                                                           const LongestSequence& longest) {
  const Result<Start> start = prepare_start(flags, longest);
  if (!start) return start.error();
  Result<std::unique_ptr<Backend>> backend = load_backend(flags, *start);
  if (!backend) return backend.error();
  std::unique_ptr<OfflineEngine> made(new OfflineEngine(start->model.vocab));
  EngineListener& listener = *made;
  made->engine_ = std::make_unique<Engine>(start->engine, *std::move(backend), made->clock_, listener);
  return made;
}

Result<OfflineEngine::Totals> OfflineEngine::run(std::vector<Request> requests) {
  totals_ = {};
  failure_.clear();
  const int64_t start_us = clock_.now_us();
  for (Request& request : requests) {
    request.arrival_us = start_us;
    const Result<SeqId> id = engine_->submit(std::move(request));
    if (!id) return id.error();
  }
  while (!engine_->idle()) engine_->step();
  totals_.elapsed_s = double(std::max<int64_t>(1, clock_.now_us() - start_us)) / 1e6;
  if (!failure_.empty()) return Error{Error::internal, failure_, {}};
  return totals_;
}

void OfflineEngine::on_event(SeqEvent event) {
  totals_.output_tokens += event.token.has_value();
  if (event.finish == FinishReason::error) failure_ = event.error;
  if (event.finish == FinishReason::none || event.stats.num_output == 0) return;
  const SeqStats& stats = event.stats;
  totals_.ttft_s.push_back(double(stats.first_token_us - stats.arrival_us) / 1e6);
  if (stats.num_output == 1) return;
  totals_.tpot_s.push_back(double(stats.last_token_us - stats.first_token_us) / 1e6 / (stats.num_output - 1));
}

void OfflineEngine::on_step(const StepRecord& record) { totals_.preemptions += record.num_preempted; }

std::vector<Request> random_requests(int batch, int input_len, int output_len, int vocab, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<Request> requests;
  for (int i = 0; i < batch; ++i) {
    std::vector<TokenId> prompt;
    for (int j = 0; j < input_len; ++j) prompt.push_back(TokenId(random() % uint64_t(vocab)));
    requests.push_back(fixed_request(std::move(prompt), output_len, uint64_t(i)));
  }
  return requests;
}

int bench_latency(int argc, const char* const* argv) {
  CLI::App app{"Latency of one batch of requests, without a server.", "elastickv bench latency"};
  LatencyFlags flags;
  RawFlags raw;
  flags.model.engine.kv.prefix_cache = false;  // the same prompts come in every iteration
  add_model_flags(app, flags.model, raw);
  const auto count = [&](const char* name, int& value, int least, const char* text) {
    app.add_option(name, value, text)->check(CLI::Range(least, 1 << 24))->capture_default_str();
  };
  count("--input-len", flags.input_len, 1, "tokens of a prompt");
  count("--output-len", flags.output_len, 1, "tokens of an answer");
  count("--batch-size", flags.batch_size, 1, "prompts at once");
  count("--n", flags.n, 1, "answers per prompt");
  count("--num-iters-warmup", flags.warmups, 0, "batches that are not counted");
  count("--num-iters", flags.iterations, 1, "batches that are");
  app.add_option("--output-json", flags.output_json, "file for the result");
  const auto finish = [&] {
    finish_model_flags(app, raw, flags.model);
    must_be_writable("--output-json", flags.output_json);
  };
  if (const auto code = parse_flags(app, argc, argv, finish)) return *code;
  const auto engine =
      OfflineEngine::make(flags.model, {.asked = flags.input_len + flags.output_len, .flag = "input-len"});
  if (!engine) return fail(engine.error());
  const Result<std::vector<OfflineEngine::Totals>> batches = measure_latency(flags, **engine);
  if (!batches) return fail(batches.error());
  const Json json = latency_json(*batches);
  print_latency(json);
  if (const Status failed = write_json(flags.output_json, json)) return fail(*failed);
  return 0;
}

int bench_throughput(int argc, const char* const* argv) {
  CLI::App app{"Throughput of many requests at once, without a server.", "elastickv bench throughput"};
  ThroughputFlags flags;
  RawFlags raw;
  add_model_flags(app, flags.model, raw);
  add_throughput_flags(app, flags);
  const auto finish = [&] {
    finish_model_flags(app, raw, flags.model);
    must_be_writable("--output-json", flags.output_json);
  };
  if (const auto code = parse_flags(app, argc, argv, finish)) return *code;
  flags.dataset.seed = flags.model.seed;
  if (flags.dataset.name == "lengths" && flags.dataset.path.empty())
    return fail({Error::invalid_argument, "--dataset-name lengths needs --dataset-path FILE", "dataset-path"});
  return run_throughput(flags);
}

}  // namespace ekv
