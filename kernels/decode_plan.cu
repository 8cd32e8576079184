// decode_plan.cu -- cuts the batch into shares, once a step.
//
// The step waits for this kernel, and most of its time is round trips to memory: so few of them follow each
// other. One CTA of few warps does it all, but for the modes of the pairs. Those are read by other CTAs of its
// cluster, while it reads the lengths. Larger tables, and older devices: many CTAs, of which the one that comes
// last goes on alone.

#include <algorithm>
#include <bit>
#include <climits>

#include "kernels/cuda_check.h"
#include "kernels/decode_plan.h"
#include "kernels/device.cuh"
#include "kernels/hopper_code.h"

namespace ekv {
namespace {

// Fewer warps make the barriers cheaper; more have more of the tables under way. Chosen by measurement (H200).
constexpr int kFewPlanWarps = 8, kPlanWarps = 16, kMaxPlanWarps = 32;
constexpr int kWordsPerWarp = 8;  // of 32 pairs each, all under way together
constexpr int kMaxPlanCtas = 64;
// Fewer words are read by the planner itself: 4.6 us for 32 words against 5.1 with a cluster, 7.8 against 5.4
// for 256, equal at 64 (H200).
constexpr int kMinClusterWords = 64;
constexpr int kMaxClusterWords = 1024;  // two or three rounds of the cluster's readers
constexpr int kMaxCluster = 8;
// A share below one slot per warp would only add partials to merge.
constexpr int kMinShare = kDecodeWarps;

struct PlanParams {
  AttnArgs a;
  DecodePlanView plan;
  int words;  // of base_masks per sequence
  bool elastic;
  bool cluster;  // the grid is one: CTA 0 plans, the others read modes for it

  __host__ __device__ int total_words() const { return a.num_seqs * words; }
};

// What the planner knows of a sequence. Sequences lie end to end on a line of slots.
struct SeqPlan {
  int blocks;               // 0: nothing to decode
  int run_first, num_base;  // first BASE pair, number of them
  int slots_before;         // on the line
  int first_item;           // index
  __device__ int slots() const { return blocks - num_base; }
};

struct ShareStart {
  int seq, slot;  // of the sequence's slots
};

// By every thread.
__device__ __forceinline__ int num_warps() { return blockDim.x / kWarpSize; }
__device__ __forceinline__ int this_warp() { return threadIdx.x / kWarpSize; }
__device__ __forceinline__ int this_lane() { return threadIdx.x % kWarpSize; }

struct PlanShared {
  SeqPlan* seqs;       // [num_seqs + 1]; the last has the totals
  ShareStart* starts;  // [num_shares], of each share that is not empty
  uint32_t* masks;     // like DecodePlanView::base_masks
};

__device__ int decode_blocks(const AttnArgs& a, int seq) {
  const bool one_row = a.q_start[seq + 1] - a.q_start[seq] == 1;
  const int keys = a.kv_len[seq];
  return one_row ? (keys + kBlockTokens - 1) / kBlockTokens : 0;
}

__device__ void count_base(SeqPlan& seq, int first_pair, uint32_t mask) {
  if (mask == 0) return;
  atomicAdd(&seq.num_base, __popc(mask));
  atomicMin(&seq.run_first, first_pair + __ffs(mask) - 1);
}

// A word of the masks, and how a warp steps to its next one without dividing again.
struct WordPlace {
  int word, seq, in_seq;
  __device__ WordPlace(int word, int words) : word(word), seq(word / words), in_seq(word % words) {}
  __device__ void advance(const WordPlace& step, int words) {
    word += step.word;
    seq += step.seq;
    in_seq += step.in_seq;
    if (in_seq < words) return;
    in_seq -= words;
    ++seq;
  }
};

// The cluster's readers: the same for all of the table, because they know no lengths, into CTA 0's shared
// memory.
__device__ void read_modes_for_planner(const PlanParams& p, const PlanShared& s) {
  const WordPlace step((gridDim.x - 1) * num_warps(), p.words);
  WordPlace at((blockIdx.x - 1) * num_warps() + this_warp(), p.words);
  uint32_t* const masks = shared_of(0, s.masks);
  bool planner_has_begun = false;
  while (at.word < p.total_words()) {
    bool base[kWordsPerWarp];  // all loaded before the first mask is written
    WordPlace next = at;
#pragma unroll
    for (int i = 0; i < kWordsPerWarp; ++i) {
      const int pair = next.in_seq * 32 + this_lane();
      base[i] = next.word < p.total_words() && pair < p.a.max_pairs &&
                p.a.tables[size_t(next.seq) * p.a.max_pairs + pair].is_base();
      next.advance(step, p.words);
    }
    if (!planner_has_begun) cluster_wait();
    planner_has_begun = true;
#pragma unroll
    for (int i = 0; i < kWordsPerWarp; ++i) {
      const uint32_t mask = __ballot_sync(kAllLanes, base[i]);
      if (this_lane() == 0 && at.word < p.total_words()) masks[at.word] = mask;
      at.advance(step, p.words);
    }
  }
  if (!planner_has_begun) cluster_wait();
}

// One warp per 32 pairs: which of them are BASE. Pairs past the sequence's last block count as TARGET.
__device__ void read_modes(const PlanParams& p, const PlanShared& s) {
  const WordPlace step(gridDim.x * num_warps(), p.words);
  WordPlace at(blockIdx.x * num_warps() + this_warp(), p.words);
  while (at.word < p.total_words()) {
    bool base[kWordsPerWarp];  // all loaded before the first mask is written
    WordPlace next = at;
#pragma unroll
    for (int i = 0; i < kWordsPerWarp; ++i) {
      const int pair = next.in_seq * 32 + this_lane();
      base[i] = next.word < p.total_words() && pair < (s.seqs[next.seq].blocks + 1) / 2 &&
                p.a.tables[size_t(next.seq) * p.a.max_pairs + pair].is_base();
      next.advance(step, p.words);
    }
#pragma unroll
    for (int i = 0; i < kWordsPerWarp; ++i) {
      const uint32_t mask = __ballot_sync(kAllLanes, base[i]);
      if (this_lane() == 0 && at.word < p.total_words()) {
        s.masks[at.word] = mask;
        if (gridDim.x == 1) count_base(s.seqs[at.seq], at.in_seq * 32, mask);
      }
      at.advance(step, p.words);
    }
  }
}

// True for the CTA that comes here last; it sees what the others have written.
__device__ bool comes_last(PlanCounters& c) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(&c.planners, 1) == gridDim.x - 1;
    if (last) c.planners = 0;
  }
  __syncthreads();
  __threadfence();
  return last;
}

// For the CTA that goes on alone. Cuts what lies past a sequence's last pair.
__device__ void count_modes(const PlanParams& p, const PlanShared& s) {
  for (int word = threadIdx.x; word < p.total_words(); word += blockDim.x) {
    SeqPlan& seq = s.seqs[word / p.words];
    const int first_pair = word % p.words * 32, pairs = (seq.blocks + 1) / 2 - first_pair;
    const uint32_t mask = pairs <= 0 ? 0 : s.masks[word] & (kAllLanes >> (32 - min(pairs, 32)));
    s.masks[word] = mask;
    count_base(seq, first_pair, mask);
  }
}

// Every CTA reads its part; false for those that have nothing more to do.
__device__ bool find_modes(const PlanParams& p, const PlanShared& s) {
  if (p.cluster) {
    if (blockIdx.x == 0)
      cluster_wait();
    else
      read_modes_for_planner(p, s);
    cluster_barrier();
    if (blockIdx.x > 0) return false;
    count_modes(p, s);
  } else {
    read_modes(p, s);
    if (gridDim.x > 1) {
      if (!comes_last(*p.plan.counters)) return false;
      count_modes(p, s);
    }
  }
  __syncthreads();
  return true;
}

// The logical block that slot `slot` of a sequence starts with. By a whole warp.
__device__ int block_of_slot(const uint32_t* masks, int words, int slot) {
  const int lane = this_lane();
  int word = 0;  // that holds the slot
  for (int base = 0; base < words; base += kWarpSize) {
    const int own = base + lane < words ? 2 * 32 - __popc(masks[base + lane]) : 0;
    int through = own;
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const int up = __shfl_up_sync(kAllLanes, through, offset);
      if (lane >= offset) through += up;
    }
    const uint32_t reached = __ballot_sync(kAllLanes, through > slot);
    word = base + (reached ? __ffs(reached) - 1 : kWarpSize);
    slot -=
        __shfl_sync(kAllLanes, reached ? through - own : through, reached ? __ffs(reached) - 1 : kWarpSize - 1);
    if (reached) break;
  }
  const uint32_t mask = masks[word];
  const int begin = 2 * lane - __popc(mask & ((1u << lane) - 1));  // this lane's pair, in slots of the word
  const int pair = kWarpSize - 1 - __clz(__ballot_sync(kAllLanes, begin <= slot));
  return 2 * (word * 32 + pair) + slot - __shfl_sync(kAllLanes, begin, pair);
}

__device__ int warp_scan(int x) {  // inclusive
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const int up = __shfl_up_sync(kAllLanes, x, offset);
    if (this_lane() >= offset) x += up;
  }
  return x;
}

// The whole line, for every thread.
struct Line {
  int slots, seqs;  // seqs: that have slots
  int share_slots;  // per share
};

// Puts the sequences on the line, and their items in order: sequence n of share k is item n + k. So the items
// of a share are neighbours, and no two items have one index. Not every index has an item.
__device__ Line place_sequences(const PlanParams& p, SeqPlan* seqs) {
  __shared__ int slots_of_warp[kMaxPlanWarps], seqs_of_warp[kMaxPlanWarps];
  const int n = p.a.num_seqs, per_thread = (n + blockDim.x - 1) / blockDim.x;
  const int begin = min(n, int(threadIdx.x) * per_thread), end = min(n, begin + per_thread);
  int slots = 0, count = 0;
  for (int s = begin; s < end; ++s) {
    slots += seqs[s].slots();
    count += seqs[s].slots() > 0;
  }
  const int slots_through = warp_scan(slots), count_through = warp_scan(count);
  if (this_lane() == kWarpSize - 1) {
    slots_of_warp[this_warp()] = slots_through;
    seqs_of_warp[this_warp()] = count_through;
  }
  __syncthreads();
  const bool is_warp = this_lane() < num_warps(), is_before = this_lane() < this_warp();
  const int warp_slots = is_warp ? slots_of_warp[this_lane()] : 0;
  const int warp_count = is_warp ? seqs_of_warp[this_lane()] : 0;
  Line line{__reduce_add_sync(kAllLanes, warp_slots), __reduce_add_sync(kAllLanes, warp_count), 0};
  line.share_slots = max((line.slots + p.plan.num_shares - 1) / p.plan.num_shares, kMinShare);
  int slots_before = __reduce_add_sync(kAllLanes, is_before ? warp_slots : 0) + slots_through - slots;
  int seqs_before = __reduce_add_sync(kAllLanes, is_before ? warp_count : 0) + count_through - count;
  for (int s = begin; s < end; ++s) {
    seqs[s].slots_before = slots_before;
    seqs[s].first_item = seqs_before + slots_before / line.share_slots;
    slots_before += seqs[s].slots();
    seqs_before += seqs[s].slots() > 0;
  }
  return line;
}

// Writes shares and items.
class Writer {
 public:
  __device__ Writer(const PlanParams& p, const PlanShared& s, const Line& line) : p_(p), s_(s), line_(line) {}

  // One thread per item. `num_merges` is 0.
  __device__ void write_items(int& num_merges) const {
    for (int i = threadIdx.x; i < line_.seqs + p_.plan.num_shares; i += blockDim.x) write(i, num_merges);
    for (int i = threadIdx.x; i < p_.plan.num_shares; i += blockDim.x)
      if (i >= used_shares()) p_.plan.shares[i].begin = p_.plan.shares[i].end = 0;
  }

  // Where a share starts in its sequence's table, and the entries there: a warp per share. Only the first item
  // of a share can start behind its sequence's first slot.
  __device__ void finish_shares() const {
    constexpr int kLoads = 4;
    for (int first = this_warp(); first < used_shares(); first += kLoads * num_warps()) {
      int block[kLoads];
      PairEntry entry[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int share = first + i * num_warps();
        if (share >= used_shares()) break;
        const ShareStart start = s_.starts[share];
        block[i] = p_.elastic && start.slot > 0
                       ? block_of_slot(s_.masks + size_t(start.seq) * p_.words, p_.words, start.slot)
                       : start.slot;
        const int pair = min(block[i] / 2 + this_lane(), p_.a.max_pairs - 1);
        entry[i] = p_.a.tables[size_t(start.seq) * p_.a.max_pairs + pair];
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int share = first + i * num_warps();
        if (share >= used_shares()) break;
        p_.plan.shares[share].window[this_lane()] = entry[i];
        if (this_lane() == 0) p_.plan.shares[share].first.block_begin = block[i];
      }
    }
  }

 private:
  // The last sequence whose first item is at most `index`; of sequences without slots some may come out, whose
  // items are empty.
  __device__ int find_seq(int index) const {
    int low = 0, high = p_.a.num_seqs;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (s_.seqs[middle].first_item <= index ? low : high) = middle;
    }
    return low;
  }

  __device__ int used_shares() const { return (line_.slots + line_.share_slots - 1) / line_.share_slots; }

  __device__ void write(int index, int& num_merges) const {
    const int seq = find_seq(index), share_slots = line_.share_slots;
    const SeqPlan& own = s_.seqs[seq];
    const int start = own.slots_before, stop = start + own.slots();
    const int first_share = start / share_slots, share = first_share + index - own.first_item;
    const int begin = max(start, share * share_slots), end = min(stop, (share + 1) * share_slots);
    if (begin >= end) return;
    DecodeItem item{};
    item.seq = seq;
    item.slot_begin = begin - start;
    item.slot_end = end - start;
    item.run_first = own.num_base ? own.run_first : 0;
    item.run_count = own.num_base;
    item.kv_len = p_.a.kv_len[seq];
    item.row = p_.a.q_start[seq];
    item.num_splits = (stop - 1) / share_slots - first_share + 1;
    item.index = index;
    item.first_index = own.first_item;
    p_.plan.items[index] = item;
    DecodeShare& out = p_.plan.shares[share];
    if (begin == share * share_slots) {
      out.begin = index;
      out.first = item;
      s_.starts[share] = {seq, item.slot_begin};
    }
    if (end == min(line_.slots, (share + 1) * share_slots)) out.end = index + 1;
    if (item.num_splits > 1 && share == first_share) p_.plan.merge_seqs[atomicAdd(&num_merges, 1)] = item;
  }

  const PlanParams& p_;
  const PlanShared& s_;
  const Line line_;
};

__global__ void __launch_bounds__(kMaxPlanWarps* kWarpSize) plan_kernel(const __grid_constant__ PlanParams p) {
  extern __shared__ SeqPlan seqs[];
  __shared__ int num_merges;
  const int n = p.a.num_seqs;
  if (p.cluster) cluster_arrive();  // the wait is in find_modes
  PlanShared s{seqs, reinterpret_cast<ShareStart*>(seqs + n), p.plan.base_masks};
  if (gridDim.x == 1 || p.cluster) s.masks = reinterpret_cast<uint32_t*>(s.starts + p.plan.num_shares);
  if (threadIdx.x == 0) num_merges = 0;
  if (!p.cluster || blockIdx.x == 0) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) seqs[i] = {decode_blocks(p.a, i), INT_MAX, 0, 0, 0};
    __syncthreads();
  }
  if (p.elastic && !find_modes(p, s)) return;
  const Writer writer(p, s, place_sequences(p, seqs));
  __syncthreads();
  writer.write_items(num_merges);
  __syncthreads();
  if (threadIdx.x == 0) p.plan.counters->merge_seqs = num_merges;
  writer.finish_shares();
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
  PlanParams p{args, decode_plan_view(w, nullptr), (args.max_pairs + 31) / 32, path != KvPath::native, false};
  const int words = p.elastic ? p.total_words() : 0;
  p.cluster = words > kMinClusterWords && words <= kMaxClusterWords && is_hopper_code(plan_kernel);
  const int for_words = p.cluster                             ? 0
                        : words <= kWordsPerWarp * kPlanWarps ? std::min(words, kPlanWarps)
                                                              : kMaxPlanWarps;
  const int for_items = ceil_div(args.num_seqs + p.plan.num_shares, kWarpSize);
  const int warps = std::clamp(std::max(for_words, for_items), kFewPlanWarps, kMaxPlanWarps);
  const int readers = ceil_div(words, kWordsPerWarp * warps);
  int ctas = std::clamp(readers, 1, kMaxPlanCtas);
  if (p.cluster) ctas = std::min(int(std::bit_ceil(unsigned(readers + 1))), kMaxCluster);

  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {unsigned(ctas), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = ctas;
  config.blockDim = warps * kWarpSize;
  config.dynamicSmemBytes = args.num_seqs * sizeof(SeqPlan) + p.plan.num_shares * sizeof(ShareStart) +
                            (ctas == 1 || p.cluster ? words * sizeof(uint32_t) : 0);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = p.cluster ? 1 : 0;
  cuda_check(cudaLaunchKernelEx(&config, plan_kernel, p));
}

}  // namespace ekv
