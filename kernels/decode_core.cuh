#pragma once
// decode_core.cuh -- the one main loop of decode: load slots, scores, softmax, values, merge.
//
// A CTA works through the items the planner gave it. Each of its warps owns a ring of slots in shared memory
// that it fills itself, across item boundaries, and consumes alone: no barrier in the loop. Keys and values are
// the A operand of the tensor cores (16 tokens, or 16 dims), query heads lie on N = 8, so a group of 4 wastes
// half and 8 nothing.
//
// Lane (i, j) = (lane % 4, lane / 4) holds, of a 16 x 8 accumulator, rows j and j + 8 of columns 2i and 2i + 1.

#include <algorithm>
#include <type_traits>

#include "kernels/base_expansion.cuh"
#include "kernels/cuda_check.h"
#include "kernels/kv_cursor.cuh"

namespace ekv {

constexpr int kDecodeThreads = kDecodeWarps * kWarpSize;
constexpr int kMaxStages = 8;
constexpr int kHeadTile = 8;  // N of the mma
// Scores may exceed the running maximum by this (base 2) before the accumulators are rescaled: fp16 holds 2^8.
constexpr float kLazyRescale = 8.0f;

struct DecodeParams {
  AttnArgs a;
  DecodePlanView plan;
  int group, stages;
  float scale_log2;  // scale * log2(e)
};

// ---- the ring of one warp

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
constexpr int kRingArrivals = 1;
#else
constexpr int kRingArrivals = kWarpSize;
#endif

class Ring {
 public:
  // `slots`, `barriers`, `tags`: this warp's parts of shared memory.
  __device__ Ring(uint8_t* slots, uint64_t* barriers, int* tags, int stages, int stride)
      : slots_(slots), barriers_(shared_address(barriers)), tags_(tags), stages_(stages), stride_(stride) {
    if (threadIdx.x % kWarpSize < stages) barrier_init(barriers_ + 8 * (threadIdx.x % kWarpSize));
    __syncwarp();
  }
  // Starts the copy of `bytes` into the next stage, which every lane has finished reading.
  __device__ void fill(const uint8_t* from, uint32_t bytes, int tag) {
    const int lane = threadIdx.x % kWarpSize;
    const uint32_t to = shared_address(slots_ + fill_ * stride_), barrier = barriers_ + 8 * fill_;
#if __CUDA_ARCH__ >= 900
    if (lane == 0) {
      tags_[fill_] = tag;
      mbarrier_arrive_expect(barrier, bytes);
      bulk_copy(to, from, bytes, barrier);
    }
#else
    if (lane == 0) tags_[fill_] = tag;
    for (uint32_t i = lane * 16; i < bytes; i += kWarpSize * 16) cp_async16(to + i, from + i);
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
#endif
    if (++fill_ == stages_) fill_ = 0;
  }
  // Waits for the oldest stage.
  __device__ uint8_t* wait(int& tag) {
    const uint32_t barrier = barriers_ + 8 * read_;
#if __CUDA_ARCH__ >= 900
    mbarrier_wait(barrier, phase_);
#else
    asm volatile(
        "{\n\t.reg .pred done;\n"
        "again:\n\tmbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n\t"
        "@!done bra again;\n\t}" ::"r"(barrier),
        "r"(phase_)
        : "memory");
#endif
    tag = tags_[read_];
    return slots_ + read_ * stride_;
  }
  // Frees the oldest stage for fill.
  __device__ void release() {
    __syncwarp();
    if (++read_ == stages_) {
      read_ = 0;
      phase_ ^= 1;
    }
  }

 private:
  __device__ static void barrier_init(uint32_t barrier) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(kRingArrivals) : "memory");
#if __CUDA_ARCH__ >= 900
    mbarrier_init_fence();
#endif
  }

  uint8_t* slots_;
  uint32_t barriers_;
  int* tags_;
  int stages_, stride_, fill_ = 0, read_ = 0;
  uint32_t phase_ = 0;
};

// Fills the ring from the CTA's items in order, as far ahead of the consumer as the ring is deep.
template <class Cursor, class Format>
class Producer {
 public:
  __device__ Producer(const DecodeParams& p, ItemRange range, int warp)
      : p_(p), item_(range.begin), items_end_(range.end), warp_(warp) {
    open();
  }
  __device__ void fill(Ring& ring) {
    while (item_ < items_end_ && cursor_.done()) {
      ++item_;
      open();
    }
    if (item_ >= items_end_) return;
    const SlotRef ref = cursor_.next();
    const KvShape& s = p_.a.shape;
    const uint32_t values = 4 * kBlockTokens * s.head_dim;
    const uint32_t bytes = Cursor::kElastic && Format::kTail && ref.base ? values + s.tail_bytes() : values;
    const int tag = Cursor::kElastic && ref.base ? -1 : ref.token;
    ring.fill(p_.a.pool + s.slot_at(p_.a.layer, ref.page, head_), bytes, tag);
  }

 private:
  __device__ void open() {
    if (item_ >= items_end_) return;
    head_ = p_.plan.items[item_].kv_head;
    cursor_.open(p_.a, p_.plan.items[item_], warp_);
  }

  const DecodeParams& p_;
  Cursor cursor_;
  int item_, items_end_, warp_, head_ = 0;
};

// ---- matrix loads of a slot

// Address parts of the 16-byte chunks of one 16-dim group, by the layout's swizzle: group g of a row of
// kRowBytes (2 chunks per group for fp16, 1 for bytes), kRows rows per tile. The lane part is the same for all
// full tiles.
template <int kRows, int kRowBytes, int kGroupBytes>
struct TileMap {
  static constexpr int tile(int g) { return g * kGroupBytes / 128; }
  static constexpr int width(int g) { return std::min(128, kRowBytes - tile(g) * 128); }
  static constexpr int chunk(int g) { return g * kGroupBytes % 128 / 16; }
  static constexpr bool swizzled(int g) { return (width(g) & (width(g) - 1)) == 0; }
  // Byte of chunk `upper` (0 or 1) of group g in `row`.
  template <int g>
  __device__ static uint32_t at(int row, int upper) {
    constexpr int kWidth = width(g), kChunks = kWidth / 16;
    constexpr int kRowsPerLine = 8 / (kChunks < 8 ? kChunks : 8);
    const int turn = swizzled(g) ? (row / kRowsPerLine) & (kChunks - 1) : 0;
    const uint32_t lane_part = row * kWidth + ((upper ^ turn) * 16);
    const uint32_t in_tile = swizzled(g) ? lane_part ^ (chunk(g) * 16) : lane_part + chunk(g) * 16;
    return tile(g) * 128 * kRows + in_tile;
  }
};

// Calls f(integral_constant<0>) .. f(integral_constant<n - 1>).
template <int n, class F>
__device__ __forceinline__ void unroll(F&& f) {
  [&]<int... i>(std::integer_sequence<int, i...>) { (f(std::integral_constant<int, i>{}), ...); }
  (std::make_integer_sequence<int, n>{});
}

// ---- the state of one warp in one item

template <int kHeadDim, int kHeadTiles>
class WarpAttention {
 public:
  static constexpr int kGroups = kHeadDim / 16;
  // Beside 128 accumulators there is no room for 64 registers of queries; they come from L1 then.
  static constexpr bool kQueryInRegisters = kHeadDim * kHeadTiles <= 256;

  // `q`: this item's first query head.
  __device__ void start(const uint16_t* q, int group) {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int n = 0; n < kHeadTiles; ++n) {
      const int head = n * kHeadTile + lane / 4;
      // A head past the group repeats the last one; its results are never stored.
      rows_[n] = reinterpret_cast<const uint32_t*>(q + size_t(min(head, group - 1)) * kHeadDim) + lane % 4;
      if (kQueryInRegisters)
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          q_[g][n][0] = __ldg(rows_[n] + g * 8);
          q_[g][n][1] = __ldg(rows_[n] + g * 8 + 4);
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
    return kQueryInRegisters ? q_[g][n][half] : __ldg(rows_[n] + g * 8 + half * 4);
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

// ---- merge

template <int kHeadDim>
struct MergeShared {
  static constexpr int kPadded = kHeadDim + 4;  // 2 * kPadded % 32 == 8: the 32 stores of a warp hit 32 banks
  float out[kDecodeWarps][kHeadTile][kPadded];
  float2 stats[kDecodeWarps][kHeadTile];  // maximum, sum
  bool last;
};

// exp2(x - top) where -inf means that nothing was seen.
__device__ __forceinline__ float weight(float x, float top) {
  return x == -INFINITY ? 0.0f : exp2_approx(x - top);
}

__device__ __forceinline__ void write_row(const DecodeParams& p, const DecodeItem& item, int head, int dim,
                                          float x0, float x1, float top, float sum) {
  const size_t row = size_t(item.row) * p.a.heads + item.kv_head * p.group + head;
  const float inverse = 1.0f / sum;
  *reinterpret_cast<uint32_t*>(p.a.out + row * p.a.shape.head_dim + dim) =
      pack_half2(x0 * inverse, x1 * inverse);
  if (dim == 0 && p.a.lse) p.a.lse[row] = (top + log2f(sum)) * 0.6931471805599453f;
}

// Joins the warps' parts of head tile n: to the output if the CTA has the whole unit, else to its partial.
template <int kHeadDim>
__device__ void merge_warps(const DecodeParams& p, const DecodeItem& item, const MergeShared<kHeadDim>& shared,
                            int n) {
  const int heads = min(kHeadTile, p.group - n * kHeadTile);
  for (int at = threadIdx.x; at < heads * kHeadDim / 2; at += kDecodeThreads) {
    const int in_tile = at / (kHeadDim / 2), dim = at % (kHeadDim / 2) * 2, head = n * kHeadTile + in_tile;
    float top = -INFINITY, sum = 0, x0 = 0, x1 = 0;
#pragma unroll
    for (int w = 0; w < kDecodeWarps; ++w) top = fmaxf(top, shared.stats[w][in_tile].x);
#pragma unroll
    for (int w = 0; w < kDecodeWarps; ++w) {
      const float f = weight(shared.stats[w][in_tile].x, top);
      const float2 x = *reinterpret_cast<const float2*>(&shared.out[w][in_tile][dim]);
      sum += f * shared.stats[w][in_tile].y;
      x0 += f * x.x;
      x1 += f * x.y;
    }
    if (item.num_splits == 1) {
      write_row(p, item, head, dim, x0, x1, top, sum);
    } else {
      const size_t row = size_t(item.partial) * p.group + head;
      *reinterpret_cast<float2*>(p.plan.partial_out + row * kHeadDim + dim) = make_float2(x0, x1);
      if (dim == 0) p.plan.partial_stats[row] = make_float2(top, sum);
    }
  }
}

// The CTA that finishes a unit last joins its partials in the order of their slots.
template <int kHeadDim>
__device__ void merge_partials(const DecodeParams& p, const DecodeItem& item) {
  for (int at = threadIdx.x; at < p.group * kHeadDim / 4; at += kDecodeThreads) {
    const int head = at / (kHeadDim / 4), dim = at % (kHeadDim / 4) * 4;
    float top = -INFINITY, sum = 0;
    for (int i = 0; i < item.num_splits; ++i)
      top = fmaxf(top, __ldcg(&p.plan.partial_stats[size_t(partial_of_split(item, i)) * p.group + head]).x);
    float4 x{0, 0, 0, 0};
#pragma unroll 4
    for (int i = 0; i < item.num_splits; ++i) {
      const size_t row = size_t(partial_of_split(item, i)) * p.group + head;
      const float2 stats = __ldcg(&p.plan.partial_stats[row]);
      const float4 y = __ldcg(reinterpret_cast<const float4*>(p.plan.partial_out + row * kHeadDim + dim));
      const float f = weight(stats.x, top);
      sum += f * stats.y;
      x.x += f * y.x;
      x.y += f * y.y;
      x.z += f * y.z;
      x.w += f * y.w;
    }
    write_row(p, item, head, dim, x.x, x.y, top, sum);
    write_row(p, item, head, dim + 2, x.z, x.w, top, sum);
  }
}

template <int kHeadDim, int kHeadTiles>
__device__ void finish_item(const DecodeParams& p, const DecodeItem& item,
                            const WarpAttention<kHeadDim, kHeadTiles>& state, MergeShared<kHeadDim>& shared,
                            int warp) {
#pragma unroll
  for (int n = 0; n < kHeadTiles; ++n) {
    state.store(shared, n, warp);
    __syncthreads();
    merge_warps(p, item, shared, n);
    __syncthreads();
  }
  if (item.num_splits == 1) return;
  __threadfence();
  __syncthreads();
  uint32_t* arrivals = &p.plan.arrivals[item.first_partial / 2];
  if (threadIdx.x == 0) shared.last = atomicAdd(arrivals, 1) == uint32_t(item.num_splits - 1);
  __syncthreads();
  if (!shared.last) return;
  __threadfence();
  merge_partials<kHeadDim>(p, item);
  if (threadIdx.x == 0) *arrivals = 0;  // the next layer uses the same plan
}

// ---- the kernel

constexpr size_t align_up(size_t x, size_t to) { return (x + to - 1) / to * to; }

// Shared memory: barriers and tags of all rings, the merge buffer, then the slots.
template <int kHeadDim>
struct DecodeShared {
  uint64_t barriers[kDecodeWarps][kMaxStages];
  int tags[kDecodeWarps][kMaxStages];
  alignas(16) MergeShared<kHeadDim> merge;
};
template <int kHeadDim>
constexpr size_t kDecodeHeadBytes = align_up(sizeof(DecodeShared<kHeadDim>), 128);

template <int kHeadDim, class Cursor, class Format, int kHeadTiles>
__global__ void __launch_bounds__(kDecodeThreads, 1) decode_kernel(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(128) uint8_t raw[];
  auto& shared = *reinterpret_cast<DecodeShared<kHeadDim>*>(raw);
  const int warp = threadIdx.x / kWarpSize, stride = p.a.shape.slot_bytes();
  Ring ring(raw + kDecodeHeadBytes<kHeadDim> + size_t(warp) * p.stages * stride, shared.barriers[warp],
            shared.tags[warp], p.stages, stride);
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  const ItemRange range = p.plan.ranges[blockIdx.x];
  if (range.begin == range.end) return;

  Producer<Cursor, Format> producer(p, range, warp);
  for (int i = 0; i < p.stages; ++i) producer.fill(ring);
  __syncwarp();

  WarpAttention<kHeadDim, kHeadTiles> state;
  for (int at = range.begin; at < range.end; ++at) {
    const DecodeItem item = p.plan.items[at];
    state.start(p.a.q + (size_t(item.row) * p.a.heads + item.kv_head * p.group) * kHeadDim, p.group);
    for (int slot = item.slot_begin + warp; slot < item.slot_end; slot += kDecodeWarps) {
      int tag;
      uint8_t* data = ring.wait(tag);
      if (Cursor::kElastic && tag < 0)
        state.template add_base<Format>(data, p.scale_log2);
      else
        state.add_target(data, item.kv_len - tag, p.scale_log2);
      ring.release();
      producer.fill(ring);
      __syncwarp();
    }
    finish_item(p, item, state, shared.merge, warp);
  }
}

// ---- the launcher

// Deepest ring that fits beside the rest; at least 2 stages on every supported device.
template <int kHeadDim>
int ring_stages(const KvShape& shape, int shared_limit) {
  const size_t per_stage = kDecodeWarps * shape.slot_bytes();
  return std::min<int>(kMaxStages, (shared_limit - kDecodeHeadBytes<kHeadDim>) / per_stage);
}

template <KvPath kPath>
using CursorOf =
    std::conditional_t<kPath == KvPath::native, NativeCursor,
                       std::conditional_t<kPath == KvPath::structured, StructuredCursor, GeneralCursor>>;
template <BaseFormat kFormat>
using FormatOf = std::conditional_t<kFormat == BaseFormat::fixed8, Fixed8, E5m2>;

template <KvPath kPath, BaseFormat kFormat, int kHeadDim, int kHeadTiles>
void launch_decode_kernel(const AttnArgs& args, const DecodeWorkspace& w, cudaStream_t stream) {
  const KvShape& s = args.shape;
  EKV_CHECK(s.head_dim == kHeadDim && args.heads % s.kv_heads == 0, "kernel and shape do not fit");
  EKV_CHECK(args.heads / s.kv_heads <= kHeadTiles * kHeadTile, "group larger than the kernel's");
  EKV_CHECK(w.heads == args.heads && w.kv_heads == s.kv_heads && w.head_dim == kHeadDim,
            "workspace of another model");
  if (args.num_seqs == 0) return;
  const auto kernel = decode_kernel<kHeadDim, CursorOf<kPath>, FormatOf<kFormat>, kHeadTiles>;
  int device, limit;
  cuda_check(cudaGetDevice(&device));
  cuda_check(cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  const int stages = ring_stages<kHeadDim>(s, limit);
  const size_t shared = kDecodeHeadBytes<kHeadDim> + size_t(kDecodeWarps) * stages * s.slot_bytes();
  cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)));

  const DecodeParams p{args, decode_plan_view(w, nullptr), args.heads / s.kv_heads, stages,
                       args.scale * 1.4426950408889634f};
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{dim3(w.num_ctas), dim3(kDecodeThreads), shared, stream, &early, 1};
  cuda_check(cudaLaunchKernelEx(&config, kernel, p));
}

}  // namespace ekv
