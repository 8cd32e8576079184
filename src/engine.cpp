#include "elastickv/engine.h"

#include <fmt/format.h>

#include <algorithm>

namespace ekv {
namespace {

Status check_lists(const SamplingParams& sampling) {
  const auto too_long = [](const char* name, size_t size, size_t most) {
    return Error{Error::invalid_argument,
                 fmt::format("{} has {} entries, at most {} are allowed", name, size, most), name};
  };
  if (sampling.logit_bias.size() > kMaxLogitBias)
    return too_long("logit_bias", sampling.logit_bias.size(), kMaxLogitBias);
  if (sampling.stop_token_ids.size() > kMaxStopTokenIds + kMaxEosIds)
    return too_long("stop_token_ids", sampling.stop_token_ids.size(), kMaxStopTokenIds + kMaxEosIds);
  return std::nullopt;
}

}  // namespace

Engine::Engine(const EngineConfig& config, std::unique_ptr<Backend> backend, const Clock& clock,
               EngineListener& listener)
    : config_(config),
      backend_(std::move(backend)),
      clock_(clock),
      listener_(listener),
      kv_(config.kv, backend_->info().num_pages, config.fidelity, backend_->info().num_host_slots),
      sequences_(config.scheduler.policy),
      planner_(config),
      flights_(config.async_scheduling
                   ? size_t(std::min(kMostStepsInFlight, backend_->info().max_steps_in_flight))
                   : 1) {}

Engine::~Engine() = default;

// One step, top to bottom, on the engine thread. The only place where policy, bookkeeping and device meet. With
// two steps in flight the device works on the step before while this one is planned, and 5. is about that one.
bool Engine::step() {
  // 1. Requests in: tokenised by the HTTP threads.
  Flight& flight = flights_[(oldest_ + num_in_flight_) % flights_.size()];
  flight.record = StepRecord{.start_us = clock_.now_us()};
  accept_commands();

  // 2. Policy: what to run, and which pairs change fidelity. Reads counts, writes a plan. A step without a plan
  // waits for copies, if there is nothing else to wait for.
  planner_.plan(kv_, sequences_, flight.plan);
  const bool waits = waits_for_copies();
  if (flight.plan.empty() && !waits && num_in_flight_ == 0) {
    report(flight.record);  // commands may have ended sequences
    return false;
  }

  if (!flight.plan.empty() || waits) {
    // 3. Bookkeeping: pages, pairs, block tables, queues. From here on the plan is a fact.
    commit(flight);

    // 4. Device: convert pairs, write K and V, attend, sample.
    launch(flight);
    if (++num_in_flight_ < flights_.size()) return true;
  }

  // 5. Tokens out; what is now valid KV becomes findable; copies that ended give back what they held.
  land(flights_[oldest_]);
  oldest_ = (oldest_ + 1) % flights_.size(), --num_in_flight_;
  return true;
}

Result<SeqId> Engine::submit(Request request) {
  if (Status refused = refuse(request)) return *std::move(refused);
  const SeqId id{next_id_.fetch_add(1, std::memory_order_relaxed)};
  mailbox_.put(NewSequence{id, std::move(request), clock_.now_us()});
  return id;
}

void Engine::cancel(SeqId id) { mailbox_.put(Cancel{id}); }
void Engine::reset_prefix_cache() { mailbox_.put(ResetPrefixCache{}); }
void Engine::wait_for_work(std::chrono::milliseconds at_most) { mailbox_.wait_for(at_most); }

// What can never fit is refused at once, with the numbers: retrying it would block everybody behind it.
Status Engine::refuse(const Request& request) const {
  const int prompt = int(request.prompt.size());
  if (prompt == 0) return Error{Error::invalid_argument, "the prompt has no tokens", "prompt"};
  if (prompt >= config_.max_model_len)
    return Error{
        Error::too_large,
        fmt::format("the prompt has {} tokens; the context of this server is {} tokens and must leave room "
                    "for one output token",
                    prompt, config_.max_model_len),
        "prompt"};
  if (!(request.max_base_fraction >= 0 && request.max_base_fraction <= 1))
    return Error{Error::invalid_argument,
                 fmt::format("max_base_fraction must be in [0, 1], got {}", request.max_base_fraction),
                 "max_base_fraction"};
  if (Status wrong = check_lists(request.sampling)) return *std::move(wrong);
  const int most = prompt + std::min(request.sampling.max_tokens, config_.max_model_len - prompt);
  // The last output token is never written to the cache.
  if (ceil_div(most - 1, kBlockTokens) > kv_.num_pages())
    return Error{Error::too_large,
                 fmt::format("{} prompt tokens and {} output tokens need {} KV pages; the pool has {}", prompt,
                             most - prompt, ceil_div(most - 1, kBlockTokens), kv_.num_pages()),
                 "max_tokens"};
  return std::nullopt;
}

void Engine::accept_commands() {
  mailbox_.take_all(commands_);
  for (Command& command : commands_) {
    if (auto* arrival = std::get_if<NewSequence>(&command)) {
      sequences_.add(arrival->id, std::move(arrival->request));
      sequences_[arrival->id].stats.queued_us = arrival->queued_us;
    } else if (const auto* cancelled = std::get_if<Cancel>(&command)) {
      if (Sequence* sequence = sequences_.find(cancelled->id)) finish(*sequence, FinishReason::cancelled, {});
    } else {
      kv_.reset_prefix_cache();
    }
  }
}

void Engine::commit(Flight& flight) {
  const StepPlan& plan = flight.plan;
  count_plan(flight);
  kv_.commit(plan, sequences_);
  sequences_.follow(plan);
  pack_step(plan, kv_.pairs(), config_.fidelity.attention_path, sequences_, flight.packed);
  mark_taint(plan, flight.packed, sequences_);
  count_fidelity(flight);
  count_copies(flight.record);
}

void Engine::launch(Flight& flight) {
  StepRecord& record = flight.record;
  flight.submit_us = clock_.now_us();
  record.plan_us = flight.submit_us - record.start_us;
  flight.submitted = !flight.plan.chunks.empty() || !kv_.jobs().empty() || waits_for_copies();
  if (!flight.submitted) return;
  const bool device_works = num_in_flight_ > 0 && flights_[oldest_].submitted;
  if (!device_works && collected_us_) record.host_gap_us = flight.submit_us - *collected_us_;
  backend_->submit(flight.packed.view(kv_.jobs()));
  advance(flight);
}

// Sequences as they are for the step after the one that was submitted. Who surely ends with its token is not
// planned again; a stop token shows only at delivery, and what was computed beyond it is dropped there.
void Engine::advance(const Flight& flight) {
  for (const ChunkPlan& chunk : flight.plan.chunks) sequences_[chunk.seq].num_computed += chunk.num_tokens;
  const PackedStep& packed = flight.packed;
  for (size_t i = 0; i < packed.sample_rows.size(); ++i) {
    if (packed.sample_rows[i].target >= 0) continue;
    Sequence& sequence = sequences_[packed.sample_seqs[i]];
    if (!is_full(sequence, sequence.num_output() + 1)) sequence.tokens.push_back(pending_token(int32_t(i)));
  }
}

void Engine::count_plan(Flight& flight) {
  const StepPlan& plan = flight.plan;
  StepRecord& record = flight.record;
  for (SeqId id : plan.preempted) ++sequences_[id].stats.num_preemptions;
  for (const ChunkPlan& chunk : plan.chunks) {
    (chunk.num_tokens == 1 && chunk.sample ? record.num_decode_tokens : record.num_prefill_tokens) +=
        chunk.num_tokens;
    Sequence& sequence = sequences_[chunk.seq];
    const int end = chunk.first_pos + chunk.num_tokens;
    record.num_recomputed += std::clamp(sequence.num_ever_computed - chunk.first_pos, 0, chunk.num_tokens);
    sequence.num_ever_computed = std::max(sequence.num_ever_computed, end);
  }
  for (const ChunkPlan& chunk : std::span(plan.chunks).last(plan.admitted.size())) {
    count_admitted(chunk.seq, chunk.first_pos, record);
    record.prefix_hit_tokens += chunk.first_pos;
  }
  for (const LoadPlan& load : plan.loads) {
    count_admitted(load.seq, load.first_pos + load.num_tokens, record);
    record.prefix_hit_tokens += load.first_pos;
  }
  record.num_preemptions_avoided = planner_.num_avoided();
  record.num_admitted = int(plan.admitted.size() + plan.loads.size());
  record.num_preempted = int(plan.preempted.size());
}

// `num_cached`: tokens that need not be computed.
void Engine::count_admitted(SeqId id, int num_cached, StepRecord& record) {
  Sequence& sequence = sequences_[id];
  record.prefix_query_tokens += sequence.may_use_prefix_cache() ? sequence.num_tokens() : 0;
  if (sequence.stats.num_preemptions > 0) return;
  sequence.stats.first_scheduled_us = clock_.now_us();
  sequence.stats.num_cached = num_cached;
}

void Engine::count_fidelity(Flight& flight) {
  const StepPlan& plan = flight.plan;
  StepRecord& record = flight.record;
  record.path = flight.packed.path;
  const KvJobs& jobs = kv_.jobs();
  record.demoted_pairs = int(jobs.demotes.size());  // with those that only the prefix cache has
  record.promoted_pairs = int(jobs.promotes.size());
  record.restores_begun = int(plan.restores.size());
  record.backups_begun = int(plan.backups.size());
  record.shortage = planner_.shortage(), record.reserve = planner_.reserve();
  for (size_t i = 0; i < plan.chunks.size(); ++i) {
    const int64_t rows = plan.chunks[i].num_tokens, keys = flight.packed.kv_len[i];
    if (rows > 1)  // the last row sees all keys, each one before it one less
      ++record.num_prefill_chunks, record.prefill_keys += rows * keys - rows * (rows - 1) / 2;
    else
      record.decode_keys += keys, record.decode_base_pairs += flight.packed.base_runs[i].count;
  }
}

void Engine::count_copies(StepRecord& record) {
  const BackendInfo& info = backend_->info();
  const KvJobs& jobs = kv_.jobs();
  for (const DemoteJob& job : jobs.demotes)
    if (job.low >= 0) record.to_host_bytes += int64_t(info.low_plane_bytes);
  for (const TransferJob& job : jobs.transfers) {
    record.stores_begun += job.kind == TransferKind::store_pair;
    record.loads_begun += job.kind == TransferKind::load_pair;
    const auto bytes = int64_t(is_whole_pair(job.kind) ? info.pair_bytes : info.low_plane_bytes);
    (is_to_host(job.kind) ? record.to_host_bytes : record.from_host_bytes) += bytes;
  }
}

void Engine::fail_all(const std::string& reason) {
  accept_commands();
  for (const bool running : {true, false})
    while (!(running ? sequences_.running() : sequences_.waiting()).empty())
      finish(*(running ? sequences_.running() : sequences_.waiting()).back(), FinishReason::error,
             {.error = reason});
}

void Engine::check_integrity() const { kv_.check_integrity(sequences_.running()); }

}  // namespace ekv
