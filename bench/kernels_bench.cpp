// kernels_bench.cpp -- attention kernels on this GPU: microseconds, TB/s, share of the read ceiling of the same
// run.
//
// Page tables are permuted, buffers rotate beyond the L2, data is random, launches are graph replays. A time
// contains the gap to the next launch of the graph.

#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <string>

#include "bench/bench_device.h"
#include "bench/bench_graph.h"
#include "kernels/attention.h"
#include "tests/support/device_array.h"

namespace ekv::bench {
namespace {

using test::DeviceArray;

constexpr size_t kRotateBytes = size_t(768) << 20;  // the L2 holds 60 MB

int multiprocessors() {
  int count;
  cuda_check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0));
  return count;
}

struct Ceilings {
  double read_tbs = 0, copy_tbs = 0, gap_us = 0;
};

Ceilings measure_ceilings() {
  const size_t bytes = size_t(2) << 30;
  DeviceArray<uint8_t> a(bytes), b(bytes);
  DeviceArray<uint32_t> sink(1);
  launch_fill_half(reinterpret_cast<uint16_t*>(a.data()), bytes / 2, nullptr);
  Ceilings c;
  const Timing read = time_graph(
      4, [&](int, cudaStream_t s) { launch_read(a.data(), bytes, sink.data(), s); }, 20);
  const Timing copy = time_graph(
      4, [&](int, cudaStream_t s) { launch_copy(b.data(), a.data(), bytes, s); }, 20);
  c.read_tbs = bytes / read.median_us / 1e6;
  c.copy_tbs = 2 * bytes / copy.median_us / 1e6;
  c.gap_us = time_graph(200, [](int, cudaStream_t s) { launch_empty(s); }).median_us;
  return c;
}

// Sequences with lengths and BASE pairs, their pages shuffled, over as many layers as it takes to leave the L2.
struct Batch {
  int heads = 32, kv_heads = 8, head_dim = 128;
  std::vector<int> rows, kv_len;
  std::vector<std::vector<bool>> base;  // per sequence and pair

  static Batch decode(int seqs, int context, double share, bool scattered) {
    Batch b;
    for (int s = 0; s < seqs; ++s) b.add(1, context, share, scattered, s);
    return b;
  }
  // `share` of the pairs are BASE: one run in the middle, or scattered.
  void add(int row_count, int context, double share, bool scattered, unsigned seed) {
    const int pairs = (context + kPairTokens - 1) / kPairTokens;
    const int count = std::min(int(std::lround(share * pairs)), context / kPairTokens);
    std::vector<bool> is_base(pairs, false);
    const int first = (context / kPairTokens - count) / 2;
    for (int p = first; p < first + count; ++p) is_base[p] = true;
    if (scattered) std::shuffle(is_base.begin(), is_base.begin() + context / kPairTokens, std::mt19937(seed));
    rows.push_back(row_count);
    kv_len.push_back(context);
    base.push_back(is_base);
  }
};

class DeviceBatch {
 public:
  explicit DeviceBatch(const Batch& b) : b_(b) {
    int max_pairs = 0, pages = 0;
    for (size_t s = 0; s < b.kv_len.size(); ++s) {
      max_pairs = std::max<int>(max_pairs, b.base[s].size());
      pages += (b.kv_len[s] + kBlockTokens - 1) / kBlockTokens;
      for (bool is_base : b.base[s]) pages -= is_base;
    }
    slots_ = pages;
    std::vector<int> order(pages);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(1));
    std::vector<PairEntry> tables;
    std::vector<uint8_t> is_base(pages);
    std::vector<int32_t> q_start{0};
    for (size_t s = 0; s < b.kv_len.size(); ++s) {
      const int blocks = (b.kv_len[s] + kBlockTokens - 1) / kBlockTokens;
      for (int p = 0; p < max_pairs; ++p) {
        PairEntry e;
        if (2 * p < blocks) {
          e.even = order[--pages];
          if (b.base[s][p]) is_base[e.even] = 1;
          if (!b.base[s][p] && 2 * p + 1 < blocks) e.odd = order[--pages];
          if (b.base[s][p]) e.even = int(unsigned(e.even) | kBasePair);
        }
        tables.push_back(e);
      }
      q_start.push_back(q_start.back() + b.rows[s]);
    }
    shape_ = {1, slots_, b.kv_heads, b.head_dim};
    shape_.layers = int(std::clamp<size_t>(
        (kRotateBytes + shape_.page_bytes() * slots_ - 1) / (shape_.page_bytes() * slots_), 2, 96));
    tables_.emplace_back(tables);
    lens_.emplace_back(b.kv_len);
    lens_.emplace_back(q_start);
    bytes_.emplace_back(shape_.page_bytes() * slots_);
    bytes_.emplace_back(is_base);
    const size_t values = size_t(q_start.back()) * b.heads * b.head_dim;
    halves_.emplace_back(values);
    halves_.emplace_back(values);
    launch_fill_pool(bytes_[0].data(), shape_, bytes_[1].data(), nullptr);
    launch_fill_half(halves_[0].data(), values, nullptr);
    cuda_check(cudaDeviceSynchronize());
    args_.shape = shape_;
    args_.heads = b.heads;
    args_.num_seqs = int(b.kv_len.size());
    args_.max_pairs = max_pairs;
    args_.rows = q_start.back();
    args_.scale = 1 / std::sqrt(float(b.head_dim));
    args_.q = halves_[0].data();
    args_.out = halves_[1].data();
    args_.pool = bytes_[0].data();
    args_.tables = tables_[0].data();
    args_.kv_len = lens_[0].data();
    args_.q_start = lens_[1].data();
  }

  const AttnArgs& args() const { return args_; }
  // What decode of one layer reads.
  double kv_bytes() const { return double(slots_) * b_.kv_heads * 4 * kBlockTokens * b_.head_dim; }

  Timing decode(KvPath path, int num_ctas = multiprocessors()) const {
    DecodeWorkspace w = decode_workspace(shape_, b_.heads, args_.num_seqs, args_.max_pairs, num_ctas);
    DeviceArray<uint8_t> memory(w.bytes);
    cuda_check(cudaMemset(memory.data(), 0, memory.size()));
    w.memory = memory.data();
    launch_decode_plan(args_, path, w, nullptr);
    cuda_check(cudaDeviceSynchronize());
    return time_graph(std::max(24, shape_.layers), [&](int i, cudaStream_t stream) {
      AttnArgs a = args_;
      a.layer = i % shape_.layers;
      launch_decode(a, path, w, stream);
    });
  }
  Timing prefill(KvPath path, MatrixUnit at_most = MatrixUnit::wgmma) const {
    int base_pairs = 0;
    for (const auto& pairs : b_.base) base_pairs += int(std::count(pairs.begin(), pairs.end(), true));
    PrefillWorkspace w =
        prefill_workspace(shape_, b_.heads, args_.rows, args_.num_seqs, args_.max_pairs, base_pairs);
    DeviceArray<uint8_t> memory(w.bytes);
    cuda_check(cudaMemset(memory.data(), 0, memory.size()));
    w.memory = memory.data();
    launch_prefill_plan(args_, w, nullptr);
    cuda_check(cudaDeviceSynchronize());
    return time_graph(
        4,
        [&](int i, cudaStream_t stream) {
          AttnArgs a = args_;
          a.layer = i % shape_.layers;
          launch_prefill(a, path, w, stream, at_most);
        },
        20);
  }
  // Multiplications and additions of the visible pairs.
  double flops() const {
    double pairs = 0;
    for (size_t s = 0; s < b_.rows.size(); ++s)
      pairs += double(b_.rows[s]) * (b_.kv_len[s] - b_.rows[s]) + double(b_.rows[s]) * (b_.rows[s] + 1) / 2;
    return 4 * pairs * b_.heads * b_.head_dim;
  }
  Timing plan(KvPath path) const {
    DecodeWorkspace w = decode_workspace(shape_, b_.heads, args_.num_seqs, args_.max_pairs, multiprocessors());
    DeviceArray<uint8_t> memory(w.bytes);
    cuda_check(cudaMemset(memory.data(), 0, memory.size()));
    w.memory = memory.data();
    return time_graph(50, [&](int, cudaStream_t stream) { launch_decode_plan(args_, path, w, stream); });
  }

 private:
  Batch b_;
  KvShape shape_;
  int slots_ = 0;
  AttnArgs args_;
  std::vector<DeviceArray<PairEntry>> tables_;
  std::vector<DeviceArray<int32_t>> lens_;
  std::vector<DeviceArray<uint8_t>> bytes_;
  std::vector<DeviceArray<uint16_t>> halves_;
};

class Report {
 public:
  explicit Report(Ceilings c) : c_(c) {
    std::printf("read %.3f TB/s, copy %.3f TB/s, empty graph node %.2f us\n", c.read_tbs, c.copy_tbs, c.gap_us);
    std::printf("%-34s %9s %9s %7s %7s %9s\n", "row", "median us", "p95 us", "TB/s", "ceil", "goal");
  }
  void row(const std::string& name, Timing t, double bytes, double goal_us) const {
    const double tbs = bytes / t.median_us / 1e6;
    std::printf("%-34s %9.2f %9.2f %7.3f %6.1f%% %9s\n", name.c_str(), t.median_us, t.p95_us, tbs,
                100 * tbs / c_.read_tbs, goal_us > 0 ? std::to_string(goal_us).substr(0, 6).c_str() : "");
    std::fflush(stdout);
  }

 private:
  Ceilings c_;
};

void prefill_rows(int head_dim) {
  std::printf("%-34s %9s %9s %9s\n", "row", "median us", "p95 us", "TFLOP/s");
  const auto row = [](const std::string& name, const DeviceBatch& b, Timing t) {
    std::printf("%-34s %9.1f %9.1f %9.1f\n", name.c_str(), t.median_us, t.p95_us,
                b.flops() / t.median_us / 1e6);
    std::fflush(stdout);
  };
  const std::string dim = " d" + std::to_string(head_dim);
  for (int past : {0, 8192, 32768}) {
    const std::string what = "2048 @ " + std::to_string(past / 1024) + "K" + dim;
    Batch batch;
    batch.head_dim = head_dim;
    batch.add(2048, 2048 + past, 0, false, 0);
    const DeviceBatch native(batch);
    // Once for the clocks: prefill runs into the power limit, and the first row would meet a cool device.
    if (past == 0) native.prefill(KvPath::native);
    row("prefill " + what, native, native.prefill(KvPath::native));
    if (past == 0) continue;
    batch = {};
    batch.head_dim = head_dim;
    batch.add(2048, 2048 + past, double(past) / (2048 + past), false, 0);
    const DeviceBatch base(batch);
    row("prefill, past all BASE " + what, base, base.prefill(KvPath::general));
    row("prefill again " + what, native, native.prefill(KvPath::native));
    if (past == 8192) row("prefill mma.sync " + what, native, native.prefill(KvPath::native, MatrixUnit::mma));
  }
}

struct Cell {
  const char* name;
  int seqs, context;
  double native_goal_us, base_goal_us;
};
constexpr Cell kCells[] = {
    {"1x1K", 1, 1024, 9, 0},       {"8x1K", 8, 1024, 14.5, 0},  {"8x4K", 8, 4096, 38, 25.5},
    {"64x1K", 64, 1024, 68, 48.7}, {"64x4K", 64, 4096, 245, 0}, {"1x32K", 1, 32768, 39, 26.5},
};

void decode_rows(const Report& report) {
  for (const Cell& c : kCells) {
    const std::string name = c.name;
    double native_us = 0;
    {
      DeviceBatch b(Batch::decode(c.seqs, c.context, 0, false));
      const Timing t = b.decode(KvPath::native);
      native_us = t.median_us;
      report.row("native " + name, t, b.kv_bytes(), c.native_goal_us);
      report.row("structured, all TARGET " + name, b.decode(KvPath::structured), b.kv_bytes(), 0);
      report.row("general, all TARGET " + name, b.decode(KvPath::general), b.kv_bytes(), 1.02 * native_us);
    }
    for (double share : {0.25, 0.5, 1.0}) {
      DeviceBatch b(Batch::decode(c.seqs, c.context, share, false));
      const std::string what = std::to_string(int(100 * share)) + "% BASE ";
      const double goal =
          share == 1 && c.base_goal_us > 0 ? c.base_goal_us : (1 - share / 2) * native_us * 1.05;
      report.row("structured " + what + name, b.decode(KvPath::structured), b.kv_bytes(), goal);
      report.row("general " + what + name, b.decode(KvPath::general), b.kv_bytes(), goal);
    }
  }
}

void goal_rows(const Report& report) {
  for (const Cell& c : kCells) {
    const DeviceBatch native(Batch::decode(c.seqs, c.context, 0, false));
    report.row(std::string("native ") + c.name, native.decode(KvPath::native), native.kv_bytes(),
               c.native_goal_us);
    const DeviceBatch base(Batch::decode(c.seqs, c.context, 1, false));
    report.row(std::string("structured 100% BASE ") + c.name, base.decode(KvPath::structured), base.kv_bytes(),
               c.base_goal_us);
  }
}

void ragged_rows(const Report& report) {
  std::mt19937 rng(3);
  std::lognormal_distribution<double> lengths(0, 0.8);
  Batch ragged;
  std::vector<double> drawn(64);
  double sum = 0;
  for (double& x : drawn) sum += x = lengths(rng);
  for (double x : drawn) ragged.add(1, std::max(16, int(x / sum * 64 * 4096)), 0, false, 0);
  DeviceBatch b(ragged);
  report.row("native ragged, mean 4K, 64 seqs", b.decode(KvPath::native), b.kv_bytes(), 0);
}

// The merge by itself: as many equal sequences as shares are never split; fewer and longer ones of the same
// bytes are. `f` is what a launch costs that has one block per sequence.
void merge_rows(const Report& report) {
  const int shares = multiprocessors() / Batch().kv_heads;
  const auto native = [&](int seqs, int context) {
    const DeviceBatch b(Batch::decode(seqs, context, 0, false));
    const Timing t = b.decode(KvPath::native);
    report.row("native " + std::to_string(seqs) + "x" + std::to_string(context), t, b.kv_bytes(), 0);
    return t.median_us;
  };
  native(shares, kBlockTokens);
  for (int context : {64, 256, 2048}) {
    const double whole = native(shares, context);
    for (int parts : {2, shares}) {
      const double merged = native(shares / parts, context * parts);
      std::printf("  merge of %d splits: %.2f us\n", parts, merged - whole);
    }
  }
}

void planner_rows(const Report& report) {
  for (const Cell& c : kCells) {
    DeviceBatch b(Batch::decode(c.seqs, c.context, 0.25, true));
    report.row(std::string("plan general ") + c.name, b.plan(KvPath::general), 0, 3);
    report.row(std::string("plan native ") + c.name, b.plan(KvPath::native), 0, 3);
  }
}

}  // namespace
}  // namespace ekv::bench

// kernels_bench [goals | decode | plan | prefill | prefill64 | prefill128 | prefill256]: the rows with a goal
// of their own, all decode rows, planner and merge, prefill rows; without an argument everything but the first.
int main(int argc, char** argv) {
  using namespace ekv::bench;
  const std::string what = argc > 1 ? argv[1] : "";
  const Report report(measure_ceilings());
  if (what == "goals") goal_rows(report);
  if (what == "decode" || what.empty()) {
    decode_rows(report);
    ragged_rows(report);
  }
  if (what == "plan" || what.empty()) {
    merge_rows(report);
    planner_rows(report);
  }
  for (int head_dim : {128, 64, 256})
    if (what == "prefill" || what == "prefill" + std::to_string(head_dim) || what.empty())
      prefill_rows(head_dim);
}
