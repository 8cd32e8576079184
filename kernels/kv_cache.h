#pragma once
// kv_cache.h -- everything that writes KV pages: the fused write of a layer's new keys and values, and the
// three conversions of whole pairs (demote, extract_low, promote).
//
// Where a value lies in a slot, and the number formats `fixed8` and `e5m2`: elastickv/kv_layout.h.
// All pointers are device memory unless said otherwise, aligned to 16 bytes. Every launcher checks its
// arguments, enqueues on `stream`, allocates nothing and does not wait.

#include "elastickv/kv_layout.h"
#include "kernels/element.h"

namespace ekv {

// One row of the QKV product becomes one row of Q and one token of K and V in its TARGET slots.
//
//   x = qkv + bias                                                      per head, in fp32 from here to the end
//   x = x / sqrt(mean(x^2) + norm_epsilon) * norm                       Q and K, if q_norm and k_norm are given
//   x[i], x[i + d/2] = x[i] c - x[i + d/2] s, x[i + d/2] c + x[i] s     Q and K, c and s = rope_*[position][i]
//   x = H x                                                             Q and K, `fixed8` only
//   Q: q = fp16(x);  K and V: TARGET of kv_layout.h (`fixed8`), or fp16(clamp(x, +-61408)) (`e5m2`)
//
// H is block-diagonal with orthonormal Sylvester-Hadamard blocks of 64, 128, 256 (the whole head_dim), of 16
// for head_dim 80 and of 32 for head_dim 96: H[i][j] = (-1)^popcount(i & j) / sqrt(block).
//
// Error:   fp32 arithmetic, at most 24 operations deep, relative to the vector's norm; then one rounding to the
//          grid or to fp16. Without norm, RoPE and rotation the stored bits equal those of the definition.
// Range:   `clamped` counts the values of K and V that the format cannot hold: |x| >= 32632 (`fixed8`), |x| >
//          61408 (`e5m2`), and those of Q beyond 65504; they are stored as the nearest value that it can.
//          A vector with a NaN or an infinity, in the input or by overflow, is stored as zeros and sets the
//          flag of its sequence.
// Rows:    prefill and decode rows in any mix. A row with a negative slot is padding: its qkv and position may
//          be anything, nothing is written. Rows outside every q_start range flag nobody. No two rows share a
//          slot.
// Alias:   nothing that is written overlaps anything that is read.
// Order:   launched programmatically (programmatic.cuh). positions, slot_mapping and rope_* are read before
//          the kernels ahead have ended: no kernel of the unbroken run of programmatic launches before this
//          one may write them.
// Source:  rotary embedding: Su et al. 2021 in the half-split pairing of GPT-NeoX; QK-norm as Qwen3 has it.
struct KvWriteArgs {
  const void* qkv = nullptr;     // [num_rows][heads + 2 * kv_heads][head_dim] of `element`: Q, then K, then V
  const void* bias = nullptr;    // [heads + 2 * kv_heads][head_dim] of `element`, or nullptr: none
  const void* q_norm = nullptr;  // [head_dim] of `element`, or nullptr: no QK-norm
  const void* k_norm = nullptr;  // [head_dim], given exactly when q_norm is
  float norm_epsilon = 1e-6f;
  const float* rope_cos = nullptr;  // [max_positions][head_dim / 2], or nullptr: no rotary embedding
  const float* rope_sin =
      nullptr;  // the same shape; whoever fills it scales (llama3, linear, attention factor)
  const int32_t* positions = nullptr;     // [num_rows] below max_positions
  const int32_t* slot_mapping = nullptr;  // [num_rows] page * kBlockTokens + token in block; negative: padding
  const int32_t* q_start = nullptr;       // [num_seqs + 1] rows of sequence s: q_start[s] to q_start[s + 1]
  int num_rows = 0;                       // 0 launches nothing
  int num_seqs = 0;
  int heads = 0;                    // query heads of this rank; KV heads are in `shape`
  Element element = Element::bf16;  // bf16 or fp16
  KvShape shape;
  int layer = 0;
  BaseFormat format = BaseFormat::fixed8;
  uint8_t* pool = nullptr;         // layout `shape`
  void* q = nullptr;               // [num_rows][heads][head_dim] fp16
  uint32_t* clamped = nullptr;     // [1] incremented
  uint32_t* non_finite = nullptr;  // [num_seqs] set to 1, never cleared
};
void launch_kv_write(const KvWriteArgs& args, cudaStream_t stream);
// From here on its kernel is another one: a quarter of the groups fills the device.
constexpr int kManyKvRows = 512;
// Rows times all heads of Q, K and V are fewer: row and head indices are 32 bits wide.
constexpr int64_t kMostKvRowHeads = int64_t(1) << 26;

// Whole pairs, all layers and KV heads, in one launch.
//
//   demote       reads TARGET of `even` and `odd`, leaves BASE in `even` (with exponents for `fixed8`; `e5m2`
//                leaves the tail alone) and, if `low` is given, the low plane there. `odd` is free afterwards.
//   extract_low  writes the low plane only; the pool is read.
//   promote      reads BASE of `even` and the low plane, writes TARGET to `even` and `odd`.
//
// Exact: promote after demote (or after extract_low, then demote without `low`) restores every bit of every
//        vector that kv_write can store, and in `e5m2` every bit pattern.
// Alias: in place: a slot is read completely before its first byte is overwritten. No page appears twice in
//        `jobs`. `low` may be any memory that the device can address, also pinned host memory.
// Order: for later work on `stream` the pairs have their new fidelity. Nothing else may read them meanwhile.
struct PairArgs {
  uint8_t* pool = nullptr;             // layout `shape`
  uint8_t* low = nullptr;              // [places] low planes of shape.low_pair_bytes()
  const int32_t* low_place = nullptr;  // [num_jobs] place of each job's low plane, or nullptr: job i at place i
  const PairJob* jobs = nullptr;       // [num_jobs]
  int num_jobs = 0;                    // 0 launches nothing; at most 65535
  KvShape shape;
  BaseFormat format = BaseFormat::fixed8;
};
void launch_demote(const PairArgs& args, cudaStream_t stream);
void launch_extract_low(const PairArgs& args, cudaStream_t stream);
void launch_promote(const PairArgs& args, cudaStream_t stream);

}  // namespace ekv
