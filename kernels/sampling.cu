// sampling.cu -- the last step of a row: exact cuts among the candidates, the token, its logprob.

#include "kernels/cuda_check.h"
#include "kernels/sampling.cuh"

namespace ekv::sampling {
namespace {

constexpr int kDigits = 256;
static_assert(kDigits == kThreads, "one thread per digit");

struct Shared {
  uint32_t bias_bits[kChunk / 32];
  uint32_t low[kDigits], high[kDigits];
  uint64_t scratch[kWarpSize];
  int digit;
  double need;
};

// The tokens on which the cuts depend: the list, or, where it overflowed, the row once more.
template <class T>
struct Candidates {
  Row<T>& row;
  const Cut& cut;
  const Candidate* list;
  int count, chunks;

  template <class F>
  __device__ __forceinline__ void for_each(F f) {
    if (count <= kMaxCandidates) {
      for (int i = threadIdx.x; i < count; i += kThreads) f(list[i].z, list[i].index);
      return;
    }
    for (int chunk = 0; chunk < chunks; ++chunk) {
      row.enter_chunk(chunk);
#pragma unroll 1
      for (int g = 0; g < kGroups; ++g) {
        const Group4 group = row.load(g);
        float z[kGroup];
        row.adjust(group, z);
        for (int j = 0; j < kGroup; ++j)
          if (z[j] >= cut.floor && is_candidate(cut, bin_of(z[j], cut.z_max))) f(z[j], group.index + j);
      }
    }
  }
};

// Sums the digits from the largest down and takes the first at which the sum reaches `need`; `need` becomes
// what is still missing before that digit.
__device__ __forceinline__ int choose_digit(Shared& s, double& need) {
  const int digit = kDigits - 1 - threadIdx.x, lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const uint64_t own = uint64_t(s.high[digit]) << 32 | s.low[digit];
  uint64_t sum = own;
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const uint64_t other = __shfl_up_sync(kAllLanes, sum, offset);
    if (lane >= offset) sum += other;
  }
  if (lane == kWarpSize - 1) s.scratch[warp] = sum;
  if (threadIdx.x == 0) s.digit = 0, s.need = 0;
  __syncthreads();
  for (int i = 0; i < warp; ++i) sum += s.scratch[i];
  if (double(sum) >= need && double(sum - own) < need) s.digit = digit, s.need = need - double(sum - own);
  __syncthreads();
  need = s.need;
  return s.digit;
}

// The largest z, as an ordered number, such that the candidates of bins [first, last] from it upwards weigh at
// least `need`: the k-th largest (weight 1), or the top-p cut (weight: mass).
template <bool kByMass, class T>
__device__ __forceinline__ uint32_t find_cut(Candidates<T>& candidates, Shared& s, int first, int last,
                                             double need) {
  const float z_max = candidates.cut.z_max;
  uint32_t prefix = 0, known = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    s.low[threadIdx.x] = s.high[threadIdx.x] = 0;
    __syncthreads();
    candidates.for_each([&](float z, int) {
      const uint32_t u = ordered(z);
      const int bin = bin_of(z, z_max);
      if ((u & known) != prefix || bin < first || bin > last) return;
      add_carry(&s.low[u >> shift & 255], &s.high[u >> shift & 255], kByMass ? mass_of(z, z_max) : 1u);
    });
    __syncthreads();
    prefix |= uint32_t(choose_digit(s, need)) << shift;
    known |= 255u << shift;
    __syncthreads();
  }
  return prefix;
}

// Mass of the candidates of bins k_first to k_last that survive top-k.
template <class T>
__device__ __forceinline__ uint64_t mass_from(Candidates<T>& candidates, Shared& s, uint32_t k_cut) {
  if (threadIdx.x == 0) s.low[0] = s.high[0] = 0;
  __syncthreads();
  candidates.for_each([&](float z, int) {
    const Cut& cut = candidates.cut;
    const int bin = bin_of(z, cut.z_max);
    if (cut.k_first <= bin && bin <= cut.k_last && ordered(z) >= k_cut)
      add_carry(&s.low[0], &s.high[0], mass_of(z, cut.z_max));
  });
  __syncthreads();
  const uint64_t mass = uint64_t(s.high[0]) << 32 | s.low[0];
  __syncthreads();  // the words are used again
  return mass;
}

// The winner of a truncating row.
template <class T>
__device__ __forceinline__ uint64_t draw_truncated(const SampleArgs& a, const Workspace& w, Row<T>& row, int r,
                                                   int chunks, Shared& s) {
  const Cut cut = w.cuts[r];
  const RowSampling& p = row.params();
  Candidates<T> candidates{row, cut, w.candidates + size_t(r) * kMaxCandidates, w.num_candidates[r], chunks};
  uint32_t least = 0;
  uint64_t mass = cut.mass;
  if (cut.k_first >= 0) {
    least = find_cut<false>(candidates, s, cut.k_first, cut.k_last, cut.k_need);
    if (cut.p_first >= 0) mass = cut.mass_above_k + mass_from(candidates, s, least);
  }
  if (cut.p_first >= 0)
    least = max(least, find_cut<true>(candidates, s, cut.p_first, cut.p_last,
                                      double(p.top_p) * double(mass) - double(cut.mass_above_p)));
  uint64_t best = int(threadIdx.x) < chunks ? w.sure[size_t(r) * chunks + threadIdx.x] : 0;
  candidates.for_each([&](float z, int index) {
    if (ordered(z) < least) return;
    const Words x = draw_words(p.seed, index / kGroup, p.output_index);
    best = max(best, ranked(race(z, word_of(x, index)), index));
  });
  return block_best(best, s.scratch);
}

// log sum exp of the raw row from its chunks.
__device__ __forceinline__ float raw_log_sum(const Workspace& w, int r, int chunks, Shared& s) {
  float* scratch = reinterpret_cast<float*>(s.scratch);
  const bool has = int(threadIdx.x) < chunks;
  const Partial* partial = w.partials + size_t(r) * chunks + threadIdx.x;
  const float own = has ? partial->raw_max : -INFINITY;
  const float top = block_max(own, scratch);
  const float sum = block_sum(own > -INFINITY ? partial->raw_sum * expf(own - top) : 0.0f, scratch);
  return top + logf(sum);
}

// Merges the chunks' sorted lists: thread c holds the head of chunk c.
__device__ __forceinline__ void merge_top(const SampleArgs& a, const Workspace& w, int r, int chunks,
                                          float log_sum, Shared& s) {
  const bool has = int(threadIdx.x) < chunks;
  const uint64_t* list = w.top + (size_t(r) * chunks + threadIdx.x) * kMaxTopLogprobs;
  const int wanted = a.params[r].num_top;
  for (int n = 0, next = 0; n < wanted; ++n) {
    const uint64_t head = has && next < wanted ? list[next] : 0;
    const uint64_t best = block_best(head, s.scratch);
    if (head == best && best) ++next;
    if (threadIdx.x) continue;
    a.top_tokens[size_t(r) * kMaxTopLogprobs + n] = best ? rank_index(best) : -1;
    a.top_logprobs[size_t(r) * kMaxTopLogprobs + n] = best ? rank_value(best) - log_sum : -INFINITY;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 2)  // without the 2 ptxas stops at 64 registers and spills
    finish_kernel(const __grid_constant__ SampleArgs a, Workspace w, int chunks) {
  __shared__ Shared s;
  const int r = blockIdx.x;
  Row<T> row(a, r, s.bias_bits);
  const RowSampling& p = row.params();
  const bool has = int(threadIdx.x) < chunks;
  const Partial* partial = w.partials + size_t(r) * chunks + threadIdx.x;
  const bool broken = __syncthreads_or(has && partial->non_finite);
  uint64_t best = block_best(has ? partial->best : 0, s.scratch);
  const SampleStatus status = broken      ? SampleStatus::non_finite
                              : best == 0 ? SampleStatus::nothing_left
                                          : SampleStatus::ok;
  if (status == SampleStatus::ok && p.truncates()) best = draw_truncated(a, w, row, r, chunks, s);
  const int token = status == SampleStatus::ok ? rank_index(best) : -1;
  if (threadIdx.x == 0) a.tokens[r] = token, a.status[r] = status;
  if (p.num_top < 0 || token < 0) return;
  const float log_sum = raw_log_sum(w, r, chunks, s);
  if (threadIdx.x == 0) a.logprobs[r] = row.raw(token) - log_sum;
  if (p.num_top > 0) merge_top(a, w, r, chunks, log_sum, s);
}

// Hands out parts of one allocation; with a null base it only counts.
struct Cutter {
  char* base;
  size_t used = 0;
  template <class V>
  V* take(size_t count) {
    V* part = reinterpret_cast<V*>(base + used);
    used += (count * sizeof(V) + 255) / 256 * 256;
    return part;
  }
};

Workspace carve(Cutter& c, size_t rows, size_t chunks) {
  Workspace w;
  w.partials = c.take<Partial>(rows * chunks);
  w.sure = c.take<uint64_t>(rows * chunks);
  w.warp_max = c.take<float>(rows * chunks * kWarps);
  w.top = c.take<uint64_t>(rows * chunks * kMaxTopLogprobs);
  w.cuts = c.take<Cut>(rows);
  w.counts = c.take<uint32_t>(rows * kBins);
  w.masses = c.take<unsigned long long>(rows * kBins);
  w.num_candidates = c.take<int32_t>(rows);
  w.candidates = c.take<Candidate>(rows * kMaxCandidates);
  return w;
}

}  // namespace

void launch_finish(const SampleArgs& a, const Workspace& w, int chunks, cudaStream_t stream) {
  with_element(a.element, [&](auto tag) {
    finish_kernel<decltype(tag)><<<a.num_rows, kThreads, 0, stream>>>(a, w, chunks);
  });
  cuda_check(cudaGetLastError());
}

}  // namespace ekv::sampling

namespace ekv {

size_t sampling_workspace_bytes(int max_rows, int vocab) {
  sampling::Cutter cutter{nullptr};
  sampling::carve(cutter, max_rows, ceil_div(vocab, sampling::kChunk));
  return cutter.used;
}

void launch_sample(const SampleArgs& args, cudaStream_t stream) {
  using namespace sampling;
  const int chunks = ceil_div(args.vocab, kChunk);
  static_assert(ceil_div(kMaxVocab, kChunk) <= kMaxChunks);
  EKV_CHECK(args.vocab > 0 && args.vocab <= kMaxVocab, "a vocabulary out of range");
  EKV_CHECK(args.row_stride >= args.vocab && args.row_stride % 8 == 0, "rows are read in whole groups");
  EKV_CHECK(args.num_rows <= 65535, "a grid dimension holds at most 65535");
  EKV_CHECK(args.workspace || args.num_rows == 0, "sampling needs a workspace");
  EKV_CHECK(!args.any_top || (args.top_tokens && args.top_logprobs), "top logprobs need a place");
  if (args.num_rows == 0) return;
  Cutter cutter{static_cast<char*>(args.workspace)};
  const Workspace w = carve(cutter, args.num_rows, chunks);
  launch_stats(args, w, chunks, stream);
  if (args.any_truncates) launch_bound(args, w, chunks, stream), launch_cut(args, w, chunks, stream);
  if (args.any_top) launch_top(args, w, chunks, stream);
  launch_finish(args, w, chunks, stream);
}

}  // namespace ekv
