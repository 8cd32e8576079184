// prefill_plan.cu -- lists tiles and BASE pairs once a step.

#include <algorithm>

#include "kernels/cuda_check.h"
#include "kernels/device.cuh"
#include "kernels/prefill_plan.h"

namespace ekv {
namespace {

constexpr int kPlanThreads = 1024;

struct PlanParams {
  AttnArgs a;
  PrefillPlanView plan;
  int scratch_pairs;
};

__device__ int prefill_rows(const AttnArgs& a, int seq) {
  const int rows = a.q_start[seq + 1] - a.q_start[seq];
  return rows > 1 && a.kv_len[seq] > 0 ? rows : 0;
}

// Exclusive prefix sum over the block; the total goes to `total`.
__device__ int block_scan(int x, int* total) {
  __shared__ int sums[kPlanThreads / kWarpSize];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  int inclusive = x;
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const int up = __shfl_up_sync(kAllLanes, inclusive, offset);
    if (lane >= offset) inclusive += up;
  }
  if (lane == kWarpSize - 1) sums[warp] = inclusive;
  __syncthreads();
  int before = inclusive - x, all = 0;
  for (int w = 0; w < kPlanThreads / kWarpSize; ++w) {
    if (w < warp) before += sums[w];
    all += sums[w];
  }
  *total = all;
  __syncthreads();
  return before;
}

// Within a sequence the last tile sees the most keys and comes first.
__device__ void list_tiles(const PlanParams& p, int unit, int tile_rows) {
  const int tokens = tile_rows / (p.a.heads / p.a.shape.kv_heads);
  int done = 0;
  for (int base = 0; base < p.a.num_seqs; base += kPlanThreads) {
    const int seq = base + threadIdx.x, rows = seq < p.a.num_seqs ? prefill_rows(p.a, seq) : 0;
    const int tiles = (rows + tokens - 1) / tokens;
    int total;
    const int at = done + block_scan(tiles, &total);
    for (int i = 0; i < tiles; ++i) p.plan.tiles[unit][at + i] = {seq, (tiles - 1 - i) * tokens};
    done += total;
  }
  if (threadIdx.x == 0) p.plan.counters->num_tiles[unit] = done;
}

__device__ void list_base_pairs(const PlanParams& p) {
  int done = 0;
  for (int seq = 0; seq < p.a.num_seqs; ++seq) {
    if (prefill_rows(p.a, seq) == 0) continue;
    const int pairs = (p.a.kv_len[seq] + kPairTokens - 1) / kPairTokens;
    for (int base = 0; base < pairs; base += kPlanThreads) {
      const int pair = base + int(threadIdx.x);
      const size_t at = size_t(seq) * p.a.max_pairs + pair;
      const PairEntry entry = pair < pairs ? p.a.tables[at] : PairEntry{};
      int total;
      const int index = done + block_scan(entry.is_base(), &total);
      done += total;
      if (done > p.scratch_pairs) __trap();  // the contract of PrefillWorkspace::scratch_pairs
      if (!entry.is_base()) continue;
      p.plan.scratch_index[at] = index;
      p.plan.jobs[index] = {entry.even_page()};
    }
  }
  if (threadIdx.x == 0) p.plan.counters->num_base_pairs = done;
}

__global__ void __launch_bounds__(kPlanThreads) prefill_plan_kernel(const __grid_constant__ PlanParams p) {
  list_tiles(p, int(MatrixUnit::mma), prefill_tile_rows(MatrixUnit::mma));
  list_tiles(p, int(MatrixUnit::wgmma), prefill_tile_rows(MatrixUnit::wgmma));
  list_base_pairs(p);
}

}  // namespace

int max_prefill_tiles(const PrefillWorkspace& w, MatrixUnit unit, int rows, int seqs) {
  const int tokens = prefill_tile_rows(unit) / (w.heads / w.kv_heads);
  return rows / tokens + std::min(seqs, rows / 2);
}

PrefillPlanView prefill_plan_view(const PrefillWorkspace& w, size_t* bytes) {
  constexpr size_t kAlign = 1024;
  size_t at = 0;
  const auto take = [&](size_t size) {
    uint8_t* here = w.memory + at;
    at += (size + kAlign - 1) / kAlign * kAlign;
    return here;
  };
  PrefillPlanView v;
  v.counters = reinterpret_cast<PrefillCounters*>(take(sizeof(PrefillCounters)));
  for (MatrixUnit unit : {MatrixUnit::mma, MatrixUnit::wgmma})
    v.tiles[int(unit)] = reinterpret_cast<PrefillTile*>(
        take(max_prefill_tiles(w, unit, w.max_rows, w.max_seqs) * sizeof(PrefillTile)));
  v.jobs = reinterpret_cast<ScratchJob*>(take(w.scratch_pairs * sizeof(ScratchJob)));
  v.scratch_index = reinterpret_cast<int32_t*>(take(size_t(w.max_seqs) * w.max_pairs * sizeof(int32_t)));
  v.scratch =
      take(size_t(w.scratch_pairs) * 2 * w.kv_heads * KvShape{1, 1, w.kv_heads, w.head_dim}.slot_bytes());
  if (bytes) *bytes = at;
  return v;
}

PrefillWorkspace prefill_workspace(const KvShape& shape, int heads, int max_rows, int max_seqs, int max_pairs,
                                   int scratch_pairs) {
  EKV_CHECK(max_seqs >= 1 && max_seqs <= kMaxPrefillSeqs && max_rows >= 1, "max_seqs or max_rows out of range");
  PrefillWorkspace w{nullptr,        0,     max_rows,      max_seqs, max_pairs, scratch_pairs,
                     shape.kv_heads, heads, shape.head_dim};
  prefill_plan_view(w, &w.bytes);
  return w;
}

void launch_prefill_plan(const AttnArgs& args, const PrefillWorkspace& w, cudaStream_t stream) {
  EKV_CHECK(args.num_seqs <= w.max_seqs && args.max_pairs <= w.max_pairs && args.rows <= w.max_rows,
            "batch larger than its workspace");
  if (args.num_seqs == 0) return;
  prefill_plan_kernel<<<1, kPlanThreads, 0, stream>>>({args, prefill_plan_view(w, nullptr), w.scratch_pairs});
  cuda_check(cudaGetLastError());
}

void launch_prefill(const AttnArgs& args, KvPath path, const PrefillWorkspace& w, cudaStream_t stream,
                    MatrixUnit at_most) {
  const PrefillKernel* kernel = find_prefill(args.shape.head_dim, at_most);
  EKV_CHECK(kernel != nullptr, "no prefill kernel for this shape; find_prefill tells so at start-up");
  launch_prefill_expand(args, path, w, stream);
  kernel->launch(args, w, stream);
}

}  // namespace ekv
