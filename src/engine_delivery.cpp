// The second half of a step: what the device said becomes tokens, findable KV and a report. By then the next
// step may be in flight. It knows the sequences as advance() left them, and they may have gone since:
// cancelled, failed, or ended by a stop token that it did not know of.

#include <algorithm>

#include "elastickv/engine.h"

namespace ekv {
namespace {

std::string invalid_chunk_error(bool fp16_activations) {
  std::string text =
      "the model's keys, values or logits were not finite for this request, or its stop tokens and min_tokens "
      "left no token to choose";
  if (fp16_activations) text += ". If the model was made for bfloat16, serve it with --dtype bfloat16";
  return text;
}

}  // namespace

void Engine::land(Flight& flight) {
  if (flight.submitted) deliver(flight, collect(flight));
  const StepRecord& r = flight.record;
  planner_.learn({r.num_prefill_tokens + r.num_decode_tokens, r.prefill_keys, r.decode_keys}, r.device_us);
  report(flight.record);
}

const StepOutput& Engine::collect(Flight& flight) {
  const int64_t start_us = clock_.now_us();
  const StepOutput& output = backend_->collect();
  const int64_t end_us = clock_.now_us();
  flight.record.wait_us = end_us - start_us;
  flight.record.device_us = end_us - std::max(flight.submit_us, collected_us_.value_or(0));
  collected_us_ = end_us;
  return output;
}

void Engine::deliver(Flight& flight, const StepOutput& output) {
  EKV_CHECK(output.rows.size() == flight.packed.sample_rows.size(), "the backend answers each sample row once");
  StepRecord& record = flight.record;
  const Exposure seen = charge_exposure(flight.plan, flight.packed, sequences_);
  record.pairs_seen = seen.pairs, record.base_pairs_seen = seen.base_pairs;
  record.query_pairs_seen = seen.query_pairs, record.query_base_pairs_seen = seen.query_base_pairs;
  for (int32_t chunk : output.invalid_chunks)
    if (Sequence* sequence = sequences_.find(flight.plan.chunks[size_t(chunk)].seq))
      finish(*sequence, FinishReason::error, {.error = invalid_chunk_error(backend_->info().fp16_activations)});
  for (const ChunkPlan& chunk : flight.plan.chunks) {
    // Who waits was preempted by the step in flight, which admitted nobody, and has no KV any more.
    Sequence* sequence = sequences_.find(chunk.seq);
    if (sequence && sequence->state == SeqState::running)
      kv_.publish(*sequence, chunk.first_pos + chunk.num_tokens);
  }
  deliver_tokens(flight, output);
  for (uint32_t ticket : output.transfers_done) kv_.transfer_done(ticket);
  kv_.finish_loads(sequences_.running());
  record.transfers_done = int(output.transfers_done.size());
  record.clamped_values = output.clamped_values;
}

// First tokens leave before the next ones of streams that are under way: with 512 streams the messages of a
// step take milliseconds, which a first token at their end would wait for.
void Engine::deliver_tokens(const Flight& flight, const StepOutput& output) {
  const int64_t now_us = clock_.now_us();
  for (const bool first_token : {true, false})
    for (size_t i = 0; i < output.rows.size(); ++i) {
      const SampleRow& asked = flight.packed.sample_rows[i];
      Sequence* sequence = sequences_.find(flight.packed.sample_seqs[i]);
      if (sequence && (asked.output_index == 0) == first_token)
        deliver_row(*sequence, asked, output.rows[i], now_us);
    }
}

// Of the row that was asked for its places only: what it pointed to may have moved since.
void Engine::deliver_row(Sequence& sequence, const SampleRow& asked, const SampledRow& row, int64_t now_us) {
  if (asked.target >= 0) {
    EKV_CHECK(row.logprobs.has_value(), "a prompt row carries its logprobs");
    sequence.prompt_logprobs.push_back(*row.logprobs);
    return;
  }
  const int num_output = asked.output_index + 1;
  const auto place = size_t(sequence.num_prompt() + asked.output_index);
  if (place == sequence.tokens.size()) sequence.tokens.push_back(pending_token(0));  // its last token
  EKV_CHECK(is_pending(sequence.tokens[place]), "a token is sampled once");
  sequence.tokens[place] = row.token;
  sequence.stats.num_output = num_output;
  if (num_output == 1) sequence.stats.first_token_us = now_us;
  sequence.stats.last_token_us = now_us;

  SeqEvent event{.token = row.token, .logprobs = row.logprobs};
  if (num_output == 1) event.prompt_logprobs = std::move(sequence.prompt_logprobs);
  const FinishReason reason = finish_reason(sequence, num_output, row.token);
  if (reason != FinishReason::none) return finish(sequence, reason, std::move(event));
  event.id = sequence.id;
  event.stats = sequence.stats;
  listener_.on_event(std::move(event));
}

bool Engine::is_full(const Sequence& sequence, int num_output) const {
  return num_output >= sequence.request.sampling.max_tokens ||
         sequence.num_prompt() + num_output >= config_.max_model_len;
}

FinishReason Engine::finish_reason(const Sequence& sequence, int num_output, TokenId last) const {
  const auto& stops = sequence.request.sampling.stop_token_ids;
  const bool may_stop = num_output >= sequence.request.sampling.min_tokens;
  if (may_stop && std::find(stops.begin(), stops.end(), last) != stops.end()) return FinishReason::stop;
  return is_full(sequence, num_output) ? FinishReason::length : FinishReason::none;
}

// A step in flight may still read and write what is released here: every step that can get those pages comes
// after it.
void Engine::finish(Sequence& sequence, FinishReason reason, SeqEvent event) {
  kv_.release(sequence);
  event.id = sequence.id;
  event.finish = reason;
  event.stats = sequence.stats;
  sequences_.erase(sequence.id);
  listener_.on_event(std::move(event));
}

void Engine::report(StepRecord& record) {
  record.end_us = clock_.now_us();
  record.num_running = int(sequences_.running().size());
  record.num_waiting = int(sequences_.waiting().size());
  record.free_pages = kv_.num_free_pages();
  record.cached_pages = kv_.num_cached_pages();
  record.total_pages = kv_.num_pages();
  const PairTable& pairs = kv_.pairs();
  record.locked_pages = pairs.num_locked_pages();
  record.resident_pairs = pairs.num_pairs(), record.resident_base_pairs = pairs.num_base();
  record.host_slots_used = pairs.num_host_slots() - pairs.num_free_host_slots() + kv_.host().num_used();
  record.stores_skipped =
      kv_.num_skipped_stores() - std::exchange(num_skipped_before_, kv_.num_skipped_stores());
  if (kv_.host().num_loads() > 0)
    record.num_loading = int(std::ranges::count_if(
        sequences_.running(), [](const Sequence* s) { return s->blocks.num_loading > 0; }));
  if (sequences_.empty()) collected_us_.reset();
  listener_.on_step(record);
}

}  // namespace ekv
