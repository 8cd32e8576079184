#pragma once
// sim_replay.h -- a load against engines on the simulator backend, in virtual time: what a machine would have
// done, step by step, hundreds of times faster than it.

#include <span>
#include <vector>

#include "backend/sim/cost_model.h"
#include "bench/replay_run.h"

namespace ekv {

// One replica. Errors: a KV pool without a page.
Result<ReplayDevice> make_sim_device(const CostModel& model, const EngineConfig& engine);

// As run_replay(), on `replicas` simulated machines.
Result<ReplayResult> run_sim(const ReplayLoad& load, const CostModel& model, int replicas,
                             const ReplayOptions& options);

// `count` requests of the same shape and of different content, all arriving at 0.
ReplayLoad synthetic_load(int count, int num_prompt, int num_output, uint64_t seed = 1);

}  // namespace ekv
