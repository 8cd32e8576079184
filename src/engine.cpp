#include "elastickv/engine.h"

#include <fmt/format.h>

#include <algorithm>

namespace ekv {

Engine::Engine(const EngineConfig& config, std::unique_ptr<Backend> backend, const Clock& clock,
               EngineListener& listener)
    : config_(config),
      backend_(std::move(backend)),
      clock_(clock),
      listener_(listener),
      kv_(config.kv, backend_->info().num_pages, config.fidelity, backend_->info().num_host_slots),
      sequences_(config.scheduler.policy),
      planner_(config) {}

Engine::~Engine() = default;

// One step, top to bottom, on the engine thread. The only place where policy, bookkeeping and device meet.
// Returns false when there was nothing to run.
bool Engine::step() {
  // 1. Requests in: tokenised by the HTTP threads.
  const int64_t start_us = clock_.now_us();
  record_ = StepRecord{};
  accept_commands();

  // 2. Policy: what to run, and which pairs change fidelity. Reads counts, writes a plan.
  planner_.plan(kv_, sequences_, plan_);
  if (plan_.empty() && kv_.pairs().num_transfers() == 0) {
    report(start_us, start_us);  // commands may have ended sequences
    return false;
  }

  // 3. Bookkeeping: pages, pairs, block tables, queues. From here on the plan is a fact.
  count_plan();
  kv_.commit(plan_, sequences_);
  for (SeqId id : plan_.preempted) sequences_.preempt(id);
  for (SeqId id : plan_.admitted) sequences_.admit(id);
  for (const LoadPlan& load : plan_.loads) sequences_.admit(load.seq);
  pack_step(plan_, kv_.pairs(), config_.fidelity.attention_path, sequences_, packed_);
  count_fidelity();
  count_copies();
  const int64_t planned_us = clock_.now_us();

  // 4. Device: convert pairs, write K and V, attend, sample. A step may preempt only, and then has nothing to
  // do.
  if (!plan_.chunks.empty() || !kv_.jobs().empty() || kv_.pairs().num_transfers() > 0) {
    backend_->submit(packed_.view(kv_.jobs()));
    const StepOutput& output = backend_->collect();
    record_.device_us = clock_.now_us() - planned_us;

    // 5. Tokens out; what is now valid KV becomes findable; copies that ended give back what they held.
    deliver(output);
  }
  report(start_us, planned_us);
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

void Engine::count_plan() {
  for (SeqId id : plan_.preempted) ++sequences_[id].stats.num_preemptions;
  for (const ChunkPlan& chunk : plan_.chunks) {
    (chunk.num_tokens == 1 && chunk.sample ? record_.num_decode_tokens : record_.num_prefill_tokens) +=
        chunk.num_tokens;
    Sequence& sequence = sequences_[chunk.seq];
    const int end = chunk.first_pos + chunk.num_tokens;
    record_.num_recomputed += std::clamp(sequence.num_ever_computed - chunk.first_pos, 0, chunk.num_tokens);
    sequence.num_ever_computed = std::max(sequence.num_ever_computed, end);
  }
  for (const ChunkPlan& chunk : std::span(plan_.chunks).last(plan_.admitted.size())) {
    count_admitted(chunk.seq, chunk.first_pos);
    record_.prefix_hit_tokens += chunk.first_pos;
  }
  for (const LoadPlan& load : plan_.loads) {
    count_admitted(load.seq, load.first_pos + load.num_tokens);
    record_.prefix_hit_tokens += load.first_pos;
  }
  record_.num_preemptions_avoided = planner_.num_avoided();
}

// `num_cached`: tokens that need not be computed.
void Engine::count_admitted(SeqId id, int num_cached) {
  Sequence& sequence = sequences_[id];
  record_.prefix_query_tokens += sequence.may_use_prefix_cache() ? sequence.num_tokens() : 0;
  if (sequence.stats.num_preemptions > 0) return;
  sequence.stats.first_scheduled_us = clock_.now_us();
  sequence.stats.num_cached = num_cached;
}

void Engine::count_fidelity() {
  const Exposure seen = charge_exposure(plan_, packed_, sequences_);
  record_.pairs_seen = seen.pairs, record_.base_pairs_seen = seen.base_pairs;
  record_.query_pairs_seen = seen.query_pairs, record_.query_base_pairs_seen = seen.query_base_pairs;
  record_.path = packed_.path;
  const KvJobs& jobs = kv_.jobs();
  record_.demoted_pairs = int(jobs.demotes.size());  // with those that only the prefix cache has
  record_.promoted_pairs = int(jobs.promotes.size());
  record_.restores_begun = int(plan_.restores.size());
  record_.backups_begun = int(plan_.backups.size());
  record_.shortage = planner_.shortage(), record_.reserve = planner_.reserve();
}

void Engine::count_copies() {
  const BackendInfo& info = backend_->info();
  const KvJobs& jobs = kv_.jobs();
  for (const DemoteJob& job : jobs.demotes)
    if (job.low >= 0) record_.to_host_bytes += int64_t(info.low_plane_bytes);
  for (const TransferJob& job : jobs.transfers) {
    record_.stores_begun += job.kind == TransferKind::store_pair;
    record_.loads_begun += job.kind == TransferKind::load_pair;
    const auto bytes = int64_t(is_whole_pair(job.kind) ? info.pair_bytes : info.low_plane_bytes);
    (is_to_host(job.kind) ? record_.to_host_bytes : record_.from_host_bytes) += bytes;
  }
}

void Engine::deliver(const StepOutput& output) {
  EKV_CHECK(output.rows.size() == packed_.sample_rows.size(), "the backend answers each sample row once");
  for (int32_t chunk : output.invalid_chunks)
    finish(sequences_[plan_.chunks[size_t(chunk)].seq], FinishReason::error,
           {.error = "the model's keys, values or logits were not finite for this request"});
  for (const ChunkPlan& chunk : plan_.chunks) {
    Sequence* sequence = sequences_.find(chunk.seq);
    if (!sequence) continue;
    sequence->num_computed += chunk.num_tokens;
    kv_.publish(*sequence);
  }
  // First tokens leave before the next ones of streams that are under way: with 512 streams the messages of a
  // step take milliseconds, which a first token at their end would wait for.
  const int64_t now_us = clock_.now_us();
  for (const bool first_token : {true, false})
    for (size_t i = 0; i < output.rows.size(); ++i) {
      const SampleRow& asked = packed_.sample_rows[i];
      Sequence* sequence = sequences_.find(packed_.sample_seqs[i]);
      if (sequence && (asked.output_index == 0) == first_token)
        deliver_row(*sequence, asked, output.rows[i], now_us);
    }
  for (uint32_t ticket : output.transfers_done) kv_.transfer_done(ticket);
  kv_.finish_loads(sequences_.running());
  record_.transfers_done = int(output.transfers_done.size());
  record_.clamped_values = output.clamped_values;
}

void Engine::deliver_row(Sequence& sequence, const SampleRow& asked, const SampledRow& row, int64_t now_us) {
  if (asked.target >= 0) {
    EKV_CHECK(row.logprobs.has_value(), "a prompt row carries its logprobs");
    sequence.prompt_logprobs.push_back(*row.logprobs);
    return;
  }
  sequence.tokens.push_back(row.token);
  sequence.stats.num_output = sequence.num_output();
  if (sequence.num_output() == 1) sequence.stats.first_token_us = now_us;
  sequence.stats.last_token_us = now_us;

  SeqEvent event{.token = row.token, .logprobs = row.logprobs};
  if (sequence.num_output() == 1) event.prompt_logprobs = std::move(sequence.prompt_logprobs);
  const FinishReason reason = finish_reason(sequence);
  if (reason != FinishReason::none) return finish(sequence, reason, std::move(event));
  event.id = sequence.id;
  event.stats = sequence.stats;
  listener_.on_event(std::move(event));
}

FinishReason Engine::finish_reason(const Sequence& sequence) const {
  const SamplingParams& params = sequence.request.sampling;
  const auto& stops = params.stop_token_ids;
  const bool may_stop = sequence.num_output() >= params.min_tokens;
  if (may_stop && std::find(stops.begin(), stops.end(), sequence.tokens.back()) != stops.end())
    return FinishReason::stop;
  const bool full =
      sequence.num_output() >= params.max_tokens || sequence.num_tokens() >= config_.max_model_len;
  return full ? FinishReason::length : FinishReason::none;
}

void Engine::finish(Sequence& sequence, FinishReason reason, SeqEvent event) {
  kv_.release(sequence);
  event.id = sequence.id;
  event.finish = reason;
  event.stats = sequence.stats;
  sequences_.erase(sequence.id);
  listener_.on_event(std::move(event));
}

void Engine::report(int64_t start_us, int64_t planned_us) {
  record_.start_us = start_us;
  record_.plan_us = planned_us - start_us;
  record_.end_us = clock_.now_us();
  record_.num_running = int(sequences_.running().size());
  record_.num_waiting = int(sequences_.waiting().size());
  record_.num_admitted = int(plan_.admitted.size() + plan_.loads.size());
  record_.num_preempted = int(plan_.preempted.size());
  record_.free_pages = kv_.num_free_pages();
  record_.cached_pages = kv_.num_cached_pages();
  record_.total_pages = kv_.num_pages();
  const PairTable& pairs = kv_.pairs();
  record_.locked_pages = pairs.num_locked_pages();
  record_.resident_pairs = pairs.num_pairs(), record_.resident_base_pairs = pairs.num_base();
  record_.host_slots_used = pairs.num_host_slots() - pairs.num_free_slots() + kv_.host().num_used();
  record_.stores_skipped =
      kv_.num_skipped_stores() - std::exchange(num_skipped_before_, kv_.num_skipped_stores());
  if (kv_.host().num_loads() > 0)
    record_.num_loading = int(std::ranges::count_if(
        sequences_.running(), [](const Sequence* s) { return s->blocks.num_loading > 0; }));
  listener_.on_step(record_);
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
