#pragma once
// decode_plan.h -- what the decode planner leaves for the decode kernels. Private to kernels/.
//
// A unit is one (sequence, KV head); its weight is the sequence's number of slots, because a slot costs the
// same bytes in either fidelity. The units lie end to end in the order (sequence, head, slot) on two lines: the
// first part of each on the static line, the rest on the dynamic one. The static line is cut into one equal
// share per CTA; the dynamic one into small shares that CTAs take as they become free, because multiprocessors
// differ by a fifth in the bandwidth they get (measured on an H200). Shares are fixed by the plan, so who takes
// one changes no bit of the result.
//
// A share holds an item for each unit that it touches; only its first and its last can be a part of a unit's
// line.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/attention.h"

namespace ekv {

constexpr int kDecodeWarps =
    4;  // that compute; slot i of an item belongs to warp (i - slot_begin) % kDecodeWarps

struct alignas(16) DecodeItem {
  int32_t seq, kv_head;
  int32_t slot_begin, slot_end;  // of the sequence's slots, in token order
  int32_t block_begin;           // the logical block that slot_begin starts with
  int32_t run_first, run_count;  // pairs of the sequence's BASE run; count 0: none (structured path)
  int32_t kv_len, row;
  int32_t first_static, first_dynamic;  // indices of the unit's first items on the two lines
  int32_t index;                        // of this item; a split unit's partials have the indices of its items
  int32_t static_splits, num_splits;    // items of the unit on the static line, and on both; 1: no merge
  int32_t pad[2];
};
constexpr int kItemWords = sizeof(DecodeItem) / sizeof(int32_t);

// The unit's items on one line have consecutive indices.
EKV_HOST_DEVICE constexpr int partial_of_split(const DecodeItem& item, int split) {
  return split < item.static_splits ? item.first_static + split
                                    : item.first_dynamic + split - item.static_splits;
}

// One share: items [begin, end), with a copy of the first so that starting it takes one load.
struct alignas(16) DecodeShare {
  int32_t begin, end;
  int32_t pad[2];
  DecodeItem first;
};
constexpr int kShareWords = sizeof(DecodeShare) / sizeof(int32_t);

struct PlanCounters {
  uint32_t dynamic_shares, merge_units;  // set by the planner
  uint32_t next_dynamic;                 // taken so far in this launch
  uint32_t arrived;  // CTAs at the end of their shares, counted over all launches on this plan
  uint32_t next_merge_unit, planners;  // of the planner; 0 between its launches
};

struct DecodePlanView {
  PlanCounters* counters;
  DecodeShare* shares;      // [max_shares]; CTA c starts with share c, the dynamic ones follow
  DecodeItem* items;        // [max_items]
  DecodeItem* merge_units;  // [max_seqs * kv_heads]: one item of each unit that is split
  uint32_t* base_masks;     // [max_seqs][ceil(max_pairs / 32)], bit p: pair p is BASE
  float* partial_out;       // [max_items][group][head_dim], not normalised
  float2* partial_stats;    // [max_items][group]: maximum of the scores (base 2), sum of exponentials
};

// The view of a workspace; `bytes` receives its size.
DecodePlanView decode_plan_view(const DecodeWorkspace& workspace, size_t* bytes);

// One instantiation per line of the table in attention_select.cpp, defined in decode_core.cuh. kHeadTiles:
// eights of query heads that share a KV head, rounded up. Native's format is fixed8 and of no meaning.
template <KvPath kPath, BaseFormat kFormat, int kHeadDim, int kHeadTiles>
void launch_decode_kernel(const AttnArgs& args, const DecodeWorkspace& workspace, cudaStream_t stream);

}  // namespace ekv
