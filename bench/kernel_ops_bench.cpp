// kernel_ops_bench.cpp -- the kernels around attention on this GPU: microseconds, TB/s, share of the copy
// ceiling of the same run, and the ratio to the floor (bytes that must move, at that ceiling).
//
// Launches are graph replays over buffers that together exceed the L2, pages permuted, data random. A time
// contains the gap to the next launch of the graph. `kernel_ops_bench PART...` runs the named parts only.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "bench/bench_device.h"
#include "bench/bench_graph.h"
#include "kernels/kv_cache.h"
#include "kernels/layer_ops.h"
#include "kernels/sampling.h"
#include "tests/support/device_array.h"

namespace ekv::bench {
namespace {

using test::DeviceArray;

constexpr size_t kRotateBytes = size_t(512) << 20;  // the L2 holds 60 MB

struct Ceilings {
  double read_tbs = 0, copy_tbs = 0, gap_us = 0;
};

Ceilings measure_ceilings() {
  const size_t bytes = size_t(1) << 30;
  DeviceArray<uint8_t> a(bytes), b(bytes);
  DeviceArray<uint32_t> sink(1);
  launch_fill_half(reinterpret_cast<uint16_t*>(a.data()), bytes / 2, nullptr);
  const auto read = [&](int, cudaStream_t s) { launch_read(a.data(), bytes, sink.data(), s); };
  const auto copy = [&](int, cudaStream_t s) { launch_copy(b.data(), a.data(), bytes, s); };
  Ceilings c;
  c.read_tbs = bytes / time_graph(4, read, 20).median_us / 1e6;
  c.copy_tbs = 2 * bytes / time_graph(4, copy, 20).median_us / 1e6;
  c.gap_us = time_graph(200, [](int, cudaStream_t s) { launch_empty(s); }).median_us;
  return c;
}

class Report {
 public:
  explicit Report(Ceilings c) : c_(c) {
    std::printf("read %.3f TB/s, copy %.3f TB/s, empty graph node %.2f us\n", c.read_tbs, c.copy_tbs, c.gap_us);
    std::printf("%-42s %9s %9s %7s %7s %9s %7s\n", "row", "median us", "p95 us", "TB/s", "ceil", "floor us",
                "ratio");
  }
  void row(const std::string& name, Timing t, double bytes) const {
    const double tbs = bytes / t.median_us / 1e6, floor_us = bytes / c_.copy_tbs / 1e6;
    std::printf("%-42s %9.2f %9.2f %7.3f %6.1f%% %9.2f %7.2f\n", name.c_str(), t.median_us, t.p95_us, tbs,
                100 * tbs / c_.copy_tbs, floor_us, t.median_us / floor_us);
    std::fflush(stdout);
  }

 private:
  Ceilings c_;
};

// Zeros would run faster than data.
DeviceArray<uint16_t> random_halves(size_t count) {
  DeviceArray<uint16_t> values(count);
  launch_fill_half(values.data(), count, nullptr);
  return values;
}

// ---- pairs

struct PairModel {
  const char* name;
  int layers, kv_heads, head_dim;
};
constexpr PairModel kPairModels[] = {
    {"llama-8b", 32, 8, 128}, {"qwen3-8b", 36, 8, 128}, {"llama-70b tp2", 80, 4, 128}, {"d64", 32, 8, 64}};

void bench_pairs(const Report& report, const PairModel& m, int pairs, BaseFormat format) {
  KvShape s{m.layers, 0, m.kv_heads, m.head_dim};
  const int rotations = std::max(2, int(kRotateBytes / (s.page_bytes() * 2 * pairs)));
  s.pages = rotations * 2 * pairs;
  DeviceArray<uint8_t> pool(s.page_bytes() * s.pages), low(s.low_pair_bytes() * pairs * 2);
  DeviceArray<uint8_t> no_base(std::vector<uint8_t>(s.pages, 0));
  launch_fill_pool(pool.data(), s, no_base.data(), nullptr);
  launch_fill_half(reinterpret_cast<uint16_t*>(low.data()), low.size() / 2, nullptr);
  std::vector<int> order(s.pages);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(1));
  std::vector<PairJob> list;
  for (int i = 0; i < s.pages; i += 2) list.push_back({order[i], order[i + 1]});
  DeviceArray<PairJob> jobs(list);

  const auto args = [&](int i, bool with_low) {
    uint8_t* staging = with_low ? low.data() + i % 2 * s.low_pair_bytes() * pairs : nullptr;
    return PairArgs{pool.data(), staging, nullptr, jobs.data() + i % rotations * pairs, pairs, s, format};
  };
  const double plane = double(s.low_pair_bytes()) * pairs;  // BASE, or the low plane; TARGET is two
  const std::string name = std::string(m.name) + (format == BaseFormat::fixed8 ? " fixed8 " : " e5m2 ") +
                           std::to_string(pairs) + " pairs";
  const int count = 2 * rotations;
  report.row("demote " + name,
             time_graph(count, [&](int i, cudaStream_t t) { launch_demote(args(i, false), t); }), 3 * plane);
  report.row("demote+low " + name,
             time_graph(count, [&](int i, cudaStream_t t) { launch_demote(args(i, true), t); }), 4 * plane);
  report.row("extract_low " + name,
             time_graph(count, [&](int i, cudaStream_t t) { launch_extract_low(args(i, true), t); }),
             3 * plane);
  report.row("promote " + name,
             time_graph(count, [&](int i, cudaStream_t t) { launch_promote(args(i, true), t); }), 4 * plane);
}

// ---- KV write

void bench_kv_write(const Report& report, const char* name, int rows, bool norm, BaseFormat format) {
  const int heads = 32, dim = 128, max_positions = 32768;
  const int blocks = (rows + kBlockTokens - 1) / kBlockTokens;
  KvShape s{1, std::max(blocks, 64), 8, dim};
  const size_t row_values = size_t(heads + 2 * s.kv_heads) * dim;
  s.layers = int(std::clamp<size_t>(kRotateBytes / (rows * row_values * 4), 2, 64));
  DeviceArray<uint16_t> qkv = random_halves(s.layers * rows * row_values);
  DeviceArray<uint16_t> q(size_t(s.layers) * rows * heads * dim), weight = random_halves(dim);
  DeviceArray<uint8_t> pool(s.page_bytes() * s.pages);
  const std::vector<float> table(size_t(max_positions) * dim / 2, 0.7071f);
  DeviceArray<float> cos(table), sin(table);
  std::vector<int32_t> positions(rows), slots(rows);
  std::mt19937 rng(1);
  for (int r = 0; r < rows; ++r) {
    positions[r] = int(rng() % max_positions);
    slots[r] = rows <= 256 ? (r % s.pages) * kBlockTokens + int(rng() % kBlockTokens) : r;
  }
  DeviceArray<int32_t> d_positions(positions), d_slots(slots), q_start(std::vector<int32_t>{0, rows});
  DeviceArray<uint32_t> counters(std::vector<uint32_t>(2, 0));
  KvWriteArgs a;
  if (norm) a.q_norm = a.k_norm = weight.data();
  a.rope_cos = cos.data(), a.rope_sin = sin.data();
  a.positions = d_positions.data(), a.slot_mapping = d_slots.data(), a.q_start = q_start.data();
  a.num_rows = rows, a.num_seqs = 1, a.heads = heads, a.element = Element::fp16, a.shape = s, a.format = format;
  a.pool = pool.data(), a.clamped = counters.data(), a.non_finite = counters.data() + 1;
  const Timing t = time_graph(2 * s.layers, [&](int i, cudaStream_t stream) {
    KvWriteArgs layer = a;
    layer.layer = i % s.layers;
    layer.qkv = qkv.data() + layer.layer * rows * row_values;
    layer.q = q.data() + size_t(layer.layer) * rows * heads * dim;
    launch_kv_write(layer, stream);
  });
  report.row(std::string("kv_write ") + name + " " + std::to_string(rows) + " rows", t,
             4.0 * rows * row_values);
}

// ---- layer operations

void bench_layer_ops(const Report& report, int rows) {
  const int hidden = 4096, width = 14336;
  const size_t x_values = size_t(rows) * hidden, mlp_values = size_t(rows) * width;
  const int sets = int(std::clamp<size_t>(kRotateBytes / (x_values * 8), 2, 64));
  DeviceArray<uint16_t> x = random_halves(sets * x_values), residual = random_halves(sets * x_values);
  DeviceArray<uint16_t> out(sets * x_values), weight = random_halves(hidden);
  RmsNormArgs norm;
  norm.weight = weight.data(), norm.num_rows = rows, norm.hidden = hidden, norm.element = Element::fp16;
  report.row("rms_norm + residual 4096, " + std::to_string(rows) + " rows",
             time_graph(2 * sets,
                        [&](int i, cudaStream_t s) {
                          const size_t at = i % sets * x_values;
                          norm.x = x.data() + at, norm.residual = residual.data() + at,
                          norm.out = out.data() + at;
                          launch_rms_norm(norm, s);
                        }),
             8.0 * x_values);

  const int mlp_sets = int(std::clamp<size_t>(kRotateBytes / (mlp_values * 6), 2, 64));
  DeviceArray<uint16_t> gate_up = random_halves(mlp_sets * mlp_values * 2), mlp(mlp_sets * mlp_values);
  report.row(
      "silu_mul 14336, " + std::to_string(rows) + " rows",
      time_graph(2 * mlp_sets,
                 [&](int i, cudaStream_t s) {
                   const size_t at = i % mlp_sets * mlp_values;
                   launch_silu_mul({gate_up.data() + 2 * at, mlp.data() + at, rows, width, Element::fp16}, s);
                 }),
      6.0 * mlp_values);

  const int vocab = 128256;
  DeviceArray<uint16_t> table = random_halves(size_t(vocab) * hidden);
  std::mt19937 rng(2);
  std::vector<int32_t> picks(size_t(sets) * rows), row_picks(size_t(sets) * rows);
  for (int32_t& t : picks) t = int32_t(rng() % vocab);
  for (int32_t& t : row_picks) t = int32_t(rng() % (size_t(sets) * rows));
  DeviceArray<int32_t> tokens(picks), from(row_picks);
  report.row("embed 4096, " + std::to_string(rows) + " rows",
             time_graph(2 * sets,
                        [&](int i, cudaStream_t s) {
                          launch_embed({.table = table.data(),
                                        .tokens = tokens.data() + size_t(i % sets) * rows,
                                        .out = out.data() + i % sets * x_values,
                                        .num_rows = rows,
                                        .hidden = hidden,
                                        .num_tokens = vocab,
                                        .element = Element::fp16},
                                       s);
                        }),
             4.0 * x_values);
  report.row("gather_rows 4096, " + std::to_string(rows) + " rows",
             time_graph(2 * sets,
                        [&](int i, cudaStream_t s) {
                          launch_gather_rows({x.data(), from.data() + size_t(i % sets) * rows,
                                              out.data() + i % sets * x_values, rows, hidden, Element::fp16},
                                             s);
                        }),
             4.0 * x_values);
}

// ---- sampling

struct SamplingMode {
  const char* name;
  RowSampling params;
};

std::vector<SamplingMode> sampling_modes() {
  const auto mode = [](float temperature, int top_k, float top_p, float min_p, int num_top) {
    RowSampling p;
    p.temperature = temperature, p.top_k = top_k, p.top_p = top_p, p.min_p = min_p, p.num_top = num_top;
    return p;
  };
  return {{"greedy", mode(0, 0, 1, 0, -1)},        {"greedy + 20 logprobs", mode(0, 0, 1, 0, 20)},
          {"temperature", mode(1, 0, 1, 0, -1)},   {"top_k 50", mode(1, 50, 1, 0, -1)},
          {"top_p 0.9", mode(1, 0, 0.9f, 0, -1)},  {"top_k 50 top_p 0.9", mode(0.7f, 50, 0.9f, 0, -1)},
          {"min_p 0.05", mode(1, 0, 1, 0.05f, -1)}};
}

// Normal logits of deviation 2 with 40 likely tokens, as models make them.
std::vector<float> model_like_rows(int rows, int vocab) {
  std::mt19937 rng(3);
  std::normal_distribution<float> normal(0, 2);
  std::vector<float> values(size_t(rows) * vocab);
  for (float& v : values) v = normal(rng);
  for (int r = 0; r < rows; ++r)
    for (int i = 0; i < 40; ++i) values[size_t(r) * vocab + rng() % vocab] += float(rng() % 100) / 6;
  return values;
}

void bench_sampling(const Report& report, int rows, int vocab) {
  const int distinct = std::min(rows, 16), sets = rows >= 1024 ? 2 : std::clamp(1024 / rows, 2, 128);
  const DeviceArray<float> some(model_like_rows(distinct, vocab));
  DeviceArray<float> logits(size_t(sets) * rows * vocab);
  for (size_t r = 0; r < size_t(sets) * rows; ++r)
    cuda_check(cudaMemcpy(logits.data() + r * vocab, some.data() + r % distinct * vocab, vocab * 4,
                          cudaMemcpyDeviceToDevice));
  DeviceArray<uint8_t> workspace(sampling_workspace_bytes(rows, vocab));
  DeviceArray<int32_t> tokens(rows), top_tokens(size_t(rows) * kMaxTopLogprobs);
  DeviceArray<SampleStatus> status(rows);
  DeviceArray<float> logprobs(rows), top_logprobs(size_t(rows) * kMaxTopLogprobs);
  for (const SamplingMode& mode : sampling_modes()) {
    std::vector<RowSampling> params(rows, mode.params);
    for (int r = 0; r < rows; ++r) params[r].seed = 1000 + r;
    DeviceArray<RowSampling> d_params(params);
    SampleArgs a;
    a.num_rows = rows, a.vocab = a.row_stride = vocab, a.params = d_params.data();
    a.any_truncates = mode.params.truncates(), a.any_top = mode.params.num_top > 0;
    a.workspace = workspace.data(), a.tokens = tokens.data(), a.status = status.data();
    a.logprobs = logprobs.data(), a.top_tokens = top_tokens.data(), a.top_logprobs = top_logprobs.data();
    const Timing t = time_graph(sets, [&](int i, cudaStream_t s) {
      a.logits = logits.data() + size_t(i) * rows * vocab;
      launch_sample(a, s);
    });
    report.row("sample " + std::to_string(rows) + "x" + std::to_string(vocab) + " " + mode.name, t,
               4.0 * rows * vocab);
  }
}

void run_all(const std::vector<std::string>& parts) {
  const auto wanted = [&](const std::string& part) {
    return parts.empty() || std::find(parts.begin(), parts.end(), part) != parts.end();
  };
  const Report report(measure_ceilings());
  if (wanted("pairs")) {
    for (const PairModel& m : kPairModels) bench_pairs(report, m, 16, BaseFormat::fixed8);
    bench_pairs(report, kPairModels[0], 16, BaseFormat::e5m2);
    bench_pairs(report, kPairModels[0], 1, BaseFormat::fixed8);
    bench_pairs(report, kPairModels[0], 64, BaseFormat::fixed8);
  }
  if (wanted("kv_write"))
    for (const int rows : {1, 64, 256, 2048, 8192}) {
      bench_kv_write(report, "fixed8 rope", rows, false, BaseFormat::fixed8);
      if (rows >= 2048) bench_kv_write(report, "fixed8 norm rope", rows, true, BaseFormat::fixed8);
      if (rows >= 2048) bench_kv_write(report, "e5m2 rope", rows, false, BaseFormat::e5m2);
    }
  if (wanted("layer_ops"))
    for (const int rows : {1, 64, 2048, 8192}) bench_layer_ops(report, rows);
  for (const int rows : {1, 64, 256, 1024})
    if (wanted("sampling") || wanted("sampling" + std::to_string(rows))) bench_sampling(report, rows, 128256);
  if (wanted("sampling")) bench_sampling(report, 64, 151936);
}

}  // namespace
}  // namespace ekv::bench

int main(int argc, char** argv) {
  ekv::bench::run_all({argv + 1, argv + argc});
  return 0;
}
