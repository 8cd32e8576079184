// sim_bench.cpp -- the simulator from the command line: closed loops at several concurrencies, or a window of a
// trace; prints what came out and how many simulated seconds a second of wall time gave.
//
//   sim_bench closed COST_MODEL PRESET COUNT:INPUT:OUTPUT KV_GIB CONCURRENCY...
//   sim_bench trace COST_MODEL PRESET FILE START:END DILATE KV_GIB [REPLICAS [EVENT_LOG]]
//
// PRESET is paper015 or modern, with the token budget appended after a colon when it is not 2048: modern:8192.

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <string>
#include <vector>

#include "bench/sim_replay.h"
#include "bench/trace.h"

namespace ekv {
namespace {

[[noreturn]] void fail(const std::string& message) {
  fmt::print(stderr, "sim_bench: {}\n", message);
  std::exit(1);
}

template <class T>
T take(Result<T> result) {
  if (!result) fail(result.error().message);
  return *std::move(result);
}

SchedulerConfig preset(const std::string& text) {
  const size_t colon = text.find(':');
  const std::string name = text.substr(0, colon);
  if (name != "paper015" && name != "modern") fail("the preset is paper015 or modern, got " + name);
  return {.max_step_tokens = colon == std::string::npos ? 2048 : std::atoi(text.c_str() + colon + 1),
          .max_step_seqs = 256,
          .reserve_full_prompt = name == "modern"};
}

SimOptions options(const std::string& model, const std::string& preset_text, double kv_gib) {
  SimOptions options{.model = take(load_cost_model(model))};
  options.engine.scheduler = preset(preset_text);
  options.engine.kv.prefix_cache = options.engine.scheduler.reserve_full_prompt;
  options.engine.kv.pool_bytes = size_t(kv_gib * double(1 << 30));
  options.engine.max_model_len = 131072;
  return options;
}

double percentile(std::vector<double> values, double share) {
  if (values.empty()) return 0;
  std::ranges::sort(values);
  const double at = share * double(values.size() - 1);
  const auto low = size_t(at);
  const size_t high = std::min(low + 1, values.size() - 1);
  return values[low] + (at - double(low)) * (values[high] - values[low]);
}

double mean(const std::vector<double>& values) {
  return values.empty() ? 0 : std::accumulate(values.begin(), values.end(), 0.0) / double(values.size());
}

void print_head() {
  fmt::print("{:>5} {:>9} {:>9} {:>8} {:>8} {:>8} {:>8} {:>8} {:>10} {:>7} {:>9} {:>8} {:>7} {:>16}\n", "load",
             "ttft_s", "ttft90_s", "tpot_ms", "tpot90", "tok/s", "preempt", "steps", "recomputed", "wait",
             "sim_s", "wall_s", "x real", "log_hash");
}

void print_row(const std::string& load, const SimResult& result) {
  std::vector<double> ttft_s, tpot_ms;
  int64_t output = 0, refused = 0;
  for (const SimRequestRecord& request : result.requests) {
    output += int64_t(request.token_us.size());
    refused += request.token_us.empty();
    if (request.token_us.empty()) continue;
    ttft_s.push_back(double(request.ttft_us()) * 1e-6);
    const int64_t span_us = request.token_us.back() - request.token_us.front();
    if (request.token_us.size() > 1)
      tpot_ms.push_back(double(span_us) * 1e-3 / double(request.token_us.size() - 1));
  }
  fmt::print(
      "{:>5} {:>9.2f} {:>9.2f} {:>8.2f} {:>8.2f} {:>8.1f} {:>8} {:>8} {:>10} {:>7.1f} {:>9.1f} {:>8.2f} "
      "{:>7.0f} "
      "{:016x}{}\n",
      load, mean(ttft_s), percentile(ttft_s, 0.9), mean(tpot_ms), percentile(tpot_ms, 0.9),
      double(output) / result.simulated_s(), result.preemptions, result.steps, result.recomputed_tokens,
      result.mean_waiting, result.simulated_s(), result.wall_s, result.simulated_s() / result.wall_s,
      result.log_hash, refused ? fmt::format(" ({} refused)", refused) : "");
  std::fflush(stdout);
}

void run_closed(int argc, char** argv) {
  SimOptions sim = options(argv[2], argv[3], std::atof(argv[5]));
  int count = 0, input = 0, output = 0;
  if (std::sscanf(argv[4], "%d:%d:%d", &count, &input, &output) != 3) fail("the load is COUNT:INPUT:OUTPUT");
  const std::vector<SimRequest> requests = synthetic_requests(count, input, output);
  print_head();
  for (int i = 6; i < argc; ++i) {
    sim.concurrency = std::atoi(argv[i]);
    print_row(argv[i], take(run_sim(requests, sim)));
  }
}

void run_trace(int argc, char** argv) {
  SimOptions sim = options(argv[2], argv[3], std::atof(argv[7]));
  TraceOptions wanted{.dilate = std::atof(argv[6])};
  if (Status bad = parse_window(argv[5], wanted)) fail(bad->message);
  const Trace trace = take(load_trace(argv[4], wanted));
  constexpr uint64_t kSeed = 0;
  constexpr int kVocab = 128'256;
  std::vector<SimRequest> requests;
  for (const TraceRequest& request : trace.requests)
    requests.push_back({.arrival_us = request.arrival_us,
                        .prompt = prompt_tokens(trace, request, kSeed, kVocab),
                        .num_output = request.output_tokens});
  if (argc > 8) sim.replicas = std::atoi(argv[8]);
  if (argc > 9) sim.event_log = argv[9];
  print_head();
  print_row(argv[6], take(run_sim(requests, sim)));
}

}  // namespace
}  // namespace ekv

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode == "closed" && argc >= 7) return ekv::run_closed(argc, argv), 0;
  if (mode == "trace" && argc >= 8) return ekv::run_trace(argc, argv), 0;
  ekv::fail(
      "closed COST_MODEL PRESET COUNT:INPUT:OUTPUT KV_GIB CONCURRENCY... | trace COST_MODEL PRESET FILE "
      "START:END DILATE KV_GIB [REPLICAS [EVENT_LOG]]");
}
