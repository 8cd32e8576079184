#pragma once
// paged_backend.h -- a device that computes nothing but respects every page: it stores token ids where K and V
// would go and "predicts" a hash of what it reads back through the block table. A wrong page, a stale prefix or
// a lost write changes the tokens, so tests of the engine see it as wrong output.

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "elastickv/backend.h"

namespace ekv::test {

constexpr int kFakeVocab = 1000;

// The definition: what the device must predict after `history`.
inline TokenId next_token(std::span<const TokenId> history) {
  uint64_t h = 0x9e3779b97f4a7c15ull;
  for (TokenId token : history) h = (h ^ uint64_t(token)) * 0x100000001b3ull + (h >> 29);
  return TokenId(h % kFakeVocab);
}

class PagedBackend : public Backend {
 public:
  explicit PagedBackend(int num_pages) : store_(size_t(num_pages) * kBlockTokens, -1) {
    info_ = {.name = "paged", .num_pages = num_pages};
  }
  const BackendInfo& info() const override { return info_; }

  void submit(const StepInput& in) override {
    output_.rows.clear();
    output_.invalid_chunks.clear();
    for (size_t i = 0; i < in.tokens.size(); ++i)
      if (in.slot_mapping[i] >= 0) store_.at(size_t(in.slot_mapping[i])) = in.tokens[i];
    for (const SampleRow& row : in.sample_rows) {
      size_t chunk = 0;
      while (in.q_start[chunk + 1] <= row.row) ++chunk;
      const int length = in.positions[size_t(row.row)] + 1;
      SampledRow sampled{.token = row.target};
      const TokenId predicted = next_token(read(in.block_table.row(int(chunk)), length));
      if (row.target < 0) sampled.token = predicted;
      if (row.num_logprobs >= 0)
        sampled.logprobs = TokenLogprobs{.chosen = {sampled.token, sampled.token == predicted ? 0.0f : -9.0f}};
      if (sampled.token == poison_token) output_.invalid_chunks.push_back(int32_t(chunk));
      output_.rows.push_back(sampled);
    }
    ++steps;
    max_batch = std::max(max_batch, int(in.kv_len.size()));
  }
  const StepOutput& collect() override { return output_; }

  int steps = 0, max_batch = 0;
  TokenId poison_token = -2;  // a row that would yield this token is reported as not finite

 private:
  std::vector<TokenId> read(std::span<const PairEntry> pairs, int length) const {
    std::vector<TokenId> history;
    for (int position = 0; position < length; ++position) {
      const PairEntry& pair = pairs[size_t(position / kPairTokens)];
      const int page = position % kPairTokens < kBlockTokens ? pair.even_page() : pair.odd;
      history.push_back(store_.at(size_t(page) * kBlockTokens + size_t(position % kBlockTokens)));
    }
    return history;
  }

  BackendInfo info_;
  std::vector<TokenId> store_;
  StepOutput output_;
};

}  // namespace ekv::test
