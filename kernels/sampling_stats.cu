// sampling_stats.cu -- the one pass over the logits that every row needs, the likeliest tokens, the counts.

#include "kernels/cuda_check.h"
#include "kernels/sampling.cuh"

namespace ekv::sampling {
namespace {

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

// The best token of a group so far: by z, or by the race if this row draws from all of its tokens.
template <class T>
__device__ void update_best(const Row<T>& row, const Group4& group, bool draws, uint64_t& best, float& bound) {
  float z[kGroup], largest = -INFINITY;
#pragma unroll
  for (int j = 0; j < kGroup; ++j) z[j] = row.z(group, j), largest = fmaxf(largest, z[j]);
  if (draws && largest + kMaxGumbel < bound) return;  // no random number can save these
  const SamplingParams& p = row.params();
  const uint4 r = draws ? philox(p.seed, group.index / kGroup, p.output_index) : uint4{};
  const uint32_t words[kGroup] = {r.x, r.y, r.z, r.w};
#pragma unroll
  for (int j = 0; j < kGroup; ++j) {
    if (!(z[j] > -INFINITY)) continue;
    const float value = draws ? race(z[j], words[j]) : z[j];
    const uint64_t rank = ranked(value, group.index + j);
    if (rank > best) best = rank, bound = value;
  }
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

  const bool truncates = row.params().truncates(), draws = !row.params().greedy() && !truncates;
  uint64_t best = 0;
  float bound = -INFINITY;
  bool finite = true;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
#pragma unroll
    for (int j = 0; j < kGroup; ++j) finite &= groups[g].raw[j] < INFINITY;  // NaN and +INFINITY fail
    update_best(row, groups[g], draws, best, bound);
  }
  Partial partial{};
  partial.best = block_best(best, scratch);
  partial.non_finite = __syncthreads_or(!finite);
  if (row.params().num_top >= 0) raw_sum(groups, reinterpret_cast<float*>(scratch), partial);
  if (threadIdx.x == 0) w.partials[size_t(r) * gridDim.x + chunk] = partial;

  if (!truncates) return;  // empty this chunk's part of the row's bins
  const int share = ceil_div(kBins, int(gridDim.x));
  for (int b = chunk * share + threadIdx.x; b < min((chunk + 1) * share, kBins); b += kThreads)
    w.counts[size_t(r) * kBins + b] = 0, w.masses[size_t(r) * kBins + b] = 0;
  if (chunk == 0 && threadIdx.x == 0) w.num_candidates[r] = 0;
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
    const uint32_t count = wanted >> shift & 0xffffu;
    const uint32_t next = prompt ? count | 0x8000u : (count & 0x7fffu) < 0x7fffu ? count + 1 : count;
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
    const int token = a.tokens[i];
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
