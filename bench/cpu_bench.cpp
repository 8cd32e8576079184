// cpu_bench -- decode and prefill of the CPU backend as shares of what this machine can do, measured in the
// same run: read bandwidth bounds decode (every weight is read once per step), the fp32 GEMM peak bounds
// prefill.
//
//   cpu_bench [model folder] [threads]          default: models/smollm2-135m-instruct, all cores

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <dnnl.hpp>
#include <functional>

#include "backend/cpu/cpu_backend.h"
#include "tests/support/backend_driver.h"

namespace ekv {
namespace {

using test::DrivenSequence;
using test::DrivenStep;

constexpr int kPrefill = 512, kDecodeContext = 128, kDecodeSteps = 32, kRounds = 5, kPages = 256;

double seconds(const std::function<void()>& body) {
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// The best of several rounds: other programs on the machine only ever make a round slower.
double best_seconds(int rounds, const std::function<void()>& body) {
  double best = 1e30;
  for (int i = 0; i < rounds; ++i) best = std::min(best, seconds(body));
  return best;
}

// Bytes per second of summing an array far larger than the caches, all threads.
double read_bandwidth(CpuThreads& threads) {
  constexpr size_t kBlock = size_t(1) << 20, kBlocks = 192;
  using V = uint64_t __attribute__((vector_size(64)));
  std::vector<V> data(kBlock * kBlocks / sizeof(V), V{1, 2, 3, 4, 5, 6, 7, 8});
  std::vector<uint64_t> sums(kBlocks);
  const double best = best_seconds(8, [&] {
    threads.for_each(int(kBlocks), [&](int block, int) {
      const V* at = data.data() + size_t(block) * kBlock / sizeof(V);
      V a{}, b{}, c{}, d{};
      for (size_t i = 0; i < kBlock / sizeof(V); i += 4) {
        a += at[i];
        b += at[i + 1];
        c += at[i + 2];
        d += at[i + 3];
      }
      const V sum = a + b + c + d;
      sums[size_t(block)] = sum[0] + sum[7];
    });
  });
  EKV_CHECK(sums[0] == 9 * kBlock / sizeof(V), "the sum is wrong");
  return double(kBlock * kBlocks) / best;
}

struct Shape {
  int inputs, outputs;
};

std::vector<Shape> layer_shapes(const ModelConfig& m) {
  return {{m.hidden, m.q_rows() + 2 * m.kv_rows()},
          {m.q_rows(), m.hidden},
          {m.hidden, 2 * m.intermediate},
          {m.intermediate, m.hidden}};
}

double layer_flop(const ModelConfig& m, int rows) {
  double flop = 0;
  for (const Shape& s : layer_shapes(m)) flop += 2.0 * rows * s.inputs * s.outputs;
  return flop;
}

// FLOP/s of oneDNN's fp32 product over the shapes of one layer: the peak that prefill is compared with.
double onednn_peak(const ModelConfig& m) {
  using dnnl::memory;
  const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  dnnl::stream stream(engine);
  double time = 0;
  for (const Shape& s : layer_shapes(m)) {
    const auto plain = [](int a, int b) {
      return memory::desc({a, b}, memory::data_type::f32, memory::format_tag::ab);
    };
    const memory::desc any({s.inputs, s.outputs}, memory::data_type::f32, memory::format_tag::any);
    const dnnl::matmul::primitive_desc desc({plain(kPrefill, s.inputs), any, plain(kPrefill, s.outputs)},
                                            engine);
    memory x(desc.src_desc(), engine), w(desc.weights_desc(), engine), y(desc.dst_desc(), engine);
    std::fill_n(static_cast<float*>(x.get_data_handle()), size_t(kPrefill) * s.inputs, 0.5f);
    std::memset(w.get_data_handle(), 0, w.get_desc().get_size());
    const dnnl::matmul product(desc);
    time += best_seconds(kRounds, [&] {
      product.execute(stream, {{DNNL_ARG_SRC, x}, {DNNL_ARG_WEIGHTS, w}, {DNNL_ARG_DST, y}});
      stream.wait();
    });
  }
  return layer_flop(m, kPrefill) / time;
}

// FLOP/s of our product over the same shapes.
double own_gemm(const ModelConfig& m, CpuThreads& threads) {
  const Model one_layer = [&] {
    ModelConfig config = m;
    config.layers = 1;
    config.vocab = 32;
    return Model::dummy(config);
  }();
  const CpuWeights weights(one_layer, threads);
  const CpuLayer& layer = weights.layers[0];
  double time = 0;
  for (const PackedMatrix* w : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down}) {
    std::vector<float> x(size_t(kPrefill) * w->inputs(), 0.5f), y(size_t(kPrefill) * w->padded_outputs());
    time += best_seconds(kRounds, [&] {
      multiply(best_cpu_kernels(), threads, *w, x.data(), w->inputs(), kPrefill, y.data(), w->padded_outputs());
    });
  }
  return layer_flop(m, kPrefill) / time;
}

std::vector<TokenId> some_prompt(const ModelConfig& m, int tokens) {
  std::vector<TokenId> prompt;
  for (int i = 0; i < tokens; ++i) prompt.push_back(TokenId((int64_t(i) * 7919 + 100) % m.vocab));
  return prompt;
}

void run_step(Backend& backend, DrivenSequence& s, std::vector<int32_t>& pages, int count) {
  DrivenStep step(pages);
  step.add(s, count);
  s.tokens.push_back(step.run(backend).rows.at(0).token);
}

double prefill_seconds(Backend& backend, const ModelConfig& m) {
  std::vector<int32_t> pages = test::all_pages(kPages);
  return best_seconds(kRounds, [&] {
    DrivenSequence s = test::driven(some_prompt(m, kPrefill));
    run_step(backend, s, pages, kPrefill);
    give_back(s, pages);
  });
}

struct StepTimes {
  double median = 0, best = 0;  // seconds
};

// The best step is compared with the best bandwidth; on a quiet machine the median is close to it.
StepTimes decode_seconds(Backend& backend, const ModelConfig& m, int sequences) {
  std::vector<int32_t> pages = test::all_pages(kPages);
  std::vector<DrivenSequence> all;
  for (int i = 0; i < sequences; ++i) {
    all.push_back(test::driven(some_prompt(m, sequences == 1 ? kDecodeContext : 32)));
    run_step(backend, all.back(), pages, all.back().num_prompt);
  }
  std::vector<double> times;
  for (int i = 0; i < kDecodeSteps; ++i) {
    times.push_back(seconds([&] {
      DrivenStep step(pages);
      for (DrivenSequence& s : all) step.add(s, 1);
      const StepOutput& out = step.run(backend);
      for (size_t j = 0; j < all.size(); ++j) all[j].tokens.push_back(out.rows[j].token);
    }));
  }
  std::sort(times.begin(), times.end());
  return {times[kDecodeSteps / 2], times.front()};
}

void report(const Model& model, int threads_wanted) {
  const ModelConfig& m = model.config();
  CpuThreads threads(threads_wanted);
  const double bandwidth = read_bandwidth(threads), peak = onednn_peak(m), gemm = own_gemm(m, threads);
  fmt::print(
      "machine   {} threads, {} kernels; reads {:.1f} GB/s; fp32 GEMM {:.0f} GFLOP/s (oneDNN), {:.0f} GFLOP/s "
      "(ours)\n",
      threads.size(), best_cpu_kernels().name, bandwidth / 1e9, peak / 1e9, gemm / 1e9);

  EngineConfig config;
  config.kv.num_pages = kPages;
  auto made = make_cpu_backend(model, config, {threads_wanted});
  EKV_CHECK(bool(made), "no CPU backend for this model");
  const auto bytes = double(static_cast<CpuBackend&>(**made).matrix_bytes());

  const StepTimes decode = decode_seconds(**made, m, 1);
  fmt::print(
      "decode    {:.1f} tok/s (median {:.1f}), batch 1, context {}: {:.0f} % of bandwidth over {:.0f} MB of "
      "weights\n",
      1 / decode.best, 1 / decode.median, kDecodeContext, 100 * bytes / bandwidth / decode.best, bytes / 1e6);
  const StepTimes batch = decode_seconds(**made, m, 16);
  fmt::print("decode    {:.1f} tok/s (median {:.1f}), batch 16, context 32\n", 16 / batch.best,
             16 / batch.median);
  const double prefill = prefill_seconds(**made, m);
  const double flop = layer_flop(m, kPrefill) * m.layers + 2.0 * m.hidden * m.vocab;
  fmt::print(
      "prefill   {:.0f} tok/s, {} tokens: {:.0f} % of the GEMM peak (attention and everything else included)\n",
      kPrefill / prefill, kPrefill, 100 * flop / prefill / peak);
}

}  // namespace
}  // namespace ekv

int main(int argc, char** argv) {
  const std::string folder = argc > 1 ? argv[1] : "models/smollm2-135m-instruct";
  const auto config = ekv::load_model_config(folder);
  if (!config) return fmt::print(stderr, "cpu_bench: {}\n", config.error().message), 1;
  const auto model = ekv::Model::load(folder, *config);
  if (!model) return fmt::print(stderr, "cpu_bench: {}\n", model.error().message), 1;
  ekv::report(*model, argc > 2 ? std::atoi(argv[2]) : 0);
}
