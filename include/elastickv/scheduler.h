#pragma once
// scheduler.h -- what to run next. Pure: counts in, plan out; knows no device and no manager.

#include <span>

#include "elastickv/config.h"
#include "elastickv/step.h"

namespace ekv {

// What the time of a step depends on.
struct StepLoad {
  int tokens = 0;            // computed in it
  int64_t prefill_keys = 0;  // keys visible to each token of the chunks of several tokens, summed
  int64_t decode_keys = 0;   // of the chunks of one
};

// Predicts that time.
struct StepCost {
  double fixed_us = 0, per_token_us = 0, per_prefill_key_us = 0, per_decode_key_us = 0;
  double us(const StepLoad& load) const {
    return fixed_us + per_token_us * load.tokens + per_prefill_key_us * double(load.prefill_keys) +
           per_decode_key_us * double(load.decode_keys);
  }
};

// Continuous batching with chunked prefill. Both spans stand in the order of the policy; the plan follows it.
//
//   Tokens     each running decode has one set aside; unfinished prefills share the rest in order, then the
//              admitted. So no prompt, however long, delays a stream by more than one step.
//   Time       with config.target_step_us prefills, in the same order, share what `cost` leaves of it beside
//              the decodes. The first one has kPairTokens however little that is, so that prompts get on.
//   Pages      in running order. A sequence that lacks pages makes the last of those after it give up all of
//              theirs (recompute), one after the other. If all of them would not do, nobody gives up anything
//              and it is left out of this step. With config.preempt_self it then gives up its own too, with all
//              after it, unless it is the first.
//   Admission  in waiting order; nobody overtakes the first in line. A step that preempts or leaves somebody
//              out admits nobody. With config.reserve_full_prompt a prompt is admitted when all of it fits
//              beside what the prompts under way still need, so that admission and preemption do not chase
//              each other; otherwise when its first chunk fits beside the next one of each that runs and has
//              none in this step. With AdmissionMode::guaranteed it is also admitted only when its peak fits
//              beside the peaks of all that run.
//   Loads      A waiting sequence of which the host holds more than the cache is admitted without a chunk, by
//              the same rules: it takes the pages of all of it and waits for the copies, then its prefill goes
//              on. Until then it gives up nothing, because its pages could not be used before the copies end.
//              The longest chunk that may follow them must fit too, and nobody who comes later gets its pages:
//              or it would have to give up, and load again, all that it has just loaded.
//              One that waits for other copies (SeqView::load_later) is not admitted, nor is anybody after it.
//   Ending     A running sequence whose last token a step in flight yields has no chunk, takes no place in the
//              batch, and gives up nothing: its pages come back when that step is delivered.
//   Fidelity   budget.max_demotions pages more may be used than are free, up to the sum of num_demotable of the
//              sequences that keep their pages; a victim takes its own with it. The caller demotes as many
//              pairs as PageDemand says are missing.
//
// Once its copies have ended, a lone sequence that fits the pool always runs, and with nobody running and no
// copy under way the first in line that fits the pool is always admitted: whoever refuses what can never fit
// has no deadlock. A step may preempt and have no chunks, when pages that victims share with each other become
// free only by giving up all of them.
//
// Same arguments, same plan. `plan` is cleared first and keeps its capacity from step to step.
PageDemand plan_step(const SchedulerConfig& config, std::span<const SeqView> running,
                     std::span<const SeqView> waiting, KvBudget budget, StepPlan& plan,
                     const StepCost& cost = {});

}  // namespace ekv
