#pragma once
// cpu_sampler.h -- one row of logits to one token and its logprobs. A row depends on its own logits,
// parameters, tokens and output index only; never on its neighbours or on earlier draws.

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "backend/cpu/cpu_kernels.h"
#include "elastickv/backend.h"

namespace ekv {

// Philox 4x32 with 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

// Uniform in (0, 1), the same for the same arguments.
double uniform_draw(uint64_t seed, int64_t output_index);

// Working memory of one thread; keep it between rows.
class CpuSampler {
 public:
  CpuSampler(const CpuKernels& kernels, int vocab);

  // `logits` [vocab] is overwritten. `last`: what the last of row.tokens stands for when it is pending.
  // nullopt: a logit is NaN or infinite.
  std::optional<SampledRow> sample(const SampleRow& row, std::span<float> logits, TokenId last = 0);

 private:
  struct Candidates {
    std::span<const TokenId> ids;  // empty: all, in order of their ids
    double total = 0;              // sum of weights_ over them
  };
  bool all_finite(std::span<const float> logits) const;
  TokenLogprobs report(TokenId token, int num_top, std::span<const float> logits);
  TokenId choose(const SampleRow& row, std::span<float> logits, TokenId last);
  void adjust(const SampleRow& row, std::span<float> logits);
  void penalise(const SampleRow& row, std::span<float> logits, TokenId last);
  TokenId draw(const SamplingParams& params, double u, std::span<float> logits);
  Candidates keep_likely(const SamplingParams& params, std::span<const float> logits);
  void order_first(int count, int sorted, std::span<const float> logits);

  const CpuKernels& kernels_;
  std::vector<float> raw_;                            // [vocab] logits as they came, kept for the report
  std::vector<float> weights_;                        // [vocab] exp((logit - max) / temperature)
  std::vector<TokenId> order_;                        // [vocab] most likely first, as far as needed
  std::vector<int32_t> prompt_count_, output_count_;  // [vocab] 0 between rows
};

}  // namespace ekv
