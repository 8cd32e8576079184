#pragma once
// skinny_gemm.h -- y = x W^T for few rows: the sizes at which a product is one reading of W.
//
// plain   y[r][o] = sum_i x[r][i] w[o][i], fp16 or bf16 in, fp32 sums, one rounding to the same type or none
// gated   y[r][o] = round(g) / (1 + exp(-round(g))) * round(u) with g = sum_i x[r][i] w[0][o][i] and
//                                                                  u = sum_i x[r][i] w[1][o][i]
//
// The gated product computes what launch_silu_mul() makes of the plain one, with the same function. Against
// exact arithmetic, of a sum: |error| <= (inputs * 2^-27 + 2^-20) * sum_i |x[r][i] w[o][i]| before rounding.
// Deterministic; a row's result depends on its own x, W, `split` and the kernel only, bit for bit, not on the
// other rows, their number or the device. There are two kernels: skinny_split.h says which one a device has a
// product from.
//
// Fewer CTAs than the device holds would leave bandwidth unused, so the inputs may be cut into `split` parts,
// each with a CTA of its own; a cluster of them adds its sums in the order of the parts. No workspace, no
// counters.
//
// The launch is programmatic on devices that know it: it may begin before the kernels ahead of it on the stream
// have ended, and reads W at once, x only after they have. So nothing that is still on its way on that stream,
// or on one that it waits for through a kernel's end alone, may write W. The kernel after this one may be
// launched in the same way; the more of it runs early, the smaller the gap.

#include <vector>

#include "kernels/element.h"

namespace ekv {

constexpr int kMaxSkinnyRows = 128;  // with wgmma; without, 32

struct SkinnyGemmArgs {
  const void* w = nullptr;  // [outputs][inputs], gated [gate, up][outputs][inputs], device memory, aligned to
                            // 16 bytes
  const void* x = nullptr;  // [rows][inputs], aligned to 16 bytes
  void* y = nullptr;        // [rows][out_stride], aligned to its element; overlaps neither w nor x
  int rows = 0;             // 1 to kMaxSkinnyRows
  int outputs = 0;          // any
  int inputs = 0;           // a multiple of 8
  int out_stride = 0;       // elements, at least `outputs`; what lies between the rows is left alone
  bool fp32_out = false;    // not with gated
  bool gated = false;       // where find_skinny_gated() says so
  Element element = Element::fp16;  // of w and x, and of y unless that is fp32; fp16 or bf16
  int split = 1;                    // one of find_skinny's
};

// The splits that a product may have, the most promising first. Empty: these kernels do not do it (more rows,
// inputs that are no multiple of 8, a gated product without wgmma). With CUDA it asks for the current device:
// those without clusters have split 1 only.
std::vector<int> find_skinny(int rows, int outputs, int inputs, bool gated = false);
// Whether a product of so many rows may be gated on the current device.
bool find_skinny_gated(int rows);

// Checks, enqueues one kernel on `stream`, allocates nothing, does not wait.
void launch_skinny_gemm(const SkinnyGemmArgs& args, cudaStream_t stream);

}  // namespace ekv
