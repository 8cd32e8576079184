#pragma once
// sampling.cuh -- what the sampling kernels share: a row's logits after bias and penalties, its random numbers,
// and the workspace. Every kernel computes z by the same functions, those of sampling_rule.h, so all agree on
// it bit for bit.

#include "kernels/sampling.h"
#include "kernels/vec8.cuh"

namespace ekv::sampling {

constexpr int kThreads = 256;
constexpr int kGroup = kDrawTokens;                  // tokens of one load
constexpr int kGroups = 4;                           // groups per thread
constexpr int kChunk = kThreads * kGroup * kGroups;  // tokens per block
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kMaxChunks = kThreads;  // so that one thread per chunk can finish a row
constexpr int kBins = 1024;
constexpr float kBinsPerNat = 39;
constexpr int kMaxCandidates = 4096;

// ---- ordered numbers: unsigned integers that compare like the floats, and (float, index) pairs in one word

__device__ __forceinline__ uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits ^ (uint32_t(int32_t(bits) >> 31) | 0x80000000u);
}
__device__ __forceinline__ float from_ordered(uint32_t u) {
  return __uint_as_float(u & 0x80000000u ? u ^ 0x80000000u : ~u);
}
// The larger word is the larger value; of equal values the one with the smaller index. 0 is below all.
__device__ __forceinline__ uint64_t ranked(float value, int index) {
  return uint64_t(ordered(value)) << 32 | (0xffffffffu - uint32_t(index));
}
__device__ __forceinline__ float rank_value(uint64_t r) { return from_ordered(uint32_t(r >> 32)); }
__device__ __forceinline__ int rank_index(uint64_t r) { return int(0xffffffffu - uint32_t(r)); }
__device__ __forceinline__ uint64_t warp_best(uint64_t x) {
  const uint32_t high = __reduce_max_sync(kAllLanes, uint32_t(x >> 32));
  const uint32_t low = __reduce_max_sync(kAllLanes, uint32_t(x >> 32) == high ? uint32_t(x) : 0u);
  return uint64_t(high) << 32 | low;
}
// `scratch`: one word per warp, free again after the call.
__device__ __forceinline__ uint64_t block_best(uint64_t x, uint64_t* scratch) {
  const int lane = threadIdx.x % kWarpSize;
  x = warp_best(x);
  if (lane == 0) scratch[threadIdx.x / kWarpSize] = x;
  __syncthreads();
  x = warp_best(lane < kThreads / kWarpSize ? scratch[lane] : 0);
  __syncthreads();
  return x;
}

// ---- random numbers

// A token with this word races worse than `best`: -log(1 - v) >= v, and v is cut down to 23 bits here.
__device__ __forceinline__ bool cannot_win(float z, uint32_t word, float best) {
  const float v = __uint_as_float(word >> 9 | 0x3f800000u) - 1.0f;
  return v > 1.001f * __expf(z - best);
}

// ---- one row

struct Group4 {
  int index;  // of the first of the tokens
  float raw[kGroup];
};

template <class T>
class Row {
 public:
  // `bias_bits`: kChunk / 32 words of shared memory.
  __device__ Row(const SampleArgs& a, int row, uint32_t* bias_bits)
      : a_(a),
        p_(a.params[row]),
        logits_(static_cast<const T*>(a.logits) + size_t(row) * a.row_stride),
        bits_(bias_bits),
        inverse_(p_.greedy() ? 1.0f : 1.0f / p_.temperature) {
    counts_ =
        p_.count_slot >= 0 && a.counts ? a.counts + size_t(p_.count_slot) * count_stride(a.vocab) : nullptr;
  }
  __device__ const RowSampling& params() const { return p_; }

  // Marks the chunk's biased tokens. All threads of the block take part, before the chunk's first z.
  __device__ void enter_chunk(int chunk) {
    chunk_ = chunk;
    if (p_.bias_begin >= p_.bias_end) return;
    __syncthreads();
    for (int i = threadIdx.x; i < kChunk / 32; i += kThreads) bits_[i] = 0;
    __syncthreads();
    for (int i = p_.bias_begin + threadIdx.x; i < p_.bias_end; i += kThreads) {
      const int local = a_.bias_tokens[i] - chunk * kChunk;
      if (0 <= local && local < kChunk) atomicOr(&bits_[local / 32], 1u << local % 32);
    }
    __syncthreads();
  }

  // For kernels that read raw logits only.
  __device__ void enter_raw(int chunk) { chunk_ = chunk; }

  // The `g`-th group of this thread; tokens past the vocabulary read as -INFINITY.
  __device__ Group4 load(int g) const {
    Group4 group{chunk_ * kChunk + (g * kThreads + int(threadIdx.x)) * kGroup, {}};
    load_raw(group);
#pragma unroll
    for (int j = 0; j < kGroup; ++j)
      if (group.index + j >= a_.vocab) group.raw[j] = -INFINITY;
    return group;
  }

  // Bias, penalties and temperature.
  __device__ __forceinline__ void adjust(const Group4& group, float (&z)[kGroup]) const {
#pragma unroll
    for (int j = 0; j < kGroup; ++j) z[j] = group.raw[j];
    if (p_.bias_begin < p_.bias_end) {
      const int local = group.index % kChunk;
      const uint32_t hits = bits_[local / 32] >> local % 32;
#pragma unroll
      for (int j = 0; j < kGroup; ++j)
        if (hits >> j & 1) z[j] = biased(z[j], group.index + j);
    }
    if (counts_ && group.index < a_.vocab) {
      const ushort4 count = *reinterpret_cast<const ushort4*>(counts_ + group.index);
      z[0] = penalised(z[0], count.x), z[1] = penalised(z[1], count.y);
      z[2] = penalised(z[2], count.z), z[3] = penalised(z[3], count.w);
    }
#pragma unroll
    for (int j = 0; j < kGroup; ++j) z[j] = scaled(z[j], inverse_);
  }
  __device__ float raw(int index) const { return to_float(logits_[index]); }

 private:
  static __device__ float to_float(float x) { return x; }
  static __device__ float to_float(__half x) { return __half2float(x); }
  static __device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

  __device__ void load_raw(Group4& group) const {
    if (group.index >= a_.vocab) return;  // rows are padded to whole groups
    if constexpr (sizeof(T) == 4) {
      const float4 v = *reinterpret_cast<const float4*>(logits_ + group.index);
      group.raw[0] = v.x, group.raw[1] = v.y, group.raw[2] = v.z, group.raw[3] = v.w;
    } else {
      const uint2 v = *reinterpret_cast<const uint2*>(logits_ + group.index);
      const float2 a = Pair16<T>::unpack(v.x), b = Pair16<T>::unpack(v.y);
      group.raw[0] = a.x, group.raw[1] = a.y, group.raw[2] = b.x, group.raw[3] = b.y;
    }
  }
  __device__ float biased(float x, int index) const {
#pragma unroll 1
    for (int i = p_.bias_begin; i < p_.bias_end; ++i)
      if (a_.bias_tokens[i] == index) x = sum(x, a_.bias_values[i]);
    return x;
  }
  __device__ float penalised(float x, uint32_t count) const {
    return sampling::penalised(x, count, p_.repetition, p_.frequency, p_.presence);
  }

  const SampleArgs& a_;
  const RowSampling p_;
  const T* logits_;
  const uint16_t* counts_;
  uint32_t* bits_;
  float inverse_;
  int chunk_ = 0;
};

// ---- workspace: per row and chunk, and per row

struct Partial {
  uint64_t best;           // ranked z (greedy and truncating rows) or ranked race (the others); 0: nothing left
  float raw_max, raw_sum;  // sum of exp(raw - raw_max); only where a logprob is wanted
  int32_t non_finite;
  int32_t unused;
};

// What is known of a truncating row's cuts. z_max is NaN if the row cannot be sampled.
struct Cut {
  float z_max, floor;       // no z below floor counts
  int32_t first;            // tokens in bins below `first` are kept whatever the cuts turn out to be
  int32_t k_first, k_last;  // one of these bins holds the k-th largest; -1: top-k cuts nothing
  int32_t p_first, p_last;  // one of these bins holds the top-p cut; -1: no top-p
  double k_need;            // the k-th largest is number k_need from bin k_first on
  uint64_t mass, mass_above_k, mass_above_p;  // of all; of the bins before k_first; of those before p_first
};
__device__ __forceinline__ bool is_candidate(const Cut& cut, int bin) {
  return (cut.k_first <= bin && bin <= cut.k_last) || (cut.p_first <= bin && bin <= cut.p_last);
}
// With a small k few tokens reach the bound that the warps' maxima give: all of them are candidates, and no
// histogram is needed.
__device__ __forceinline__ bool is_listed(const RowSampling& p, int chunks) {
  return 0 < p.top_k && p.top_k <= chunks * kWarps;
}
__device__ __forceinline__ bool needs_bins(const RowSampling& p, int chunks) {
  return p.truncates() && !is_listed(p, chunks) && (p.top_k > 0 || p.top_p < 1);
}

struct Candidate {
  float z;
  int32_t index;
};

struct Workspace {
  Partial* partials;           // [rows][chunks]
  uint64_t* sure;              // [rows][chunks] best race among the tokens that are kept in any case
  float* warp_max;             // [rows][chunks][kWarps] largest z of each warp of a chunk
  uint64_t* top;               // [rows][chunks][kMaxTopLogprobs] ranked raw logits, descending
  Cut* cuts;                   // [rows]
  uint32_t* counts;            // [rows][kBins]
  unsigned long long* masses;  // [rows][kBins]
  int32_t* num_candidates;     // [rows]; may exceed kMaxCandidates: then the list is not complete
  Candidate* candidates;       // [rows][kMaxCandidates]
};

// Of a z between z_max - kReach and z_max. Monotone, so a bin is a range of z.
static_assert(kReach * kBinsPerNat < kBins - 1);
__device__ __forceinline__ int bin_of(float z, float z_max) {
  return int(__fmul_rn(__fsub_rn(z_max, z), kBinsPerNat));
}
__device__ __forceinline__ uint32_t mass_of(float z, float z_max) {
  return __float2uint_rn(__fmul_rn(expf(__fsub_rn(z, z_max)), kMassOne));
}
// 64-bit sum in two 32-bit words of shared memory, for which there are native atomics.
__device__ __forceinline__ void add_carry(uint32_t* low, uint32_t* high, uint32_t x) {
  if (x && atomicAdd(low, x) > 0xffffffffu - x) atomicAdd(high, 1u);
}
// Kernels of the other files, in the order in which launch_sample enqueues them.
void launch_stats(const SampleArgs& a, const Workspace& w, int chunks, cudaStream_t stream);
void launch_bound(const SampleArgs& a, const Workspace& w, int chunks, cudaStream_t stream);
void launch_cut(const SampleArgs& a, const Workspace& w, int chunks, cudaStream_t stream);
void launch_top(const SampleArgs& a, const Workspace& w, int chunks, cudaStream_t stream);
void launch_finish(const SampleArgs& a, const Workspace& w, int chunks, cudaStream_t stream);

// Calls launch(tag) with a value of the logits' type.
template <class F>
void with_element(Element element, F launch) {
  if (element == Element::fp32)
    launch(float{});
  else if (element == Element::bf16)
    launch(__nv_bfloat16{});
  else
    launch(__half{});
}

}  // namespace ekv::sampling
