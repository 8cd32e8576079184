#pragma once
// kv_cursor.cuh -- three address policies of decode: from the slots of an item to pages, in token order.
//
// A cursor walks the slots of an item for the producer warp, kBatch at a time: lane i gets slot i % kBatch of
// the batch. Every lane holds one entry of a window of 32 pairs of the block table, so a table line is waited
// for once per 64 slots. All calls are made by the whole warp. Slots past the item's end come out as garbage
// that the caller drops.

#include "kernels/decode_plan.h"
#include "kernels/device.cuh"

namespace ekv {

constexpr int kBatch = 4;

struct SlotRef {
  int page;
  int token;  // position of the slot's first token
  bool base;
};

__device__ __forceinline__ PairEntry load_pair(const PairEntry* p) {
  const int2 raw = *reinterpret_cast<const int2*>(p);
  return {raw.x, raw.y};
}

// 32 consecutive entries of one sequence's row of the table, one per lane.
struct PairWindow {
  const PairEntry* row;
  int first, max_pairs;
  PairEntry mine;

  // From the pair that the item starts in. `entry`: this lane's.
  __device__ PairWindow(const AttnArgs& a, const DecodeItem& item, PairEntry entry)
      : row(a.tables + size_t(item.seq) * a.max_pairs),
        first(item.block_begin / 2),
        max_pairs(a.max_pairs),
        mine(entry) {}
  __device__ void load(int pair) {
    first = pair;
    // Lanes past the row repeat its last entry; nobody asks for it.
    mine = load_pair(row + min(pair + int(threadIdx.x) % kWarpSize, max_pairs - 1));
  }
  // Makes pairs `from` to `to`, at most 31 apart, part of the window.
  __device__ void cover(int from, int to) {
    if (to >= first + kWarpSize) load(from);
  }
  // The page of half `odd` of `pair`; each lane asks for its own.
  __device__ int page(int pair, int odd) const {
    const int lane = (pair - first) & (kWarpSize - 1);
    const int even_page = __shfl_sync(kAllLanes, mine.even, lane);
    const int odd_page = __shfl_sync(kAllLanes, mine.odd, lane);
    return odd ? odd_page : even_page;
  }
};

class NativeCursor {
 public:
  static constexpr bool kElastic = false;

  __device__ NativeCursor(const PairWindow& window, const DecodeItem& item)
      : window_(window), slot_(item.slot_begin) {}
  __device__ SlotRef next() {
    window_.cover(slot_ / 2, (slot_ + kBatch - 1) / 2);
    const int block = slot_ + int(threadIdx.x) % kBatch;
    slot_ += kBatch;
    return {window_.page(block / 2, block & 1), block * kBlockTokens, false};
  }

 private:
  PairWindow window_;
  int slot_;
};

// TARGET slots before the run, BASE slots of the run, TARGET slots after it: arithmetic, no search.
class StructuredCursor {
 public:
  static constexpr bool kElastic = true;

  __device__ StructuredCursor(const PairWindow& window, const DecodeItem& item)
      : window_(window), slot_(item.slot_begin) {
    run_begin_ = 2 * item.run_first;
    run_end_ = run_begin_ + item.run_count;
    if (item.run_count == 0) run_begin_ = run_end_ = item.slot_end;
  }
  __device__ SlotRef next() {
    window_.cover(block_of(slot_) / 2, block_of(slot_ + kBatch - 1) / 2);
    const int slot = slot_ + int(threadIdx.x) % kBatch, block = block_of(slot);
    const bool base = slot >= run_begin_ && slot < run_end_;
    const int page = window_.page(block / 2, base ? 0 : block & 1);
    slot_ += kBatch;
    return {base ? int(unsigned(page) & ~kBasePair) : page, block * kBlockTokens, base};
  }

 private:
  // Every BASE slot before a slot adds a block to what the slots count.
  __device__ int block_of(int slot) const { return slot + max(0, min(slot, run_end_) - run_begin_); }

  PairWindow window_;
  int slot_, run_begin_, run_end_;
};

// Any mix: the set of the window's slots that begin a pair tells which lane holds a slot.
class GeneralCursor {
 public:
  static constexpr bool kElastic = true;

  __device__ GeneralCursor(const PairWindow& window, const DecodeItem& item)
      : window_(window), slot_(item.slot_begin) {
    count(item.slot_begin - item.block_begin % 2);
  }
  __device__ SlotRef next() {
    if (slot_ + kBatch > first_slot_ + num_slots_) move_window();
    const int slot = slot_ - first_slot_ + int(threadIdx.x) % kBatch;
    const int lane = lane_of(slot), odd = begins_pair(slot) ? 0 : 1;
    const PairEntry entry{__shfl_sync(kAllLanes, window_.mine.even, lane),
                          __shfl_sync(kAllLanes, window_.mine.odd, lane)};
    slot_ += kBatch;
    return {odd ? entry.odd : entry.even_page(), (2 * (window_.first + lane) + odd) * kBlockTokens,
            entry.is_base()};
  }

 private:
  // Slots here count from the window's first, 0 .. 63.
  __device__ bool begins_pair(int slot) const { return begins_ >> slot & 1; }
  // The lane whose pair holds `slot`.
  __device__ int lane_of(int slot) const { return __popcll(begins_ & ((2ull << slot) - 1)) - 1; }

  // Starts the window at the pair of slot_.
  __device__ void move_window() {
    int pair = window_.first + kWarpSize, slot = first_slot_ + num_slots_;
    if (slot_ < slot) {
      const int own = slot_ - first_slot_;
      pair = window_.first + lane_of(own);
      slot = begins_pair(own) ? slot_ : slot_ - 1;
    }
    window_.load(pair);
    count(slot);
  }
  // `slot`: the slot of the window's first pair.
  __device__ void count(int slot) {
    const int lane = int(threadIdx.x) % kWarpSize;
    const uint32_t bases = __ballot_sync(kAllLanes, window_.mine.is_base());
    const uint64_t own = 1ull << (2 * lane - __popc(bases & ((1u << lane) - 1)));
    begins_ = uint64_t(__reduce_or_sync(kAllLanes, uint32_t(own >> 32))) << 32 |
              __reduce_or_sync(kAllLanes, uint32_t(own));
    first_slot_ = slot;
    num_slots_ = 2 * kWarpSize - __popc(bases);
  }

  PairWindow window_;
  int slot_, first_slot_, num_slots_;
  uint64_t begins_;
};

}  // namespace ekv
