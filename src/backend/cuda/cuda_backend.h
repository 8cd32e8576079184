#pragma once
// cuda_backend.h -- the GPU backend: one compute stream, one upload, one download and one wait a step.

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

  int64_t num_clamped() const { return num_clamped_; }  // KV values outside the number format so far

 private:
  CudaBackend(const Model& model, const EngineConfig& config, const CudaOptions& options, CudaWeights weights,
              const CudaSizes& sizes, int num_pages);
  void sample(const StepInput& input);
  void read_step();

  CudaSizes sizes_;
  CudaWeights weights_;
  DeviceBuffer<uint8_t> pool_;
  Stream compute_ = make_stream();
  StepMemory step_, results_;
  std::unique_ptr<CudaForward> forward_;
  CudaSampler sampler_;
  CudaTransitions transitions_;
  BackendInfo info_;
  StepOutput output_;
  int64_t num_clamped_ = 0;

  // Of the step under way.
  std::span<const SampleRow> sample_rows_;
  std::vector<int32_t> row_chunk_;  // [sample rows]
  std::vector<int> failed_rows_;
  size_t num_chunks_ = 0;
  bool idle_ = false;  // nothing to do but to wait for copies
};

}  // namespace ekv
