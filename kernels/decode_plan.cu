// decode_plan.cu -- one CTA cuts the batch into equal shares, once a step.

#include <algorithm>

#include "kernels/cuda_check.h"
#include "kernels/decode_plan.h"
#include "kernels/device.cuh"

namespace ekv {
namespace {

constexpr int kPlanThreads = 1024;
// A share below one slot per warp would only add partials to merge.
constexpr int kMinShare = kDecodeWarps;

struct PlanParams {
  AttnArgs a;
  DecodePlanView plan;
  int num_ctas, words;  // words: of base_masks per sequence
  bool elastic;
};

__device__ int decode_blocks(const AttnArgs& a, int seq) {
  const bool one_row = a.q_start[seq + 1] - a.q_start[seq] == 1;
  return one_row ? (a.kv_len[seq] + kBlockTokens - 1) / kBlockTokens : 0;
}

// One warp per 32 pairs: which of them are BASE. Pairs past the sequence's last block count as TARGET.
__device__ void read_modes(const PlanParams& p) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
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

// Where a sequence starts on the line of slots, and how many sequences with slots come before it.
struct Start {
  int slots, seqs;
  __device__ Start operator+(Start o) const { return {slots + o.slots, seqs + o.seqs}; }
};

// Exclusive prefix sums over all sequences into `starts`; the totals go to starts[num_seqs].
__device__ void scan_slots(const PlanParams& p, Start* starts) {
  __shared__ Start warp_sums[kPlanThreads / kWarpSize];
  const int n = p.a.num_seqs, lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int per_thread = (n + kPlanThreads - 1) / kPlanThreads;
  const int begin = min(n, int(threadIdx.x) * per_thread), end = min(n, begin + per_thread);
  Start sum{0, 0};
  for (int s = begin; s < end; ++s) {
    const int slots = seq_shape(p, s).slots;
    starts[s] = {slots, slots > 0};
    sum = sum + starts[s];
  }
  Start inclusive = sum;
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const Start up{__shfl_up_sync(kAllLanes, inclusive.slots, offset),
                   __shfl_up_sync(kAllLanes, inclusive.seqs, offset)};
    if (lane >= offset) inclusive = inclusive + up;
  }
  if (lane == kWarpSize - 1) warp_sums[warp] = inclusive;
  __syncthreads();
  Start before{inclusive.slots - sum.slots, inclusive.seqs - sum.seqs};
  for (int w = 0; w < warp; ++w) before = before + warp_sums[w];
  for (int s = begin; s < end; ++s) {
    const Start own = starts[s];
    starts[s] = before;
    before = before + own;
  }
  if (threadIdx.x == kPlanThreads - 1) starts[n] = before;
  __syncthreads();
}

// The sequence that holds `slot` of the line.
__device__ int find_seq(const Start* starts, int n, int slot) {
  int low = 0, high = n;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (starts[middle].slots <= slot ? low : high) = middle;
  }
  return low;
}

__device__ void write_share(const PlanParams& p, const Start* starts, int cta, int chunk) {
  const int heads = p.a.shape.kv_heads, n = p.a.num_seqs, total = starts[n].slots * heads;
  const int begin = min(total, cta * chunk), end = min(total, begin + chunk);
  p.plan.arrivals[cta] = 0;
  if (begin == end) {
    p.plan.ranges[cta] = {0, 0};
    return;
  }
  int seq = find_seq(starts, n, begin / heads);
  int slots = starts[seq + 1].slots - starts[seq].slots;
  int head = (begin - starts[seq].slots * heads) / slots;
  // Unit u of CTA c is item u + c: two CTAs that share a unit, and neighbours that do not, never collide.
  const int first_item = starts[seq].seqs * heads + head + cta;
  int item = first_item;
  SeqShape shape = seq_shape(p, seq);
  for (int at = begin; at < end; ++item) {
    const int unit = starts[seq].slots * heads + head * slots, first_cta = unit / chunk;
    DecodeItem& out = p.plan.items[item];
    out.seq = seq;
    out.kv_head = head;
    out.slot_begin = at - unit;
    out.slot_end = min(slots, end - unit);
    out.block_begin = out.slot_begin == 0 ? 0 : block_of_slot(p, seq, out.slot_begin);
    out.run_first = shape.run_first;
    out.run_count = shape.run_count;
    out.kv_len = p.a.kv_len[seq];
    out.row = p.a.q_start[seq];
    out.num_splits = (unit + slots - 1) / chunk - first_cta + 1;
    out.partial = 2 * cta + (item == first_item ? 0 : 1);
    out.first_partial = 2 * first_cta + (unit % chunk == 0 ? 0 : 1);
    at = unit + out.slot_end;
    if (at < end && ++head == heads) {
      head = 0;
      do {
        ++seq;
        slots = starts[seq + 1].slots - starts[seq].slots;
      } while (slots == 0);
      shape = seq_shape(p, seq);
    }
  }
  p.plan.ranges[cta] = {first_item, item};
}

__global__ void __launch_bounds__(kPlanThreads) plan_kernel(const __grid_constant__ PlanParams p) {
  extern __shared__ Start starts[];
  if (p.elastic) {
    read_modes(p);
    __syncthreads();
  }
  scan_slots(p, starts);
  const int total = starts[p.a.num_seqs].slots * p.a.shape.kv_heads;
  const int chunk = max((total + p.num_ctas - 1) / p.num_ctas, kMinShare);
  for (int cta = threadIdx.x; cta < p.num_ctas; cta += kPlanThreads) write_share(p, starts, cta, chunk);
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
  const size_t ctas = w.num_ctas, seqs = w.max_seqs, words = (w.max_pairs + 31) / 32;
  const size_t group = w.heads / w.kv_heads;
  DecodePlanView v;
  v.ranges = reinterpret_cast<ItemRange*>(take(ctas * sizeof(ItemRange)));
  v.arrivals = reinterpret_cast<uint32_t*>(take(ctas * sizeof(uint32_t)));
  v.items = reinterpret_cast<DecodeItem*>(take((ctas + seqs * w.kv_heads) * sizeof(DecodeItem)));
  v.base_masks = reinterpret_cast<uint32_t*>(take(seqs * words * sizeof(uint32_t)));
  v.partial_stats = reinterpret_cast<float2*>(take(2 * ctas * group * sizeof(float2)));
  v.partial_out = reinterpret_cast<float*>(take(2 * ctas * group * w.head_dim * sizeof(float)));
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
  const PlanParams p{args, decode_plan_view(w, nullptr), w.num_ctas, (args.max_pairs + 31) / 32,
                     path != KvPath::native};
  plan_kernel<<<1, kPlanThreads, (args.num_seqs + 1) * sizeof(Start), stream>>>(p);
  cuda_check(cudaGetLastError());
}

}  // namespace ekv
