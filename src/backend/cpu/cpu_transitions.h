#pragma once
// cpu_transitions.h -- pairs that change fidelity in place, and host slots with the copies from and to them.
//
// A copy is made at the collect that reports it, not earlier: whoever touches its source or target too soon
// gets wrong bytes here as on a GPU. With two steps in flight it comes after the chunks of the younger one.
// Host slots remember what they hold, so a restore of bytes that never arrived is a failed check.

#include <deque>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "backend/cpu/cpu_kv.h"
#include "backend/cpu/cpu_threads.h"
#include "elastickv/backend.h"

namespace ekv {

class CpuTransitions {
 public:
  // Takes memory for options.num_host_slots slots now and no more of it later. Copies end
  // options.transfer_delay collects after that of the step that carries them.
  CpuTransitions(CpuKvPool& pool, const CpuOptions& options);

  int num_host_slots() const { return int(slots_.size()); }
  size_t host_bytes() const { return slot_bytes_ * slots_.size(); }
  std::span<std::byte> host_slot(int slot);

  // The demotions of a step, then its promotions; before its chunks.
  void change_fidelity(CpuThreads& threads, const StepInput& input);
  // Once a step, after its chunks: takes note of the copies that it carries.
  void start_transfers(const StepInput& input);
  // Once a step, at collect: makes the copies that end now and appends their tickets in order.
  void finish_transfers(std::vector<uint32_t>& tickets);

 private:
  enum class Content : uint8_t { nothing, arriving, low_plane, pair };
  struct Copy {
    TransferJob job;
    bool demotion = false;  // the low plane was written by the demotion itself
    int64_t ends = 0;       // step
  };
  void demote(CpuThreads& threads, const DemoteJob& job);
  void promote(CpuThreads& threads, const PromoteJob& job);
  void finish(const Copy& copy);
  void copy_pages(const TransferJob& job, bool to_host);
  void expect_arrival(int host);
  Content& content(int host);
  std::vector<std::byte>& stage(int host);

  CpuKvPool& pool_;
  HostContent holds_;
  size_t slot_bytes_;
  int delay_;
  std::unique_ptr<std::byte[]> memory_;  // [slots][slot_bytes_]
  std::vector<Content> slots_;
  std::map<int, std::vector<std::byte>> staged_;  // host slot -> low plane that waits for its promotion
  std::vector<std::vector<std::byte>> spare_;     // staging memory to be used again
  std::deque<Copy> copies_;
  int64_t num_submitted_ = 0, num_collected_ = 0;  // steps
};

}  // namespace ekv
