#pragma once
// decode_merge.cuh -- joins the warps of a CTA, and the partials of sequences that are split over CTAs.
//
// A partial is its own flag. Its memory is zero between launches, and what is written there is never zero: +0
// goes as -0, which weighs the same. Whoever joins partials asks for their words until none is zero, and then
// puts the zeros back. Every word is checked by itself, so no order among words is assumed, and neither fence
// nor atomic nor barrier is needed: a barrier of the grid cost 1 us (H200).

#include "kernels/decode_producer.cuh"
#include "kernels/decode_warp.cuh"
#include "kernels/vec8.cuh"

namespace ekv {

template <int kHeadDim>
struct MergeShared {
  static constexpr int kPadded = kHeadDim + 4;  // 2 * kPadded % 32 == 8: the 32 stores of a warp hit 32 banks
  float out[kDecodeWarps][kHeadTile][kPadded];
  float2 stats[kDecodeWarps][kHeadTile];  // maximum, sum
  float2 merge_stats[kDecodeWarps][kWarpSize];
  int32_t merge_items[kDecodeWarps][kItemWords];
};

// exp2(x - top) where -inf means that nothing was seen.
__device__ __forceinline__ float weight(float x, float top) {
  return x == -INFINITY ? 0.0f : exp2_approx(x - top);
}

// ---- words of partials

__device__ __forceinline__ float never_zero(float x) { return x == 0 ? -0.0f : x; }

__device__ __forceinline__ void store_words(float2* to, float x, float y) {
  asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(never_zero(x)), "f"(never_zero(y))
               : "memory");
}
__device__ __forceinline__ float2 load_words(const float2* from) {
  float2 v;
  asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ float4 load_words(const float4* from) {
  float4 v;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(from)
               : "memory");
  return v;
}
__device__ __forceinline__ bool written(float x) { return __float_as_uint(x) != 0; }
__device__ __forceinline__ bool written(float2 v) { return written(v.x) && written(v.y); }
__device__ __forceinline__ bool written(float4 v) {
  return written(v.x) && written(v.y) && written(v.z) && written(v.w);
}

// ---- one CTA

// `head`: of the query. Out, the output's type, is a template's argument all the way up: chosen here at run
// time it changed the main loop and took a register more.
template <class Out>
__device__ __forceinline__ void write_row(const DecodeParams& p, int q_row, int head, int dim, float x0,
                                          float x1, float top, float sum) {
  const size_t row = size_t(q_row) * p.a.heads + head;
  const float inverse = 1.0f / sum;
  *reinterpret_cast<uint32_t*>(p.a.out + row * p.a.shape.head_dim + dim) =
      Pair16<Out>::pack(x0 * inverse, x1 * inverse);
  if (dim == 0 && p.a.lse) p.a.lse[row] = (top + log2f(sum)) * 0.6931471805599453f;
}

// Joins the warps' parts of head tile n: to the output if the CTA has the whole unit, else to its partial.
template <class Out, int kHeadDim>
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
      write_row<Out>(p, item.row, item.kv_head * p.group + head, dim, x0, x1, top, sum);
    } else {
      const size_t row = size_t(item.index) * p.a.heads + item.kv_head * p.group + head;
      store_words(reinterpret_cast<float2*>(p.plan.partial_out + row * kHeadDim + dim), x0, x1);
      if (dim == 0) store_words(&p.plan.partial_stats[row], top, sum);
    }
  }
}

// A barrier among the consumers; the producer is far ahead.
__device__ __forceinline__ void consumers_sync() {
  asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");
}

template <class Out, int kHeadDim, int kHeadTiles>
__device__ void finish_item(const DecodeParams& p, const DecodeItem& item,
                            const WarpAttention<kHeadDim, kHeadTiles>& state, MergeShared<kHeadDim>& shared,
                            int warp) {
#pragma unroll
  for (int n = 0; n < kHeadTiles; ++n) {
    state.store(shared, n, warp);
    consumers_sync();
    merge_warps<Out>(p, item, shared, n);
    consumers_sync();
  }
}

// ---- the grid

// A weighted sum of vectors with the maximum that the weights are relative to. A lane has 4 dims of each 128.
template <int kHeadDim>
struct MergeSum {
  static constexpr int kVectors = (kHeadDim + 4 * kWarpSize - 1) / (4 * kWarpSize);
  float top = -INFINITY, sum = 0;
  float4 x[kVectors] = {};

  __device__ void raise(float to) {
    const float shrink = weight(top, to);
    top = to;
    sum *= shrink;
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      x[v] = make_float4(x[v].x * shrink, x[v].y * shrink, x[v].z * shrink, x[v].w * shrink);
  }
  __device__ void add(float2 stats, const float4 (&y)[kVectors]) {
    const float f = weight(stats.x, top);
    sum += f * stats.y;
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      x[v] = make_float4(x[v].x + f * y[v].x, x[v].y + f * y[v].y, x[v].z + f * y[v].z, x[v].w + f * y[v].w);
  }
};

// Partials [first, last) of one query head of a sequence, for one warp. Lanes past the head repeat its end.
template <int kHeadDim>
class PartialReader {
 public:
  static constexpr int kVectors = MergeSum<kHeadDim>::kVectors;

  // `first_index`: of the sequence's partials.
  __device__ PartialReader(const DecodeParams& p, int first_index, int head)
      : stats_(p.plan.partial_stats + size_t(first_index) * p.a.heads + head),
        out_(p.plan.partial_out + (size_t(first_index) * p.a.heads + head) * kHeadDim),
        heads_(p.a.heads) {}

  // In the order of their slots.
  __device__ MergeSum<kHeadDim> join(int first, int last) {
    MergeSum<kHeadDim> m;
    for (; first < last; first += kLoads) {
      // Some partial of equal shares comes a moment later than the others; asking for all again is the shortest
      // way then. Who has to wait longer asks for one word at a time: others still read the cache at full
      // speed.
      for (int tries = 1; !load(first, last); ++tries)
        if (tries >= kEagerTries) await(first, last);
      float top = m.top;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) top = fmaxf(top, loaded_[i].x);
      m.raise(top);
#pragma unroll
      for (int i = 0; i < kLoads; ++i)
        if (first + i < last) m.add(loaded_[i], y_[i]);
      clear(first, last);
    }
    return m;
  }

 private:
  static constexpr int kLoads = 8;  // under way together; the rest of the time is latency
  static constexpr int kEagerTries = 16;

  __device__ static int dim(int v) {
    return min((v * kWarpSize + int(threadIdx.x) % kWarpSize) * 4, kHeadDim - 4);
  }
  __device__ float2* stats(int i) const { return stats_ + size_t(i) * heads_; }
  __device__ float4* out(int i, int v) const {
    return reinterpret_cast<float4*>(out_ + size_t(i) * heads_ * kHeadDim + dim(v));
  }

  // True: all words are there, for every lane.
  __device__ bool load(int first, int last) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int at = min(first + i, last - 1);
      loaded_[i] = load_words(stats(at));
#pragma unroll
      for (int v = 0; v < kVectors; ++v) y_[i][v] = load_words(out(at, v));
    }
    bool all = true;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      all &= written(loaded_[i]);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) all &= written(y_[i][v]);
    }
    return __all_sync(kAllLanes, all);
  }
  __device__ void await(int first, int last) const {
    for (int i = first; i < min(first + kLoads, last); ++i)
      while (!written(load_words(stats(i)))) __nanosleep(20);
  }
  __device__ void clear(int first, int last) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (first + i >= last) return;
      if (threadIdx.x % kWarpSize == 0) *stats(first + i) = make_float2(0, 0);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) *out(first + i, v) = make_float4(0, 0, 0, 0);
    }
  }

  float2* stats_;
  float* out_;
  int heads_;
  float2 loaded_[kLoads];
  float4 y_[kLoads][kVectors];
};

// Joins the partials of all split sequences, spread over the whole grid: a task is one (sequence, query head),
// for which a team of warps reads consecutive ranges of its partials, the more the fewer rows there are.
template <class Out, int kHeadDim>
class SplitMerge {
 public:
  // Asks for the first task at once: after the slots, every round trip to memory is on the way to the result.
  __device__ SplitMerge(const DecodeParams& p, MergeShared<kHeadDim>& shared)
      : p_(p), shared_(shared), rows_(int(p.plan.counters->merge_seqs) * p.a.heads) {
    if (rows_ > 0) fetch(first_row(team()));
  }

  __device__ void run() {
    const int team = this->team(), step = gridDim.x * (kDecodeWarps / team), member = warp() % team;
    const int own = warp() / team;
    for (int row = first_row(team); row - own < rows_; row += step) {
      const DecodeItem& item = *reinterpret_cast<const DecodeItem*>(shared_.merge_items[warp()]);
      const int head = row % p_.a.heads, q_row = item.row, splits = row < rows_ ? item.num_splits : 0;
      const int share = (splits + team - 1) / team;
      const int first = min(member * share, splits), last = min(first + share, splits);
      MergeSum<kHeadDim> m = PartialReader<kHeadDim>(p_, item.first_index, head).join(first, last);
      if (team > 1) m = join(m, team);
      if (member == 0 && row < rows_) write(q_row, head, m);
      if (row - own + step < rows_) fetch(row + step);
    }
  }

 private:
  static constexpr int kVectors = MergeSum<kHeadDim>::kVectors;

  __device__ static int dim(int v) { return (v * kWarpSize + int(threadIdx.x) % kWarpSize) * 4; }

  __device__ static int warp() { return threadIdx.x / kWarpSize; }

  __device__ int team() const {
    int team = kDecodeWarps;
    while (team > 1 && rows_ * team > int(gridDim.x) * kDecodeWarps) team /= 2;
    return team;
  }
  __device__ static int first_row(int team) { return blockIdx.x * (kDecodeWarps / team) + warp() / team; }

  // The item of `row`, or of some row if there is none, for this warp.
  __device__ void fetch(int row) {
    const int lane = threadIdx.x % kWarpSize, seq = min(row, rows_ - 1) / p_.a.heads;
    __syncwarp();
    if (lane < kItemWords)
      shared_.merge_items[warp()][lane] = reinterpret_cast<const int32_t*>(&p_.plan.merge_seqs[seq])[lane];
    __syncwarp();
  }

  __device__ void write(int q_row, int head, const MergeSum<kHeadDim>& m) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (dim(v) >= kHeadDim) continue;
      write_row<Out>(p_, q_row, head, dim(v), m.x[v].x, m.x[v].y, m.top, m.sum);
      write_row<Out>(p_, q_row, head, dim(v) + 2, m.x[v].z, m.x[v].w, m.top, m.sum);
    }
  }

  // The sum over the team, for its first member. By all consumers: they have one team size and one loop.
  __device__ MergeSum<kHeadDim> join(const MergeSum<kHeadDim>& m, int team) {
    const int lane = threadIdx.x % kWarpSize, first = warp() - warp() % team;
    consumers_sync();
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      if (dim(v) < kHeadDim) *reinterpret_cast<float4*>(&shared_.out[warp()][0][dim(v)]) = m.x[v];
    shared_.merge_stats[warp()][lane] = make_float2(m.top, m.sum);
    consumers_sync();
    MergeSum<kHeadDim> joined;
    float top = -INFINITY;
    for (int i = 0; i < team; ++i) top = fmaxf(top, shared_.merge_stats[first + i][lane].x);
    joined.raise(top);
    for (int i = 0; i < team; ++i) {
      float4 x[kVectors];
#pragma unroll
      for (int v = 0; v < kVectors; ++v)
        x[v] = *reinterpret_cast<const float4*>(&shared_.out[first + i][0][min(dim(v), kHeadDim - 4)]);
      joined.add(shared_.merge_stats[first + i][lane], x);
    }
    return joined;
  }

  const DecodeParams& p_;
  MergeShared<kHeadDim>& shared_;
  int rows_;  // sequences that are split, times heads
};

}  // namespace ekv
