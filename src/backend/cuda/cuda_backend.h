#pragma once
// cuda_backend.h -- the GPU backend: one compute stream; an upload, a download and an event a step, two steps
// in flight.

#include <array>
#include <memory>
#include <vector>

#include "backend/cuda/cuda_forward.h"
#include "backend/cuda/cuda_sampler.h"
#include "backend/cuda/cuda_transitions.h"
#include "elastickv/backend.h"

namespace ekv {

// Everything is allocated by make(); a step allocates nothing on the device. Calls throw CudaError when the
// device is lost.
class CudaBackend : public Backend {
 public:
  // Errors: the model, the settings or the device's memory do not fit.
  static Result<std::unique_ptr<CudaBackend>> make(const Model& model, const EngineConfig& config,
                                                   const CudaOptions& options);
  ~CudaBackend() override;  // waits for the device, which may still read what goes away

  const BackendInfo& info() const override { return info_; }
  void submit(const StepInput& input) override;
  const StepOutput& collect() override;

 private:
  // Submitted and not yet collected.
  struct Flight {
    Event ended = make_event();  // what the host fills again is read, results are in host memory
    ChunkFlags flags;
    SampleResults samples;
    std::vector<int32_t> row_chunk;  // [sample rows]
    size_t num_chunks = 0;
    bool idle = false;  // nothing to do but to wait for copies
  };
  CudaBackend(const Model& model, const EngineConfig& config, const CudaOptions& options, CudaWeights weights,
              const CudaSizes& sizes, int num_pages);
  void load_code(bool makes_base);
  void sample(const StepInput& input, Flight& flight);
  void read_step(const Flight& flight);

  CudaSizes sizes_;
  CudaWeights weights_;
  DeviceBuffer<uint8_t> pool_;
  Stream compute_ = make_stream();
  StepMemory step_, results_;
  const int32_t* previous_;  // in results_: the tokens of the last step that sampled
  std::unique_ptr<CudaForward> forward_;
  CudaSampler sampler_;
  CudaTransitions transitions_;
  BackendInfo info_;
  StepOutput output_;
  std::vector<int> failed_rows_;

  std::array<Flight, kMostStepsInFlight> flights_;  // a ring
  size_t first_ = 0, num_flights_ = 0;
};

}  // namespace ekv
