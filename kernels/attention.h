#pragma once
// attention.h -- attention of packed query rows over a paged KV cache of two fidelities.
//
//   q        [rows][heads][head_dim] fp16, rotated like K (kv_layout.h)
//   out      [rows][heads][head_dim] fp16 or bf16. It may not alias q.
//   lse      [rows][heads] fp32, natural logarithm of the sum of exponentials; nullptr: not wanted
//   pool     the KV pool of kv_layout.h, 16-byte aligned
//   tables   [num_seqs][max_pairs]; entries past a sequence's last block are never followed
//   q_start  [num_seqs + 1]; rows q_start[s] .. q_start[s + 1] - 1 are the last rows of sequence s
//   kv_len   [num_seqs]; keys visible to the last row of sequence s. Row i of n sees kv_len - n + 1 + i keys.
//
// Formula  out = sum_j softmax_j(scale * q.k_j) v_j over the visible keys, query head h reading KV head
//          h / group. A TARGET value is the fp16 number in the slot, a BASE value is what kv_layout.h says its
//          byte stands for.
// Error    products are exact, sums fp32, the probabilities are rounded to fp16 (at most 2^8 before the
//          division): |out - exact| <= r |out| + 2^-10 max|v| + the scores' error, which is
//          2^-22 * scale * sum|q k| * max|v|; r is 2^-11 where out is fp16, 2^-8 where it is bf16.
// Reads    only rows < kv_len of a slot are used; the bytes of later rows may hold anything, NaN too.
// Skips    a sequence with kv_len 0 or without rows: its rows are not written, and nothing else is.
// Order    asynchronous on `stream`. Every kernel but the one launched directly before must have finished with
//          what decode reads; that one is waited for inside the kernel (programmatic launch).
//          CTAs of one decode wait for each other. Other kernels may run beside it, but two decodes of one
//          device must be ordered (one stream, or events): side by side each could hold what the other waits
//          for.
// Repeats  the same arguments give the same bits: no floating-point atomics, partials are merged in a fixed
//          order.
// Source   online softmax: Milakov and Gimelshein, arXiv 1805.02867; split-KV: Flash-Decoding; equal shares of
//          one flattened range: Stream-K, arXiv 2301.03598.

#include <cstddef>
#include <cstdint>

#include "elastickv/kv_layout.h"
#include "elastickv/kv_path.h"
#include "kernels/element.h"

namespace ekv {

struct AttnArgs {
  KvShape shape;
  int layer = 0;
  int heads = 0;  // group = heads / shape.kv_heads is 1 .. 16
  int num_seqs = 0;
  int max_pairs = 0;
  int rows = 0;     // of q; prefill sizes its grid by it
  float scale = 0;  // usually 1 / sqrt(head_dim)
  BaseFormat format = BaseFormat::fixed8;
  Element out_element = Element::fp16;  // or bf16
  const uint16_t* q = nullptr;
  uint16_t* out = nullptr;
  float* lse = nullptr;
  const uint8_t* pool = nullptr;
  const PairEntry* tables = nullptr;
  const int32_t* q_start = nullptr;
  const int32_t* kv_len = nullptr;
};

// ---- decode: the sequences that have exactly one row. Others are left to prefill.

// Device memory that plan and decode share. One plan serves all layers of a step.
struct DecodeWorkspace {
  uint8_t* memory = nullptr;  // `bytes` of device memory, 256-byte aligned; zeroed once, then left alone
  size_t bytes = 0;
  int num_ctas = 0;  // that decode runs on; at most the multiprocessors of the device
  int max_seqs = 0, max_pairs = 0, kv_heads = 0, heads = 0, head_dim = 0;
};
constexpr int kMaxDecodeSeqs = 2048;

// Sizes the workspace for batches up to `max_seqs` sequences of `max_pairs` pairs; the caller brings the
// memory. num_ctas: normally the number of multiprocessors; the results' last bits depend on it.
DecodeWorkspace decode_workspace(const KvShape& shape, int heads, int max_seqs, int max_pairs, int num_ctas);

// Cuts the batch into equal contiguous shares of slots. Reads tables, q_start and kv_len.
void launch_decode_plan(const AttnArgs& args, KvPath path, const DecodeWorkspace& workspace,
                        cudaStream_t stream);

// After launch_decode_plan with the same path, tables, q_start and kv_len.
void launch_decode(const AttnArgs& args, KvPath path, const DecodeWorkspace& workspace, cudaStream_t stream);

// ---- prefill: the sequences that have two rows or more.

enum class MatrixUnit : uint8_t { mma, wgmma };  // mma.sync of sm_80 and up; wgmma of sm_90a

// Device memory that plan and prefill share. BASE pairs are expanded, layer by layer, to TARGET slots in the
// scratch.
struct PrefillWorkspace {
  uint8_t* memory = nullptr;  // `bytes` of device memory, 1024-byte aligned, contents irrelevant
  size_t bytes = 0;
  int max_rows = 0, max_seqs = 0, max_pairs = 0;
  int scratch_pairs =
      0;  // most BASE pairs of all prefilling sequences of a batch together; more is a device fault
  int kv_heads = 0, heads = 0, head_dim = 0;
};
constexpr int kMaxPrefillSeqs = 2048;

PrefillWorkspace prefill_workspace(const KvShape& shape, int heads, int max_rows, int max_seqs, int max_pairs,
                                   int scratch_pairs);

// Lists the tiles of the batch, longest first, and its BASE pairs. Once a step.
void launch_prefill_plan(const AttnArgs& args, const PrefillWorkspace& workspace, cudaStream_t stream);

// Expands BASE pairs unless `path` is native, then attends. After launch_prefill_plan with the same batch.
void launch_prefill(const AttnArgs& args, KvPath path, const PrefillWorkspace& workspace, cudaStream_t stream,
                    MatrixUnit at_most = MatrixUnit::wgmma);

// ---- selection

using DecodeLauncher = void (*)(const AttnArgs&, const DecodeWorkspace&, cudaStream_t);

struct DecodeKernel {
  KvPath path;
  BaseFormat format;  // of no meaning for native
  int head_dim;
  int max_group;
  DecodeLauncher launch;
  const char* name;
};

using PrefillLauncher = void (*)(const AttnArgs&, const PrefillWorkspace&, cudaStream_t);

struct PrefillKernel {
  MatrixUnit unit;
  int head_dim;
  PrefillLauncher launch;
  const char* name;
};

// The fastest kernel of this build that the current device runs; nullptr: none. `at_most`: tests and
// comparisons can ask for the kernels of older devices.
const PrefillKernel* find_prefill(int head_dim, MatrixUnit at_most = MatrixUnit::wgmma);

// nullptr: this build has no such kernel. Ask at start-up, not at the first request.
const DecodeKernel* find_decode(KvPath path, BaseFormat format, int head_dim, int group);

}  // namespace ekv
