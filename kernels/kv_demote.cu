// kv_demote.cu -- two TARGET slots become one BASE slot in place, and the low plane beside it.

#include "kernels/pair_convert.cuh"

namespace ekv {
namespace {

enum class Output { base, base_and_low, low };

struct Unit {
  uint4 chunk[2];  // 16 fp16 values of one token
};

// dim_at[i]: the dim, 0 to 15, whose byte lies at place i of a BASE chunk.
struct ChunkOrder {
  int dim_at[16];
};
__host__ __device__ constexpr ChunkOrder chunk_order(int part) {
  ChunkOrder order{};
  for (int dim = 0; dim < 16; ++dim) order.dim_at[KvShape::in_chunk(part, dim)] = dim;
  return order;
}

template <int kDim>
__device__ __forceinline__ float row_max(const Unit& unit) {
  const uint32_t w[8] = {unit.chunk[0].x, unit.chunk[0].y, unit.chunk[0].z, unit.chunk[0].w,
                         unit.chunk[1].x, unit.chunk[1].y, unit.chunk[1].z, unit.chunk[1].w};
  __half2 m = __habs2(*reinterpret_cast<const __half2*>(&w[0]));
#pragma unroll
  for (int i = 1; i < 8; ++i) m = __hmax2(m, __habs2(*reinterpret_cast<const __half2*>(&w[i])));
#pragma unroll
  for (int offset = PairTiling<kDim>::kLanes / 2; offset > 0; offset /= 2)
    m = __hmax2(m, __shfl_xor_sync(kAllLanes, m, offset));
  return __half2float(__hmax(__low2half(m), __high2half(m)));
}

// u of all 16 values, in the low 16 bits of each word. fixed8: 1.5 * 2^23 + 128 + t is exact and ends in u.
template <BaseFormat kFormat>
__device__ __forceinline__ void to_words(const Unit& unit, int k, uint32_t (&u)[16]) {
  const uint32_t w[8] = {unit.chunk[0].x, unit.chunk[0].y, unit.chunk[0].z, unit.chunk[0].w,
                         unit.chunk[1].x, unit.chunk[1].y, unit.chunk[1].z, unit.chunk[1].w};
  const float up = fixed8::exp2_int(15 - k);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if constexpr (kFormat == BaseFormat::fixed8) {
      constexpr float kMagic = 12582912.0f + 128.0f;
      const float2 x = __half22float2(*reinterpret_cast<const __half2*>(&w[i]));
      u[2 * i] = __float_as_uint(fmaf(x.x, up, kMagic));
      u[2 * i + 1] = __float_as_uint(fmaf(x.y, up, kMagic));
    } else {
      u[2 * i] = w[i], u[2 * i + 1] = w[i] >> 16;
    }
  }
}

// Splits the words into the two planes, in the chunk's byte order.
template <int kPart>
__device__ __forceinline__ void split(const uint32_t (&u)[16], uint4& high, uint4& low) {
  constexpr ChunkOrder kOrder = chunk_order(kPart);
  uint32_t h[4], l[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t a = __byte_perm(u[kOrder.dim_at[4 * i]], u[kOrder.dim_at[4 * i + 1]], 0x5410);
    const uint32_t b = __byte_perm(u[kOrder.dim_at[4 * i + 2]], u[kOrder.dim_at[4 * i + 3]], 0x5410);
    h[i] = __byte_perm(a, b, 0x7531), l[i] = __byte_perm(a, b, 0x6420);
  }
  high = make_uint4(h[0], h[1], h[2], h[3]), low = make_uint4(l[0], l[1], l[2], l[3]);
}

template <int kDim, BaseFormat kFormat, Output kOutput>
__global__ void __launch_bounds__(PairTiling<kDim>::kThreads)
    demote_kernel(const __grid_constant__ PairArgs a) {
  using Tiling = PairTiling<kDim>;
  const KvShape s = fixed_shape<kDim>(a.shape);
  const PairPlace place = this_pair(a, s);

  Unit units[Tiling::kUnits];
#pragma unroll
  for (int i = 0; i < Tiling::kUnits; ++i) {
    const Tiling t = Tiling::at(i);
    units[i] = {};
    if (!t.used()) continue;
    const uint8_t* slot = a.pool + (t.token < kBlockTokens ? place.even : place.odd);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      units[i].chunk[half] =
          load16(slot + s.target_at(place.part, t.token % kBlockTokens, t.group * 16 + half * 8));
  }
  if (kOutput != Output::low) __syncthreads();  // all is in registers: `even` may be overwritten

#pragma unroll
  for (int i = 0; i < Tiling::kUnits; ++i) {
    const Tiling t = Tiling::at(i);
    const int k = kFormat == BaseFormat::fixed8 ? fixed8::fast_exponent(row_max<kDim>(units[i])) : 0;
    if (!t.used()) continue;
    uint32_t u[16];
    to_words<kFormat>(units[i], k, u);
    uint4 high, low;
    if (place.part == kKey)
      split<kKey>(u, high, low);
    else
      split<kValue>(u, high, low);
    const size_t chunk = s.base_at(place.part, t.token, t.group * 16) & ~size_t(15);
    if (kOutput != Output::low) {
      store16(a.pool + place.even + chunk, high);
      if (kFormat == BaseFormat::fixed8 && t.group == 0)
        a.pool[place.even + s.exponent_at(place.part, t.token)] = uint8_t(int8_t(k));
    }
    if (kOutput != Output::base) store16(a.low + place.low + chunk, low);
  }
}

template <int kDim, Output kOutput>
void launch(const PairArgs& a, cudaStream_t stream) {
  if (a.format == BaseFormat::fixed8)
    demote_kernel<kDim, BaseFormat::fixed8, kOutput>
        <<<pair_grid(a), PairTiling<kDim>::kThreads, 0, stream>>>(a);
  else
    demote_kernel<kDim, BaseFormat::e5m2, kOutput><<<pair_grid(a), PairTiling<kDim>::kThreads, 0, stream>>>(a);
}

template <Output kOutput>
void launch_for(const PairArgs& a, cudaStream_t stream) {
  if (a.num_jobs == 0) return;
  switch (a.shape.head_dim) {
    case 64:
      launch<64, kOutput>(a, stream);
      break;
    case 80:
      launch<80, kOutput>(a, stream);
      break;
    case 96:
      launch<96, kOutput>(a, stream);
      break;
    case 128:
      launch<128, kOutput>(a, stream);
      break;
    case 256:
      launch<256, kOutput>(a, stream);
      break;
    default:
      EKV_CHECK(false, "head_dim must be 64, 80, 96, 128 or 256");
  }
  cuda_check(cudaGetLastError());
}

}  // namespace

void launch_demote(const PairArgs& args, cudaStream_t stream) {
  if (args.low)
    launch_for<Output::base_and_low>(args, stream);
  else
    launch_for<Output::base>(args, stream);
}

void launch_extract_low(const PairArgs& args, cudaStream_t stream) {
  EKV_CHECK(args.low || args.num_jobs == 0, "extract_low needs a place for the low plane");
  launch_for<Output::low>(args, stream);
}

}  // namespace ekv
