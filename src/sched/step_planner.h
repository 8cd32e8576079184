#pragma once
// step_planner.h -- one step's plan: what runs, who gives up pages, which pairs change fidelity. Views in, plan
// out; the decisions themselves are plan_step() and plan_fidelity(), which are pure.

#include <vector>

#include "elastickv/config.h"
#include "elastickv/scheduler.h"
#include "kv/demotable.h"
#include "sched/step_cost.h"

namespace ekv {

// Algorithm 1 of the paper, with these differences. The probe is plan_step() itself, so probe and schedule
// cannot disagree, and it is exact: no bound on the demand is needed to skip the search for candidates. The
// demand counts admissions, which are covered whole and in order or not at all. Nothing is promoted while
// anybody waits.
class StepPlanner {
 public:
  explicit StepPlanner(const EngineConfig& config) : config_(config) {}

  // Deterministic. Changes nothing but the planner's reserve. `plan` is cleared first.
  void plan(const KvManager& kv, const SequenceTable& sequences, StepPlan& plan);
  // What a step took, for the plans to come; only target_step_us asks.
  void learn(const StepLoad& load, int64_t device_us);

  // Of the last plan.
  std::span<const SeqView> waiting() const { return waiting_; }
  int shortage() const { return shortage_; }  // pages that only demotion could give
  int reserve() const { return reserve_; }    // pages that promotion leaves alone: R_t
  // Sequences that the same step would have preempted without demotion, less those that it does preempt.
  int num_avoided() const { return num_avoided_; }

 private:
  void view(const KvManager& kv, const SequenceTable& sequences);
  PageDemand probe(std::span<const SeqView> waiting, const KvBudget& budget, StepPlan& plan) const;
  void set_peaks(SeqView& view, const Sequence& sequence, int most_slots) const;
  void count_natively(const KvBudget& budget, StepPlan& plan);
  void view_pages(const KvManager& kv, const SequenceTable& sequences);
  bool wants_candidates(const PageDemand& demand, const KvBudget& budget) const;
  int most_demotions(const KvManager& kv) const;
  void keep_hits_of_capped(const KvManager& kv, const SequenceTable& sequences);
  void count_candidates(const KvManager& kv, const SequenceTable& sequences);
  void demote(const PageDemand& demand, const KvBudget& budget, StepPlan& plan);
  int promotable(const KvManager& kv, const PageDemand& demand, const KvBudget& budget, const StepPlan& plan,
                 bool anybody_waits) const;
  void promote(const KvManager& kv, const SequenceTable& sequences, const PageDemand& demand,
               const KvBudget& budget, StepPlan& plan);
  void back_up(const KvManager& kv, const SequenceTable& sequences, StepPlan& plan);

  EngineConfig config_;
  std::vector<SeqView> running_, waiting_;
  DemotableScan demotable_;
  RestorableScan restorable_;
  FidelityShares shares_;
  StepCostFit fit_;
  std::vector<PairId> kept_;  // not to be demoted in this step
  int shortage_ = 0, reserve_ = 0, num_avoided_ = 0;
};

}  // namespace ekv
