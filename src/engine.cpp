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
      kv_(config.kv, backend_->info().num_pages),
      sequences_(config.scheduler.policy) {}

Engine::~Engine() = default;

// One step, top to bottom, on the engine thread. The only place where policy, bookkeeping and device meet.
// Returns false when there was nothing to run.
bool Engine::step() {
  // 1. Requests in: tokenised by the HTTP threads.
  const int64_t start_us = clock_.now_us();
  record_ = StepRecord{};
  accept_commands();

  // 2. Policy: what to run. Pure: reads counts, writes a plan.
  view_sequences();
  plan_step(config_.scheduler, running_, waiting_, kv_.budget(), plan_);
  if (plan_.empty()) {
    report(start_us, start_us);  // commands may have ended sequences
    return false;
  }

  // 3. Bookkeeping: pages, reference counts, block tables, queues. From here on the plan is a fact.
  count_plan();
  kv_.commit(plan_, sequences_);
  for (SeqId id : plan_.preempted) sequences_.preempt(id);
  for (SeqId id : plan_.admitted) sequences_.admit(id);
  pack_step(plan_, sequences_, packed_);
  const int64_t planned_us = clock_.now_us();

  // 4. Device: write K and V, attend, sample. A step may preempt only, and then has nothing to compute.
  if (!plan_.chunks.empty()) {
    backend_->submit(packed_.view());
    const StepOutput& output = backend_->collect();
    record_.device_us = clock_.now_us() - planned_us;

    // 5. Tokens out, and what is now valid KV becomes findable.
    deliver(output);
  }
  report(start_us, planned_us);
  return true;
}

Result<SeqId> Engine::submit(Request request) {
  if (Status refused = refuse(request)) return *std::move(refused);
  const SeqId id{next_id_.fetch_add(1, std::memory_order_relaxed)};
  mailbox_.put(NewSequence{id, std::move(request)});
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
    } else if (const auto* cancelled = std::get_if<Cancel>(&command)) {
      if (Sequence* sequence = sequences_.find(cancelled->id)) finish(*sequence, FinishReason::cancelled, {});
    } else {
      kv_.reset_prefix_cache();
    }
  }
}

// Waiting sequences are viewed only as far as this step could admit them: looking up their prefixes costs time.
void Engine::view_sequences() {
  running_.clear();
  for (const Sequence* s : sequences_.running()) running_.push_back(kv_.view(*s));
  waiting_.clear();
  const size_t places = size_t(std::max(0, config_.scheduler.max_step_seqs - int(running_.size())));
  const int chunk = config_.scheduler.max_chunk_tokens;
  int64_t tokens = 0;  // that admitting those viewed so far would take from this step
  for (const Sequence* s : sequences_.waiting()) {
    if (waiting_.size() == places || tokens >= config_.scheduler.max_step_tokens) break;
    waiting_.push_back(kv_.view(*s));
    const int uncached = s->num_tokens() - waiting_.back().num_cached;
    tokens += chunk > 0 ? std::min(uncached, chunk) : uncached;
  }
}

void Engine::count_plan() {
  for (SeqId id : plan_.preempted) {
    Sequence& sequence = sequences_[id];
    ++sequence.stats.num_preemptions;
    record_.num_recomputed += sequence.num_computed;
  }
  for (const ChunkPlan& chunk : plan_.chunks)
    (chunk.num_tokens == 1 && chunk.sample ? record_.num_decode_tokens : record_.num_prefill_tokens) +=
        chunk.num_tokens;
  for (SeqId id : plan_.admitted) {
    Sequence& sequence = sequences_[id];
    const auto chunk =
        std::find_if(plan_.chunks.begin(), plan_.chunks.end(), [&](auto& c) { return c.seq == id; });
    EKV_CHECK(chunk != plan_.chunks.end(), "an admitted sequence has a chunk");
    record_.prefix_query_tokens += sequence.may_use_prefix_cache() ? sequence.num_tokens() : 0;
    record_.prefix_hit_tokens += chunk->first_pos;
    if (sequence.stats.first_scheduled_us) continue;
    sequence.stats.first_scheduled_us = clock_.now_us();
    sequence.stats.num_cached = chunk->first_pos;
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
  for (size_t i = 0; i < output.rows.size(); ++i)
    if (Sequence* sequence = sequences_.find(packed_.sample_seqs[i]))
      deliver_row(*sequence, packed_.sample_rows[i], output.rows[i]);
}

void Engine::deliver_row(Sequence& sequence, const SampleRow& asked, const SampledRow& row) {
  if (asked.target >= 0) {
    EKV_CHECK(row.logprobs.has_value(), "a prompt row carries its logprobs");
    sequence.prompt_logprobs.push_back(*row.logprobs);
    return;
  }
  const int64_t now_us = clock_.now_us();
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
  record_.num_admitted = int(plan_.admitted.size());
  record_.num_preempted = int(plan_.preempted.size());
  record_.free_pages = kv_.num_free_pages();
  record_.cached_pages = kv_.num_cached_pages();
  record_.total_pages = kv_.num_pages();
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
