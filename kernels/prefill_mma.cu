// prefill_mma.cu -- prefill with mma.sync: every device from sm_80 on, and the head dims that wgmma tiles do
// not fit.
//
// A CTA of 4 warps takes 64 rows, 16 per warp; slots are copied as they lie and double-buffered. Lane (i, j) =
// (lane % 4, lane / 4) holds rows j and j + 8 of its warp's 16, columns 2i and 2i + 1 of each 8.

#include "kernels/cuda_check.h"
#include "kernels/prefill_core.cuh"
#include "kernels/tile_map.cuh"

namespace ekv {
namespace {

constexpr int kWarps = 4, kThreads = kWarps * kWarpSize;
constexpr int kRows = prefill_tile_rows(MatrixUnit::mma);

template <int kHeadDim>
struct Shape {
  static constexpr int kGroups = kHeadDim / 16;
  static constexpr int kSlots = kHeadDim <= 128 ? 4 : 2;  // of a key tile; two tiles and Q fit in 99 KiB
  static constexpr int kKeys = kSlots * kBlockTokens;
  static constexpr int kPartBytes = 2 * kBlockTokens * kHeadDim;  // K, or V, of a slot; also 16 rows of Q
  static constexpr int kTileBytes = kSlots * 2 * kPartBytes;
  static constexpr int kSharedBytes = kRows / 16 * kPartBytes + 2 * kTileBytes;
  using Map = TileMap<kBlockTokens, 2 * kHeadDim, 32>;
};

// Q rows in the layout of keys; rows past the tile are zero.
template <int kHeadDim>
__device__ void load_queries(const PrefillParams& p, const PrefillWork& w, uint8_t* shared) {
  using S = Shape<kHeadDim>;
  for (int i = threadIdx.x; i < kRows * S::kGroups * 2; i += kThreads) {
    const int row = i / (S::kGroups * 2), chunk = i % (S::kGroups * 2);
    uint4 x = make_uint4(0, 0, 0, 0);
    if (row < w.rows) x = load16(p.a.q + row_offset(p, w, row) + chunk * 8);
    const KvShape s{1, 1, 1, kHeadDim};
    store16(shared + row / 16 * S::kPartBytes + s.target_at(kKey, row % 16, chunk * 8), x);
  }
}

// Starts the copies of key tile `tile`; slots that no row sees are left alone.
template <int kHeadDim>
__device__ void load_keys(const PrefillParams& p, const PrefillWork& w, int tile, uint8_t* shared) {
  using S = Shape<kHeadDim>;
#pragma unroll
  for (int i = 0; i < S::kSlots; ++i) {
    const int block = tile * S::kSlots + i;
    if (block * kBlockTokens >= w.keys) break;
    const uint8_t* from = prefill_slot(p, w, block);
    const uint32_t to = shared_address(shared + i * 2 * S::kPartBytes);
    for (int at = threadIdx.x * 16; at < 2 * S::kPartBytes; at += kThreads * 16) cp_async16(to + at, from + at);
  }
  cp_async_commit();
}

// Values past the last key may be anything, and 0 * NaN is NaN.
template <int kHeadDim>
__device__ void clear_values(const PrefillWork& w, int tile, uint8_t* shared) {
  using S = Shape<kHeadDim>;
  const int first = w.keys - tile * S::kKeys;
  if (first >= S::kKeys) return;
  const KvShape s{1, 1, 1, kHeadDim};
  for (int i = threadIdx.x; i < (S::kKeys - first) * S::kGroups * 2; i += kThreads) {
    const int row = first + i / (S::kGroups * 2), chunk = i % (S::kGroups * 2);
    store16(shared + row / 16 * 2 * S::kPartBytes + s.target_at(kValue, row % 16, chunk * 8),
            make_uint4(0, 0, 0, 0));
  }
  __syncthreads();
}

template <int kHeadDim>
class WarpRows {
 public:
  using S = Shape<kHeadDim>;
  static constexpr int kTiles = S::kKeys / 8;  // of 8 keys

  __device__ WarpRows(const PrefillParams& p, const PrefillWork& w) : scale_(p.scale_log2) {
    const int lane = threadIdx.x % kWarpSize;
    first_row_ = threadIdx.x / kWarpSize * 16 + lane / 4;
    for (int half = 0; half < 2; ++half) visible_[half] = w.visible(first_row_ + 8 * half, p.group);
  }

  __device__ void add(const uint8_t* queries, const uint8_t* slots, int first_key, bool masked) {
    float s[kTiles][4] = {};
    scores(queries, slots, s);
    if (masked) mask(s, first_key);
    softmax(s);
    values(slots, s);
  }

  template <class Out>
  __device__ void store(const PrefillParams& p, const PrefillWork& w) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = sum_[half];
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      sum += __shfl_xor_sync(kAllLanes, sum, 2);
      const int row = first_row_ + 8 * half, i = threadIdx.x % 4;
      if (row >= w.rows) continue;
      const size_t at = row_offset(p, w, row);
      const float inverse = 1.0f / sum;
#pragma unroll
      for (int d = 0; d < kHeadDim / 8; ++d)
        *reinterpret_cast<uint32_t*>(p.a.out + at + d * 8 + 2 * i) =
            Pair16<Out>::pack(out_[d][2 * half] * inverse, out_[d][2 * half + 1] * inverse);
      if (i == 0 && p.a.lse) p.a.lse[at / kHeadDim] = (top_[half] + log2f(sum)) * kLn2;
    }
  }

 private:
  __device__ void scores(const uint8_t* queries, const uint8_t* slots, float (&s)[kTiles][4]) const {
    const int lane = threadIdx.x % kWarpSize, matrix = lane / 8, warp = threadIdx.x / kWarpSize;
    const uint32_t q_at = shared_address(queries + warp * S::kPartBytes), k_at = shared_address(slots);
    unroll<S::kGroups>([&](auto g) {
      uint32_t q[4];
      ldmatrix_x4(q, q_at + S::Map::template at<g>(lane % 8 + matrix % 2 * 8, matrix / 2));
#pragma unroll
      for (int slot = 0; slot < S::kSlots; ++slot) {
        uint32_t k[4];
        const uint32_t in_slot = S::Map::template at<g>(lane % 8 + matrix / 2 * 8, matrix % 2);
        ldmatrix_x4(k, k_at + slot * 2 * S::kPartBytes + in_slot);
        mma_m16n8k16(s[2 * slot], q, k[0], k[1]);
        mma_m16n8k16(s[2 * slot + 1], q, k[2], k[3]);
      }
    });
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[t][e] *= scale_;
  }

  __device__ void mask(float (&s)[kTiles][4], int first_key) const {
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (first_key + t * 8 + int(threadIdx.x) % 4 * 2 + e % 2 >= visible_[e / 2]) s[t][e] = -INFINITY;
  }

  // Every row sees key 0, so its maximum is finite from the first tile on.
  __device__ void softmax(float (&s)[kTiles][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = top_[half];
#pragma unroll
      for (int t = 0; t < kTiles; ++t) top = fmaxf(top, fmaxf(s[t][2 * half], s[t][2 * half + 1]));
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
      const float shrink = exp2_approx(top_[half] - top);
      top_[half] = top;
      sum_[half] *= shrink;
#pragma unroll
      for (int d = 0; d < kHeadDim / 8; ++d) {
        out_[d][2 * half] *= shrink;
        out_[d][2 * half + 1] *= shrink;
      }
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) sum_[half] += s[t][e] = exp2_approx(s[t][e] - top);
    }
  }

  __device__ void values(const uint8_t* slots, const float (&s)[kTiles][4]) {
    const int lane = threadIdx.x % kWarpSize, matrix = lane / 8;
#pragma unroll
    for (int slot = 0; slot < S::kSlots; ++slot) {
      const uint32_t v_at = shared_address(slots + slot * 2 * S::kPartBytes + S::kPartBytes);
      const float(&low)[4] = s[2 * slot], (&high)[4] = s[2 * slot + 1];
      const uint32_t p[4] = {pack_half2(low[0], low[1]), pack_half2(low[2], low[3]),
                             pack_half2(high[0], high[1]), pack_half2(high[2], high[3])};
      unroll<S::kGroups>([&](auto g) {
        uint32_t v[4];
        ldmatrix_x4_trans(v, v_at + S::Map::template at<g>(lane % 8 + matrix % 2 * 8, matrix / 2));
        mma_m16n8k16(out_[2 * g], p, v[0], v[1]);
        mma_m16n8k16(out_[2 * g + 1], p, v[2], v[3]);
      });
    }
  }

  float out_[kHeadDim / 8][4] = {};
  float top_[2] = {-INFINITY, -INFINITY}, sum_[2] = {};
  float scale_;
  int first_row_, visible_[2];
};

template <class Out, int kHeadDim>
__global__ void __launch_bounds__(kThreads) prefill_mma_kernel(const __grid_constant__ PrefillParams p) {
  using S = Shape<kHeadDim>;
  extern __shared__ __align__(128) uint8_t shared[];
  uint8_t* tiles = shared + kRows / 16 * S::kPartBytes;
  PrefillWork w;
  if (!prefill_work(p, MatrixUnit::mma, w)) return;
  load_keys<kHeadDim>(p, w, 0, tiles);
  load_queries<kHeadDim>(p, w, shared);

  WarpRows<kHeadDim> rows(p, w);
  const int num_tiles = (w.keys + S::kKeys - 1) / S::kKeys;
  for (int tile = 0; tile < num_tiles; ++tile) {
    uint8_t* now = tiles + tile % 2 * S::kTileBytes;
    if (tile + 1 < num_tiles) {
      load_keys<kHeadDim>(p, w, tile + 1, tiles + (tile + 1) % 2 * S::kTileBytes);
      cp_async_wait<1>();
    } else {
      cp_async_wait<0>();
    }
    __syncthreads();
    if (tile + 1 == num_tiles) clear_values<kHeadDim>(w, tile, now);
    rows.add(shared, now, tile * S::kKeys, (tile + 1) * S::kKeys > w.first_key + 1);
    __syncthreads();
  }
  rows.template store<Out>(p, w);
}

}  // namespace

template <int kHeadDim>
void launch_prefill_mma(const AttnArgs& args, const PrefillWorkspace& w, cudaStream_t stream) {
  const KvShape& s = args.shape;
  EKV_CHECK(
      s.head_dim == kHeadDim && w.head_dim == kHeadDim && w.heads == args.heads && w.kv_heads == s.kv_heads,
      "workspace of another model");
  EKV_CHECK(args.out_element != Element::fp32, "the output is bf16 or fp16");
  const int tiles = max_prefill_tiles(w, MatrixUnit::mma, args.rows, args.num_seqs);
  if (tiles == 0 || args.rows < 2) return;
  const auto kernel = args.out_element == Element::bf16 ? prefill_mma_kernel<__nv_bfloat16, kHeadDim>
                                                        : prefill_mma_kernel<__half, kHeadDim>;
  constexpr int kBytes = Shape<kHeadDim>::kSharedBytes;
  cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const PrefillParams p{args, prefill_plan_view(w, nullptr), args.heads / s.kv_heads, args.scale * kLog2E};
  kernel<<<tiles * s.kv_heads, kThreads, kBytes, stream>>>(p);
  cuda_check(cudaGetLastError());
}

#define EKV_PREFILL(head_dim) \
  template void launch_prefill_mma<head_dim>(const AttnArgs&, const PrefillWorkspace&, cudaStream_t)

EKV_PREFILL(64);
EKV_PREFILL(80);
EKV_PREFILL(96);
EKV_PREFILL(128);
EKV_PREFILL(256);

#undef EKV_PREFILL

}  // namespace ekv
