#include "backend/cuda/penalty_counts.h"

#include <algorithm>

#include "kernels/sampling.h"

namespace ekv {
namespace {

constexpr size_t kRoundTokens = 1 << 16;

size_t round_bytes(const CudaSizes& sizes) {
  return StepMemory::bytes_for<int32_t>(kRoundTokens) +
         StepMemory::bytes_for<CountUpdate>(size_t(sizes.max_seqs));
}

}  // namespace

PenaltyCounts::PenaltyCounts(const CudaSizes& sizes, int vocab, const int32_t* previous)
    : vocab_(vocab),
      previous_(previous),
      counts_(size_t(sizes.max_seqs) * size_t(count_stride(vocab))),
      memory_(round_bytes(sizes)),
      slots_(size_t(sizes.max_seqs)) {}

void PenaltyCounts::begin_step() {
  ++step_;
  memory_.begin_step();
  begin_round();
}

size_t PenaltyCounts::device_bytes(const CudaSizes& sizes, int vocab) {
  return size_t(sizes.max_seqs) * size_t(count_stride(vocab)) * sizeof(uint16_t) + round_bytes(sizes);
}

void PenaltyCounts::begin_round() {
  memory_.clear();  // the stream has read what was there, or it is the step's first round
  updates_ = memory_.take<std::byte>(slots_.size() * sizeof(CountUpdate));
  tokens_ = memory_.take<int32_t>(kRoundTokens);
  num_tokens_ = 0, num_updates_ = 0;
}

// The sequence's slot, or the one that was longest out of use, emptied.
int PenaltyCounts::find(SeqId seq) {
  const auto known = std::ranges::find(slots_, seq, &Slot::seq);
  auto at =
      seq != SeqId{} && known != slots_.end() ? known : std::ranges::min_element(slots_, {}, &Slot::last_step);
  EKV_CHECK(at->last_step != step_, "a step has more rows with penalties than sequences");
  if (at->seq != seq || seq == SeqId{}) *at = Slot{seq};
  at->last_step = step_;
  return int(at - slots_.begin());
}

int PenaltyCounts::slot_of(const SampleRow& row, const Stream& stream) {
  const int index = find(row.seq);
  Slot& slot = slots_[size_t(index)];
  EKV_CHECK(slot.counted <= row.tokens.size(), "a sequence does not lose tokens");
  for (bool clear = slot.counted == 0; slot.counted < row.tokens.size(); clear = false) {
    if (num_tokens_ == kRoundTokens || num_updates_ == int(slots_.size())) {
      launch(stream);
      cuda_check(cudaStreamSynchronize(stream.get()));
      begin_round();
    }
    const size_t some = std::min(kRoundTokens - num_tokens_, row.tokens.size() - slot.counted);
    std::copy_n(row.tokens.begin() + long(slot.counted), some, tokens_.host + num_tokens_);
    const size_t of_prompt = size_t(row.num_prompt) > slot.counted ? size_t(row.num_prompt) - slot.counted : 0;
    reinterpret_cast<CountUpdate*>(updates_.host)[num_updates_++] = {
        .slot = index,
        .begin = int32_t(num_tokens_),
        .prompt_end = int32_t(num_tokens_ + std::min(of_prompt, some)),
        .end = int32_t(num_tokens_ + some),
        .clear = clear};
    num_tokens_ += some, slot.counted += some;
  }
  return index;
}

void PenaltyCounts::launch(const Stream& stream) {
  if (num_updates_ == 0) return;
  memory_.clear();  // the same places again, of the tokens only as many as there are
  memory_.take<std::byte>(updates_.size);
  memory_.take<int32_t>(num_tokens_);
  memory_.upload(stream);
  launch_count_tokens({.counts = counts_.data(),
                       .tokens = tokens_.device,
                       .updates = reinterpret_cast<const CountUpdate*>(updates_.device),
                       .num_updates = num_updates_,
                       .vocab = vocab_,
                       .previous = previous_},
                      stream.get());
  num_updates_ = 0;
}

}  // namespace ekv
