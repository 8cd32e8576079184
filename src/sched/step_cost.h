#pragma once
// step_cost.h -- how long a step takes, learned from the steps before: what --target-step-ms sizes chunks by.

#include "elastickv/scheduler.h"

namespace ekv {

// Least squares of the relative error, none of the coefficients below zero, over all steps so far, the last
// ones most: a step counts 1 % less with each that follows it. Relative to the time or to what was predicted,
// whichever is more, so that one stall counts no more than any other step. Nor does a step that ended unseen
// with the one before, and seems to have taken nothing: it is taken for half of what was predicted. The first
// steps have only their time to go by, as the very first may have been a stall.
class StepCostFit {
 public:
  void add(const StepLoad& load, double us);      // `us` > 0
  const StepCost& cost() const { return cost_; }  // zero until the first step

 private:
  static constexpr int kTerms = 4;
  void solve();

  StepCost cost_;
  int num_steps_ = 0;                    // at most those that have only their time to go by
  double squares_[kTerms][kTerms] = {};  // of the normal equations: left and
  double products_[kTerms] = {};         // right hand side
};

}  // namespace ekv
