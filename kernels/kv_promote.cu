// kv_promote.cu -- one BASE slot and its low plane become two TARGET slots, the even one in place.

#include "kernels/pair_convert.cuh"

namespace ekv {
namespace {

struct Unit {
  uint4 high, low;
  int k;
};

// Value `dim` of a chunk as the 16-bit number (high byte, low byte).
template <int kPart>
__device__ __forceinline__ uint32_t joined(const uint32_t (&high)[4], const uint32_t (&low)[4], int dim) {
  const int place = KvShape::in_chunk(kPart, dim), byte = place % 4;
  return __byte_perm(low[place / 4], high[place / 4], (4 + byte) << 4 | byte);
}

// t 2^(k - 15) from u = 256 base + low. With the sign bit of base flipped, u + 2^15 is the mantissa of a float
// above 2^23; one exact multiply-add removes both offsets and scales. t = 0 gives +0.
__device__ __forceinline__ float from_word(uint32_t word, float down) {
  const float biased = __uint_as_float(__byte_perm(word, 0x4b00u, 0x5410));
  constexpr float kOffset = 8388608.0f + 32768.0f + 128.0f;
  return fmaf(biased, down, -kOffset * down);
}

template <BaseFormat kFormat, int kPart>
__device__ __forceinline__ void join(const Unit& unit, uint4 (&chunk)[2]) {
  constexpr uint32_t kFlip = kFormat == BaseFormat::fixed8 ? 0x80808080u : 0u;
  const uint32_t high[4] = {unit.high.x ^ kFlip, unit.high.y ^ kFlip, unit.high.z ^ kFlip, unit.high.w ^ kFlip};
  const uint32_t low[4] = {unit.low.x, unit.low.y, unit.low.z, unit.low.w};
  const float down = fixed8::exp2_int(unit.k - 15);
  uint32_t w[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t a = joined<kPart>(high, low, 2 * i), b = joined<kPart>(high, low, 2 * i + 1);
    w[i] = kFormat == BaseFormat::fixed8 ? pack_half2(from_word(a, down), from_word(b, down))
                                         : __byte_perm(a, b, 0x5410);
  }
  chunk[0] = make_uint4(w[0], w[1], w[2], w[3]);
  chunk[1] = make_uint4(w[4], w[5], w[6], w[7]);
}

// Two neighbouring lanes write their two rows of chunks together, so that one store of theirs is a whole
// 32-byte sector: each storing its own two chunks was 1.2 times slower on an H200. The first store takes the
// chunks of the even lane's unit, the second those of the odd lane's.
__device__ __forceinline__ void exchange_chunks(uint4 (&chunk)[2], bool odd) {
  uint32_t* first[4] = {&chunk[0].x, &chunk[0].y, &chunk[0].z, &chunk[0].w};
  uint32_t* second[4] = {&chunk[1].x, &chunk[1].y, &chunk[1].z, &chunk[1].w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t received = __shfl_xor_sync(kAllLanes, odd ? *first[i] : *second[i], 1);
    *first[i] = odd ? received : *first[i];
    *second[i] = odd ? *second[i] : received;
  }
}

template <int kDim, BaseFormat kFormat>
__global__ void __launch_bounds__(PairTiling<kDim>::kThreads)
    promote_kernel(const __grid_constant__ PairArgs a) {
  using Tiling = PairTiling<kDim>;
  const KvShape s = fixed_shape<kDim>(a.shape);
  const PairPlace place = this_pair(a, s);

  Unit units[Tiling::kUnits];
#pragma unroll
  for (int i = 0; i < Tiling::kUnits; ++i) {
    const Tiling t = Tiling::at(i);
    units[i] = {};
    if (!t.used()) continue;
    const size_t chunk = s.base_at(place.part, t.token, t.group * 16) & ~size_t(15);
    units[i].high = load16(a.pool + place.even + chunk);
    units[i].low = load16(a.low + place.low + chunk);
    if (kFormat == BaseFormat::fixed8)
      units[i].k = int8_t(a.pool[place.even + s.exponent_at(place.part, t.token)]);
  }
  __syncthreads();  // BASE is in registers: `even` may be overwritten

#pragma unroll
  for (int i = 0; i < Tiling::kUnits; ++i) {
    const Tiling t = Tiling::at(i);
    uint4 chunk[2];
    if (place.part == kKey)
      join<kFormat, kKey>(units[i], chunk);
    else
      join<kFormat, kValue>(units[i], chunk);
    exchange_chunks(chunk, t.group & 1);
    uint8_t* slot = a.pool + (t.token < kBlockTokens ? place.even : place.odd);
#pragma unroll
    for (int store = 0; store < 2; ++store) {
      const int dim = ((t.group & ~1) + store) * 16 + (t.group & 1) * 8;
      if (dim < kDim) store16(slot + s.target_at(place.part, t.token % kBlockTokens, dim), chunk[store]);
    }
  }
}

template <int kDim>
void launch(const PairArgs& a, cudaStream_t stream) {
  if (a.format == BaseFormat::fixed8)
    promote_kernel<kDim, BaseFormat::fixed8><<<pair_grid(a), PairTiling<kDim>::kThreads, 0, stream>>>(a);
  else
    promote_kernel<kDim, BaseFormat::e5m2><<<pair_grid(a), PairTiling<kDim>::kThreads, 0, stream>>>(a);
}

}  // namespace

void launch_promote(const PairArgs& args, cudaStream_t stream) {
  EKV_CHECK(args.low || args.num_jobs == 0, "promote needs the low plane");
  if (args.num_jobs == 0) return;
  switch (args.shape.head_dim) {
    case 64:
      launch<64>(args, stream);
      break;
    case 80:
      launch<80>(args, stream);
      break;
    case 96:
      launch<96>(args, stream);
      break;
    case 128:
      launch<128>(args, stream);
      break;
    case 256:
      launch<256>(args, stream);
      break;
    default:
      EKV_CHECK(false, "head_dim must be 64, 80, 96, 128 or 256");
  }
  cuda_check(cudaGetLastError());
}

}  // namespace ekv
