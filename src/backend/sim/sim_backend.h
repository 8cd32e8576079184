#pragma once
// sim_backend.h -- a device that computes nothing and takes as long as the cost model says, in virtual time.
// The scheduler, the KV manager and the engine above it are the real ones.

#include <array>
#include <memory>

#include "backend/sim/cost_model.h"
#include "backend/sim/transfer_servers.h"
#include "backend/sim/virtual_clock.h"
#include "elastickv/backend.h"

namespace ekv {

// What a step consists of, as the cost model sees it; BASE pairs are counted in the block table.
void measure_work(const StepInput& input, StepWork& work);

// The device runs steps in the order of their submission: each begins when it was submitted, or when the one
// before has ended if that is later, and takes as long as its price. collect() moves the clock to the end of
// the oldest one, so that whatever the host does before it happens while the device works, and takes no time
// itself. The low bytes of a demotion leave and loads begin with the step, other copies after its chunks; a
// restore is staged for a promotion of a later step. A step with nothing in it does not occupy the device: its
// collect() waits for the next copy to end. Same inputs, same times and tokens. Nothing is allocated in a step
// once buffers are as large as its kind needs, but for logprobs. Every sampled row gets the smallest token id
// that is not one of its stop tokens, so that outputs have the length they were asked to have; logprobs, where
// asked for, say that this token was certain.
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
  struct Flight {
    int64_t end_us = 0;  // Clock time
    bool waits = false;  // it has nothing in it
    std::vector<SampledRow> rows;
  };

  void start_transfer(int64_t begin_us, TransferKind kind, uint32_t ticket);

  CostModel model_;
  VirtualClock& clock_;
  BackendInfo info_;
  TransferServers transfers_;
  std::array<Flight, kMostStepsInFlight> flights_;  // a ring
  size_t first_ = 0, num_flights_ = 0;
  int64_t free_us_ = 0;  // when the device has run all that was submitted
  std::vector<uint64_t> done_;
  StepWork work_;      // of the step being submitted
  StepOutput output_;  // of the step collected last
};

// The pool has config.num_pages pages, or as many as fit in config.pool_bytes; `num_host_slots`: pairs that
// the host has room for, their low bytes or all of them.
std::unique_ptr<SimBackend> make_sim_backend(const CostModel& model, const KvConfig& config,
                                             VirtualClock& clock, int num_host_slots = 0);

}  // namespace ekv
