// sampling_cut.cu -- min-p, top-k and top-p without sorting.
//
// Where k is small, the bound of bound_kernel leaves few tokens: all are listed as candidates, for which the
// last kernel finds the exact cuts. Otherwise a histogram of z over 1024 bins, counts and probability masses,
// tells which bins hold the k-th largest token and the top-p cut. Tokens above those bins are kept in any case
// and race at once; those inside, normally a few hundred, are the candidates. All sums are integers, so neither
// the order of atomics nor the number of blocks can change a cut.

#include "kernels/cuda_check.h"
#include "kernels/sampling.cuh"

namespace ekv::sampling {
namespace {

template <class T>
__global__ void __launch_bounds__(kThreads)
    histogram_kernel(const __grid_constant__ SampleArgs a, Workspace w) {
  __shared__ uint32_t bias_bits[kChunk / 32], counts[kBins], low[kBins], high[kBins];
  const int r = blockIdx.y;
  if (!needs_bins(a.params[r], gridDim.x)) return;
  const float z_max = w.cuts[r].z_max, floor = w.cuts[r].floor;
  if (isnan(z_max)) return;
  for (int b = threadIdx.x; b < kBins; b += kThreads) counts[b] = low[b] = high[b] = 0;
  __syncthreads();

  Row<T> row(a, r, bias_bits);
  row.enter_chunk(blockIdx.x);
  const bool by_count = row.params().top_k > 0, by_mass = row.params().top_p < 1;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const Group4 group = row.load(g);
    float z[kGroup];
    row.adjust(group, z);
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      if (!(z[j] >= floor)) continue;
      const int b = bin_of(z[j], z_max);
      if (by_count) atomicAdd(&counts[b], 1u);
      if (by_mass) add_carry(&low[b], &high[b], mass_of(z[j], z_max));
    }
  }
  __syncthreads();
  for (int b = threadIdx.x; b < kBins; b += kThreads) {
    const unsigned long long mass = (unsigned long long)(high[b]) << 32 | low[b];
    if (counts[b]) atomicAdd(&w.counts[size_t(r) * kBins + b], counts[b]);
    if (mass) atomicAdd(&w.masses[size_t(r) * kBins + b], mass);
  }
}

constexpr int kBinsPerThread = kBins / kThreads;

// Inclusive sums over all bins, from the likeliest on, and the first bin whose sum reaches a target.
struct BinSums {
  uint64_t through[kBinsPerThread];  // of this thread's bins

  template <class V>
  __device__ BinSums(const V* values, uint64_t* scratch) {
    uint64_t sum = 0;
#pragma unroll
    for (int i = 0; i < kBinsPerThread; ++i) through[i] = sum += values[threadIdx.x * kBinsPerThread + i];
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    uint64_t before = sum;
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const uint64_t other = __shfl_up_sync(kAllLanes, before, offset);
      if (lane >= offset) before += other;
    }
    if (lane == kWarpSize - 1) scratch[warp] = before;
    before -= sum;
    __syncthreads();
    for (int i = 0; i < warp; ++i) before += scratch[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kBinsPerThread; ++i) through[i] += before;
  }

  // The first bin whose sum reaches the target; kBins if none does.
  __device__ int find(double target, uint64_t* shared) const {
    if (threadIdx.x == 0) shared[0] = kBins;
    __syncthreads();
#pragma unroll
    for (int i = kBinsPerThread - 1; i >= 0; --i)
      if (double(through[i]) >= target)
        atomicMin(reinterpret_cast<unsigned long long*>(shared), 0ull + threadIdx.x * kBinsPerThread + i);
    __syncthreads();
    const int bin = int(shared[0]);
    __syncthreads();
    return bin;
  }

  // The sum through a bin, for every thread; through -1 it is 0.
  __device__ uint64_t at(int bin, uint64_t* shared) const {
#pragma unroll
    for (int i = 0; i < kBinsPerThread; ++i)
      if (int(threadIdx.x) * kBinsPerThread + i == bin) shared[0] = through[i];
    __syncthreads();
    const uint64_t sum = bin < 0 ? 0 : shared[0];
    __syncthreads();
    return sum;
  }
};

// One block per row: which bins hold the cuts?
__global__ void __launch_bounds__(kThreads)
    cut_kernel(const __grid_constant__ SampleArgs a, Workspace w, int chunks) {
  __shared__ uint64_t scratch[kWarpSize];
  const int r = blockIdx.x;
  const RowSampling p = a.params[r];
  if (!needs_bins(p, chunks)) return;
  Cut cut = w.cuts[r];
  if (isnan(cut.z_max)) return;
  const BinSums counts(w.counts + size_t(r) * kBins, scratch), masses(w.masses + size_t(r) * kBins, scratch);
  uint64_t kept_least = masses.at(kBins - 1, scratch), kept_most = kept_least;
  cut.mass = kept_least;
  const int k_bin = p.top_k > 0 ? counts.find(p.top_k, scratch) : kBins;
  if (k_bin < kBins) {
    cut.first = cut.k_first = cut.k_last = k_bin;
    cut.k_need = double(p.top_k - int64_t(counts.at(k_bin - 1, scratch)));
    cut.mass_above_k = kept_least = masses.at(k_bin - 1, scratch);
    kept_most = masses.at(k_bin, scratch);
  }
  if (p.top_p < 1) {
    cut.first = cut.p_first = masses.find(double(p.top_p) * double(kept_least), scratch);
    cut.p_last = masses.find(double(p.top_p) * double(kept_most), scratch);
    cut.mass_above_p = masses.at(cut.p_first - 1, scratch);
  }
  if (threadIdx.x == 0) w.cuts[r] = cut;
}

// Lets the tokens that are kept in any case race, and lists those that depend on the exact cuts.
template <class T>
__global__ void __launch_bounds__(kThreads) gather_kernel(const __grid_constant__ SampleArgs a, Workspace w) {
  __shared__ uint32_t bias_bits[kChunk / 32];
  __shared__ uint64_t scratch[kWarpSize];
  __shared__ int listed, place;
  const int r = blockIdx.y;
  if (!a.params[r].truncates()) return;
  const Cut cut = w.cuts[r];
  if (isnan(cut.z_max)) return;
  if (threadIdx.x == 0) listed = 0;
  __syncthreads();
  Row<T> row(a, r, bias_bits);
  row.enter_chunk(blockIdx.x);
  const RowSampling& p = row.params();

  uint64_t best = 0;
  uint32_t wanted = 0;  // bit g * kGroup + j: a candidate
  float z[kGroups][kGroup];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const Group4 group = row.load(g);
    uint32_t races = 0;
    row.adjust(group, z[g]);
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      if (!(z[g][j] >= cut.floor)) continue;
      const int b = bin_of(z[g][j], cut.z_max);
      races |= uint32_t(b < cut.first) << j;
      wanted |= uint32_t(is_candidate(cut, b)) << (g * kGroup + j);
    }
    if (!races) continue;
    const Words x = draw_words(p.seed, group.index / kGroup, p.output_index);
    const uint32_t words[kGroup] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int j = 0; j < kGroup; ++j)
      if (races >> j & 1) best = max(best, ranked(race(z[g][j], words[j]), group.index + j));
  }
  best = block_best(best, scratch);
  if (threadIdx.x == 0) w.sure[size_t(r) * gridDim.x + blockIdx.x] = best;

  int at = wanted ? atomicAdd(&listed, __popc(wanted)) : 0;
  __syncthreads();
  if (threadIdx.x == 0) place = listed ? atomicAdd(&w.num_candidates[r], listed) : 0;
  __syncthreads();
  at += place;
#pragma unroll
  for (int i = 0; i < kGroups * kGroup; ++i) {
    if (!(wanted >> i & 1)) continue;
    const int index = blockIdx.x * kChunk + (i / kGroup * kThreads + int(threadIdx.x)) * kGroup + i % kGroup;
    if (at < kMaxCandidates) w.candidates[size_t(r) * kMaxCandidates + at] = {z[i / kGroup][i % kGroup], index};
    ++at;
  }
}

}  // namespace

void launch_cut(const SampleArgs& a, const Workspace& w, int chunks, cudaStream_t stream) {
  const dim3 grid(chunks, a.num_rows);
  with_element(a.element, [&](auto tag) {
    histogram_kernel<decltype(tag)><<<grid, kThreads, 0, stream>>>(a, w);
    cuda_check(cudaGetLastError());
    cut_kernel<<<a.num_rows, kThreads, 0, stream>>>(a, w, chunks);
    cuda_check(cudaGetLastError());
    gather_kernel<decltype(tag)><<<grid, kThreads, 0, stream>>>(a, w);
    cuda_check(cudaGetLastError());
  });
}

}  // namespace ekv::sampling
