#pragma once
// step_cost.h -- how long a step takes, learned from the steps before: what --target-step-ms sizes chunks by.

#include "elastickv/scheduler.h"

namespace ekv {

// Least squares of the relative error, none of the coefficients below zero, over all steps so far, the last
// ones most: a step counts 1 % less with each that follows it. Relative, because that keeps one stall from
// bending the fit.
class StepCostFit {
 public:
  void add(const StepLoad& load, double us);      // `us` > 0
  const StepCost& cost() const { return cost_; }  // zero until the first step

 private:
  static constexpr int kTerms = 4;
  void solve();

  StepCost cost_;
  double squares_[kTerms][kTerms] = {};  // of the normal equations: left and
  double products_[kTerms] = {};         // right hand side
};

}  // namespace ekv
