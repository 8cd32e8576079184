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
constexpr int kSeqWord = offsetof(DecodeItem, seq) / sizeof(int32_t);

// One share: items [begin, end), with a copy of the first and of the 32 pairs of the block table from its first
// on (past the sequence's last pair: anything), so that reading the first slots waits for one load, not three.
struct alignas(16) DecodeShare {
  int32_t begin, end;
  int32_t pad[2];
  DecodeItem first;
  PairEntry window[32];
};
constexpr int kItemWord = offsetof(DecodeShare, first) / sizeof(int32_t), kShareWords = kItemWord + kItemWords;

struct PlanCounters {
  uint32_t merge_seqs;  // sequences with more than one item
  uint32_t planners;    // CTAs of the planner that have read their part of the tables; 0 between its launches
};

struct DecodePlanView {
  int num_shares;
  PlanCounters* counters;
  DecodeShare* shares;     // [num_shares]
  DecodeItem* items;       // [num_shares + max_seqs]
  DecodeItem* merge_seqs;  // [max_seqs]: one item of each sequence that is split
  uint32_t* base_masks;    // [max_seqs][ceil(max_pairs / 32)], bit p: pair p is BASE
  // Partials are all 0 between launches (decode_merge.cuh).
  float* partial_out;     // [num_shares + max_seqs][heads][head_dim], not normalised
  float2* partial_stats;  // [num_shares + max_seqs][heads]: maximum of the scores (base 2), sum of exponentials
};

// The view of a workspace; `bytes` receives its size.
DecodePlanView decode_plan_view(const DecodeWorkspace& workspace, size_t* bytes);

// One instantiation per line of the table in attention_select.cpp, defined in decode_core.cuh. kHeadTiles:
// eights of query heads that share a KV head, rounded up. Native's format is fixed8 and of no meaning.
template <KvPath kPath, BaseFormat kFormat, int kHeadDim, int kHeadTiles>
void launch_decode_kernel(const AttnArgs& args, const DecodeWorkspace& workspace, cudaStream_t stream);

}  // namespace ekv
