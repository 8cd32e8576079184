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
            .pair_bytes = model_.slot_bytes(HostContent::whole_pairs),
            .max_steps_in_flight = kMostStepsInFlight},
      transfers_(model_.to_host, model_.from_host) {}

void SimBackend::start_transfer(int64_t begin_us, TransferKind kind, uint32_t ticket) {
  transfers_.start(begin_us, is_to_host(kind) ? TransferDirection::to_host : TransferDirection::from_host,
                   is_whole_pair(kind) ? info_.pair_bytes : info_.low_plane_bytes, ticket);
}

// Copies are queued here for the times at which the step will begin and end: no later step begins before.
void SimBackend::submit(const StepInput& input) {
  EKV_CHECK(num_flights_ < flights_.size(), "a step was submitted before an older one was collected");
  Flight& flight = flights_[(first_ + num_flights_++) % flights_.size()];
  measure_work(input, work_);
  const int64_t begin_us = std::max(clock_.now_us(), free_us_);
  // Beyond the time at which a run of absurd figures ends with an error (kMostRunUs), and with both steps in
  // flight still below 2^63.
  free_us_ = flight.end_us = begin_us + std::llround(std::min(step_us(model_, work_), 3e18));
  flight.waits = input.empty();
  for (const DemoteJob& job : input.demotes)
    if (job.low >= 0) start_transfer(begin_us, TransferKind::backup_low, job.ticket);
  for (const bool with_the_step : {true, false})
    for (const TransferJob& job : input.transfers)
      if ((job.kind == TransferKind::load_pair) == with_the_step)
        start_transfer(with_the_step ? begin_us : flight.end_us, job.kind, job.ticket);
  flight.rows.clear();
  for (const SampleRow& row : input.sample_rows) flight.rows.push_back(answer(row));
}

const StepOutput& SimBackend::collect() {
  EKV_CHECK(num_flights_ > 0, "there is no step to collect");
  Flight& flight = flights_[first_];
  first_ = (first_ + 1) % flights_.size(), --num_flights_;
  clock_.advance_to(flight.end_us);
  const auto next_us = transfers_.next_done_us();
  if (flight.waits && next_us) clock_.advance_to(*next_us);
  done_.clear();
  transfers_.take_done(clock_.now_us(), done_);
  output_.transfers_done.assign(done_.begin(), done_.end());
  output_.rows.swap(flight.rows);  // the flight gets the buffer of a step whose output is not valid any more
  return output_;
}

std::unique_ptr<SimBackend> make_sim_backend(const CostModel& model, const KvConfig& config,
                                             VirtualClock& clock, int num_host_slots) {
  const int num_pages = config.num_pages > 0 ? config.num_pages : model.pages_in(config.pool_bytes);
  return std::make_unique<SimBackend>(model, num_pages, clock, num_host_slots);
}

}  // namespace ekv
