#pragma once
// bench_serve.h -- `elastickv bench serve`: load on a running server over HTTP, with the flag names, the
// arrival process, the definitions and the result fields of `vllm bench serve`, so that the two can be laid
// side by side. Where we differ: bench/report.h (nothing without a token has a latency), bench/stream_reply.h
// (the role chunk is no token), prompts of random tokens go out as token ids, and --goodput knows itl:MS.

#include <optional>
#include <string>
#include <vector>

#include "bench/arrivals.h"

namespace ekv {

struct ServeBenchFlags {
  std::string backend = "openai";  // openai, vllm: completions; openai-chat
  std::string base_url;            // empty: host and port
  HttpTarget target;
  std::string endpoint;   // empty: by the backend
  std::string model;      // empty: the first that the server names
  std::string tokenizer;  // folder; empty: the model's on this machine, or else the server is asked
  DatasetOptions dataset;
  int max_concurrency = 0;  // 0: no limit
  bool ignore_eos = false;
  std::optional<double> temperature;
  Json extra_body = Json::object();
  Slo slo;
  std::vector<std::string> percentile_metrics{"ttft", "tpot", "itl"};  // of the table; the result has all
  std::vector<double> percentiles{99};
  int num_warmups = 0;
  double ready_timeout_s = 0;  // how long to wait for a server that does not answer yet
  bool save_result = false, save_detailed = false;
  std::string result_dir = ".", result_filename, label;
  std::vector<std::pair<std::string, std::string>> metadata;
  bool quiet = false;  // no progress bar

  bool chat() const;
  std::string path() const;
};

struct ServeBenchOutcome {
  Report report;
  ClientHealth health;
  int64_t num_without_usage = 0;       // replies whose output tokens are a count of messages
  std::optional<int64_t> preemptions;  // during the run, where the server's /metrics tells
  Json result;                         // what --save-result writes
};

// Errors: flags that make no sense, a server that does not answer. Failed requests are in the report.
Result<ServeBenchOutcome> run_serve_bench(ServeBenchFlags flags);

// Exit code: 0 when every request was answered, 1 when some failed or the run could not start, 2 for bad flags.
int bench_serve(int argc, const char* const* argv);

}  // namespace ekv
