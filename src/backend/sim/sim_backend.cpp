#include "backend/sim/sim_backend.h"

#include <algorithm>
#include <cmath>

namespace ekv {
namespace {

TokenId token_for(const SampleRow& row) {
  if (row.target >= 0) return row.target;
  TokenId token = 0;
  if (row.params)
    while (std::ranges::find(row.params->stop_token_ids, token) != row.params->stop_token_ids.end()) ++token;
  return token;
}

SampledRow answer(const SampleRow& row) {
  SampledRow sampled{.token = token_for(row)};
  if (row.num_logprobs < 0) return sampled;
  const TokenLogprob certain{.token = sampled.token, .logprob = 0};
  sampled.logprobs = TokenLogprobs{.chosen = certain};
  if (row.num_logprobs > 0) sampled.logprobs->top.push_back(certain);
  return sampled;
}

// Half of a simulation is this loop and the packing of the table it reads; without a branch it is vectorised.
int count_base(std::span<const PairEntry> pairs) {
  int count = 0;
  for (const PairEntry& pair : pairs) count += pair.is_base();
  return count;
}

}  // namespace

void measure_work(const StepInput& input, StepWork& work) {
  work.chunks.clear();
  work.num_demoted_pairs = work.num_promoted_pairs = 0;
  for (size_t i = 0; i < input.kv_len.size(); ++i) {
    const auto num_pairs = size_t(ceil_div(input.kv_len[i], kPairTokens));
    const auto row = input.block_table.row(int(i)).first(num_pairs);
    work.chunks.push_back({.num_tokens = input.q_start[i + 1] - input.q_start[i],
                           .kv_len = input.kv_len[i],
                           .num_base_pairs = count_base(row)});
  }
}

SimBackend::SimBackend(CostModel model, int num_pages, VirtualClock& clock)
    : model_(std::move(model)),
      clock_(clock),
      info_{.name = "sim", .num_pages = num_pages},
      transfers_(model_.to_host, model_.from_host) {}

void SimBackend::submit(const StepInput& input) {
  measure_work(input, work_);
  output_.rows.clear();
  for (const SampleRow& row : input.sample_rows) output_.rows.push_back(answer(row));
}

const StepOutput& SimBackend::collect() {
  clock_.advance_us(std::llround(step_us(model_, work_)));
  return output_;
}

std::unique_ptr<SimBackend> make_sim_backend(const CostModel& model, const KvConfig& config,
                                             VirtualClock& clock) {
  const int num_pages = config.num_pages > 0 ? config.num_pages : model.pages_in(config.pool_bytes);
  return std::make_unique<SimBackend>(model, num_pages, clock);
}

}  // namespace ekv
