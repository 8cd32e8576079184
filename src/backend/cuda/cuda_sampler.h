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

// What a step asked for, and where its answers lie once they are downloaded.
struct SampleResults {
  struct Row {
    TokenId target = -1;
    int num_top = -1;
  };
  std::vector<Row> rows;
  StepArray<int32_t> tokens, top_tokens;
  StepArray<SampleStatus> status;
  StepArray<float> logprobs, top_logprobs;
};

class CudaSampler {
 public:
  // `previous`: the place of every step's tokens on the device. They stay there until the next step samples,
  // so that a step finds those of the one before.
  CudaSampler(const CudaSizes& sizes, int vocab, const int32_t* previous);

  // Before the step's upload and download: takes places in both, of `results` first that of the tokens, and
  // counts tokens for penalties.
  void pack(std::span<const SampleRow> rows, StepMemory& step, StepMemory& results, SampleResults& answers,
            const Stream& stream);
  // For the rows [first, first + count), whose logits these are.
  void sample(const float* logits, int first, int count, const SampleResults& answers, const Stream& stream);
  // After the step's download. `failed` gets the index of every row without an answer, ascending.
  void read(const SampleResults& answers, std::vector<SampledRow>& out, std::vector<int>& failed) const;

 private:
  RowSampling settings(const SampleRow& row, const Stream& stream);
  void add_bias(TokenId token, float value);
  void pack_results(size_t rows, StepMemory& results, SampleResults& answers) const;
  SampledRow read_row(const SampleResults& answers, size_t index) const;

  int vocab_, stride_;
  const int32_t* previous_;
  DeviceBuffer<std::byte> workspace_;
  PenaltyCounts counts_;

  // Of the step.
  StepArray<RowSampling> params_;
  StepArray<int32_t> bias_tokens_;
  StepArray<float> bias_values_;
  size_t num_biases_ = 0;
  bool any_truncates_ = false, any_top_ = false;
};

}  // namespace ekv
