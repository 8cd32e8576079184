#pragma once
// replay_command.h -- `elastickv replay`: a trace or a synthetic load against the simulator, a CPU or CUDA
// backend in this process, or a server over HTTP; what came out as a table, as JSON and over time.

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backend/start.h"
#include "bench/load_client.h"
#include "bench/replay_run.h"
#include "bench/trace.h"
#include "elastickv/backend.h"

namespace ekv {

struct ReplayFlags {
  // What is sent.
  std::string trace, synthetic;  // one of the two
  TraceOptions load;
  std::string window;   // as it was given
  int concurrency = 0;  // 0: open loop
  // What answers.
  std::string device = "sim";  // sim, cpu, cuda
  std::string cost_model;      // sim: name or file
  int replicas = 1;            // sim
  ModelFlags model;  // cpu, cuda; its engine is that of sim too, its model the name asked for over HTTP
  std::string preset;
  std::optional<int> max_model_len;  // absent: as long as the load needs, or the model has positions
  std::string url;                   // not empty: a server instead of a device
  HttpTarget target;                 // from the URL
  std::string tokenizer;             // folder; empty: the model's on this machine, or else the server is asked
  // What comes out.
  std::string json, time_series, step_log;
  double series_period_s = 5;
  std::vector<std::pair<std::string, std::string>> metadata;
  Slo slo;
  bool quiet = false;

  bool over_http() const { return !url.empty(); }
};

// The exit code when the command is to end now; what there is to say has been printed.
std::optional<int> parse_replay_flags(int argc, const char* const* argv, ReplayFlags& flags);

struct ReplayOutcome {
  Report report;
  std::vector<SeriesPoint> series;
  bool async_scheduling = false;  // of the engine in this process
  ClientHealth health;            // over HTTP
};
Result<ReplayOutcome> replay_on_sim(const ReplayFlags& flags, const Trace& trace);
Result<ReplayOutcome> replay_on_device(const ReplayFlags& flags, const Trace& trace);
Result<ReplayOutcome> replay_over_http(const ReplayFlags& flags, const Trace& trace);

// The subcommand. A request that failed and a line of the trace that is broken make its exit code 1.
int replay(int argc, const char* const* argv);

}  // namespace ekv
