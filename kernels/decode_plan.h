#pragma once
// decode_plan.h -- what the decode planner leaves for the decode kernels. Private to kernels/.
//
// A unit is one (sequence, KV head); its weight is the sequence's number of slots. The units lie end to end in
// the order (sequence, head, slot) and CTA c takes slots [c * chunk, (c + 1) * chunk) of that line: an item for
// each unit it touches. Only the first and the last item of a CTA can be part of a unit.

#include <cstddef>
#include <cstdint>

#include "kernels/attention.h"

namespace ekv {

constexpr int kDecodeWarps = 4;  // slot i of an item belongs to warp (i - slot_begin) % kDecodeWarps

struct alignas(16) DecodeItem {
  int32_t seq, kv_head;
  int32_t slot_begin, slot_end;  // of the sequence's slots, in token order
  int32_t block_begin;           // the logical block that slot_begin starts with
  int32_t run_first, run_count;  // pairs of the sequence's BASE run; count 0: none (structured path)
  int32_t kv_len, row;
  int32_t num_splits;              // CTAs that share the unit; 1: no merge
  int32_t partial, first_partial;  // this item's place among the partials, and that of the unit's first item
};

// The unit's item in CTA first + i, i >= 1, is that CTA's first item; partial 2c is the first item of CTA c.
EKV_HOST_DEVICE constexpr int partial_of_split(const DecodeItem& item, int split) {
  return split == 0 ? item.first_partial : 2 * (item.first_partial / 2 + split);
}

struct ItemRange {
  int32_t begin, end;
};

struct DecodePlanView {
  ItemRange* ranges;      // [num_ctas]
  DecodeItem* items;      // [num_ctas + max_seqs * kv_heads]
  uint32_t* arrivals;     // [num_ctas], of the unit whose first item is the CTA's last
  uint32_t* base_masks;   // [max_seqs][ceil(max_pairs / 32)], bit p: pair p is BASE
  float* partial_out;     // [2 * num_ctas][group][head_dim], not normalised
  float2* partial_stats;  // [2 * num_ctas][group]: maximum of the scores (base 2), sum of exponentials
};

// The view of a workspace; `bytes` receives its size.
DecodePlanView decode_plan_view(const DecodeWorkspace& workspace, size_t* bytes);

// One instantiation per line of the table in attention_select.cpp, defined in decode_core.cuh. kHeadTiles:
// eights of query heads that share a KV head, rounded up. Native's format is fixed8 and of no meaning.
template <KvPath kPath, BaseFormat kFormat, int kHeadDim, int kHeadTiles>
void launch_decode_kernel(const AttnArgs& args, const DecodeWorkspace& workspace, cudaStream_t stream);

}  // namespace ekv
