#pragma once
// decode_core.cuh -- the one main loop of decode: load slots, scores, softmax, values, merge.
//
// One warp of a CTA produces: it walks the CTA's shares (decode_plan.h) and keeps a ring of slots in shared
// memory full. kDecodeWarps warps consume, each every kDecodeWarps-th stage of the ring, without a barrier
// among them until an item ends. Keys and values are the A operand of the tensor cores (16 tokens, or 16 dims),
// query heads lie on N = 8, so a group of 4 wastes half and 8 nothing.

#include <algorithm>
#include <type_traits>

#include "kernels/cuda_check.h"
#include "kernels/decode_producer.cuh"
#include "kernels/decode_warp.cuh"

namespace ekv {

constexpr size_t align_up(size_t x, size_t to) { return (x + to - 1) / to * to; }

// ---- merge

template <int kHeadDim>
struct MergeShared {
  static constexpr int kPadded = kHeadDim + 4;  // 2 * kPadded % 32 == 8: the 32 stores of a warp hit 32 banks
  float out[kDecodeWarps][kHeadTile][kPadded];
  float2 stats[kDecodeWarps][kHeadTile];  // maximum, sum
  float2 merge_stats[kDecodeWarps][kWarpSize];
};

// exp2(x - top) where -inf means that nothing was seen.
__device__ __forceinline__ float weight(float x, float top) {
  return x == -INFINITY ? 0.0f : exp2_approx(x - top);
}

// `head`: of the query.
__device__ __forceinline__ void write_row(const DecodeParams& p, int q_row, int head, int dim, float x0,
                                          float x1, float top, float sum) {
  const size_t row = size_t(q_row) * p.a.heads + head;
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
  for (int at = threadIdx.x; at < heads * kHeadDim / 2; at += kConsumers) {
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
      write_row(p, item.row, item.kv_head * p.group + head, dim, x0, x1, top, sum);
    } else {
      const size_t row = size_t(item.index) * p.a.heads + item.kv_head * p.group + head;
      *reinterpret_cast<float2*>(p.plan.partial_out + row * kHeadDim + dim) = make_float2(x0, x1);
      if (dim == 0) p.plan.partial_stats[row] = make_float2(top, sum);
    }
  }
}

// A barrier among the consumers; the producer is far ahead.
__device__ __forceinline__ void consumers_sync() {
  asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");
}

template <int kHeadDim, int kHeadTiles>
__device__ void finish_item(const DecodeParams& p, const DecodeItem& item,
                            const WarpAttention<kHeadDim, kHeadTiles>& state, MergeShared<kHeadDim>& shared,
                            int warp) {
#pragma unroll
  for (int n = 0; n < kHeadTiles; ++n) {
    state.store(shared, n, warp);
    consumers_sync();
    merge_warps(p, item, shared, n);
    consumers_sync();
  }
}

// Waits for all CTAs of the launch, whose partials are then visible; the launch says that they are on the
// device together. One barrier costs less than a fence and an atomic per item, each of which takes microseconds
// while the memory is saturated.
__device__ __forceinline__ void grid_sync(PlanCounters& counters) {
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t arrival, seen;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;"
                 : "=r"(arrival)
                 : "l"(&counters.arrived)
                 : "memory");
    const uint32_t target = arrival / gridDim.x * gridDim.x + gridDim.x;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(&counters.arrived) : "memory");
    while (int(seen - target) < 0);
  }
  __syncthreads();
}

// A weighted sum of vectors with the maximum that the weights are relative to.
struct MergeSum {
  float top = -INFINITY, sum = 0;
  float4 x{0, 0, 0, 0};
  __device__ void raise(float to) {
    const float shrink = weight(top, to);
    top = to;
    sum *= shrink;
    x = make_float4(x.x * shrink, x.y * shrink, x.z * shrink, x.w * shrink);
  }
  __device__ void add(float2 stats, float4 y) {
    const float f = weight(stats.x, top);
    sum += f * stats.y;
    x = make_float4(x.x + f * y.x, x.y + f * y.y, x.z + f * y.z, x.w + f * y.w);
  }
};

// The partials [first, last) of one query head of a sequence, 4 dims of it, in the order of their slots.
template <int kHeadDim>
__device__ MergeSum merge_range(const DecodeParams& p, const DecodeItem& item, int head, int dim, int first,
                                int last) {
  constexpr int kLoads = 8;  // in flight; the rest of the time is latency
  MergeSum m;
  for (; first < last; first += kLoads) {
    float2 stats[kLoads];
    float4 y[kLoads];
    float top = m.top;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const size_t row = size_t(item.first_index + min(first + i, last - 1)) * p.a.heads + head;
      stats[i] = __ldcg(&p.plan.partial_stats[row]);
      y[i] = __ldcg(reinterpret_cast<const float4*>(p.plan.partial_out + row * kHeadDim + dim));
      top = fmaxf(top, stats[i].x);
    }
    m.raise(top);
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      if (first + i < last) m.add(stats[i], y[i]);
  }
  return m;
}

// Joins the partials of all split sequences, spread over the whole grid: a task is one (sequence, query head),
// for which a team of warps reads consecutive ranges of its partials, the more the fewer rows there are.
template <int kHeadDim>
class SplitMerge {
 public:
  // Reads the plan only, so it comes before the grid's barrier.
  __device__ explicit SplitMerge(const DecodeParams& p)
      : p_(p), rows_(int(p.plan.counters->merge_seqs) * p.a.heads), warp_(threadIdx.x / kWarpSize) {
    while (team_ > 1 && rows_ * team_ > int(gridDim.x) * kDecodeWarps) team_ /= 2;
    per_cta_ = kDecodeWarps / team_;
    load(blockIdx.x * per_cta_ + warp_ / team_);
  }

  __device__ bool nothing() const { return rows_ == 0; }

  __device__ void run(MergeShared<kHeadDim>& shared) {
    const int lane = threadIdx.x % kWarpSize, member = warp_ % team_;
    for (int base = blockIdx.x * per_cta_; base < rows_; base += gridDim.x * per_cta_) {
      const DecodeItem item = item_;
      const int head = head_;
      load(base + gridDim.x * per_cta_ + warp_ / team_);
      const int share = (item.num_splits + team_ - 1) / team_;
      const int first = min(member * share, item.num_splits), last = min(first + share, item.num_splits);
      const bool writer = member == 0 && base + warp_ / team_ < rows_;
#pragma unroll
      for (int at = lane; at < align_up(kLanes, kWarpSize); at += kWarpSize) {
        const int dim = min(at, kLanes - 1) * 4;
        MergeSum m = merge_range<kHeadDim>(p_, item, head, dim, first, last);
        if (team_ > 1) m = join(shared, m, dim);
        if (!writer || at >= kLanes) continue;
        write_row(p_, item.row, head, dim, m.x.x, m.x.y, m.top, m.sum);
        write_row(p_, item.row, head, dim + 2, m.x.z, m.x.w, m.top, m.sum);
      }
    }
  }

 private:
  static constexpr int kLanes = kHeadDim / 4;

  __device__ void load(int row) {
    if (rows_ == 0) return;
    row = min(row, rows_ - 1);
    head_ = row % p_.a.heads;
    item_ = p_.plan.merge_seqs[row / p_.a.heads];
  }

  // The sum over the team, for its first member. By all consumers: they have one team size and one loop.
  __device__ MergeSum join(MergeShared<kHeadDim>& shared, const MergeSum& m, int dim) {
    const int lane = threadIdx.x % kWarpSize, first = warp_ - warp_ % team_;
    consumers_sync();
    *reinterpret_cast<float4*>(&shared.out[warp_][0][dim]) = m.x;
    shared.merge_stats[warp_][lane] = make_float2(m.top, m.sum);
    consumers_sync();
    MergeSum joined;
    float top = -INFINITY;
    for (int i = 0; i < team_; ++i) top = fmaxf(top, shared.merge_stats[first + i][lane].x);
    joined.raise(top);
    for (int i = 0; i < team_; ++i)
      joined.add(shared.merge_stats[first + i][lane],
                 *reinterpret_cast<const float4*>(&shared.out[first + i][0][dim]));
    return joined;
  }

  const DecodeParams& p_;
  int rows_, warp_, team_ = kDecodeWarps, per_cta_, head_ = 0;
  DecodeItem item_;
};

// ---- the kernel

// Shared memory: the ring's bookkeeping, the merge buffer, queries, then the slots.
template <int kHeadDim, int kHeadTiles>
struct DecodeShared {
  RingShared ring;
  alignas(16) MergeShared<kHeadDim> merge;
  alignas(128) uint8_t queries[kItemBuffers][kHeadTiles * kHeadTile * kHeadDim * 2];
};
template <int kHeadDim, int kHeadTiles>
constexpr size_t kDecodeHeadBytes = align_up(sizeof(DecodeShared<kHeadDim, kHeadTiles>), 128);

template <int kHeadDim, bool kElastic, class Format, int kHeadTiles>
__device__ void consume(const DecodeParams& p, DecodeShared<kHeadDim, kHeadTiles>& shared,
                        const uint8_t* slots) {
  const int warp = threadIdx.x / kWarpSize, stride = p.a.shape.slot_bytes();
  const bool leader = threadIdx.x % kWarpSize == 0;
  RingShared& ring = shared.ring;
  RingPlace place, item_place;  // place: of the item's first slot
  WarpAttention<kHeadDim, kHeadTiles> state;
  while (true) {
    barrier_wait(&ring.item_full[item_place.at], item_place.phase);
    const DecodeItem item = ring.items[item_place.at];
    if (item.num_splits == 0) return;
    state.start(shared.queries[item_place.at], p.group);
    int left = item.slot_end - item.slot_begin - warp;
    place.advance(min(left, 0) + warp, p.stages);
    for (; left > 0; left -= kDecodeWarps) {
      barrier_wait(&ring.full[place.at], place.phase);
      const int token = ring.tokens[place.at];
      uint8_t* slot = const_cast<uint8_t*>(slots) + size_t(place.at) * stride;
      if (kElastic && token == kBaseSlot)
        state.template add_base<Format>(slot, p.scale_log2);
      else
        state.add_target(slot, item.kv_len - token, p.scale_log2);
      __syncwarp();
      if (leader) barrier_arrive(&ring.empty[place.at]);
      place.advance(min(left, kDecodeWarps), p.stages);
    }
    finish_item(p, item, state, shared.merge, warp);
    if (leader) barrier_arrive(&ring.item_empty[item_place.at]);
    item_place.advance(1, kItemBuffers);
  }
}

template <int kHeadDim, class Cursor, class Format, int kHeadTiles>
__global__ void __launch_bounds__(kDecodeThreads, 1) decode_kernel(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(128) uint8_t raw[];
  auto& shared = *reinterpret_cast<DecodeShared<kHeadDim, kHeadTiles>*>(raw);
  uint8_t* slots = raw + kDecodeHeadBytes<kHeadDim, kHeadTiles>;
  init_ring(shared.ring, p.stages);
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  // The kernel after may be launched now: it waits at this place until this one has ended.
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  const bool consumer = threadIdx.x < kConsumers;
  if (consumer)
    consume<kHeadDim, Cursor::kElastic, Format, kHeadTiles>(p, shared, slots);
  else
    Producer<Cursor, Format>(p, shared.ring, slots, shared.queries[0], sizeof(shared.queries[0])).run();
  SplitMerge<kHeadDim> merge(p);
  if (merge.nothing()) return;
  grid_sync(*p.plan.counters);
  if (consumer) merge.run(shared.merge);
}

// ---- the launcher

// Deepest ring that fits beside the rest, in multiples of kDecodeWarps: then a stage belongs to one consumer
// for a whole item, and no consumer can wait on a barrier that is a full turn behind.
template <int kHeadDim, int kHeadTiles>
int ring_stages(const KvShape& shape, int shared_limit) {
  const size_t fit = (shared_limit - kDecodeHeadBytes<kHeadDim, kHeadTiles>) / shape.slot_bytes();
  return std::min<int>(kMaxStages, fit / kDecodeWarps * kDecodeWarps);
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
  const int stages = ring_stages<kHeadDim, kHeadTiles>(s, limit);
  EKV_CHECK(stages > 0, "the device's shared memory does not hold a ring of this head_dim");
  const size_t shared = kDecodeHeadBytes<kHeadDim, kHeadTiles> + size_t(stages) * s.slot_bytes();
  cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)));

  const DecodeParams p{args, decode_plan_view(w, nullptr), args.heads / s.kv_heads, stages,
                       args.scale * 1.4426950408889634f};
  // Early: the launch overlaps the end of the kernel before. Together: the merge waits for all CTAs.
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeCooperative;
  attributes[1].val.cooperative = 1;
  const int tasks = p.plan.num_shares * s.kv_heads;
  cudaLaunchConfig_t config{
      dim3(std::min(w.num_ctas, tasks)), dim3(kDecodeThreads), shared, stream, attributes, 2};
  cuda_check(cudaLaunchKernelEx(&config, kernel, p));
}

}  // namespace ekv
