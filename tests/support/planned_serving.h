#pragma once
// planned_serving.h -- the step loop of planner, KV manager and packer without a device: tokens are made up,
// and copies end with the step that began them unless `copies_end` is false.

#include <utility>

#include "elastickv/kv_manager.h"
#include "sched/pack_step.h"
#include "sched/step_planner.h"

namespace ekv::test {

struct PlannedServing {
  PlannedServing(const EngineConfig& c, int num_pages, int num_slots)
      : config(c), kv(c.kv, num_pages, c.fidelity, num_slots), sequences(c.scheduler.policy), planner(c) {}

  Sequence& add(Request r) { return sequences.add(SeqId(next_id++), std::move(r)); }

  // All that the host does before the device runs.
  void prepare() {
    planner.plan(kv, sequences, plan);
    kv.commit(plan, sequences);
    sequences.follow(plan);
    pack_step(plan, kv.pairs(), AttentionPath::automatic, sequences, packed);
    mark_taint(plan, packed, sequences);
    charge_exposure(plan, packed, sequences);
  }

  void finish_step() {
    for (const ChunkPlan& chunk : plan.chunks) {
      Sequence& s = sequences[chunk.seq];
      s.num_computed += chunk.num_tokens;
      kv.publish(s);
      if (!chunk.sample) continue;
      s.tokens.push_back(TokenId(s.id) * 1000 + s.num_tokens());
      if (s.num_remaining() == 0) end(s);
    }
    if (!copies_end) return;
    for (const DemoteJob& job : kv.jobs().demotes)
      if (job.ticket) kv.transfer_done(job.ticket);
    for (const TransferJob& job : kv.jobs().transfers) kv.transfer_done(job.ticket);
    kv.finish_loads(sequences.running());
  }
  void step() { prepare(), finish_step(); }
  void end(Sequence& s) {
    kv.release(s);
    sequences.erase(s.id);
  }

  EngineConfig config;
  KvManager kv;
  SequenceTable sequences;
  StepPlanner planner;
  StepPlan plan;
  PackedStep packed;
  bool copies_end = true;
  uint64_t next_id = 1;
};

}  // namespace ekv::test
