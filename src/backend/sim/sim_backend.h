#pragma once
// sim_backend.h -- a device that computes nothing and takes as long as the cost model says, in virtual time.
// The scheduler, the KV manager and the engine above it are the real ones.

#include <memory>

#include "backend/sim/cost_model.h"
#include "backend/sim/transfer_servers.h"
#include "backend/sim/virtual_clock.h"
#include "elastickv/backend.h"

namespace ekv {

// What a step consists of, as the cost model sees it; BASE pairs are counted in the block table.
void measure_work(const StepInput& input, StepWork& work);

// submit() notes what the step asks for, collect() moves the clock by its price; a step with nothing in it
// waits for the next copy to end. The low bytes of a demotion leave and loads begin with the step, other copies
// after its chunks; a restore is staged for a promotion of a later step. Same inputs, same times and tokens.
// Every sampled row gets the smallest token id that is not one of its stop tokens, so that outputs have the
// length they were asked to have; logprobs, where asked for, say that this token was certain.
class SimBackend : public Backend {
 public:
  // `clock` outlives the backend and is the engine's clock.
  SimBackend(CostModel model, int num_pages, VirtualClock& clock, int num_host_slots = 0);

  const BackendInfo& info() const override { return info_; }
  void submit(const StepInput& input) override;
  const StepOutput& collect() override;

  const CostModel& model() const { return model_; }
  const TransferServers& transfers() const { return transfers_; }

 private:
  void start_transfer(TransferKind kind, uint32_t ticket);

  CostModel model_;
  VirtualClock& clock_;
  BackendInfo info_;
  TransferServers transfers_;
  std::vector<TransferJob> jobs_;  // of the submitted step
  std::vector<uint64_t> done_;
  bool waits_ = false;  // the submitted step has nothing in it
  StepWork work_;       // of the submitted step
  StepOutput output_;   // of the submitted step
};

// The pool has config.num_pages pages, or as many as fit in config.pool_bytes; `num_host_slots`: pairs that
// the host has room for, their low bytes or all of them.
std::unique_ptr<SimBackend> make_sim_backend(const CostModel& model, const KvConfig& config,
                                             VirtualClock& clock, int num_host_slots = 0);

}  // namespace ekv
