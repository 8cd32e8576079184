#include "sched/pack_step.h"

#include <algorithm>

namespace ekv {
namespace {

Slot slot_of(const BlockTable& blocks, int position) {
  const PairRef& pair = blocks.pairs[size_t(position / kPairTokens)];
  const PageId page = position % kPairTokens < kBlockTokens ? pair.even : pair.odd;
  EKV_CHECK(pair.fidelity == Fidelity::target && page != kNoPage,
            "a written position must lie in a TARGET page");
  return Slot(page) * kBlockTokens + position % kBlockTokens;
}

PairEntry entry_of(const PairRef& pair) {
  const bool base = pair.fidelity == Fidelity::base;
  return {int32_t(uint32_t(pair.even) | (base ? kBasePair : 0)), int32_t(pair.odd)};
}

void pack_rows(const ChunkPlan& chunk, const Sequence& sequence, PackedStep& packed) {
  for (int i = 0; i < chunk.num_tokens; ++i) {
    const int position = chunk.first_pos + i;
    packed.tokens.push_back(sequence.tokens[size_t(position)]);
    packed.positions.push_back(position);
    packed.slot_mapping.push_back(slot_of(sequence.blocks, position));
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
                                .num_prompt = sequence.num_prompt()});
  packed.sample_seqs.push_back(sequence.id);
}

// Row r of the chunk predicts the token after it: prompt logprobs need the rows whose successor is a prompt
// token, once; a resumed sequence has collected them already.
void pack_samples(const ChunkPlan& chunk, const Sequence& sequence, PackedStep& packed) {
  const int first_row = packed.q_start[packed.q_start.size() - 2];
  const SamplingParams& params = sequence.request.sampling;
  if (params.prompt_logprobs >= 0) {
    const int first = std::max(chunk.first_pos, int(sequence.prompt_logprobs.size()));
    const int end = std::min(chunk.first_pos + chunk.num_tokens, sequence.num_prompt() - 1);
    for (int position = first; position < end; ++position)
      add_sample_row(sequence, first_row + position - chunk.first_pos, sequence.tokens[size_t(position) + 1],
                     params.prompt_logprobs, packed);
  }
  if (chunk.sample) add_sample_row(sequence, first_row + chunk.num_tokens - 1, -1, params.logprobs, packed);
}

}  // namespace

StepInput PackedStep::view() const {
  return {.tokens = tokens,
          .positions = positions,
          .slot_mapping = slot_mapping,
          .q_start = q_start,
          .kv_len = kv_len,
          .block_table = {table, max_pairs},
          .sample_rows = sample_rows};
}

void pack_step(const StepPlan& plan, SequenceTable& sequences, PackedStep& packed) {
  packed.tokens.clear(), packed.positions.clear(), packed.slot_mapping.clear();
  packed.q_start.assign(1, 0), packed.kv_len.clear();
  packed.sample_rows.clear(), packed.sample_seqs.clear();

  packed.max_pairs = 0;
  for (const ChunkPlan& chunk : plan.chunks)
    packed.max_pairs = std::max(packed.max_pairs, int(sequences[chunk.seq].blocks.pairs.size()));
  const size_t entries = plan.chunks.size() * size_t(packed.max_pairs);
  if (packed.table.capacity() < entries)
    packed.table.reserve(2 * entries);  // tables grow by a pair every 32 steps
  packed.table.assign(entries, PairEntry{});

  auto row = packed.table.begin();
  for (const ChunkPlan& chunk : plan.chunks) {
    const Sequence& sequence = sequences[chunk.seq];
    pack_rows(chunk, sequence, packed);
    pack_samples(chunk, sequence, packed);
    std::transform(sequence.blocks.pairs.begin(), sequence.blocks.pairs.end(), row, entry_of);
    row += packed.max_pairs;
  }
}

}  // namespace ekv
