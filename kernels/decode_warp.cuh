#pragma once
// decode_warp.cuh -- attention of one warp: scores, softmax and values of the slots it gets.
//
// Lane (i, j) = (lane % 4, lane / 4) holds, of a 16 x 8 accumulator, rows j and j + 8 of columns 2i and 2i + 1.

#include "kernels/base_expansion.cuh"
#include "kernels/device.cuh"
#include "kernels/tile_map.cuh"

namespace ekv {

constexpr int kHeadTile = 8;  // N of the mma
// Scores may exceed the running maximum by this (base 2) before the accumulators are rescaled: fp16 holds 2^8.
constexpr float kLazyRescale = 8.0f;

template <int kHeadDim, int kHeadTiles>
class WarpAttention {
 public:
  static constexpr int kGroups = kHeadDim / 16;
  // Beside 128 accumulators there is no room for 64 registers of queries; they are read where they lie.
  static constexpr bool kQueryInRegisters = kHeadDim * kHeadTiles <= 256;

  // `q`: this item's query heads, [group][kHeadDim] in shared memory until the item ends.
  __device__ void start(const uint8_t* q, int group) {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int n = 0; n < kHeadTiles; ++n) {
      const int head = n * kHeadTile + lane / 4;
      // A head past the group repeats the last one; its results are never stored.
      rows_[n] = reinterpret_cast<const uint32_t*>(q + min(head, group - 1) * kHeadDim * 2) + lane % 4;
      if (kQueryInRegisters)
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          q_[g][n][0] = rows_[n][g * 8];
          q_[g][n][1] = rows_[n][g * 8 + 4];
        }
      top_[n][0] = top_[n][1] = -INFINITY;
      sum_[n][0] = sum_[n][1] = 0;
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
#pragma unroll
      for (int n = 0; n < kHeadTiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) out_[g][n][e] = 0;
  }

  // One block of 16 tokens, of which `valid` count.
  __device__ void add_target(uint8_t* slot, int valid, float scale_log2) {
    using Map = TileMap<kBlockTokens, 2 * kHeadDim, 32>;
    const int lane = threadIdx.x % kWarpSize, matrix = lane / 8;
    const uint32_t keys = shared_address(slot), values = keys + 2 * kBlockTokens * kHeadDim;
    float s[1][kHeadTiles][4] = {}, odd[1][kHeadTiles][4] = {};  // two chains hide the latency of the mma
    unroll<kGroups>([&](auto g) {
      uint32_t k[4];
      ldmatrix_x4(k, keys + Map::template at<g>(lane % 8 + matrix % 2 * 8, matrix / 2));
#pragma unroll
      for (int n = 0; n < kHeadTiles; ++n)
        mma_m16n8k16(g % 2 ? odd[0][n] : s[0][n], k, query(g, n, 0), query(g, n, 1));
    });
#pragma unroll
    for (int n = 0; n < kHeadTiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[0][n][e] = (s[0][n][e] + odd[0][n][e]) * scale_log2;
    if (valid < kBlockTokens) mask_tail(s, slot + 2 * kBlockTokens * kHeadDim, valid);

    uint32_t p[1][kHeadTiles][2];
    softmax(s, p, 1.0f);
    unroll<kGroups>([&](auto g) {
      uint32_t v[4];
      ldmatrix_x4_trans(v, values + Map::template at<g>(lane % 8 + matrix / 2 * 8, matrix % 2));
#pragma unroll
      for (int n = 0; n < kHeadTiles; ++n) mma_m16n8k16(out_[g][n], v, p[0][n][0], p[0][n][1]);
    });
  }

  // A BASE pair: 32 tokens, all of them valid.
  template <class Format>
  __device__ void add_base(const uint8_t* slot, float scale_log2) {
    using Map = TileMap<kPairTokens, kHeadDim, 16>;
    const int lane = threadIdx.x % kWarpSize;
    const uint32_t keys = shared_address(slot), values = keys + kPairTokens * kHeadDim;
    const int8_t* tail = reinterpret_cast<const int8_t*>(slot + 2 * kPairTokens * kHeadDim);
    float s[2][kHeadTiles][4] = {};
    unroll<kGroups>([&](auto g) {
      uint32_t x[4];
      ldmatrix_x4(x, keys + Map::template at<g>(lane, 0));
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const HalfPairs upper = Format::key(x[2 * r]), lower = Format::key(x[2 * r + 1]);
        const uint32_t k[4] = {upper.low, lower.low, upper.high, lower.high};
#pragma unroll
        for (int n = 0; n < kHeadTiles; ++n) mma_m16n8k16(s[r][n], k, query(g, n, 0), query(g, n, 1));
      }
    });
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float scale = scale_log2 * Format::key_scale(tail, 16 * r + 8 * half + lane / 4);
#pragma unroll
        for (int n = 0; n < kHeadTiles; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) s[r][n][2 * half + e] *= scale;
      }

    uint32_t p[2][kHeadTiles][2];
    softmax(s, p, Format::kValueGain);
    Format format;
    format.load_value_scales(tail, lane % 4);
    unroll<kGroups>([&](auto g) {
      uint32_t x[4];
      ldmatrix_x4_trans(x, values + Map::template at<g>(lane, 0));
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const HalfPairs first = format.value(x[2 * r], 2 * r), second = format.value(x[2 * r + 1], 2 * r + 1);
        const uint32_t v[4] = {first.low, first.high, second.low, second.high};
#pragma unroll
        for (int n = 0; n < kHeadTiles; ++n) mma_m16n8k16(out_[g][n], v, p[r][n][0], p[r][n][1]);
      }
    });
  }

  // Leaves maximum, sum and output of head tile n in `shared`.
  template <class Shared>
  __device__ void store(Shared& shared, int n, int warp) const {
    const int lane = threadIdx.x % kWarpSize, i = lane % 4, j = lane / 4;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float sum = sum_[n][e];
#pragma unroll
      for (int offset = 4; offset < kWarpSize; offset *= 2) sum += __shfl_xor_sync(kAllLanes, sum, offset);
      if (j == 0) shared.stats[warp][2 * i + e] = make_float2(top_[n][e], sum);
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
#pragma unroll
      for (int e = 0; e < 4; ++e) shared.out[warp][2 * i + e % 2][16 * g + j + e / 2 * 8] = out_[g][n][e];
  }

 private:
  __device__ uint32_t query(int g, int n, int half) const {
    return kQueryInRegisters ? q_[g][n][half] : rows_[n][g * 8 + half * 4];
  }

  // Rows past the end may hold anything: their scores become -inf, and their values 0, because 0 * NaN is NaN.
  __device__ void mask_tail(float (&s)[1][kHeadTiles][4], uint8_t* values, int valid) {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int n = 0; n < kHeadTiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (lane / 4 + e / 2 * 8 >= valid) s[0][n][e] = -INFINITY;
    using Map = TileMap<kBlockTokens, 2 * kHeadDim, 32>;
    for (int row = valid + lane / 2; row < kBlockTokens; row += kWarpSize / 2)
      unroll<kGroups>(
          [&](auto g) { store16(values + Map::template at<g>(row, lane % 2), make_uint4(0, 0, 0, 0)); });
#if __CUDA_ARCH__ >= 900
    fence_proxy_async();  // the copy engine writes here next
#endif
    __syncwarp();
  }

  // Turns scores into probabilities relative to the running maximum, as the B operand of the values' mma.
  template <int kTiles>
  __device__ void softmax(float (&s)[kTiles][kHeadTiles][4], uint32_t (&p)[kTiles][kHeadTiles][2], float gain) {
    bool raise = false;
#pragma unroll
    for (int r = 0; r < kTiles; ++r)
#pragma unroll
      for (int n = 0; n < kHeadTiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) raise |= s[r][n][e] > top_[n][e % 2] + kLazyRescale;
    if (__any_sync(kAllLanes, raise)) raise_top(s);
#pragma unroll
    for (int r = 0; r < kTiles; ++r)
#pragma unroll
      for (int n = 0; n < kHeadTiles; ++n) {
        float w[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          w[e] = exp2_approx(s[r][n][e] - top_[n][e % 2]);
          sum_[n][e % 2] += w[e];
        }
        p[r][n][0] = movmatrix_trans(pack_half2(w[0] * gain, w[1] * gain));
        p[r][n][1] = movmatrix_trans(pack_half2(w[2] * gain, w[3] * gain));
      }
  }

  template <int kTiles>
  __device__ void raise_top(const float (&s)[kTiles][kHeadTiles][4]) {
#pragma unroll
    for (int n = 0; n < kHeadTiles; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float top = top_[n][e];
#pragma unroll
        for (int r = 0; r < kTiles; ++r) top = fmaxf(top, fmaxf(s[r][n][e], s[r][n][e + 2]));
#pragma unroll
        for (int offset = 4; offset < kWarpSize; offset *= 2)
          top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, offset));
        // A head whose scores are all -inf keeps that maximum; -inf - -inf would be NaN.
        const float factor = top == -INFINITY ? 1.0f : exp2_approx(top_[n][e] - top);
        top_[n][e] = top;
        sum_[n][e] *= factor;
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          out_[g][n][e] *= factor;
          out_[g][n][e + 2] *= factor;
        }
      }
  }

  const uint32_t* rows_[kHeadTiles];
  uint32_t q_[kQueryInRegisters ? kGroups : 1][kHeadTiles][2];
  float out_[kGroups][kHeadTiles][4];
  float top_[kHeadTiles][2], sum_[kHeadTiles][2];
};

}  // namespace ekv
