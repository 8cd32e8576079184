#pragma once
// tile_gemm.h -- matrix products of many rows, and the gated one of an MLP in a single kernel (sm_90a).
//
//   plain   out[r][o] = sum_i x[r][i] w[o][i]
//   added   out[r][o] = round(out[r][o] + round(sum_i x[r][i] w[o][i]))
//   gated   out[r][o] = round(g) / (1 + exp(-round(g))) * round(u)  with g = sum_i x[r][i] w[0][o][i] and
//                                                                        u = sum_i x[r][i] w[1][o][i]
//
// `element` in and out, fp32 sums. The gated product rounds g and u to `element` as a product followed by
// launch_silu_mul() does, and computes the rest with the same function: the results differ only where another
// order of sums rounds g or u otherwise. Against exact arithmetic: a sum is off by at most (inputs * 2^-24 +
// 2^-20) * sum_i |x w| before it is rounded, the rest as layer_ops.h says.
//
// Deterministic; a row's result depends on its own x and on W only, bit for bit, neither on the other rows nor
// on their number nor on the device. Rows are computed in blocks of 256: fewer take the time of 256.
//
// The launch is programmatic (programmatic.cuh) and waits inside for what lies ahead of it on the stream. No
// workspace.

#include "kernels/element.h"

namespace ekv {

struct TileGemmArgs {
  const void* x = nullptr;  // [rows][inputs], device memory
  const void* w = nullptr;  // [outputs][inputs]; gated: [gate, up][outputs][inputs]
  void* out = nullptr;      // [rows][outputs]; overlaps neither x nor w
  int rows = 0;             // at least 1
  int outputs = 0;          // of `out`; a multiple of 8
  int inputs = 0;           // a multiple of 8
  bool gated = false;
  bool add = false;                 // to `out`; not gated
  Element element = Element::fp16;  // or bf16
};

// Whether there is a kernel for the sizes on the current device.
bool has_tile_gemm(int outputs, int inputs);

// Checks, enqueues one kernel on `stream`, allocates nothing, does not wait. Pointers are aligned to 16 bytes.
void launch_tile_gemm(const TileGemmArgs& args, cudaStream_t stream);

}  // namespace ekv
