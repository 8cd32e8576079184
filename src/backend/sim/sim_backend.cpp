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
  work.num_demoted_pairs = int(input.demotes.size());
  work.num_promoted_pairs = int(input.promotes.size());
  for (size_t i = 0; i < input.kv_len.size(); ++i) {
    const auto num_pairs = size_t(ceil_div(input.kv_len[i], kPairTokens));
    const auto row = input.block_table.row(int(i)).first(num_pairs);
    work.chunks.push_back({.num_tokens = input.q_start[i + 1] - input.q_start[i],
                           .kv_len = input.kv_len[i],
                           .num_base_pairs = count_base(row)});
  }
}

SimBackend::SimBackend(CostModel model, int num_pages, VirtualClock& clock, int num_host_slots)
    : model_(std::move(model)),
      clock_(clock),
      info_{.name = "sim",
            .num_pages = num_pages,
            .num_host_slots = num_host_slots,
            .low_plane_bytes = model_.slot_bytes(HostContent::low_planes),
            .pair_bytes = model_.slot_bytes(HostContent::whole_pairs)},
      transfers_(model_.to_host, model_.from_host) {}

void SimBackend::start_transfer(TransferKind kind, uint32_t ticket) {
  transfers_.start(clock_.now_us(),
                   is_to_host(kind) ? TransferDirection::to_host : TransferDirection::from_host,
                   is_whole_pair(kind) ? info_.pair_bytes : info_.low_plane_bytes, ticket);
}

void SimBackend::submit(const StepInput& input) {
  jobs_.assign(input.transfers.begin(), input.transfers.end());
  waits_ = input.q_start.size() < 2 && input.demotes.empty() && input.promotes.empty() && jobs_.empty();
  for (const DemoteJob& job : input.demotes)
    if (job.low >= 0) start_transfer(TransferKind::backup_low, job.ticket);
  for (const TransferJob& job : jobs_)
    if (job.kind == TransferKind::load_pair) start_transfer(job.kind, job.ticket);
  measure_work(input, work_);
  output_.rows.clear();
  for (const SampleRow& row : input.sample_rows) output_.rows.push_back(answer(row));
}

const StepOutput& SimBackend::collect() {
  clock_.advance_us(std::llround(step_us(model_, work_)));
  if (const auto next_us = transfers_.next_done_us(); waits_ && next_us && *next_us > clock_.now_us())
    clock_.advance_us(*next_us - clock_.now_us());
  for (const TransferJob& job : jobs_)
    if (job.kind != TransferKind::load_pair) start_transfer(job.kind, job.ticket);
  done_.clear();
  transfers_.take_done(clock_.now_us(), done_);
  output_.transfers_done.assign(done_.begin(), done_.end());
  return output_;
}

std::unique_ptr<SimBackend> make_sim_backend(const CostModel& model, const KvConfig& config,
                                             VirtualClock& clock, int num_host_slots) {
  const int num_pages = config.num_pages > 0 ? config.num_pages : model.pages_in(config.pool_bytes);
  return std::make_unique<SimBackend>(model, num_pages, clock, num_host_slots);
}

}  // namespace ekv
