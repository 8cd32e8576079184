// kv_write.cu -- the epilogue of the QKV product: bias, QK-norm, RoPE, rotation, number format, paged write.
//
// A group of lanes holds one head of one row, every global access is 16 bytes wide, and the whole chain runs in
// registers and shuffles. Where head_dim is a power of two a lane has the same 8 dims of both halves of the
// head, so that RoPE and one step of the rotation stay inside the lane; shuffles are what the kernel has least
// room for. With many rows a group takes some heads of its row, which share the angles and whose loads are
// under way together; with few rows every head has its own group.

#include "kernels/cuda_check.h"
#include "kernels/fixed8.cuh"
#include "kernels/kv_cache.h"
#include "kernels/programmatic.cuh"
#include "kernels/vec8.cuh"

namespace ekv {
namespace {

constexpr int kThreads = 128;
// Code for older devices is not launched before the kernels ahead have ended, and spills when it loads early.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
constexpr bool kStartsEarly = true;
#else
constexpr bool kStartsEarly = false;
#endif
constexpr float kLastOnGrid = fixed8::kBound - 0x1p-9f;  // the float before kBound
constexpr float kHalfMax = 65504.0f, kE5m2Clamp = 61408.0f;

__device__ __forceinline__ float max_or_nan(float a, float b) {
  float m;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(a), "f"(b));
  return m;
}

template <int kDim>
struct Group {
  static constexpr bool kHalves = (kDim & (kDim - 1)) == 0;
  static constexpr int kChunks = kHalves ? 2 : 1;   // of 8 values, per lane
  static constexpr int kUsed = kDim / 8 / kChunks;  // lanes that hold values
  static constexpr int kLanes = kUsed <= 4 ? 4 : kUsed <= 8 ? 8 : 16;
  static constexpr int kHeads = 2;  // of a row that a group takes when there are many rows
  static constexpr int kBlock = kDim == 80 ? 16 : kDim == 96 ? 32 : kDim;  // of the Hadamard matrix
  static constexpr float kScale = kBlock == 16    ? 0.25f
                                  : kBlock == 32  ? 0.17677669529663688f
                                  : kBlock == 64  ? 0.125f
                                  : kBlock == 128 ? 0.08838834764831845f
                                                  : 0.0625f;  // 1 / sqrt(kBlock)

  using Values = float[kChunks][8];
  static __device__ int dim(int lane, int chunk) { return lane * 8 + chunk * (kDim / 2); }

  static __device__ float sum(float x) {
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(kAllLanes, x, offset);
    return x;
  }
  static __device__ float max(float x) {  // NaN if any is
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2)
      x = max_or_nan(x, __shfl_xor_sync(kAllLanes, x, offset));
    return x;
  }
};

// What a group works on. Groups past the end and padding rows run along with zeros, for the shuffles.
struct Vector {
  int row, head, slot;
  bool valid, query, key;

  __device__ Vector(const KvWriteArgs& a, int row, int head, int slot)
      : row(row), head(head), slot(slot), valid(slot >= 0 && head < a.heads + 2 * a.shape.kv_heads) {
    query = head < a.heads;
    key = !query && head < a.heads + a.shape.kv_heads;
  }
};

// Calls f(chunk, i) for every value of a lane.
template <int kDim, class F>
__device__ __forceinline__ void for_values(F f) {
#pragma unroll
  for (int c = 0; c < Group<kDim>::kChunks; ++c)
#pragma unroll
    for (int i = 0; i < 8; ++i) f(c, i);
}

// What the heads of a row share. The rotation's scale is folded into the angles. Where a lane has one half of
// the head, the signs of the half-split pairing are in the sines; those of the transform's butterflies are in
// `sign`.
struct Turn {
  float c[8], s[8];
  float sign[4];  // of this lane in the butterfly over 1, 2, 4, 8 lanes
};

template <int kDim, BaseFormat kFormat>
__device__ __forceinline__ void load_turn(const KvWriteArgs& a, int row, int slot, int lane, Turn& turn) {
  using G = Group<kDim>;
  constexpr float kScale = kFormat == BaseFormat::fixed8 ? G::kScale : 1.0f;
  const bool upper = !G::kHalves && lane >= G::kUsed / 2;
#pragma unroll
  for (int i = 0; i < 8; ++i) turn.c[i] = 1, turn.s[i] = 0;
  if (a.rope_cos && slot >= 0) {
    const size_t at = size_t(a.positions[row]) * (kDim / 2) + (upper ? lane - G::kUsed / 2 : lane) * 8;
    load8f(a.rope_cos + at, turn.c);
    load8f(a.rope_sin + at, turn.s);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) turn.c[i] *= kScale, turn.s[i] *= G::kHalves || upper ? kScale : -kScale;
#pragma unroll
  for (int i = 0; i < 4; ++i) turn.sign[i] = lane >> i & 1 ? -1.0f : 1.0f;
}

template <class T, int kDim>
__device__ __forceinline__ void add_bias(const KvWriteArgs& a, const Vector& v, int lane,
                                         typename Group<kDim>::Values& x) {
  typename Group<kDim>::Values bias;
#pragma unroll
  for (int c = 0; c < Group<kDim>::kChunks; ++c)
    load8<T>(a.bias, size_t(v.head) * kDim + Group<kDim>::dim(lane, c), bias[c]);
  for_values<kDim>([&](int c, int i) { x[c][i] += bias[c][i]; });
}

template <class T, int kDim>
__device__ __forceinline__ void normalise(const KvWriteArgs& a, const Vector& v, int lane,
                                          typename Group<kDim>::Values& x) {
  float squares = 0;
  for_values<kDim>([&](int c, int i) { squares += x[c][i] * x[c][i]; });
  const float scale = rsqrtf(Group<kDim>::sum(squares) / kDim + a.norm_epsilon);
  if (!v.valid || !(v.query || v.key)) return;
  typename Group<kDim>::Values weight;
#pragma unroll
  for (int c = 0; c < Group<kDim>::kChunks; ++c)
    load8<T>(v.query ? a.q_norm : a.k_norm, Group<kDim>::dim(lane, c), weight[c]);
  for_values<kDim>([&](int c, int i) { x[c][i] *= scale * weight[c][i]; });
}

// Dim i of one half of the head turns with dim i of the other.
template <int kDim>
__device__ __forceinline__ void rotate_positions(int lane, const Turn& turn, typename Group<kDim>::Values& x) {
  using G = Group<kDim>;
  const int partner = lane >= G::kUsed / 2 ? lane - G::kUsed / 2 : lane + G::kUsed / 2;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if constexpr (G::kHalves) {
      const float lower = x[0][i], upper = x[1][i];
      x[0][i] = lower * turn.c[i] - upper * turn.s[i];
      x[1][i] = upper * turn.c[i] + lower * turn.s[i];
    } else {
      const float y = __shfl_sync(kAllLanes, x[0][i], partner, G::kLanes);
      x[0][i] = x[0][i] * turn.c[i] + y * turn.s[i];
    }
  }
}

__device__ __forceinline__ void butterfly(float& a, float& b) {
  const float sum = a + b;
  b = a - b;
  a = sum;
}

// Fast Walsh-Hadamard transform without its scale: index bits 0 to 2 inside the chunk, then those across lanes,
// then the one between a lane's chunks.
template <int kDim>
__device__ __forceinline__ void hadamard(const Turn& turn, typename Group<kDim>::Values& x) {
  using G = Group<kDim>;
#pragma unroll
  for (int step = 1; step < 8; step *= 2)
    for_values<kDim>([&](int c, int i) {
      if (!(i & step)) butterfly(x[c][i], x[c][i + step]);
    });
#pragma unroll
  for (int bit = 0; 8 << bit < G::kBlock / G::kChunks; ++bit)
    for_values<kDim>([&](int c, int i) {
      x[c][i] = fmaf(x[c][i], turn.sign[bit], __shfl_xor_sync(kAllLanes, x[c][i], 1 << bit));
    });
  if constexpr (G::kHalves)
#pragma unroll
    for (int i = 0; i < 8; ++i) butterfly(x[0][i], x[1][i]);
}

// Rare path: whose row is it?
__device__ void flag_sequence(const KvWriteArgs& a, int row) {
  for (int s = 0; s < a.num_seqs; ++s)
    if (a.q_start[s] <= row && row < a.q_start[s + 1]) a.non_finite[s] = 1;
}

// Rare path: clamps to what the format holds and counts what lies beyond `last_kept`.
__device__ __forceinline__ int clamp_all(float (&x)[8], float last_kept, float clamp) {
  int clamped = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    clamped += fabsf(x[i]) > last_kept;
    x[i] = fminf(fmaxf(x[i], -clamp), clamp);
  }
  return clamped;
}

// The grid of a vector. kv_layout.h: t = fp16(clamp(rint(x 2^(15-k)))), TARGET = t 2^(k-15). Adding and
// subtracting 1.5 2^23 rounds to an integer, and leaves +0 for what rounds to -0. Only the largest exponent can
// meet values out of range, others at most the last half step below kBound.
struct Grid {
  float up, down;
  bool clamps;
  __device__ explicit Grid(float max_abs) {
    const int k = fixed8::fast_exponent(max_abs);
    up = fixed8::exp2_int(15 - k);
    down = fixed8::exp2_int(k - 15);
    clamps = max_abs * up > fixed8::kClamp;
  }
  __device__ __forceinline__ uint4 place(float (&x)[8], int& clamped) const {
    constexpr float kMagic = 12582912.0f;
    if (clamps) clamped += clamp_all(x, kLastOnGrid, fixed8::kClamp * down);
    const __half2 scale = __float2half2_rn(down);
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t t =
          pack_half2(fmaf(x[2 * i], up, kMagic) - kMagic, fmaf(x[2 * i + 1], up, kMagic) - kMagic);
      const __half2 target = __hmul2(*reinterpret_cast<const __half2*>(&t), scale);  // exact
      w[i] = *reinterpret_cast<const uint32_t*>(&target);
    }
    return make_uint4(w[0], w[1], w[2], w[3]);
  }
};

template <int kDim, BaseFormat kFormat>
__device__ __forceinline__ void write_kv(const KvWriteArgs& a, const Vector& v, int lane,
                                         typename Group<kDim>::Values& x, float max_abs, int& clamped) {
  KvShape s = a.shape;
  s.head_dim = kDim;
  const int kv_head = v.head - a.heads - (v.key ? 0 : s.kv_heads), part = v.key ? kKey : kValue;
  uint8_t* slot = a.pool + s.slot_at(a.layer, v.slot / kBlockTokens, kv_head);
  const Grid grid(max_abs);
#pragma unroll
  for (int c = 0; c < Group<kDim>::kChunks; ++c) {
    uint4 bits;
    if constexpr (kFormat == BaseFormat::fixed8) {
      bits = grid.place(x[c], clamped);
    } else {
      if (max_abs > kE5m2Clamp) clamped += clamp_all(x[c], kE5m2Clamp, kE5m2Clamp);
      bits = pack8<__half>(x[c]);
    }
    store16(slot + s.target_at(part, v.slot % kBlockTokens, Group<kDim>::dim(lane, c)), bits);
  }
}

template <int kDim>
__device__ __forceinline__ void write_query(const KvWriteArgs& a, const Vector& v, int lane,
                                            typename Group<kDim>::Values& x, float max_abs, int& clamped) {
#pragma unroll
  for (int c = 0; c < Group<kDim>::kChunks; ++c) {
    if (max_abs > kHalfMax) clamped += clamp_all(x[c], kHalfMax, kHalfMax);
    const size_t at = (size_t(v.row) * a.heads + v.head) * kDim + Group<kDim>::dim(lane, c);
    store16(static_cast<uint16_t*>(a.q) + at, pack8<__half>(x[c]));
  }
}

// One head of one row, from its loaded values to memory. The transforms run where any head of the warp needs
// them; a value head that shares the warp keeps its own values.
template <class T, int kDim, BaseFormat kFormat>
__device__ __forceinline__ void write_vector(const KvWriteArgs& a, const Vector& v, int lane, const Turn& turn,
                                             typename Group<kDim>::Values& x, int& clamped) {
  if (a.bias && v.valid) add_bias<T, kDim>(a, v, lane, x);
  const bool rotated = v.query || v.key;
  if (__any_sync(kAllLanes, rotated)) {
    typename Group<kDim>::Values y;
    for_values<kDim>([&](int c, int i) { y[c][i] = x[c][i]; });
    if (a.q_norm) normalise<T, kDim>(a, v, lane, y);
    rotate_positions<kDim>(lane, turn, y);
    if constexpr (kFormat == BaseFormat::fixed8) hadamard<kDim>(turn, y);
    for_values<kDim>([&](int c, int i) { x[c][i] = rotated ? y[c][i] : x[c][i]; });
  }
  float max_abs = 0;
  for_values<kDim>([&](int c, int i) { max_abs = max_or_nan(max_abs, fabsf(x[c][i])); });
  max_abs = Group<kDim>::max(max_abs);
  if (!v.valid) return;
  if (!(max_abs < INFINITY)) {
    for_values<kDim>([&](int c, int i) { x[c][i] = 0; });
    max_abs = 0;
    if (lane == 0) flag_sequence(a, v.row);
  }
  if (v.query)
    write_query<kDim>(a, v, lane, x, max_abs, clamped);
  else
    write_kv<kDim, kFormat>(a, v, lane, x, max_abs, clamped);
}

template <class T, int kDim, BaseFormat kFormat, int kHeads>
__global__ void __launch_bounds__(kThreads) kv_write_kernel(const __grid_constant__ KvWriteArgs a) {
  using G = Group<kDim>;
  // Few rows: slot and angles, a chain of two loads, come while the product ahead still runs. Many: for most
  // blocks its end is far behind, and q, k, v are better asked for first.
  constexpr bool kEarly = kStartsEarly && kHeads == 1;
  let_next_kernel_begin();
  if constexpr (!kEarly) wait_for_kernels_ahead();
  const int per_row = a.heads + 2 * a.shape.kv_heads, groups_per_row = ceil_div(per_row, kHeads);
  const int index = (blockIdx.x * kThreads + threadIdx.x) / G::kLanes, lane = threadIdx.x % G::kLanes;
  const int row = index / groups_per_row, first = index % groups_per_row * kHeads;
  const bool inside = row < a.num_rows && lane < G::kUsed;
  const int slot = inside ? a.slot_mapping[row] : -1;
  Turn turn;
  if constexpr (kEarly) {
    load_turn<kDim, kFormat>(a, row, slot, lane, turn);
    wait_for_kernels_ahead();
  }
  uint4 loaded[kHeads][G::kChunks];
#pragma unroll
  for (int h = 0; h < kHeads; ++h)
#pragma unroll
    for (int c = 0; c < G::kChunks; ++c) {
      const size_t at = (size_t(row) * per_row + first + h) * kDim + G::dim(lane, c);
      loaded[h][c] = inside && first + h < per_row ? load16(static_cast<const uint16_t*>(a.qkv) + at) : uint4{};
    }
  if constexpr (!kEarly) load_turn<kDim, kFormat>(a, row, slot, lane, turn);
  int clamped = 0;
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const Vector v(a, row, first + h, slot);
    typename G::Values x;
#pragma unroll
    for (int c = 0; c < G::kChunks; ++c) unpack8<T>(loaded[h][c], x[c]);
    write_vector<T, kDim, kFormat>(a, v, lane, turn, x, clamped);
  }
  if (clamped) atomicAdd(a.clamped, unsigned(clamped));
}

template <class T, int kDim, int kHeads>
void launch(const KvWriteArgs& a, cudaStream_t stream) {
  const int64_t groups = int64_t(a.num_rows) * ceil_div(a.heads + 2 * a.shape.kv_heads, kHeads);
  const int per_block = kThreads / Group<kDim>::kLanes;
  const unsigned blocks = unsigned((groups + per_block - 1) / per_block);
  if (a.format == BaseFormat::fixed8)
    launch_programmatic(kv_write_kernel<T, kDim, BaseFormat::fixed8, kHeads>, blocks, kThreads, a, stream);
  else
    launch_programmatic(kv_write_kernel<T, kDim, BaseFormat::e5m2, kHeads>, blocks, kThreads, a, stream);
}

template <class T, int kDim>
void launch(const KvWriteArgs& a, cudaStream_t stream) {
  if (a.num_rows < kManyKvRows)
    launch<T, kDim, 1>(a, stream);
  else
    launch<T, kDim, Group<kDim>::kHeads>(a, stream);
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
  EKV_CHECK(int64_t(args.num_rows) * (args.heads + 2 * args.shape.kv_heads) < kMostKvRowHeads,
            "more rows than indices");
  if (args.num_rows == 0) return;
  if (args.element == Element::bf16)
    launch_for<__nv_bfloat16>(args, stream);
  else
    launch_for<__half>(args, stream);
  cuda_check(cudaGetLastError());
}

}  // namespace ekv
