#pragma once
// layer_ops.h -- what is left of a layer beside matrix products and attention. Memory-bound, one pass each.
//
// Arithmetic in fp32, one rounding to the output type: |error| <= half a step of the type plus what its line
// says. Pointers are device memory, aligned to 16 bytes; `element` is bf16 or fp16; `hidden` and `width` are
// multiples of 8. Every launcher checks, enqueues on `stream`, allocates nothing and does not wait. num_rows 0
// launches nothing. RMSNorm and SiLU are launched programmatically (programmatic.cuh): weights of a norm are
// read before the kernels ahead have ended, so none of them may write those.

#include "kernels/element.h"
#include "kernels/read_next.h"

namespace ekv {

constexpr int kMaxHidden = 32768;  // a row must fit in the registers of one block

// Whether this build has code for the current device. Throws CudaError when the device cannot be used at all.
bool has_device_code();

// residual = round(x + residual);  out = residual / sqrt(mean(residual^2) + epsilon) * weight
// Without a residual: out = x / sqrt(mean(x^2) + epsilon) * weight.
// The norm reads the rounded sum, which is what the next layer adds to. Error: 2^-20 relative before rounding.
// Alias: out may be x; residual is updated in place and overlaps neither.
struct RmsNormArgs {
  const void* x = nullptr;       // [num_rows][hidden]
  void* residual = nullptr;      // [num_rows][hidden], or nullptr: none
  const void* weight = nullptr;  // [hidden]
  void* out = nullptr;           // [num_rows][hidden]
  int num_rows = 0;
  int hidden = 0;  // at most kMaxHidden
  float epsilon = 1e-6f;
  Element element = Element::bf16;
  ReadNext next{};  // asked for before the kernels ahead have ended
};
void launch_rms_norm(const RmsNormArgs& args, cudaStream_t stream);

// out[r][i] = g / (1 + exp(-g)) * u with g = gate_up[r][i], u = gate_up[r][width + i].
// Error: 2^-20 relative before rounding. Alias: none.
struct SiluMulArgs {
  const void* gate_up = nullptr;  // [num_rows][2][width]
  void* out = nullptr;            // [num_rows][width]
  int num_rows = 0;
  int width = 0;
  Element element = Element::bf16;
};
void launch_silu_mul(const SiluMulArgs& args, cudaStream_t stream);

// out[r] = table[token - first_token] with token = tokens[r], or previous[i] where tokens[r] is -1 - i; a token
// outside [first_token, first_token + num_tokens) gives a row of zeros, so that the shards of a vocabulary add
// up. Copies bits. Alias: none.
struct EmbedArgs {
  const void* table = nullptr;      // [num_tokens][hidden]
  const int32_t* tokens = nullptr;  // [num_rows]
  const int32_t* previous =
      nullptr;          // tokens that the host did not know; nullptr: negative ones are outside every table
  void* out = nullptr;  // [num_rows][hidden]
  int num_rows = 0;
  int hidden = 0;
  int first_token = 0;
  int num_tokens = 0;
  Element element = Element::bf16;
};
void launch_embed(const EmbedArgs& args, cudaStream_t stream);

// out[i] = in[rows[i]]: the rows whose logits are needed, from the last layer's attention or from its end on.
// Copies bits. Alias: none. A negative row (padding of a captured batch) leaves out[i] alone.
struct GatherRowsArgs {
  const void* in = nullptr;       // [any][hidden]
  const int32_t* rows = nullptr;  // [num_rows]
  void* out = nullptr;            // [num_rows][hidden]
  int num_rows = 0;
  int hidden = 0;
  Element element = Element::bf16;
};
void launch_gather_rows(const GatherRowsArgs& args, cudaStream_t stream);

}  // namespace ekv
