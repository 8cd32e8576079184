#pragma once
// pack_step.h -- plan + block tables -> flat arrays. Small loops; the arrays keep their capacity between steps.

#include <vector>

#include "elastickv/backend.h"
#include "elastickv/kv_manager.h"
#include "elastickv/sequence.h"
#include "elastickv/step.h"

namespace ekv {

struct PackedStep {
  std::vector<TokenId> tokens;
  std::vector<int32_t> positions;
  std::vector<Slot> slot_mapping;
  std::vector<int32_t> q_start, kv_len;
  std::vector<PairEntry> table;
  int max_pairs = 0;
  std::vector<BaseRun> base_runs;  // [chunks]
  std::vector<uint8_t> tainted;    // [chunks] what it computes depends on BASE; mark_taint()
  KvPath path = KvPath::native;
  std::vector<SampleRow> sample_rows;
  std::vector<SeqId> sample_seqs;  // [sample_rows] whose row it is

  StepInput view(const KvJobs& jobs) const;
};

// What the chunks of a step saw: each once, whatever its length, or once for each of its tokens.
struct Exposure {
  int64_t pairs = 0, base_pairs = 0;
  int64_t query_pairs = 0, query_base_pairs = 0;
};

// `plan` has been committed: every position it writes has a page. Sample rows stand in the order of the chunks,
// and rows of prompt logprobs before the sampled row of their chunk; they point into `sequences` until those
// change.
void pack_step(const StepPlan& plan, const PairTable& pairs, AttentionPath attention_path,
               SequenceTable& sequences, PackedStep& packed);

// Marks what a sequence of the packed plan computes as tainted from its first BASE pair on. Before the step is
// submitted.
void mark_taint(const StepPlan& plan, PackedStep& packed, SequenceTable& sequences);

// Charges each sequence of the packed plan, as far as it is still there, for the pairs that it saw in this
// step. Returns what was charged: sums over steps and over sequences are the same.
Exposure charge_exposure(const StepPlan& plan, const PackedStep& packed, SequenceTable& sequences);

}  // namespace ekv
