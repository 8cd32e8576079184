#pragma once
// scheduler.h -- what to run next. Pure: counts in, plan out; knows no device and no manager.

#include <span>

#include "elastickv/config.h"
#include "elastickv/kv_manager.h"
#include "elastickv/sequence.h"
#include "elastickv/step.h"

namespace ekv {

// Continuous batching with chunked prefill. Decodes of running sequences come first, then their unfinished
// prefills, then waiting sequences in queue order; nobody overtakes the first in line. A running sequence that
// lacks a page makes the last running one give up its pages (recompute). A step that preempts admits nobody.
// Admission asks for the whole prompt (config.reserve_full_prompt), so that it and preemption do not chase each
// other. Same arguments, same plan; `plan` is cleared first and keeps its capacity from step to step.
void plan_step(const SchedulerConfig& config, std::span<const SeqView> running,
               std::span<const SeqView> waiting, KvBudget budget, StepPlan& plan);

}  // namespace ekv
