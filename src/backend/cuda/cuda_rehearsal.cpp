#include "backend/cuda/cuda_rehearsal.h"

#include <algorithm>

namespace ekv {

RehearsedStep::RehearsedStep(int num_rows, KvPath path) : path_(path) {
  const bool base = path != KvPath::native;
  const int chunk = std::min(num_rows, kBlockTokens), page = base ? 1 : 0;
  tokens_.assign(size_t(num_rows), 0);
  positions_.assign(size_t(num_rows), 0);
  slots_.assign(size_t(num_rows), -1);
  for (int i = 0; i < chunk; ++i) slots_[size_t(i)] = Slot(page) * kBlockTokens + i;
  q_start_ = {0, chunk};
  kv_len_ = {chunk + (base ? kPairTokens : 0)};
  if (base) table_.push_back({.even = int32_t(kBasePair)});
  table_.push_back({.even = page});
  base_runs_ = {find_base(table_)};
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
          .block_table = {table_, int(table_.size())},
          .base_runs = base_runs_,
          .path = path_,
          .sample_rows = sample_rows_};
}

}  // namespace ekv
