#pragma once
// cuda_sampler.h -- rows of logits to tokens and logprobs on the device: what the engine asks for becomes what
// kernels/sampling.h takes, and back.

#include <vector>

#include "backend/cuda/cuda_sizes.h"
#include "backend/cuda/penalty_counts.h"
#include "backend/cuda/step_memory.h"
#include "elastickv/backend.h"
#include "kernels/sampling.h"

namespace ekv {

class CudaSampler {
 public:
  CudaSampler(const CudaSizes& sizes, int vocab);

  // Before the step's upload and download: takes places in both, and counts tokens for penalties.
  void pack(std::span<const SampleRow> rows, StepMemory& step, StepMemory& results, const Stream& stream);
  // For the rows [first, first + count), whose logits these are.
  void sample(const float* logits, int first, int count, const Stream& stream);
  // After the step's download. `failed` gets the index of every row without an answer, ascending.
  void read(std::span<const SampleRow> rows, std::vector<SampledRow>& out, std::vector<int>& failed) const;

 private:
  RowSampling settings(const SampleRow& row, const Stream& stream);
  void add_biases(const SampleRow& row, RowSampling& settings);
  bool add_bias(TokenId token, float value);
  SampledRow read_row(const SampleRow& row, size_t index) const;

  int vocab_, stride_;
  size_t max_biases_;
  DeviceBuffer<std::byte> workspace_;
  PenaltyCounts counts_;

  // Of the step.
  StepArray<RowSampling> params_;
  StepArray<int32_t> bias_tokens_;
  StepArray<float> bias_values_;
  size_t num_biases_ = 0;
  bool any_truncates_ = false, any_top_ = false;
  std::vector<uint8_t> overflowed_;  // [rows] its biases found no room
  StepArray<int32_t> tokens_, top_tokens_;
  StepArray<SampleStatus> status_;
  StepArray<float> logprobs_, top_logprobs_;
};

}  // namespace ekv
