// kv_write.cu -- the epilogue of the QKV product: bias, QK-norm, RoPE, rotation, number format, paged write.
//
// A group of lanes holds one head of one row, 8 values a lane, so every global access is 16 bytes wide and the
// whole chain runs in registers and shuffles.

#include "kernels/cuda_check.h"
#include "kernels/fixed8.cuh"
#include "kernels/kv_cache.h"
#include "kernels/vec8.cuh"

namespace ekv {
namespace {

constexpr int kThreads = 256;
constexpr float kHalfMax = 65504.0f, kE5m2Clamp = 61408.0f;

template <int kDim>
struct Group {
  static constexpr int kUsed = kDim / 8;  // lanes that hold values
  static constexpr int kLanes = kUsed <= 8 ? 8 : kUsed <= 16 ? 16 : 32;
  static constexpr int kBlock = kDim == 80 ? 16 : kDim == 96 ? 32 : kDim;  // of the Hadamard matrix

  static __device__ float sum(float x) {
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(kAllLanes, x, offset);
    return x;
  }
  static __device__ float max(float x) {
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, offset));
    return x;
  }
  static __device__ bool any(bool x) {
    const unsigned lanes = kLanes == 32 ? kAllLanes : (1u << kLanes) - 1;
    return __ballot_sync(kAllLanes, x) >> (threadIdx.x % kWarpSize & ~(kLanes - 1)) & lanes;
  }
};

// What a group works on. Groups past the end and padding rows run along with zeros, for the shuffles.
struct Vector {
  int row, head, slot;
  bool valid, query, key;
};

template <int kDim>
__device__ __forceinline__ Vector this_vector(const KvWriteArgs& a) {
  const int index = (blockIdx.x * kThreads + threadIdx.x) / Group<kDim>::kLanes;
  const int per_row = a.heads + 2 * a.shape.kv_heads;
  Vector v;
  v.row = index / per_row, v.head = index % per_row;
  const bool inside = v.row < a.num_rows && int(threadIdx.x % Group<kDim>::kLanes) < Group<kDim>::kUsed;
  v.slot = inside ? a.slot_mapping[v.row] : -1;
  v.valid = v.slot >= 0;
  v.query = v.head < a.heads;
  v.key = !v.query && v.head < a.heads + a.shape.kv_heads;
  return v;
}

template <class T, int kDim>
__device__ __forceinline__ void load_row(const KvWriteArgs& a, const Vector& v, int lane, float (&x)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = 0;
  if (!v.valid) return;
  const int per_row = a.heads + 2 * a.shape.kv_heads;
  load8<T>(a.qkv, (size_t(v.row) * per_row + v.head) * kDim + lane * 8, x);
  if (!a.bias) return;
  float bias[8];
  load8<T>(a.bias, size_t(v.head) * kDim + lane * 8, bias);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] += bias[i];
}

template <class T, int kDim>
__device__ __forceinline__ void normalise(const KvWriteArgs& a, const Vector& v, int lane, float (&x)[8]) {
  float squares = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) squares += x[i] * x[i];
  const float scale = rsqrtf(Group<kDim>::sum(squares) / kDim + a.norm_epsilon);
  if (!v.valid || !(v.query || v.key)) return;
  float weight[8];
  load8<T>(v.query ? a.q_norm : a.k_norm, lane * 8, weight);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] *= scale * weight[i];
}

// Lane j holds dims 8j to 8j + 7; its partner in the other half of the head lies kUsed / 2 lanes away.
template <int kDim>
__device__ __forceinline__ void rotate_positions(const KvWriteArgs& a, const Vector& v, int lane,
                                                 float (&x)[8]) {
  using G = Group<kDim>;
  const bool upper = lane >= G::kUsed / 2;
  const int partner = upper ? lane - G::kUsed / 2 : lane + G::kUsed / 2;
  float y[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) y[i] = __shfl_sync(kAllLanes, x[i], partner, G::kLanes);
  if (!v.valid || !(v.query || v.key)) return;
  const size_t at = size_t(a.positions[v.row]) * (kDim / 2) + (upper ? partner : lane) * 8;
  float c[8], s[8];
  load8f(a.rope_cos + at, c);
  load8f(a.rope_sin + at, s);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = upper ? x[i] * c[i] + y[i] * s[i] : x[i] * c[i] - y[i] * s[i];
}

// Fast Walsh-Hadamard transform: index bits 0 to 2 inside the lane, the rest across lanes. Values, not
// branches, keep a value head of the same warp as it is.
template <int kDim>
__device__ __forceinline__ void hadamard(bool rotated, int lane, float (&x)[8]) {
  constexpr int kBlock = Group<kDim>::kBlock;
  constexpr float kScale = kBlock == 16    ? 0.25f
                           : kBlock == 32  ? 0.17677669529663688f
                           : kBlock == 64  ? 0.125f
                           : kBlock == 128 ? 0.08838834764831845f
                                           : 0.0625f;
  float y[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) y[i] = x[i];
#pragma unroll
  for (int step = 1; step < 8; step *= 2)
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (!(i & step)) {
        const float sum = y[i] + y[i + step];
        y[i + step] = y[i] - y[i + step];
        y[i] = sum;
      }
#pragma unroll
  for (int step = 1; step < kBlock / 8; step *= 2)
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float other = __shfl_xor_sync(kAllLanes, y[i], step);
      y[i] = lane & step ? other - y[i] : y[i] + other;
    }
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = rotated ? y[i] * kScale : x[i];
}

// Rare path: whose row is it?
__device__ void flag_sequence(const KvWriteArgs& a, int row) {
  for (int s = 0; s < a.num_seqs; ++s)
    if (a.q_start[s] <= row && row < a.q_start[s + 1]) a.non_finite[s] = 1;
}

__device__ __forceinline__ void write_query(const KvWriteArgs& a, const Vector& v, int lane, int dim,
                                            float (&x)[8], int& clamped) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    clamped += fabsf(x[i]) > kHalfMax;
    x[i] = fminf(fmaxf(x[i], -kHalfMax), kHalfMax);
  }
  const size_t at = (size_t(v.row) * a.heads + v.head) * dim + lane * 8;
  store16(static_cast<uint16_t*>(a.q) + at, pack8<__half>(x));
}

// Puts the vector on its grid. kv_layout.h: t = fp16(clamp(rint(x 2^(15-k)))), TARGET = t 2^(k-15).
__device__ __forceinline__ uint4 on_grid(float (&x)[8], float max_abs, int& clamped) {
  const int k = fixed8::fast_exponent(max_abs);
  const float up = fixed8::exp2_int(15 - k), down = fixed8::exp2_int(k - 15);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    clamped += fabsf(x[i]) >= fixed8::kBound;
    const float t = fminf(fmaxf(rintf(x[i] * up), -fixed8::kClamp), fixed8::kClamp);
    x[i] = __half2float(__float2half_rn(t + 0.0f)) * down;  // -0 + 0 is +0
  }
  return pack8<__half>(x);
}

template <int kDim, BaseFormat kFormat>
__device__ __forceinline__ void write_kv(const KvWriteArgs& a, const Vector& v, int lane, float (&x)[8],
                                         float max_abs, int& clamped) {
  uint4 bits;
  if constexpr (kFormat == BaseFormat::fixed8) {
    bits = on_grid(x, max_abs, clamped);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      clamped += fabsf(x[i]) > kE5m2Clamp;
      x[i] = fminf(fmaxf(x[i], -kE5m2Clamp), kE5m2Clamp);
    }
    bits = pack8<__half>(x);
  }
  KvShape s = a.shape;
  s.head_dim = kDim;
  const int kv_head = v.head - a.heads - (v.key ? 0 : s.kv_heads);
  const size_t slot = s.slot_at(a.layer, v.slot / kBlockTokens, kv_head);
  store16(a.pool + slot + s.target_at(v.key ? kKey : kValue, v.slot % kBlockTokens, lane * 8), bits);
}

template <class T, int kDim, BaseFormat kFormat>
__global__ void __launch_bounds__(kThreads) kv_write_kernel(const __grid_constant__ KvWriteArgs a) {
  using G = Group<kDim>;
  const Vector v = this_vector<kDim>(a);
  const int lane = threadIdx.x % G::kLanes;
  float x[8];
  load_row<T, kDim>(a, v, lane, x);
  const bool rotated = v.query || v.key;
  if (__any_sync(kAllLanes, rotated)) {
    if (a.q_norm) normalise<T, kDim>(a, v, lane, x);
    if (a.rope_cos) rotate_positions<kDim>(a, v, lane, x);
    if constexpr (kFormat == BaseFormat::fixed8) hadamard<kDim>(rotated, lane, x);
  }
  bool finite = true;
  float max_abs = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) finite &= isfinite(x[i]), max_abs = fmaxf(max_abs, fabsf(x[i]));
  const bool broken = G::any(!finite);
  if (kFormat == BaseFormat::fixed8) max_abs = G::max(max_abs);
  if (!v.valid) return;
  if (broken) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = 0;
    max_abs = 0;
    if (lane == 0) flag_sequence(a, v.row);
  }
  int clamped = 0;
  if (v.query)
    write_query(a, v, lane, kDim, x, clamped);
  else
    write_kv<kDim, kFormat>(a, v, lane, x, max_abs, clamped);
  if (clamped) atomicAdd(a.clamped, unsigned(clamped));
}

template <class T, int kDim>
void launch(const KvWriteArgs& a, cudaStream_t stream) {
  const int64_t vectors = int64_t(a.num_rows) * (a.heads + 2 * a.shape.kv_heads);
  const int per_block = kThreads / Group<kDim>::kLanes;
  const unsigned blocks = unsigned((vectors + per_block - 1) / per_block);
  if (a.format == BaseFormat::fixed8)
    kv_write_kernel<T, kDim, BaseFormat::fixed8><<<blocks, kThreads, 0, stream>>>(a);
  else
    kv_write_kernel<T, kDim, BaseFormat::e5m2><<<blocks, kThreads, 0, stream>>>(a);
}

template <class T>
void launch_for(const KvWriteArgs& a, cudaStream_t stream) {
  switch (a.shape.head_dim) {
    case 64:
      return launch<T, 64>(a, stream);
    case 80:
      return launch<T, 80>(a, stream);
    case 96:
      return launch<T, 96>(a, stream);
    case 128:
      return launch<T, 128>(a, stream);
    case 256:
      return launch<T, 256>(a, stream);
    default:
      EKV_CHECK(false, "head_dim must be 64, 80, 96, 128 or 256");
  }
}

}  // namespace

void launch_kv_write(const KvWriteArgs& args, cudaStream_t stream) {
  EKV_CHECK(args.element != Element::fp32, "qkv must be bf16 or fp16");
  EKV_CHECK(!args.q_norm == !args.k_norm, "QK-norm needs both weights");
  EKV_CHECK(!args.rope_cos == !args.rope_sin, "RoPE needs both tables");
  EKV_CHECK(0 <= args.layer && args.layer < args.shape.layers, "layer outside the pool");
  EKV_CHECK(int64_t(args.num_rows) * (args.heads + 2 * args.shape.kv_heads) < int64_t(1) << 26,
            "row and head indices are 32 bits wide");
  if (args.num_rows == 0) return;
  if (args.element == Element::bf16)
    launch_for<__nv_bfloat16>(args, stream);
  else
    launch_for<__half>(args, stream);
  cuda_check(cudaGetLastError());
}

}  // namespace ekv
