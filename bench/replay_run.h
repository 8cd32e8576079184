#pragma once
// replay_run.h -- a load against engines in this process: requests come at their times, or as those before them
// end; every step and every token is noted. Time is the replica's: virtual on the simulator, real on the CPU.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bench/report.h"
#include "elastickv/config.h"
#include "elastickv/engine.h"

namespace ekv {

struct ReplayRequest {
  int64_t arrival_us = 0;  // since the start of the run; not used in a closed loop
  int num_prompt = 1;
  int num_output = 1;  // exactly so many tokens come out
};

struct ReplayLoad {
  std::vector<ReplayRequest> requests;  // by arrival
  // The num_prompt tokens of a request. Asked for when it arrives, so that not all of a trace is in memory.
  std::function<std::vector<TokenId>(size_t index)> prompt;
};

// Time that can be waited for.
class ReplayClock : public Clock {
 public:
  virtual void wait_until(int64_t time_us) = 0;  // a time that has passed changes nothing
};

// What one replica runs on. The backend's clock, where it has one, is `clock`.
struct ReplayDevice {
  std::unique_ptr<ReplayClock> clock;
  std::unique_ptr<Backend> backend;
};

struct ReplayOptions {
  EngineConfig engine;  // of every replica
  // 0: open loop, requests come at their arrival times. Otherwise so many are under way all the time, in the
  // order of the list, each arriving the moment one before it ends.
  int concurrency = 0;
  // Path of a JSONL file, empty: none. Besides the steps it has a line for each ended request, {"kind":
  // "request", ...}: its arrival, its sums, and "gaps_us", arrival to first token, then from token to token.
  // `finish` is a FinishReason. Every figure of the result can be computed again from it.
  std::string step_log;
  int64_t series_period_us = 0;  // time between the points of ReplayResult::series; 0: no series
  // After every step, with the replica that made it and the Clock time of its end.
  std::function<void(int replica, const StepRecord& record)> on_step;
  // After every step: requests that have ended, and how far the run is.
  std::function<void(int64_t num_ended, int64_t time_us)> on_progress;
};

// Times are Clock times of the run.
struct ReplayRecord {
  int64_t arrival_us = 0, first_scheduled_us = 0, end_us = 0;
  std::vector<int64_t> token_us;  // when each output token left
  int num_prompt = 0;
  int num_cached = 0;  // prompt tokens from the prefix cache at first admission
  int num_preemptions = 0;
  int64_t pairs_seen = 0, base_pairs_seen = 0;  // summed over the steps that ran it
  int replica = -1;                             // -1: refused
  FinishReason finish = FinishReason::none;
  std::string error;  // of a refused or failed request

  int64_t ttft_us() const { return token_us.front() - arrival_us; }
};

struct ReplayResult {
  std::vector<ReplayRecord> requests;  // in the order of the list
  int64_t steps = 0;
  int64_t preemptions = 0, recomputed_tokens = 0;
  int64_t prefill_tokens = 0, decode_tokens = 0;  // computed, recomputation included
  int64_t prefix_query_tokens = 0, prefix_hit_tokens = 0;
  int64_t preemptions_avoided = 0;
  int64_t to_host_bytes = 0, from_host_bytes = 0;
  int64_t demoted_pairs = 0, promoted_pairs = 0;
  int64_t demotion_steps = 0, promotion_steps = 0;  // that demoted a pair; that sent for low bytes
  int64_t pairs_seen = 0, base_pairs_seen = 0;      // as in StepRecord, over all steps
  int64_t query_pairs_seen = 0, query_base_pairs_seen = 0;
  // Requests that wait for a place or for their KV from the host.
  int max_waiting = 0;                      // of one replica after a step
  double mean_waiting = 0;                  // waiting requests of all replicas together, mean over time
  int64_t last_arrival_us = 0, end_us = 0;  // last request in, last token out
  double wall_s = 0;                        // what the run took here
  // Over every step and every ended request, whether or not they are written to a file. Equal inputs give equal
  // logs in virtual time, on every machine with IEEE arithmetic.
  uint64_t log_hash = 0;
  std::vector<SeriesPoint>
      series;  // how things stood every series_period_us, up to the first point after the end

  double duration_s() const { return double(end_us) * 1e-6; }
};

// Engines side by side, one per device, each with a GPU (or tensor-parallel group) of its own. A request goes
// to the one with the fewest unfinished requests, the first among equals. Errors: settings that make no sense,
// a request without prompt or output, arrivals that go back in time, a log that cannot be written. Requests
// that can never fit are refused one by one and stand in the result.
Result<ReplayResult> run_replay(const ReplayLoad& load, std::vector<ReplayDevice> devices,
                                const ReplayOptions& options);

// For the report: what happened to each request, and what only the engine can tell.
std::vector<RequestRecord> request_records(const ReplayResult& result);
EngineTotals engine_totals(const ReplayResult& result);

}  // namespace ekv
