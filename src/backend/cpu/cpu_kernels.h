#pragma once
// cpu_kernels.h -- the inner loops, compiled once per instruction set and chosen once at start-up.
//
// Every sum here has an order that depends only on the shape of one row: results of a row are the same bits
// whatever other rows are computed beside it. They may differ between instruction sets (fused multiply-add or
// not), never between runs on one machine.

#include <cstddef>
#include <cstdint>

#include "elastickv/kv_layout.h"
#include "elastickv/model.h"

namespace ekv {

constexpr int kPanelCols = 32;  // columns of a weight panel, see TileArgs
constexpr int kChunk = 8;       // fp16 values that lie side by side in a KV slot
constexpr int kBaseChunk = 16;  // bytes of one BASE chunk, in the order of KvShape::in_chunk

// y[r][32 p + c] = (accumulate ? y[r][32 p + c] : 0) + sum over i = 0, 1, .. k - 1, in this order, of
// x[r][i] * w[p][i][c]. Each element is one chain of (fused) multiply-adds in float.
struct TileArgs {
  const float* x = nullptr;  // [rows][ldx]
  const void* w = nullptr;   // [panels][k][kPanelCols] of `type`
  float* y = nullptr;        // [rows][ldy], kPanelCols * panels columns are written
  int64_t ldx = 0, ldy = 0;
  int rows = 0, k = 0, panels = 0;
  DType type = DType::f32;
  bool accumulate = false;
};

// State of an online softmax over tiles of keys.
struct SoftmaxState {
  float max = 0, sum = 0;
};

// How a BASE byte reads. scale: fixed8, one factor per token, value = int8 * factor; null: e5m2, the byte is
// the high one of an fp16 value and `fill` the low one.
struct BaseReading {
  const float* scale = nullptr;
  uint8_t fill = 0;
};

// Tokens that may win a draw (sampling_rule.h).
struct RaceArgs {
  const float* z = nullptr;  // [count] of the tokens from `first` on
  int first = 0, count = 0;  // `first` is a multiple of kDrawTokens
  uint64_t seed = 0;
  uint32_t output_index = 0;
  float best = 0;   // a race that somebody has reached
  float least = 0;  // cuts have removed the tokens with a smaller z
};
struct Racer {
  int32_t token = 0;
  uint32_t word = 0;
};

struct CpuKernels {
  const char* name;
  int tile_rows;  // rows that a tile computes at full speed
  void (*tile)(const TileArgs& args);
  void (*half_to_float)(const uint16_t* x, float* y, int n);
  void (*float_to_half)(const float* x, uint16_t* y, int n);  // nearest even

  // 8 keys of `chunks` 8-value chunks each, at slot + offsets[key * chunks + chunk], to kt[dim][ld] columns.
  void (*load_keys)(const std::byte* slot, const uint32_t* offsets, int chunks, float* kt, int ld);
  // One row of chunks to y[chunk / 4][ld * 32][8 (chunk % 4)]: a row of value panels of `ld` rows.
  void (*load_value)(const std::byte* slot, const uint32_t* offsets, int chunks, float* y, int ld);
  // The same from BASE chunks of 16 bytes: 8 keys, and one row of values.
  void (*load_base_keys)(const std::byte* slot, const uint32_t* offsets, int chunks, BaseReading read,
                         float* kt, int ld);
  void (*load_base_value)(const std::byte* slot, const uint32_t* offsets, int chunks, BaseReading read,
                          float* y, int ld);

  // Scores of one tile of keys to unnormalised probabilities; keys from `visible` on get 0. Returns the factor
  // for what was accumulated before. First tile: state.max = -inf, visible >= 1.
  float (*softmax_tile)(float* scores, int keys, int visible, SoftmaxState& state);

  void (*rms_norm)(const float* x, const float* weight, float* y, int n, float eps);
  void (*silu_mul)(const float* gate, const float* up, float* y, int n);     // y = gate * sigmoid(gate) * up
  void (*add)(const float* x, float* y, int n);                              // y += x
  void (*scale)(float factor, float* y, int n);                              // y *= factor
  void (*rope)(const float* cosine, const float* sine, float* x, int half);  // turns x[i], x[i + half]
  // x times the orthonormal Hadamard matrix of each of its blocks of `block` (a power of two) values.
  void (*hadamard)(float* x, int n, int block);
  float (*max_abs)(const float* x, int n);  // NaN if there is one
  // fp16 of the fixed8 grid with the exponent of max_abs; returns how many values were clamped.
  int (*grid_fixed8)(const float* x, int exponent, uint16_t* y, int n);
  double (*sum_exp)(const float* x, float max, int n);  // sum of exp(x - max)
  void (*exp_all)(const float* x, float max, float* y, int n);
  // Writes every token with z >= least that races `best` or more, and few others, in order; returns how many.
  // `out` has room for all.
  int (*find_racers)(const RaceArgs& args, Racer* out);
};

enum class CpuIsa : uint8_t { generic, avx2, avx512 };
const CpuKernels* find_cpu_kernels(CpuIsa isa);  // null: this machine cannot run them
const CpuKernels& best_cpu_kernels();

}  // namespace ekv
