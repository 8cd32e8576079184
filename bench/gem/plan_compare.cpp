// The planner of this build against the one before: the same plans, and times.
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "bench/bench_graph.h"
#include "kernels/decode_plan.h"
#include "tests/support/device_array.h"

namespace ekv {
void launch_decode_plan_before(const AttnArgs& args, KvPath path, const DecodeWorkspace& w,
                               cudaStream_t stream);
}
using namespace ekv;
using test::DeviceArray;

struct Batch {
  std::vector<int32_t> kv_len, q_start{0};
  std::vector<PairEntry> tables;
  int max_pairs;
  Batch(int seqs, int context, int max_pairs, bool ragged, unsigned seed) : max_pairs(max_pairs) {
    std::mt19937 rng(seed);
    for (int s = 0; s < seqs; ++s) {
      const bool none = ragged && rng() % 8 == 0;
      kv_len.push_back(ragged ? 1 + rng() % context : context);
      q_start.push_back(q_start.back() + (none ? int(rng() % 2) * 2 : 1));
      for (int p = 0; p < max_pairs; ++p) {
        PairEntry e{int(rng() % 100000), int(rng() % 100000)};
        if (rng() % 4 == 0 && p < kv_len.back() / 32) e.even = int(unsigned(e.even) | kBasePair);
        if (ragged && p >= (kv_len.back() + 31) / 32) e.even = int(rng());  // never followed
        tables.push_back(e);
      }
    }
  }
};

struct Plan {
  std::vector<uint8_t> shares, items, merges;
};

int main() {
  const KvShape shape{1, 1, 8, 128};
  int wrong = 0, plans = 0;
  const auto each = [&](const Batch& b, KvPath path, bool timed) {
    const int seqs = int(b.kv_len.size());
    DeviceArray<PairEntry> tables(b.tables);
    DeviceArray<int32_t> kv_len(b.kv_len), q_start(b.q_start);
    DecodeWorkspace w = decode_workspace(shape, 32, seqs, b.max_pairs, 132);
    DeviceArray<uint8_t> memory(w.bytes);
    w.memory = memory.data();
    AttnArgs a;
    a.shape = shape, a.heads = 32, a.num_seqs = seqs, a.max_pairs = b.max_pairs, a.rows = b.q_start.back();
    a.tables = tables.data(), a.kv_len = kv_len.data(), a.q_start = q_start.data();
    const DecodePlanView v = decode_plan_view(w, nullptr);
    const auto plan = [&](auto launch) {
      cuda_check(cudaMemset(memory.data(), 0, memory.size()));
      Plan p;
      for (int i = 0; i < 2; ++i) launch(a, path, w, nullptr);
      p.shares.resize(v.num_shares * sizeof(DecodeShare)),
          p.items.resize((v.num_shares + seqs) * sizeof(DecodeItem));
      PlanCounters c;
      cuda_check(cudaMemcpy(p.shares.data(), v.shares, p.shares.size(), cudaMemcpyDeviceToHost));
      cuda_check(cudaMemcpy(p.items.data(), v.items, p.items.size(), cudaMemcpyDeviceToHost));
      cuda_check(cudaMemcpy(&c, v.counters, sizeof c, cudaMemcpyDeviceToHost));
      std::vector<DecodeItem> merges(c.merge_seqs);
      if (c.merge_seqs)
        cuda_check(
            cudaMemcpy(merges.data(), v.merge_seqs, c.merge_seqs * sizeof(DecodeItem), cudaMemcpyDeviceToHost));
      std::sort(merges.begin(), merges.end(), [](auto& x, auto& y) { return x.seq < y.seq; });
      p.merges.resize(merges.size() * sizeof(DecodeItem));
      if (!merges.empty()) std::memcpy(p.merges.data(), merges.data(), p.merges.size());
      return p;
    };
    const Plan before = plan(launch_decode_plan_before), now = plan(launch_decode_plan);
    ++plans;
    if (before.shares != now.shares || before.items != now.items || before.merges != now.merges) {
      ++wrong;
      if (wrong < 5) std::printf("DIFFERENT: %d sequences, %d pairs, path %d\n", seqs, b.max_pairs, int(path));
    }
    if (!timed) return;
    const auto us = [&](auto launch) {
      return bench::time_graph(50, [&](int, cudaStream_t t) { launch(a, path, w, t); }).median_us;
    };
    const double t0 = us(launch_decode_plan_before), t1 = us(launch_decode_plan);
    std::printf("plan %-8s %4d sequences x %5d (%d pairs wide): before %.2f us, now %.2f us\n",
                path == KvPath::native ? "native" : "elastic", seqs, b.kv_len[0], b.max_pairs, t0, t1);
  };
  std::mt19937 rng(7);
  for (int i = 0; i < 200; ++i) {
    const int seqs = 1 + rng() % (i % 2 ? 20 : 300), pairs = 1 + rng() % (i % 3 ? 40 : 400);
    each(Batch(seqs, pairs * 32, pairs + int(rng() % 3), true, i), i % 4 ? KvPath::general : KvPath::native,
         false);
  }
  std::printf("plans compared with the planner before: %d, different: %d\n", plans, wrong);
  for (KvPath path : {KvPath::native, KvPath::general}) {
    for (auto [seqs, context] :
         {std::pair{1, 1024}, {8, 1024}, {8, 4096}, {64, 1024}, {64, 4096}, {1, 32768}, {256, 4096}})
      each(Batch(seqs, context, context / 32, false, 1), path, true);
    each(Batch(64, 1024, 1024, false, 1), path, true);
  }
  return wrong > 0;
}
