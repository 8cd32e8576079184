#pragma once
// kv_layout.h -- what a KV page holds and where. The only header that knows; host and device share it.
//
//   block   kBlockTokens consecutive tokens of one sequence, all layers; pair: blocks 2p and 2p + 1
//   pool    [layer][page][kv_head] kernel slots of slot_bytes(); a page is one slot of each layer and KV head
//   TARGET slot  K then V, fp16, 16 tokens                                   (one block)
//   BASE slot    K then V, one byte per value, 32 tokens, then 64 exponents  (a pair; same size)
//   low plane    [layer][kv_head] K then V, one byte per value, 32 tokens    (a pair; what the host keeps)
//
// The order of bytes inside a slot serves the kernels: a swizzle against bank conflicts, and in BASE slots and
// the low plane the order in which a warp's matrix loads hand bytes to its tensor cores. Whoever reads or
// writes a slot asks target_at, base_at, exponent_at and low_at, and may rely on this alone: the 8 values of a
// TARGET row that start at a multiple of 8 lie side by side, and the 16 of a BASE row that start at a multiple
// of 16 fill one aligned 16-byte chunk (in the order of in_chunk).
//
// Number format `fixed8`: a vector x of one token and KV head lies on the grid 2^(k - 15) with
//   k = the smallest integer in [-9, 15] with max|x| * 2^(15 - k) < 32632
//   t = fp16(clamp(rint(x * 2^(15 - k)), +-32624))
//   TARGET = t * 2^(k - 15), exact in fp16; -0 is stored as +0
//   u = t + 128, base = u >> 8 (int8), low = u & 255
//   BASE reads as base * 2^(k - 7)
// K is rotated by an orthonormal Hadamard matrix over head_dim before the grid, and so is Q.
//
// Number format `e5m2` (the paper's): base and low are the high and low byte of the fp16 value, BASE reads as
// (base << 8) | e5m2::kFill, the exponents are unused.

#include <cstddef>
#include <cstdint>

#include "elastickv/host_device.h"

namespace ekv {

constexpr int kBlockTokens = 16;
constexpr int kPairTokens = 2 * kBlockTokens;

enum class Fidelity : uint8_t { target, base };
enum class BaseFormat : uint8_t { fixed8, e5m2 };
enum KvPart : int { kKey = 0, kValue = 1 };

struct KvShape {
  int layers = 0, pages = 0, kv_heads = 0, head_dim = 0;  // head_dim: 64, 80, 96, 128 or 256

  EKV_HOST_DEVICE constexpr size_t tail_bytes() const { return 2 * kPairTokens; }
  // Padded to whole lines of the GPU's L2: reading slots that start in the middle of one is 4 % slower (H200).
  EKV_HOST_DEVICE constexpr size_t slot_bytes() const {
    return (size_t(4) * kBlockTokens * head_dim + tail_bytes() + 127) / 128 * 128;
  }
  EKV_HOST_DEVICE constexpr size_t page_bytes() const { return slot_bytes() * layers * kv_heads; }
  EKV_HOST_DEVICE constexpr size_t slot_at(int layer, int page, int head) const {
    return ((size_t(layer) * pages + page) * kv_heads + head) * slot_bytes();
  }

  // Byte offset inside a TARGET slot of the fp16 value (part, token 0..15, dim).
  EKV_HOST_DEVICE constexpr size_t target_at(int part, int token, int dim) const {
    return size_t(part) * 2 * kBlockTokens * head_dim + tiled(kBlockTokens, token, 2 * dim, 2 * head_dim);
  }
  // Byte offset inside a BASE slot of the high byte of (part, token 0..31, dim).
  EKV_HOST_DEVICE constexpr size_t base_at(int part, int token, int dim) const {
    return size_t(part) * kPairTokens * head_dim +
           tiled(kPairTokens, token, (dim & ~15) + in_chunk(part, dim & 15), head_dim);
  }
  // Place of dim 0..15 of a 16-dim group inside its 16-byte chunk of a BASE row. A matrix load gives lane i of
  // a quad 4 bytes of a key row: dims 2i, 2i + 1, 2i + 8, 2i + 9, which are its share of the mma operand. The
  // transposed load of values gives lane i 2 bytes of each of two rows: dims i and i + 8.
  EKV_HOST_DEVICE static constexpr int in_chunk(int part, int dim) {
    const int half = dim / 8, in_half = dim % 8;
    return part == kKey ? in_half / 2 * 4 + half * 2 + in_half % 2 : in_half * 2 + half;
  }
  // Byte offset inside a BASE slot of the int8 exponent k of (part, token 0..31).
  EKV_HOST_DEVICE constexpr size_t exponent_at(int part, int token) const {
    return size_t(4) * kBlockTokens * head_dim + size_t(part) * kPairTokens + token;
  }
  // The low plane of a pair mirrors its BASE slots without the tail.
  EKV_HOST_DEVICE constexpr size_t low_slot_bytes() const { return size_t(4) * kBlockTokens * head_dim; }
  EKV_HOST_DEVICE constexpr size_t low_pair_bytes() const { return low_slot_bytes() * layers * kv_heads; }
  EKV_HOST_DEVICE constexpr size_t low_at(int layer, int head, int part, int token, int dim) const {
    return (size_t(layer) * kv_heads + head) * low_slot_bytes() + base_at(part, token, dim);
  }

 private:
  // Rows of `row_bytes` are cut into tiles of at most 128 bytes; inside a tile the 16-byte chunks of a row are
  // XORed with the row, so that 8 consecutive rows of one chunk column fall into different banks.
  EKV_HOST_DEVICE static constexpr size_t tiled(int rows, int row, int byte, int row_bytes) {
    const int tile = byte / 128, in_tile = byte % 128;
    const int width = row_bytes - tile * 128 < 128 ? row_bytes - tile * 128 : 128;
    const int chunks = width / 16, chunk = in_tile / 16;
    const int mask = (chunks & (chunks - 1)) == 0 ? chunks - 1 : 0;
    const int rows_per_line = 8 / (chunks < 8 ? chunks : 8);
    const int swizzled = chunk ^ ((row / rows_per_line) & mask);
    return size_t(tile) * 128 * rows + size_t(row) * width + size_t(swizzled) * 16 + in_tile % 16;
  }
};

// One entry of a flat block table: the pages of blocks 2p and 2p + 1. A BASE pair lives in the page of `even`,
// which then carries kBasePair; `odd` is -1 for a BASE pair and where the sequence has no odd block yet.
struct PairEntry {
  int32_t even = -1, odd = -1;
  EKV_HOST_DEVICE constexpr bool is_base() const { return even < -1; }
  EKV_HOST_DEVICE constexpr int even_page() const {
    return is_base() ? int32_t(uint32_t(even) & 0x7fffffffu) : even;
  }
  bool operator==(const PairEntry&) const = default;
};
constexpr uint32_t kBasePair = 0x80000000u;  // set in PairEntry::even; page ids stay below 2^31 - 1

// A pair that changes fidelity. Demotion reads both pages and leaves BASE in `even`; promotion reads BASE from
// `even` and the low plane, and writes TARGET to both.
struct PairJob {
  int32_t even = -1, odd = -1;
  bool operator==(const PairJob&) const = default;
};

namespace e5m2 {
constexpr uint8_t kFill = 0x80;  // the missing low byte reads as the middle of its range
}  // namespace e5m2

namespace fixed8 {
constexpr int kMinExponent = -9, kMaxExponent = 15;
constexpr float kBound = 32632.0f, kClamp = 32624.0f;

// 2^e for |e| <= 126, exact.
EKV_HOST_DEVICE constexpr float power_of_two(int e) {
  float r = 1;
  for (int i = 0; i < (e < 0 ? -e : e); ++i) r *= e < 0 ? 0.5f : 2.0f;
  return r;
}
// The exponent k of a vector whose largest magnitude is `max_abs` (finite).
EKV_HOST_DEVICE constexpr int exponent(float max_abs) {
  int k = kMinExponent;
  while (k < kMaxExponent && !(max_abs * power_of_two(15 - k) < kBound)) ++k;
  return k;
}
}  // namespace fixed8

}  // namespace ekv
