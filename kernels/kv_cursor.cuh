#pragma once
// kv_cursor.cuh -- three address policies of decode: from the slots of an item to pages, in token order.
//
// A cursor walks the slots slot_begin + warp, + kDecodeWarps, ... of an item for one warp. Every lane holds one
// entry of a window of 32 pairs of the block table, so a table line is read once per 64 slots and never waited
// for twice. All calls are made by the whole warp; all results are the same in every lane.

#include "kernels/decode_plan.h"
#include "kernels/device.cuh"

namespace ekv {

struct SlotRef {
  int page;
  int token;  // position of the slot's first token
  bool base;
};

// 32 consecutive entries of one sequence's row of the table, one per lane.
struct PairWindow {
  const PairEntry* row;
  int first = 0, max_pairs;
  PairEntry mine;

  __device__ void open(const AttnArgs& a, int seq, int pair) {
    row = a.tables + size_t(seq) * a.max_pairs;
    max_pairs = a.max_pairs;
    load(pair);
  }
  __device__ void load(int pair) {
    first = pair;
    const int own = pair + int(threadIdx.x) % kWarpSize;
    // Lanes past the row repeat its last entry; nobody asks for it.
    const int2 raw = *reinterpret_cast<const int2*>(row + min(own, max_pairs - 1));
    mine = {raw.x, raw.y};
  }
  // The page of half `odd` of `pair`, which is at or after the window's first pair.
  __device__ int page(int pair, int odd) {
    if (pair >= first + kWarpSize) load(pair);
    const int even_page = __shfl_sync(kAllLanes, mine.even, pair - first);
    const int odd_page = __shfl_sync(kAllLanes, mine.odd, pair - first);
    return odd ? odd_page : even_page;
  }
};

class NativeCursor {
 public:
  static constexpr bool kElastic = false;

  __device__ void open(const AttnArgs& a, const DecodeItem& item) {
    slot_ = item.slot_begin;
    window_.open(a, item.seq, item.slot_begin / 2);
  }
  __device__ SlotRef next() {
    const SlotRef ref{window_.page(slot_ / 2, slot_ & 1), slot_ * kBlockTokens, false};
    ++slot_;
    return ref;
  }

 private:
  PairWindow window_;
  int slot_;
};

// TARGET slots before the run, BASE slots of the run, TARGET slots after it: arithmetic, no search.
class StructuredCursor {
 public:
  static constexpr bool kElastic = true;

  __device__ void open(const AttnArgs& a, const DecodeItem& item) {
    slot_ = item.slot_begin;
    run_begin_ = 2 * item.run_first;
    run_end_ = run_begin_ + item.run_count;
    if (item.run_count == 0) run_begin_ = run_end_ = item.slot_end;
    window_.open(a, item.seq, item.block_begin / 2);
  }
  __device__ SlotRef next() {
    const bool base = slot_ >= run_begin_ && slot_ < run_end_;
    // Every BASE slot before this one adds a block to what the slots count.
    const int passed = max(0, min(slot_, run_end_) - run_begin_);
    const int block = slot_ + passed;
    const int page = window_.page(block / 2, base ? 0 : block & 1);
    ++slot_;
    return {base ? int(unsigned(page) & ~kBasePair) : page, block * kBlockTokens, base};
  }

 private:
  PairWindow window_;
  int slot_, run_begin_, run_end_;
};

// Any mix: the modes of the window's 32 pairs tell which lane holds a slot.
class GeneralCursor {
 public:
  static constexpr bool kElastic = true;

  __device__ void open(const AttnArgs& a, const DecodeItem& item) {
    slot_ = item.slot_begin;
    window_.open(a, item.seq, item.block_begin / 2);
    count(item.slot_begin - item.block_begin % 2);
  }
  __device__ SlotRef next() {
    while (slot_ >= window_end_) {
      window_.load(window_.first + kWarpSize);
      count(window_end_);
    }
    const bool mine = slot_ >= lane_slot_ && slot_ < lane_slot_ + (window_.mine.is_base() ? 1 : 2);
    const int lane = __ffs(__ballot_sync(kAllLanes, mine)) - 1;
    const int even = __shfl_sync(kAllLanes, window_.mine.even, lane);
    const int odd_page = __shfl_sync(kAllLanes, window_.mine.odd, lane);
    const int odd = slot_ - __shfl_sync(kAllLanes, lane_slot_, lane);
    const PairEntry entry{even, odd_page};
    ++slot_;
    return {odd ? odd_page : entry.even_page(), (2 * (window_.first + lane) + odd) * kBlockTokens,
            entry.is_base()};
  }

 private:
  // `slot`: the slot of the window's first pair.
  __device__ void count(int slot) {
    const int lane = int(threadIdx.x) % kWarpSize;
    const uint32_t bases = __ballot_sync(kAllLanes, window_.mine.is_base());
    lane_slot_ = slot + 2 * lane - __popc(bases & ((1u << lane) - 1));
    window_end_ = slot + 2 * kWarpSize - __popc(bases);
  }

  PairWindow window_;
  int slot_, lane_slot_, window_end_;
};

}  // namespace ekv
