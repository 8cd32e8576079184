#pragma once
// sim_replay.h -- requests against engines on the simulator backend, in virtual time: what a machine would have
// done, step by step, hundreds of times faster than it.

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "backend/sim/cost_model.h"
#include "elastickv/config.h"
#include "elastickv/engine.h"

namespace ekv {

struct SimRequest {
  int64_t arrival_us = 0;  // since the start of the run; not used in a closed loop
  std::vector<TokenId> prompt;
  int num_output = 1;  // exactly so many tokens come out
};

struct SimOptions {
  EngineConfig engine;  // of every replica
  CostModel model;
  // 0: open loop, requests come at their arrival times. Otherwise so many are under way all the time, in the
  // order of the list, each arriving the moment one before it ends.
  int concurrency = 0;
  // Engines side by side, each with a GPU (or tensor-parallel group) of its own. A request goes to the one with
  // the fewest unfinished requests, the first among equals.
  int replicas = 1;
  std::string event_log;  // path of a JSONL file with a line per step and per finished request; empty: none
  // After every step, with the replica that made it and the Clock time of its end; for time series and
  // progress.
  std::function<void(int replica, const StepRecord& record)> on_step;
};

// Times are Clock times of the run.
struct SimRequestRecord {
  int64_t arrival_us = 0, first_scheduled_us = 0;
  std::vector<int64_t> token_us;  // when each output token left
  int num_prompt = 0;
  int num_cached = 0;  // prompt tokens from the prefix cache at first admission
  int num_preemptions = 0;
  int replica = -1;  // -1: refused
  FinishReason finish = FinishReason::none;
  std::string error;  // of a refused or failed request

  int64_t ttft_us() const { return token_us.front() - arrival_us; }
};

struct SimResult {
  std::vector<SimRequestRecord> requests;  // in the order of the list
  int64_t steps = 0;
  int64_t preemptions = 0, recomputed_tokens = 0;
  int64_t prefill_tokens = 0, decode_tokens = 0;  // computed, recomputation included
  int64_t prefix_query_tokens = 0, prefix_hit_tokens = 0;
  int max_waiting = 0;                      // longest waiting queue of one replica after a step
  double mean_waiting = 0;                  // waiting requests of all replicas together, mean over time
  int64_t last_arrival_us = 0, end_us = 0;  // last request in, last token out
  double wall_s = 0;                        // what the run took here
  // Over every step and every finished request, whether or not they are written to a file. Equal inputs give
  // equal logs on every machine with IEEE arithmetic.
  uint64_t log_hash = 0;

  double simulated_s() const { return double(end_us) * 1e-6; }
};

// Errors: settings that make no sense, a request without prompt or output, arrivals that go back in time, a log
// that cannot be written. Requests that can never fit are refused one by one and stand in the result.
Result<SimResult> run_sim(std::span<const SimRequest> requests, const SimOptions& options);

// `count` requests of the same shape and of different content, all arriving at 0.
std::vector<SimRequest> synthetic_requests(int count, int num_prompt, int num_output, uint64_t seed = 1);

}  // namespace ekv
