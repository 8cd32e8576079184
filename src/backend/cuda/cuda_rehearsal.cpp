#include "backend/cuda/cuda_rehearsal.h"

#include <algorithm>

namespace ekv {

// The rows that the other sequences leave are the chunk of the first.
RehearsedStep::RehearsedStep(int num_rows, int num_seqs, KvPath path) : path_(path) {
  const bool base = path != KvPath::native;
  const int page = base ? 1 : 0;
  const int chunk = std::min(num_rows - (num_seqs - 1), kBlockTokens);
  tokens_.assign(size_t(num_rows), 0);
  positions_.assign(size_t(num_rows), 0);
  slots_.assign(size_t(num_rows), -1);
  for (int i = 0; i < chunk; ++i) slots_[size_t(i)] = Slot(page) * kBlockTokens + i;
  q_start_ = {0};
  for (int seq = 0; seq < num_seqs; ++seq) q_start_.push_back(chunk + seq);
  kv_len_.assign(size_t(num_seqs), 0);
  kv_len_[0] = chunk + (base ? kPairTokens : 0);
  if (base) table_.push_back({.even = int32_t(kBasePair)});
  table_.push_back({.even = page});
  table_pairs_ = int(table_.size());
  base_runs_.resize(size_t(num_seqs));
  base_runs_[0] = find_base(table_);
  table_.resize(table_.size() * size_t(num_seqs));
  sampling_.top_k = 2;
  sampling_.repetition_penalty = 1.5f;
  sample_rows_.push_back({.row = chunk - 1,
                          .num_logprobs = 1,
                          .params = &sampling_,
                          .tokens = std::span(tokens_).first(1),
                          .num_prompt = 1});
}

StepInput RehearsedStep::input() const {
  return {.tokens = tokens_,
          .positions = positions_,
          .slot_mapping = slots_,
          .q_start = q_start_,
          .kv_len = kv_len_,
          .block_table = {table_, table_pairs_},
          .base_runs = base_runs_,
          .path = path_,
          .sample_rows = sample_rows_};
}

}  // namespace ekv
