// sampling_stats.cu -- the one pass over the logits that every row needs, the likeliest tokens, the counts.

#include "kernels/cuda_check.h"
#include "kernels/sampling.cuh"

namespace ekv::sampling {
namespace {

__device__ __forceinline__ int block_count(int x, uint64_t* scratch) {
  x = __reduce_add_sync(kAllLanes, x);
  int* sums = reinterpret_cast<int*>(scratch);
  if (threadIdx.x % kWarpSize == 0) sums[threadIdx.x / kWarpSize] = x;
  __syncthreads();
  int sum = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) sum += sums[i];
  __syncthreads();
  return sum;
}

// Largest raw logit and sum of exponentials of a chunk.
__device__ void raw_sum(const Group4 (&groups)[kGroups], float* scratch, Partial& partial) {
  float top = -INFINITY, sum = 0;
#pragma unroll
  for (int g = 0; g < kGroups; ++g)
#pragma unroll
    for (int j = 0; j < kGroup; ++j) top = fmaxf(top, groups[g].raw[j]);
  top = block_max(top, scratch);
  if (top > -INFINITY) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
#pragma unroll
      for (int j = 0; j < kGroup; ++j) sum += expf(groups[g].raw[j] - top);
  }
  partial.raw_max = top, partial.raw_sum = block_sum(sum, scratch);
}

// The best token of a thread by z; of equal ones the first.
__device__ uint64_t largest(const Group4 (&groups)[kGroups], const float (&z)[kGroups][kGroup]) {
  float best = -INFINITY;
  int index = 0;
#pragma unroll
  for (int g = 0; g < kGroups; ++g)
#pragma unroll
    for (int j = 0; j < kGroup; ++j)
      if (z[g][j] > best) best = z[g][j], index = groups[g].index + j;
  return best > -INFINITY ? ranked(best, index) : 0;
}

// The race of one token. Any token's race is a bound for the winner's; that of a thread's likeliest token is a
// good one, and the best of a block's 256 leaves only a handful of tokens whose race must be worked out.
__device__ float race_of(const RowSampling& p, uint64_t rank) {
  const int index = rank_index(rank);
  const Words r = draw_words(p.seed, index / kGroup, p.output_index);
  return race(rank_value(rank), word_of(r, index));
}

// The best token of a thread by race, if it is no worse than `bound`.
__device__ uint64_t fastest(const Group4 (&groups)[kGroups], const float (&z)[kGroups][kGroup],
                            const RowSampling& p, float bound) {
  uint64_t best = 0;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const Words r = draw_words(p.seed, groups[g].index / kGroup, p.output_index);
    const float likeliest = fmaxf(fmaxf(z[g][0], z[g][1]), fmaxf(z[g][2], z[g][3]));
    if (cannot_win(likeliest, min(min(r.x, r.y), min(r.z, r.w)), bound)) continue;
    const uint32_t words[kGroup] = {r.x, r.y, r.z, r.w};
#pragma unroll
    for (int j = 0; j < kGroup; ++j)
      if (z[g][j] > -INFINITY && !cannot_win(z[g][j], words[j], bound))
        best = max(best, ranked(race(z[g][j], words[j]), groups[g].index + j));
  }
  return best;
}

// What the later kernels of a truncating row start from.
__device__ void prepare_cut(const Workspace& w, int r, uint64_t thread_best) {
  const int chunk = blockIdx.x, chunks = gridDim.x;
  const uint64_t best = warp_best(thread_best);
  if (threadIdx.x % kWarpSize == 0)
    w.warp_max[(size_t(r) * chunks + chunk) * kWarps + threadIdx.x / kWarpSize] =
        best ? rank_value(best) : -INFINITY;
  const int share = ceil_div(kBins, chunks);
  for (int b = chunk * share + threadIdx.x; b < min((chunk + 1) * share, kBins); b += kThreads)
    w.counts[size_t(r) * kBins + b] = 0, w.masses[size_t(r) * kBins + b] = 0;
  if (chunk == 0 && threadIdx.x == 0) w.num_candidates[r] = 0;
}

template <class T>
__global__ void __launch_bounds__(kThreads) stats_kernel(const __grid_constant__ SampleArgs a, Workspace w) {
  __shared__ uint32_t bias_bits[kChunk / 32];
  __shared__ uint64_t scratch[kWarpSize];
  const int chunk = blockIdx.x, r = blockIdx.y;
  Row<T> row(a, r, bias_bits);
  row.enter_chunk(chunk);
  Group4 groups[kGroups];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) groups[g] = row.load(g);

  float z[kGroups][kGroup];
  bool finite = true;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    row.adjust(groups[g], z[g]);
#pragma unroll
    for (int j = 0; j < kGroup; ++j) finite &= groups[g].raw[j] < INFINITY;  // NaN and +INFINITY fail
  }
  const RowSampling& p = row.params();
  const uint64_t thread_best = largest(groups, z);
  Partial partial{};
  partial.best = block_best(thread_best, scratch);
  if (p.truncates())
    prepare_cut(w, r, thread_best);
  else if (!p.greedy() && partial.best) {
    const uint64_t own = thread_best ? ranked(race_of(p, thread_best), 0) : 0;
    partial.best = block_best(fastest(groups, z, p, rank_value(block_best(own, scratch))), scratch);
  }
  partial.non_finite = __syncthreads_or(!finite);
  if (p.num_top >= 0) raw_sum(groups, reinterpret_cast<float*>(scratch), partial);
  if (threadIdx.x == 0) w.partials[size_t(r) * gridDim.x + chunk] = partial;
}

// The least z worth counting in a truncating row: within reach of the largest, above min-p, and at least the
// k-th largest of the warps' maxima, if there are so many: they are k tokens, so the k-th largest of all is no
// smaller. One block per row.
__global__ void __launch_bounds__(kThreads)
    bound_kernel(const __grid_constant__ SampleArgs a, Workspace w, int chunks) {
  __shared__ uint64_t scratch[kWarpSize];
  const int r = blockIdx.x;
  const RowSampling p = a.params[r];
  if (!p.truncates()) return;
  const bool has = int(threadIdx.x) < chunks;
  const Partial* partial = w.partials + size_t(r) * chunks + threadIdx.x;
  const bool broken = __syncthreads_or(has && partial->non_finite);
  const uint64_t best = block_best(has ? partial->best : 0, scratch);
  const float z_max = broken || best == 0 ? NAN : rank_value(best);
  float floor = __fsub_rn(z_max, kReach);
  if (p.min_p > 0) floor = fmaxf(floor, __fadd_rn(z_max, logf(p.min_p)));

  uint32_t maxima[kWarps];  // ordered; 0 where there is none
#pragma unroll
  for (int i = 0; i < kWarps; ++i)
    maxima[i] = has ? ordered(w.warp_max[(size_t(r) * chunks + threadIdx.x) * kWarps + i]) : 0;
  if (is_listed(p, chunks)) {
    uint32_t least = 0;
    for (int bit = 31; bit >= 0; --bit) {
      const uint32_t trial = least | 1u << bit;
      int above = 0;
#pragma unroll
      for (int i = 0; i < kWarps; ++i) above += maxima[i] >= trial;
      if (block_count(above, scratch) >= p.top_k) least = trial;
    }
    if (least) floor = fmaxf(floor, from_ordered(least));
  }
  Cut cut{z_max, floor, kBins, -1, -1, -1, -1, 0, 0, 0, 0};
  if (is_listed(p, chunks)) {
    cut.first = cut.k_first = 0, cut.k_last = kBins, cut.k_need = p.top_k;
    if (p.top_p < 1) cut.p_first = 0, cut.p_last = kBins;
  }
  if (threadIdx.x == 0) w.cuts[r] = cut;
}

// The num_top largest raw logits of a chunk, in order: the block's best, num_top times.
template <class T>
__global__ void __launch_bounds__(kThreads) top_kernel(const __grid_constant__ SampleArgs a, Workspace w) {
  __shared__ uint64_t scratch[kWarpSize];
  const int chunk = blockIdx.x, r = blockIdx.y, wanted = a.params[r].num_top;
  if (wanted <= 0) return;
  Row<T> row(a, r, nullptr);
  row.enter_raw(chunk);
  uint64_t ranks[kGroups * kGroup], mine = 0;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const Group4 group = row.load(g);
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      const bool exists = group.index + j < a.vocab;
      ranks[g * kGroup + j] = exists ? ranked(__fadd_rn(group.raw[j], 0.0f), group.index + j) : 0;
      mine = max(mine, ranks[g * kGroup + j]);
    }
  }
  uint64_t* out = w.top + (size_t(r) * gridDim.x + chunk) * kMaxTopLogprobs;
  for (int n = 0; n < wanted; ++n) {
    const uint64_t best = block_best(mine, scratch);
    if (threadIdx.x == 0) out[n] = best;
    if (best != mine || best == 0) continue;
    mine = 0;
#pragma unroll
    for (int i = 0; i < kGroups * kGroup; ++i) {
      if (ranks[i] == best) ranks[i] = 0;
      mine = max(mine, ranks[i]);
    }
  }
}

// Adds to one of the two counts that share a 32-bit word.
__device__ void update_count(uint16_t* counts, int token, bool prompt) {
  uint32_t* word = reinterpret_cast<uint32_t*>(counts) + token / 2;
  const int shift = token % 2 * 16;
  uint32_t seen = *word, wanted;
  do {
    wanted = seen;
    const uint32_t next = sampling::counted(wanted >> shift & 0xffffu, prompt);
    seen = atomicCAS(word, wanted, (wanted & ~(0xffffu << shift)) | next << shift);
  } while (seen != wanted);
}

__global__ void __launch_bounds__(1024) count_kernel(const __grid_constant__ CountArgs a) {
  const CountUpdate u = a.updates[blockIdx.x];
  uint16_t* counts = a.counts + size_t(u.slot) * count_stride(a.vocab);
  if (u.clear) {
    for (int i = threadIdx.x * 8; i < count_stride(a.vocab); i += blockDim.x * 8) store16(counts + i, uint4{});
    __syncthreads();
  }
  for (int i = u.begin + threadIdx.x; i < u.end; i += blockDim.x) {
    int token = a.tokens[i];
    if (is_pending(token) && a.previous) token = a.previous[pending_row(token)];
    if (0 <= token && token < a.vocab) update_count(counts, token, i < u.prompt_end);
  }
}

}  // namespace

void launch_stats(const SampleArgs& a, const Workspace& w, int chunks, cudaStream_t stream) {
  with_element(a.element, [&](auto tag) {
    stats_kernel<decltype(tag)><<<dim3(chunks, a.num_rows), kThreads, 0, stream>>>(a, w);
  });
  cuda_check(cudaGetLastError());
}

void launch_bound(const SampleArgs& a, const Workspace& w, int chunks, cudaStream_t stream) {
  bound_kernel<<<a.num_rows, kThreads, 0, stream>>>(a, w, chunks);
  cuda_check(cudaGetLastError());
}

void launch_top(const SampleArgs& a, const Workspace& w, int chunks, cudaStream_t stream) {
  with_element(a.element, [&](auto tag) {
    top_kernel<decltype(tag)><<<dim3(chunks, a.num_rows), kThreads, 0, stream>>>(a, w);
  });
  cuda_check(cudaGetLastError());
}

}  // namespace ekv::sampling

namespace ekv {

void launch_count_tokens(const CountArgs& args, cudaStream_t stream) {
  EKV_CHECK(args.vocab > 0 || args.num_updates == 0, "counts need a vocabulary");
  if (args.num_updates == 0) return;
  sampling::count_kernel<<<args.num_updates, 1024, 0, stream>>>(args);
  cuda_check(cudaGetLastError());
}

}  // namespace ekv
