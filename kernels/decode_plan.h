#pragma once
// decode_plan.h -- what the decode planner leaves for the decode kernels. Private to kernels/.
//
// The sequences lie end to end on two lines, in slots, because a slot costs the same bytes in either fidelity:
// the first part of each on the static line, the rest on the dynamic one. The lines are cut into shares, and a
// task is one share for one KV head. The static line has about one task per CTA; the dynamic one has small
// tasks that CTAs take as they become free, because multiprocessors differ in the bandwidth they get. Tasks of
// one share run at the same time, one per KV head: a page's slots lie side by side, and reading them together
// keeps rows of the memory open. The plan fixes the tasks, so who takes one changes no bit of the result.
//
// A share holds an item for each sequence that it touches.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/attention.h"

namespace ekv {

constexpr int kDecodeWarps =
    4;  // that compute; slot i of an item belongs to warp (i - slot_begin) % kDecodeWarps

struct alignas(16) DecodeItem {
  int32_t seq, kv_head;          // kv_head: of the task; the planner leaves it open
  int32_t slot_begin, slot_end;  // of the sequence's slots, in token order
  int32_t block_begin;           // the logical block that slot_begin starts with
  int32_t run_first, run_count;  // pairs of the sequence's BASE run; count 0: none (structured path)
  int32_t kv_len, row;
  int32_t first_static, first_dynamic;  // indices of the sequence's first items on the two lines
  int32_t index;                      // of this item; the partials of a split sequence have those of its items
  int32_t static_splits, num_splits;  // items of the sequence on the static line, and on both; 1: no merge
  int32_t pad[2];
};
constexpr int kItemWords = sizeof(DecodeItem) / sizeof(int32_t);

// A sequence's items on one line have consecutive indices.
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
  uint32_t static_shares, dynamic_shares, merge_seqs;  // set by the planner
  uint32_t next_dynamic;                               // tasks taken so far in this launch
  uint32_t arrived;                   // CTAs at the end of their shares, counted over all launches on this plan
  uint32_t next_merge_seq, planners;  // of the planner; 0 between its launches
};

struct DecodePlanView {
  PlanCounters* counters;
  DecodeShare* shares;     // [max_shares]; the dynamic ones follow the static ones
  DecodeItem* items;       // [max_items]
  DecodeItem* merge_seqs;  // [max_seqs]: one item of each sequence that is split
  uint32_t* base_masks;    // [max_seqs][ceil(max_pairs / 32)], bit p: pair p is BASE
  float* partial_out;      // [max_items][heads][head_dim], not normalised
  float2* partial_stats;   // [max_items][heads]: maximum of the scores (base 2), sum of exponentials
};

// The view of a workspace; `bytes` receives its size.
DecodePlanView decode_plan_view(const DecodeWorkspace& workspace, size_t* bytes);

// One instantiation per line of the table in attention_select.cpp, defined in decode_core.cuh. kHeadTiles:
// eights of query heads that share a KV head, rounded up. Native's format is fixed8 and of no meaning.
template <KvPath kPath, BaseFormat kFormat, int kHeadDim, int kHeadTiles>
void launch_decode_kernel(const AttnArgs& args, const DecodeWorkspace& workspace, cudaStream_t stream);

}  // namespace ekv
