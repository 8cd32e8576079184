#pragma once
// cpu_sampler.h -- one row of logits to one token and its logprobs, by the rule of sampling_rule.h: a row
// depends on its own logits, parameters, tokens and output index only. Races are compared in double.

#include <cstdint>
#include <span>
#include <vector>

#include "backend/cpu/cpu_kernels.h"
#include "elastickv/backend.h"

namespace ekv {

// Working memory of one thread; keep it between rows.
class CpuSampler {
 public:
  CpuSampler(const CpuKernels& kernels, int vocab);

  // `logits` [vocab] is overwritten. `last`: what the last of row.tokens stands for when it is pending.
  // nullopt: the rule gives this row no token, or its target has probability 0.
  std::optional<SampledRow> sample(const SampleRow& row, std::span<float> logits, TokenId last = 0);

 private:
  bool readable(std::span<const float> logits) const;
  TokenLogprobs report(TokenId token, int num_top, std::span<const float> logits);
  void order_first(int count, std::span<const float> logits);

  // In order, on logits that become z. -1: no token is left.
  TokenId choose(const SampleRow& row, std::span<float> logits, TokenId last);
  void add_biases(const SampleRow& row, std::span<float> logits) const;
  void penalise(const SampleRow& row, std::span<float> logits, TokenId last);
  float least_kept(const SamplingParams& params, float z_max, std::span<const float> z);
  float top_p_cut(std::span<float> kept, float z_max, double top_p);
  double mass(std::span<const float> z, float z_max);
  TokenId draw(const SampleRow& row, TokenId likeliest, std::span<const float> z);

  const CpuKernels& kernels_;
  std::vector<float> raw_;        // [vocab] logits as they came, kept for the report
  std::vector<float> kept_;       // [vocab] z of the tokens that no cut has removed yet
  std::vector<float> exps_;       // [vocab] exp(z - max z)
  std::vector<TokenId> order_;    // [vocab] most likely first, as far as needed
  std::vector<uint16_t> counts_;  // [vocab] see sampling::counted; 0 between rows
  std::vector<Racer> racers_;     // [kRaceBlock]
};

}  // namespace ekv
