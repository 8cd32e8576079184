#include "sched/step_cost.h"

#include <algorithm>

namespace ekv {
namespace {

constexpr double kMemory = 0.99;  // of a step, from one step to the next
constexpr int kFirstSteps = 8;    // whose times are taken as they are
constexpr int kSweeps = 20;       // over the coefficients, each exact in one of them, from where the fit was

}  // namespace

void StepCostFit::add(const StepLoad& load, double us) {
  EKV_CHECK(us > 0, "a step takes time");
  const double predicted = num_steps_ < kFirstSteps ? 0 : cost_.us(load);
  us = std::max(us, predicted / 2);
  const double scale = std::max(us, predicted);
  num_steps_ = std::min(num_steps_ + 1, kFirstSteps);
  const double terms[kTerms] = {1.0, double(load.tokens), double(load.prefill_keys), double(load.decode_keys)};
  for (int i = 0; i < kTerms; ++i) {
    for (int j = 0; j < kTerms; ++j)
      squares_[i][j] = kMemory * squares_[i][j] + terms[i] / scale * (terms[j] / scale);
    products_[i] = kMemory * products_[i] + terms[i] / scale * (us / scale);
  }
  solve();
}

void StepCostFit::solve() {
  double* const found[kTerms] = {&cost_.fixed_us, &cost_.per_token_us, &cost_.per_prefill_key_us,
                                 &cost_.per_decode_key_us};
  for (int sweep = 0; sweep < kSweeps; ++sweep)
    for (int i = 0; i < kTerms; ++i) {
      if (squares_[i][i] == 0) continue;
      double rest = products_[i];
      for (int j = 0; j < kTerms; ++j)
        if (j != i) rest -= squares_[i][j] * *found[j];
      *found[i] = std::max(0.0, rest / squares_[i][i]);
    }
}

}  // namespace ekv
