#include "sched/pack_step.h"

#include <algorithm>

namespace ekv {
namespace {

Slot slot_of(const BlockTable& blocks, const PairTable& pairs, int position) {
  const size_t index = size_t(position / kPairTokens);
  EKV_CHECK(index < blocks.pairs.size(), "a written position must lie in the block table");
  const PairEntry& pair = pairs.entry(blocks.pairs[index]);
  const int page = position % kPairTokens < kBlockTokens ? pair.even : pair.odd;
  EKV_CHECK(!pair.is_base() && page != int(kNoPage), "a written position must lie in a TARGET page");
  return Slot(page) * kBlockTokens + position % kBlockTokens;
}

// Copies the table of a sequence and tells where its BASE pairs lie.
BaseRun pack_table(const BlockTable& blocks, const PairTable& pairs, PairEntry* row) {
  BaseRun run;
  for (size_t i = 0; i < blocks.pairs.size(); ++i) {
    row[i] = pairs.entry(blocks.pairs[i]);
    if (row[i].is_base()) run.add(int32_t(i));
  }
  return run;
}

KvPath path_of(std::span<const BaseRun> runs, AttentionPath attention_path) {
  const KvPath path = choose_path(runs, KvPath::native);
  const bool as_asked = path == KvPath::native || attention_path == AttentionPath::automatic;
  return as_asked ? path : KvPath::general;
}

void pack_rows(const ChunkPlan& chunk, const PairTable& pairs, const Sequence& sequence, PackedStep& packed) {
  for (int i = 0; i < chunk.num_tokens; ++i) {
    const int position = chunk.first_pos + i;
    packed.tokens.push_back(sequence.tokens[size_t(position)]);
    packed.positions.push_back(position);
    packed.slot_mapping.push_back(slot_of(sequence.blocks, pairs, position));
  }
  packed.q_start.push_back(int32_t(packed.tokens.size()));
  packed.kv_len.push_back(chunk.first_pos + chunk.num_tokens);
}

void add_sample_row(const Sequence& sequence, int row, TokenId target, int num_logprobs, PackedStep& packed) {
  packed.sample_rows.push_back({.row = row,
                                .target = target,
                                .output_index = sequence.num_output(),
                                .num_logprobs = num_logprobs,
                                .params = &sequence.request.sampling,
                                .tokens = sequence.tokens,
                                .num_prompt = sequence.num_prompt(),
                                .seq = sequence.id});
  packed.sample_seqs.push_back(sequence.id);
}

// Row r of the chunk predicts the token after it: prompt logprobs need the rows whose successor is a prompt
// token, once; a resumed sequence has collected them already.
void pack_samples(const ChunkPlan& chunk, const Sequence& sequence, PackedStep& packed) {
  const int first_row = packed.q_start[packed.q_start.size() - 2];
  const SamplingParams& params = sequence.request.sampling;
  if (params.prompt_logprobs >= 0 && sequence.num_output() == 0) {
    const int first = std::max(chunk.first_pos, int(sequence.prompt_logprobs.size()));
    const int end = std::min(chunk.first_pos + chunk.num_tokens, sequence.num_prompt() - 1);
    for (int position = first; position < end; ++position)
      add_sample_row(sequence, first_row + position - chunk.first_pos, sequence.tokens[size_t(position) + 1],
                     params.prompt_logprobs, packed);
  }
  if (chunk.sample) add_sample_row(sequence, first_row + chunk.num_tokens - 1, -1, params.logprobs, packed);
}

}  // namespace

StepInput PackedStep::view(const KvJobs& jobs) const {
  return {.demotes = jobs.demotes,
          .promotes = jobs.promotes,
          .transfers = jobs.transfers,
          .tokens = tokens,
          .positions = positions,
          .slot_mapping = slot_mapping,
          .q_start = q_start,
          .kv_len = kv_len,
          .block_table = {table, max_pairs},
          .base_runs = base_runs,
          .path = path,
          .sample_rows = sample_rows};
}

void pack_step(const StepPlan& plan, const PairTable& pairs, AttentionPath attention_path,
               SequenceTable& sequences, PackedStep& packed) {
  packed.tokens.clear(), packed.positions.clear(), packed.slot_mapping.clear();
  packed.q_start.assign(1, 0), packed.kv_len.clear();
  packed.sample_rows.clear(), packed.sample_seqs.clear(), packed.base_runs.clear();

  packed.max_pairs = 0;
  for (const ChunkPlan& chunk : plan.chunks)
    packed.max_pairs = std::max(packed.max_pairs, int(sequences[chunk.seq].blocks.pairs.size()));
  const size_t entries = plan.chunks.size() * size_t(packed.max_pairs);
  if (packed.table.capacity() < entries)
    packed.table.reserve(2 * entries);  // tables grow by a pair every 32 steps
  packed.table.assign(entries, PairEntry{});

  PairEntry* row = packed.table.data();
  for (const ChunkPlan& chunk : plan.chunks) {
    const Sequence& sequence = sequences[chunk.seq];
    pack_rows(chunk, pairs, sequence, packed);
    pack_samples(chunk, sequence, packed);
    packed.base_runs.push_back(pack_table(sequence.blocks, pairs, row));
    row += packed.max_pairs;
  }
  packed.path = path_of(packed.base_runs, attention_path);
}

void mark_taint(const StepPlan& plan, PackedStep& packed, SequenceTable& sequences) {
  packed.tainted.clear();
  for (size_t i = 0; i < plan.chunks.size(); ++i) {
    Sequence& sequence = sequences[plan.chunks[i].seq];
    if (packed.base_runs[i].count > 0)
      sequence.tainted_from = std::min(sequence.tainted_from, plan.chunks[i].first_pos);
    packed.tainted.push_back(sequence.tainted_from != kClean);
  }
}

Exposure charge_exposure(const StepPlan& plan, const PackedStep& packed, SequenceTable& sequences) {
  Exposure sum;
  for (size_t i = 0; i < plan.chunks.size(); ++i) {
    const ChunkPlan& chunk = plan.chunks[i];
    Sequence* sequence = sequences.find(chunk.seq);
    if (!sequence) continue;
    const int num_pairs = ceil_div(packed.kv_len[i], kPairTokens), num_base = packed.base_runs[i].count;
    SeqStats& stats = sequence->stats;
    stats.pairs_seen += num_pairs, stats.base_pairs_seen += num_base;
    stats.peak_base_fraction = std::max(stats.peak_base_fraction, double(num_base) / num_pairs);
    if (packed.tainted[i]) stats.num_tainted += chunk.num_tokens;
    sum.pairs += num_pairs, sum.base_pairs += num_base;
    sum.query_pairs += int64_t(num_pairs) * chunk.num_tokens;
    sum.query_base_pairs += int64_t(num_base) * chunk.num_tokens;
  }
  return sum;
}

}  // namespace ekv
