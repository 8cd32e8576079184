#pragma once
// prefill_core.cuh -- what both prefill kernels share: where a tile's rows and slots lie, and which keys a row
// sees.

#include "kernels/device.cuh"
#include "kernels/prefill_plan.h"
#include "kernels/vec8.cuh"

namespace ekv {

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

struct PrefillParams {
  AttnArgs a;
  PrefillPlanView plan;
  int group;
  float scale_log2;  // scale * log2(e)
};

// One CTA's work: a tile of one sequence and one KV head.
struct PrefillWork {
  int seq, kv_head;
  int first_row;     // of the batch: the tile's first token
  int tokens;        // of this tile
  int rows;          // tokens * group
  int first_key;     // position of the tile's first token
  int kv_len, keys;  // keys: that the tile's last token sees

  // Rows past the tile's own behave like its last token and are never stored.
  __device__ int visible(int row, int group) const { return first_key + 1 + min(row / group, tokens - 1); }
};

__device__ __forceinline__ bool prefill_work(const PrefillParams& p, MatrixUnit unit, PrefillWork& w) {
  // Tiles of one head run together, so that its keys and values are read from the L2.
  const int tiles = p.plan.counters->num_tiles[int(unit)];
  if (int(blockIdx.x) >= tiles * p.a.shape.kv_heads) return false;
  const PrefillTile tile = p.plan.tiles[int(unit)][blockIdx.x % tiles];
  const int begin = p.a.q_start[tile.seq], rows = p.a.q_start[tile.seq + 1] - begin;
  w.seq = tile.seq;
  w.kv_head = blockIdx.x / tiles;
  w.first_row = begin + tile.first;
  w.tokens = min(prefill_tile_rows(unit) / p.group, rows - tile.first);
  w.rows = w.tokens * p.group;
  w.kv_len = p.a.kv_len[tile.seq];
  w.first_key = w.kv_len - rows + tile.first;
  w.keys = w.first_key + w.tokens;
  return true;
}

// Element offset of row `row` of the tile in q and out.
__device__ __forceinline__ size_t row_offset(const PrefillParams& p, const PrefillWork& w, int row) {
  const size_t token = w.first_row + row / p.group;
  return (token * p.a.heads + w.kv_head * p.group + row % p.group) * p.a.shape.head_dim;
}

// The TARGET slot of `block`, in the pool or, for a BASE pair, in the scratch.
__device__ __forceinline__ const uint8_t* prefill_slot(const PrefillParams& p, const PrefillWork& w,
                                                       int block) {
  const KvShape& s = p.a.shape;
  const size_t at = size_t(w.seq) * p.a.max_pairs + block / 2;
  const int2 raw = __ldg(reinterpret_cast<const int2*>(p.a.tables + at));
  const PairEntry entry{raw.x, raw.y};
  if (!entry.is_base()) return p.a.pool + s.slot_at(p.a.layer, block % 2 ? entry.odd : entry.even, w.kv_head);
  const size_t index = 2 * size_t(p.plan.scratch_index[at]) + block % 2;
  return p.plan.scratch + (index * s.kv_heads + w.kv_head) * s.slot_bytes();
}

}  // namespace ekv
