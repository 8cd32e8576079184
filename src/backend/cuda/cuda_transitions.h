#pragma once
// cuda_transitions.h -- pairs that change fidelity in place, and the copies between the pool and host slots.
//
// clang-format off
//   demote       compute stream: pack kernel into the ring; to-host stream: ring -> host slot
//   backup_low   compute stream, after the chunks: extract kernel into the ring; to-host stream: ring -> host slot
//   store_pair   to-host stream, after the chunks: pages -> host slot
//   restore_low  from-host stream: host slot -> staging; a later step's promotion joins it, compute stream
//   load_pair    from-host stream: host slot -> pages
// clang-format on
//
// Two steps may be in flight, and pages of the older are given to others by the younger: what orders them.
//   - Everything on the compute stream, demotions and extractions too, follows all work of the steps before.
//   - A copy into the pool or the staging waits for `changed_`, which the compute stream reaches after all
//     chunks of the steps before and the demotions and promotions of its own: the last readers and writers of a
//     page or place that it was given. Chunks of its own step touch neither: a pair that is being loaded is in
//     no chunk before its ticket was reported, a staged plane in no promotion.
//   - A copy out of the pool waits for `chunks_done_`, the last writers. Its pages stay as they are until its
//     ticket was reported: whole pairs are written no more, and the KV manager locks those of sequences that
//     end. A copy out of the ring waits for its pack kernel, and the next pack kernel of the place for that
//     copy.
//   - What a ticket promises is seen by the host after its event, so by all that is submitted afterwards.
//
// One stream for each direction, because the copy engines of the two run side by side and copies of one
// direction end in order. The compute stream waits for a copy only when the ring is full. Host slots remember
// what they hold, so a copy of bytes that never arrived is a failed check.

#include <span>
#include <vector>

#include "backend/cuda/cuda_raii.h"
#include "backend/cuda/cuda_sizes.h"
#include "backend/cuda/pinned_pool.h"
#include "backend/cuda/step_memory.h"
#include "elastickv/backend.h"
#include "kernels/kv_cache.h"

namespace ekv {

// The copies of one direction that have not been reported, by step.
class CopyQueue {
 public:
  CopyQueue();
  const Stream& stream() const { return stream_; }
  void add(uint32_t ticket);  // a copy was enqueued
  void end_step();            // no more of this step
  // Appends the tickets of all steps whose copies have ended.
  void take_done(std::vector<uint32_t>& tickets);
  bool empty() const { return num_ == 0; }
  void wait_for_first();  // on the host

 private:
  struct Batch {
    Event ended = make_event();
    std::vector<uint32_t> tickets;
  };
  static constexpr size_t kBatches = 64;  // steps with copies under way; one more waits for the oldest
  Batch& open() { return batches_[(first_ + num_) % kBatches]; }
  void take_first(std::vector<uint32_t>& tickets);

  Stream stream_ = make_stream();
  std::vector<Batch> batches_;  // a ring; the one after the last is being filled
  size_t first_ = 0, num_ = 0;
  std::vector<uint32_t> overdue_;  // tickets of batches that had to be waited for
};

class CudaTransitions {
 public:
  // `pool` has the layout `shape`. Takes all host slots and device memory now.
  CudaTransitions(uint8_t* pool, const KvShape& shape, BaseFormat format, const CudaSizes& sizes,
                  int num_host_slots, HostContent host_content);

  int num_host_slots() const { return int(slots_.size()); }
  size_t host_bytes() const { return host_.size(); }

  // Converts the pair of pages 0 and 1 of an empty pool in every way, so that no step waits for code; it ends
  // as BASE. For a policy that makes BASE.
  void load_code(StepMemory& step, const Stream& compute);

  // Called in this order. Arrays of the step, before its upload
  void pack(const StepInput& input, StepMemory& step);
  // its demotions and promotions, before its chunks
  void change_fidelity(const StepInput& input, const Stream& compute);
  // its copies, after the chunks were enqueued.
  void start_transfers(const StepInput& input, const Stream& compute);

  // Appends the tickets of copies that have ended. `wait`: blocks until there is one, if any copy is under way.
  void finish_transfers(bool wait, std::vector<uint32_t>& tickets);

 private:
  enum class Content : uint8_t { nothing, low_plane, pair };
  struct Jobs {
    StepArray<PairJob> jobs;
    StepArray<int32_t> places;
  };
  Jobs take_jobs(size_t count, StepMemory& step);
  PairArgs pair_args(const Jobs& jobs, size_t first, size_t count, uint8_t* low) const;
  int next_ring_place();
  size_t ring_run(size_t first, size_t count) const;
  void demote_kept(const StepInput& input, const Stream& compute);
  void back_up(const StepInput& input, const Stream& compute);
  void send_low(int place, int host, uint32_t ticket);
  void restore(const TransferJob& job);
  void copy_pages(const TransferJob& job, const Stream& stream);
  void expect(int host, Content content) const;
  uint8_t* host_slot(int host) const { return host_.data() + size_t(host) * slot_bytes_; }
  uint8_t* ring_place(int place) const { return ring_.data() + size_t(place) * shape_.low_pair_bytes(); }

  uint8_t* pool_;
  KvShape shape_;
  BaseFormat format_;
  HostContent holds_;
  size_t slot_bytes_;
  PinnedPool host_;               // [slots][slot_bytes_]
  std::vector<Content> slots_;    // what they hold or will hold
  DeviceBuffer<uint8_t> ring_;    // low planes on their way out
  std::vector<Event> ring_sent_;  // [places] the last copy from the place
  int ring_next_ = 0;
  DeviceBuffer<uint8_t> staging_;  // low planes that came back
  std::vector<int> staged_;        // [slots] place of the low plane in staging_, -1: none
  std::vector<int> free_staging_;

  CopyQueue to_host_, from_host_;
  Event changed_ = make_event(), chunks_done_ = make_event(), packed_ = make_event();

  // Of the step.
  Jobs kept_, dropped_, promotes_, backups_;  // demotions with and without low planes
  std::vector<DemoteJob> kept_jobs_;
};

}  // namespace ekv
