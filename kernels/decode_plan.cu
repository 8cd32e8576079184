// decode_plan.cu -- cuts the batch into shares, once a step.

#include <algorithm>

#include "kernels/cuda_check.h"
#include "kernels/decode_plan.h"
#include "kernels/device.cuh"

namespace ekv {
namespace {

constexpr int kPlanThreads = 512,
              kPlanCtas = 16;  // each CTA repeats the sums and writes its part of the shares
// A share below one slot per warp would only add partials to merge.
constexpr int kMinShare = kDecodeWarps;

struct PlanParams {
  AttnArgs a;
  DecodePlanView plan;
  int words;  // of base_masks per sequence
  bool elastic;
};

__device__ int decode_blocks(const AttnArgs& a, int seq) {
  const bool one_row = a.q_start[seq + 1] - a.q_start[seq] == 1;
  return one_row ? (a.kv_len[seq] + kBlockTokens - 1) / kBlockTokens : 0;
}

// One warp per 32 pairs: which of them are BASE. Pairs past the sequence's last block count as TARGET.
__device__ void read_modes(const PlanParams& p) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
#pragma unroll 4
  for (int unit = warp; unit < p.a.num_seqs * p.words; unit += kPlanThreads / kWarpSize) {
    const int seq = unit / p.words, pair = unit % p.words * 32 + lane;
    const int pairs = (decode_blocks(p.a, seq) + 1) / 2;
    const bool base = pair < pairs && p.a.tables[size_t(seq) * p.a.max_pairs + pair].is_base();
    const uint32_t mask = __ballot_sync(kAllLanes, base);
    if (lane == 0) p.plan.base_masks[unit] = mask;
  }
}

struct SeqShape {
  int slots, run_first, run_count;
};

__device__ SeqShape seq_shape(const PlanParams& p, int seq) {
  const int blocks = decode_blocks(p.a, seq);
  SeqShape s{blocks, 0, 0};
  if (!p.elastic) return s;
  s.run_first = -1;
  const uint32_t* masks = p.plan.base_masks + size_t(seq) * p.words;
#pragma unroll 4
  for (int w = 0; w < (blocks + 63) / 64; ++w) {
    const uint32_t mask = masks[w];
    if (mask != 0 && s.run_first < 0) s.run_first = w * 32 + __ffs(mask) - 1;
    s.run_count += __popc(mask);
  }
  s.slots -= s.run_count;
  return s;
}

// The logical block that slot `slot` of sequence `seq` starts with.
__device__ int block_of_slot(const PlanParams& p, int seq, int slot) {
  if (!p.elastic) return slot;
  const uint32_t* masks = p.plan.base_masks + size_t(seq) * p.words;
  int pair = 0;
  for (int w = 0;; ++w, pair += 32) {
    const int in_word = 64 - __popc(masks[w]);
    if (slot < in_word) break;
    slot -= in_word;
  }
  for (uint32_t mask = masks[pair / 32];; mask >>= 1, ++pair) {
    const int in_pair = mask & 1 ? 1 : 2;
    if (slot < in_pair) break;
    slot -= in_pair;
  }
  return 2 * pair + slot;
}

// What lies before a sequence on the line: slots, and sequences that have any.
struct Start {
  int slots, seqs;
  __device__ Start operator+(const Start& o) const { return {slots + o.slots, seqs + o.seqs}; }
  __device__ Start operator-(const Start& o) const { return {slots - o.slots, seqs - o.seqs}; }
};

// Exclusive prefix sums over all sequences into `starts`; the totals go to starts[num_seqs].
__device__ void scan_starts(const PlanParams& p, Start* starts) {
  __shared__ Start warp_sums[kPlanThreads / kWarpSize];
  const int n = p.a.num_seqs, lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int per_thread = (n + kPlanThreads - 1) / kPlanThreads;
  const int begin = min(n, int(threadIdx.x) * per_thread), end = min(n, begin + per_thread);
  Start sum{};
  for (int s = begin; s < end; ++s) {
    const int slots = seq_shape(p, s).slots;
    sum = sum + (starts[s] = {slots, slots > 0});
  }
  Start inclusive = sum;
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const Start up{__shfl_up_sync(kAllLanes, inclusive.slots, offset),
                   __shfl_up_sync(kAllLanes, inclusive.seqs, offset)};
    if (lane >= offset) inclusive = inclusive + up;
  }
  if (lane == kWarpSize - 1) warp_sums[warp] = inclusive;
  __syncthreads();
  Start before = inclusive - sum;
  for (int w = 0; w < warp; ++w) before = before + warp_sums[w];
  for (int s = begin; s < end; ++s) {
    const Start own = starts[s];
    starts[s] = before;
    before = before + own;
  }
  if (threadIdx.x == kPlanThreads - 1) starts[n] = before;
  __syncthreads();
}

// All that one thread needs to write a share's items.
struct Writer {
  const PlanParams& p;
  const Start* starts;
  int share_slots;

  __device__ int begin(int share) const { return min(starts[p.a.num_seqs].slots, share * share_slots); }

  // The sequence that holds slot `slot` of the line.
  __device__ int find_seq(int slot) const {
    int low = 0, high = p.a.num_seqs;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (starts[middle].slots <= slot ? low : high) = middle;
    }
    return low;
  }

  // Sequence n of share k is item n + k: shares that have a sequence in common never collide, others neither.
  __device__ int item_index(int seq, int share) const { return starts[seq].seqs + share; }

  __device__ DecodeItem item(int seq, int begin, int end, int share) const {
    const SeqShape shape = seq_shape(p, seq);
    const int first_share = starts[seq].slots / share_slots,
              last_share = (starts[seq + 1].slots - 1) / share_slots;
    DecodeItem out{};
    out.seq = seq;
    out.slot_begin = begin;
    out.slot_end = end;
    out.block_begin = begin == 0 ? 0 : block_of_slot(p, seq, begin);
    out.run_first = shape.run_first;
    out.run_count = shape.run_count;
    out.kv_len = p.a.kv_len[seq];
    out.row = p.a.q_start[seq];
    out.num_splits = last_share - first_share + 1;
    out.index = item_index(seq, share);
    out.first_index = item_index(seq, first_share);
    return out;
  }

  __device__ void write(int share) const {
    const int end = begin(share + 1);
    int slot = begin(share);
    DecodeShare& out = p.plan.shares[share];
    out.begin = out.end = 0;
    if (slot == end) return;
    out.begin = out.end = item_index(find_seq(slot), share);
    for (int seq = find_seq(slot); slot < end; ++seq) {
      const int start = starts[seq].slots, stop = min(starts[seq + 1].slots, end);
      if (slot == stop) continue;
      const DecodeItem made = item(seq, slot - start, stop - start, share);
      p.plan.items[made.index] = made;
      if (out.begin == made.index) out.first = made;
      if (made.num_splits > 1 && made.index == made.first_index)
        p.plan.merge_seqs[atomicAdd(&p.plan.counters->next_merge_seq, 1)] = made;
      ++out.end;
      slot = stop;
    }
  }
};

// The last CTA to come here sets what decode reads and leaves its own counters as it found them.
__device__ void publish(PlanCounters& c) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  if (atomicAdd(&c.planners, 1) != kPlanCtas - 1) return;
  c.merge_seqs = atomicExch(&c.next_merge_seq, 0);
  c.arrived = c.planners = 0;
}

__global__ void __launch_bounds__(kPlanThreads) plan_kernel(const __grid_constant__ PlanParams p) {
  extern __shared__ Start starts[];
  if (p.elastic) {
    read_modes(p);
    __syncthreads();
  }
  scan_starts(p, starts);
  const int total = starts[p.a.num_seqs].slots, shares = p.plan.num_shares;
  const Writer writer{p, starts, max((total + shares - 1) / shares, kMinShare)};
  for (int i = blockIdx.x * kPlanThreads + threadIdx.x; i < shares; i += kPlanCtas * kPlanThreads)
    writer.write(i);
  publish(*p.plan.counters);
}

}  // namespace

DecodePlanView decode_plan_view(const DecodeWorkspace& w, size_t* bytes) {
  constexpr size_t kAlign = 256;
  size_t at = 0;
  const auto take = [&](size_t size) {
    uint8_t* here = w.memory + at;
    at += (size + kAlign - 1) / kAlign * kAlign;
    return here;
  };
  const size_t seqs = w.max_seqs, shares = std::max(1, w.num_ctas / w.kv_heads), items = shares + seqs;
  const size_t words = (w.max_pairs + 31) / 32, heads = w.heads;
  DecodePlanView v;
  v.num_shares = int(shares);
  v.counters = reinterpret_cast<PlanCounters*>(take(sizeof(PlanCounters)));
  v.shares = reinterpret_cast<DecodeShare*>(take(shares * sizeof(DecodeShare)));
  v.items = reinterpret_cast<DecodeItem*>(take(items * sizeof(DecodeItem)));
  v.merge_seqs = reinterpret_cast<DecodeItem*>(take(seqs * sizeof(DecodeItem)));
  v.base_masks = reinterpret_cast<uint32_t*>(take(seqs * words * sizeof(uint32_t)));
  v.partial_stats = reinterpret_cast<float2*>(take(items * heads * sizeof(float2)));
  v.partial_out = reinterpret_cast<float*>(take(items * heads * w.head_dim * sizeof(float)));
  if (bytes) *bytes = at;
  return v;
}

DecodeWorkspace decode_workspace(const KvShape& shape, int heads, int max_seqs, int max_pairs, int num_ctas) {
  EKV_CHECK(max_seqs >= 1 && max_seqs <= kMaxDecodeSeqs, "max_seqs out of range");
  EKV_CHECK(num_ctas >= 1 && max_pairs >= 1, "an empty workspace");
  DecodeWorkspace w{nullptr, 0, num_ctas, max_seqs, max_pairs, shape.kv_heads, heads, shape.head_dim};
  decode_plan_view(w, &w.bytes);
  return w;
}

void launch_decode_plan(const AttnArgs& args, KvPath path, const DecodeWorkspace& w, cudaStream_t stream) {
  EKV_CHECK(args.num_seqs <= w.max_seqs && args.max_pairs <= w.max_pairs, "batch larger than its workspace");
  if (args.num_seqs == 0) return;
  const PlanParams p{args, decode_plan_view(w, nullptr), (args.max_pairs + 31) / 32, path != KvPath::native};
  plan_kernel<<<kPlanCtas, kPlanThreads, (args.num_seqs + 1) * sizeof(Start), stream>>>(p);
  cuda_check(cudaGetLastError());
}

}  // namespace ekv
