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
// Below this many slots per CTA a dynamic line costs more in partials than it evens out.
constexpr int kMinSlotsForDynamic = 64;
// The static part of a sequence in sixteenths: the slowest multiprocessor must be done with it when the mean
// is.
constexpr int kStaticSixteenths = 14;
// Sequences shorter than this go to one line as a whole, every eighth to the dynamic one.
constexpr int kMinSplitSlots = 512;
// Dynamic shares: the first half of the line in shares of twice the size, the rest in the size that leaves each
// CTA about this many, and never below two slots per warp.
constexpr int kDynamicPerCta = 6;
constexpr int kMinDynamicShare = 2 * kDecodeWarps;

constexpr int max_shares(int groups) { return groups * (2 + kDynamicPerCta) + 4; }

struct PlanParams {
  AttnArgs a;
  DecodePlanView plan;
  int groups, words;  // groups: of CTAs, one CTA per KV head each; words: of base_masks per sequence
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

// What lies before a sequence on the two lines: slots, and sequences that have slots there.
struct Start {
  int slots[2], seqs[2];
  __device__ Start operator+(const Start& o) const {
    return {{slots[0] + o.slots[0], slots[1] + o.slots[1]}, {seqs[0] + o.seqs[0], seqs[1] + o.seqs[1]}};
  }
  __device__ Start operator-(const Start& o) const {
    return {{slots[0] - o.slots[0], slots[1] - o.slots[1]}, {seqs[0] - o.seqs[0], seqs[1] - o.seqs[1]}};
  }
};
constexpr int kStatic = 0, kDynamic = 1;

__device__ Start cut(int seq, int slots, bool dynamic) {
  int first = slots;
  if (dynamic) first = slots >= kMinSplitSlots ? slots * kStaticSixteenths / 16 : seq % 8 == 7 ? 0 : slots;
  return {{first, slots - first}, {first > 0, slots > first}};
}

// Exclusive prefix sums over all sequences into `starts`; the totals go to starts[num_seqs].
__device__ void scan_starts(const PlanParams& p, bool dynamic, Start* starts) {
  __shared__ Start warp_sums[kPlanThreads / kWarpSize];
  const int n = p.a.num_seqs, lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int per_thread = (n + kPlanThreads - 1) / kPlanThreads;
  const int begin = min(n, int(threadIdx.x) * per_thread), end = min(n, begin + per_thread);
  Start sum{};
  for (int s = begin; s < end; ++s) sum = sum + (starts[s] = cut(s, seq_shape(p, s).slots, dynamic));
  Start inclusive = sum;
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    Start up;
    for (int line = 0; line < 2; ++line) {
      up.slots[line] = __shfl_up_sync(kAllLanes, inclusive.slots[line], offset);
      up.seqs[line] = __shfl_up_sync(kAllLanes, inclusive.seqs[line], offset);
    }
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

// How a line is cut: `big` shares of `big_size` slots, then shares of `size`.
struct LineCut {
  int total, size, big, big_size;
  __device__ int shares() const { return big + (total - big * big_size + size - 1) / size; }
  __device__ int begin(int share) const {
    return min(total, share < big ? share * big_size : big * big_size + (share - big) * size);
  }
  __device__ int share_of(int slot) const {
    return slot < big * big_size ? slot / big_size : big + (slot - big * big_size) / size;
  }
};

__device__ LineCut cut_static(int total, int groups) {
  return {total, max((total + groups - 1) / groups, kMinShare), 0, 1};
}
__device__ LineCut cut_dynamic(int total, int groups) {
  const int size = max((total + groups * kDynamicPerCta - 1) / (groups * kDynamicPerCta), kMinDynamicShare);
  return {total, size, total / 2 / (2 * size), 2 * size};
}

// All that one thread needs to write a share's items.
struct Writer {
  const PlanParams& p;
  const Start* starts;
  LineCut cuts[2];

  __device__ int length(int line, int seq) const {
    return starts[seq + 1].slots[line] - starts[seq].slots[line];
  }
  __device__ int first_share(int line) const { return line == kStatic ? 0 : p.groups; }

  // The sequence that holds slot `slot` of the line.
  __device__ int find_seq(int line, int slot) const {
    int low = 0, high = p.a.num_seqs;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (starts[middle].slots[line] <= slot ? low : high) = middle;
    }
    return low;
  }

  // The n-th sequence of share k is item n + k of its line: shares that have a sequence in common never
  // collide, others neither.
  __device__ int item_index(int line, int seq, int share) const {
    const int before = line == kStatic ? 0 : p.groups + starts[p.a.num_seqs].seqs[kStatic];
    return before + starts[seq].seqs[line] + share;
  }

  // Items of a sequence on one line, and the index of the first of them.
  __device__ int splits(int line, int seq, int* first_index) const {
    const int begin = starts[seq].slots[line], end = starts[seq + 1].slots[line];
    if (begin == end) return 0;
    const int share = cuts[line].share_of(begin);
    *first_index = item_index(line, seq, share);
    return cuts[line].share_of(end - 1) - share + 1;
  }

  __device__ DecodeItem item(int line, int seq, int begin, int end, int index) const {
    const SeqShape shape = seq_shape(p, seq);
    DecodeItem out{};
    const int skipped = line == kDynamic ? length(kStatic, seq) : 0;
    out.seq = seq;
    out.slot_begin = skipped + begin;
    out.slot_end = skipped + end;
    out.block_begin = out.slot_begin == 0 ? 0 : block_of_slot(p, seq, out.slot_begin);
    out.run_first = shape.run_first;
    out.run_count = shape.run_count;
    out.kv_len = p.a.kv_len[seq];
    out.row = p.a.q_start[seq];
    out.index = index;
    out.static_splits = splits(kStatic, seq, &out.first_static);
    out.num_splits = out.static_splits + splits(kDynamic, seq, &out.first_dynamic);
    return out;
  }

  __device__ void write(int line, int share) const {
    const int begin = cuts[line].begin(share), end = cuts[line].begin(share + 1);
    DecodeShare& out = p.plan.shares[first_share(line) + share];
    out.begin = out.end = 0;
    if (begin == end) return;
    int seq = find_seq(line, begin);
    const int first_item = item_index(line, seq, share);
    int at = first_item;
    for (int slot = begin; slot < end; ++seq) {
      const int start = starts[seq].slots[line], stop = min(starts[seq + 1].slots[line], end);
      if (slot == stop) continue;
      const DecodeItem made = item(line, seq, slot - start, stop - start, at);
      p.plan.items[at] = made;
      if (at == first_item) out.first = made;
      if (made.num_splits > 1 && at == partial_of_split(made, 0))
        p.plan.merge_seqs[atomicAdd(&p.plan.counters->next_merge_seq, 1)] = made;
      ++at;
      slot = stop;
    }
    out.begin = first_item;
    out.end = at;
  }
};

// The last CTA to come here sets what decode reads and leaves its own counters as it found them.
__device__ void publish(PlanCounters& c, int static_shares, int dynamic_shares) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  if (atomicAdd(&c.planners, 1) != kPlanCtas - 1) return;
  c.static_shares = uint32_t(static_shares);
  c.dynamic_shares = uint32_t(dynamic_shares);
  c.merge_seqs = atomicExch(&c.next_merge_seq, 0);
  c.next_dynamic = c.arrived = c.planners = 0;
}

__global__ void __launch_bounds__(kPlanThreads) plan_kernel(const __grid_constant__ PlanParams p) {
  extern __shared__ Start starts[];
  __shared__ int all_slots;
  const int n = p.a.num_seqs;
  if (p.elastic) {
    read_modes(p);
    __syncthreads();
  }
  if (threadIdx.x == 0) all_slots = 0;
  __syncthreads();
  int own = 0;
  for (int s = threadIdx.x; s < n; s += kPlanThreads) own += seq_shape(p, s).slots;
  own = warp_reduce(own, [](int a, int b) { return a + b; });
  if (threadIdx.x % kWarpSize == 0 && own) atomicAdd(&all_slots, own);
  __syncthreads();
  scan_starts(p, all_slots >= kMinSlotsForDynamic * p.groups, starts);

  const Writer writer{
      p,
      starts,
      {cut_static(starts[n].slots[kStatic], p.groups), cut_dynamic(starts[n].slots[kDynamic], p.groups)}};
  const int dynamic_shares = writer.cuts[kDynamic].shares();
  for (int i = blockIdx.x * kPlanThreads + threadIdx.x; i < p.groups + dynamic_shares;
       i += kPlanCtas * kPlanThreads)
    writer.write(i < p.groups ? kStatic : kDynamic, i < p.groups ? i : i - p.groups);
  publish(*p.plan.counters, p.groups, dynamic_shares);
}

int num_groups(const DecodeWorkspace& w) { return std::max(1, w.num_ctas / w.kv_heads); }

}  // namespace

DecodePlanView decode_plan_view(const DecodeWorkspace& w, size_t* bytes) {
  constexpr size_t kAlign = 256;
  size_t at = 0;
  const auto take = [&](size_t size) {
    uint8_t* here = w.memory + at;
    at += (size + kAlign - 1) / kAlign * kAlign;
    return here;
  };
  const size_t seqs = w.max_seqs, shares = max_shares(num_groups(w));
  const size_t words = (w.max_pairs + 31) / 32, heads = w.heads, items = shares + 2 * seqs;
  DecodePlanView v;
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
  const PlanParams p{args, decode_plan_view(w, nullptr), num_groups(w), (args.max_pairs + 31) / 32,
                     path != KvPath::native};
  plan_kernel<<<kPlanCtas, kPlanThreads, (args.num_seqs + 1) * sizeof(Start), stream>>>(p);
  cuda_check(cudaGetLastError());
}

}  // namespace ekv
