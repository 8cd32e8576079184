#pragma once
// decode_plan.h -- what the decode planner leaves for the decode kernels. Private to kernels/.
//
// The sequences lie end to end on a line, in slots, because a slot costs the same bytes in either fidelity. The
// line is cut into equal shares, and a task is one share for one KV head, about one task per CTA. Tasks of one
// share run side by side: the slots of a page lie together, and reading them at the same time keeps rows of the
// memory open (H200, 64 sequences of 1K: 5 % faster than neighbours that read one KV head each).
//
// A share holds an item for each sequence that it touches.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/attention.h"

namespace ekv {

// Warps that compute; slot i of an item belongs to warp (i - slot_begin) % kDecodeWarps.
constexpr int kDecodeWarps = 4;

struct alignas(16) DecodeItem {
  int32_t seq, kv_head;          // kv_head: of the task; the planner leaves it open
  int32_t slot_begin, slot_end;  // of the sequence's slots, in token order
  int32_t block_begin;           // the logical block that slot_begin starts with
  int32_t run_first, run_count;  // pairs of the sequence's BASE run; count 0: none (structured path)
  int32_t kv_len, row;
  int32_t num_splits;  // items of the sequence; 1: no merge
  int32_t index,
      first_index;  // of this item and of the sequence's first; partials have the indices of their items
};
constexpr int kItemWords = sizeof(DecodeItem) / sizeof(int32_t);

// One share: items [begin, end), with a copy of the first so that starting it takes one load.
struct alignas(16) DecodeShare {
  int32_t begin, end;
  int32_t pad[2];
  DecodeItem first;
};
constexpr int kShareWords = sizeof(DecodeShare) / sizeof(int32_t);

struct PlanCounters {
  uint32_t merge_seqs;                // set by the planner
  uint32_t arrived;                   // CTAs at the end of their tasks, counted over all launches on this plan
  uint32_t next_merge_seq, planners;  // of the planner; 0 between its launches
};

struct DecodePlanView {
  int num_shares;
  PlanCounters* counters;
  DecodeShare* shares;     // [num_shares]
  DecodeItem* items;       // [num_shares + max_seqs]
  DecodeItem* merge_seqs;  // [max_seqs]: one item of each sequence that is split
  uint32_t* base_masks;    // [max_seqs][ceil(max_pairs / 32)], bit p: pair p is BASE
  float* partial_out;      // [num_shares + max_seqs][heads][head_dim], not normalised
  float2* partial_stats;  // [num_shares + max_seqs][heads]: maximum of the scores (base 2), sum of exponentials
};

// The view of a workspace; `bytes` receives its size.
DecodePlanView decode_plan_view(const DecodeWorkspace& workspace, size_t* bytes);

// One instantiation per line of the table in attention_select.cpp, defined in decode_core.cuh. kHeadTiles:
// eights of query heads that share a KV head, rounded up. Native's format is fixed8 and of no meaning.
template <KvPath kPath, BaseFormat kFormat, int kHeadDim, int kHeadTiles>
void launch_decode_kernel(const AttnArgs& args, const DecodeWorkspace& workspace, cudaStream_t stream);

}  // namespace ekv
