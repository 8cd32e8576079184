#pragma once
// cuda_rehearsal.h -- steps on the first two pages of an empty pool that together take every kernel that a step
// can need, but for matrix products and changes of fidelity: CudaForward::load_products and
// CudaTransitions::load_code load those.
//
// CUDA loads a kernel when it is launched for the first time, and may wait meanwhile until all that was
// enqueued before has ended (CUDA programming guide, lazy loading). While serving, that is a step of prefill
// for which the host can neither hand out tokens nor submit. Seen on an H200: 410 ms between two tokens. That
// loading was the cause is inferred, not measured.

#include <vector>

#include "elastickv/backend.h"

namespace ekv {

// A chunk of one sequence with a sampled row that uses all of the sampler. With another path than the native
// one the chunk sees a BASE pair, which is whatever page 0 holds.
class RehearsedStep {
 public:
  // One row is a decode, up to kBlockTokens are a prefill, those beyond are padding that only makes the step
  // larger.
  static RehearsedStep chunk(int num_rows, KvPath path) { return {num_rows, 1, path}; }
  // A step of decodes only, of which all but the first have no keys.
  static RehearsedStep decodes(int num_seqs) { return {num_seqs, num_seqs, KvPath::native}; }
  RehearsedStep(const RehearsedStep&) = delete;
  RehearsedStep& operator=(const RehearsedStep&) = delete;
  StepInput input() const;  // valid as long as this

 private:
  RehearsedStep(int num_rows, int num_seqs, KvPath path);

  KvPath path_;
  std::vector<TokenId> tokens_;
  std::vector<int32_t> positions_, q_start_, kv_len_;
  std::vector<Slot> slots_;
  std::vector<PairEntry> table_;
  int table_pairs_;
  std::vector<BaseRun> base_runs_;
  SamplingParams sampling_;
  std::vector<SampleRow> sample_rows_;
};

}  // namespace ekv
