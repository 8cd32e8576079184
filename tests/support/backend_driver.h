#pragma once
// backend_driver.h -- drives a Backend without an engine: sequences with pages of their own choice, chunks in
// any order. What a test wants from a step it says per sequence.

#include <algorithm>
#include <vector>

#include "elastickv/backend.h"

namespace ekv::test {

struct DrivenSequence {
  std::vector<TokenId> tokens;  // prompt, then output
  int num_prompt = 0;
  int num_computed = 0;
  std::vector<PairEntry> pairs;  // pages so far
  SamplingParams sampling = greedy_sampling();
  SeqId seq{};

  static SamplingParams greedy_sampling() {
    SamplingParams params;
    params.temperature = 0;
    return params;
  }
};

inline DrivenSequence driven(std::vector<TokenId> prompt) {
  DrivenSequence sequence;
  sequence.num_prompt = int(prompt.size());
  sequence.tokens = std::move(prompt);
  return sequence;
}

// The arrays of one step, built chunk by chunk.
class DrivenStep {
 public:
  // `free_pages`: ids to take from, at the back; the caller keeps it large enough.
  explicit DrivenStep(std::vector<int32_t>& free_pages) : free_pages_(free_pages) {}

  // The next `count` tokens of the sequence. The last one is sampled if it is the last known token.
  void add(DrivenSequence& s, int count, int num_logprobs = -1) {
    const int begin = s.num_computed, end = begin + count;
    take_pages(s, end);
    for (int position = begin; position < end; ++position) {
      const PairEntry& pair = s.pairs[position / kPairTokens];
      const int page = position % kPairTokens < kBlockTokens ? pair.even : pair.odd;
      tokens_.push_back(s.tokens[position]);
      positions_.push_back(position);
      slots_.push_back(Slot(page) * kBlockTokens + position % kBlockTokens);
    }
    q_start_.push_back(int32_t(tokens_.size()));
    kv_len_.push_back(end);
    chunks_.push_back(&s);
    if (end == int(s.tokens.size())) want(s, end - 1, -1, num_logprobs);
    s.num_computed = end;
  }

  // Logprobs of the token that follows `position`, a position of the chunk added last.
  void want_target(const DrivenSequence& s, int position, TokenId target, int num_logprobs) {
    want(s, position, target, num_logprobs);
  }

  const StepOutput& run(Backend& backend) {
    submit(backend);
    return backend.collect();
  }

  // The arrays may go afterwards.
  void submit(Backend& backend) {
    int max_pairs = 0;
    for (const DrivenSequence* s : chunks_) max_pairs = std::max(max_pairs, int(s->pairs.size()));
    std::vector<PairEntry> table(chunks_.size() * size_t(max_pairs));
    for (size_t i = 0; i < chunks_.size(); ++i) {
      std::copy(chunks_[i]->pairs.begin(), chunks_[i]->pairs.end(), table.begin() + i * size_t(max_pairs));
    }
    backend.submit({.demotes = demotes,
                    .promotes = promotes,
                    .transfers = transfers,
                    .tokens = tokens_,
                    .positions = positions_,
                    .slot_mapping = slots_,
                    .q_start = q_start_,
                    .kv_len = kv_len_,
                    .block_table = {table, max_pairs},
                    .path = path,
                    .sample_rows = samples_});
  }

  // Packs pair `pair` of the sequence before the chunks of this step; its odd page is free from now on.
  void demote(DrivenSequence& s, int pair, int low = -1, uint32_t ticket = 0) {
    PairEntry& entry = s.pairs[size_t(pair)];
    demotes.push_back({entry.even, entry.odd, low, ticket});
    free_pages_.push_back(entry.odd);
    entry = {int32_t(uint32_t(entry.even) | kBasePair), -1};
  }
  // The reverse, with the low bytes that a restore of host slot `low` has staged.
  void promote(DrivenSequence& s, int pair, int low) {
    PairEntry& entry = s.pairs[size_t(pair)];
    EKV_CHECK(!free_pages_.empty(), "the test's pool is too small");
    entry = {entry.even_page(), free_pages_.back()};
    free_pages_.pop_back();
    promotes.push_back({entry.even, entry.odd, low});
  }

  std::vector<DemoteJob> demotes;
  std::vector<PromoteJob> promotes;
  std::vector<TransferJob> transfers;
  KvPath path = KvPath::native;  // the least general one to use

  size_t num_samples() const { return samples_.size(); }

 private:
  void take_pages(DrivenSequence& s, int end) {
    for (int block = 0; block * kBlockTokens < end; ++block) {
      if (block % 2 == 0 && size_t(block / 2) == s.pairs.size()) s.pairs.emplace_back();
      PairEntry& pair = s.pairs[block / 2];
      if (pair.is_base()) continue;
      int32_t& page = block % 2 == 0 ? pair.even : pair.odd;
      if (page >= 0) continue;
      EKV_CHECK(!free_pages_.empty(), "the test's pool is too small");
      page = free_pages_.back();
      free_pages_.pop_back();
    }
  }

  void want(const DrivenSequence& s, int position, TokenId target, int num_logprobs) {
    SampleRow row;
    row.row = q_start_.back() - kv_len_.back() + position;
    row.target = target;
    row.output_index = int32_t(s.tokens.size()) - s.num_prompt;
    row.num_logprobs = num_logprobs;
    row.params = &s.sampling;
    row.tokens = s.tokens;
    row.num_prompt = s.num_prompt;
    row.seq = s.seq;
    samples_.push_back(row);
  }

  std::vector<int32_t>& free_pages_;
  std::vector<TokenId> tokens_;
  std::vector<int32_t> positions_, q_start_{0}, kv_len_;
  std::vector<Slot> slots_;
  std::vector<DrivenSequence*> chunks_;
  std::vector<SampleRow> samples_;
};

inline std::vector<int32_t> all_pages(int count) {
  std::vector<int32_t> pages;
  for (int page = count - 1; page >= 0; --page) pages.push_back(page);
  return pages;
}

inline void give_back(DrivenSequence& s, std::vector<int32_t>& free_pages) {
  for (const PairEntry& pair : s.pairs) {
    if (pair.even_page() >= 0) free_pages.push_back(pair.even_page());
    if (pair.odd >= 0) free_pages.push_back(pair.odd);
  }
  s.pairs.clear();
  s.num_computed = 0;
}

}  // namespace ekv::test
