#pragma once
// penalty_counts.h -- how often each token occurred in the sequences that have penalties, on the device. A
// sequence keeps its counts between steps, and only new tokens are sent.

#include <cstdint>
#include <span>
#include <vector>

#include "backend/cuda/cuda_sizes.h"
#include "backend/cuda/step_memory.h"
#include "elastickv/backend.h"

namespace ekv {

class PenaltyCounts {
 public:
  // `previous`: on the device, the tokens of the step before, by sample row; what pending tokens stand for.
  PenaltyCounts(const CudaSizes& sizes, int vocab, const int32_t* previous);

  // Before the rows of a step.
  void begin_step();
  // Brings the counts of the row's sequence up to date and returns their slot. A row without SeqId is counted
  // anew. Waits for the device only when the tokens do not fit in one copy: when many long prompts start at
  // once.
  int slot_of(const SampleRow& row, const Stream& stream);
  // After them: sends what is left.
  void finish_step(const Stream& stream) { launch(stream); }

  const uint16_t* counts() const { return counts_.data(); }
  static size_t device_bytes(const CudaSizes& sizes, int vocab);

 private:
  struct Slot {
    SeqId seq{};
    size_t counted = 0;  // tokens of the sequence
    int64_t last_step = -1;
  };
  int find(SeqId seq);
  void launch(const Stream& stream);
  void begin_round();

  int vocab_;
  const int32_t* previous_;
  DeviceBuffer<uint16_t> counts_;  // [slots][count_stride(vocab)]
  StepMemory memory_;
  std::vector<Slot> slots_;
  int64_t step_ = 0;

  // The round that is being filled.
  StepArray<int32_t> tokens_;
  StepArray<std::byte> updates_;
  size_t num_tokens_ = 0;
  int num_updates_ = 0;
};

}  // namespace ekv
