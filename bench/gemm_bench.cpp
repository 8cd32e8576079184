// gemm_bench.cpp -- matrix products of decode steps as the CUDA backend computes them: cuBLASLt's first choice,
// what tuning chose, and the kernel for few rows with its best split. Weights rotate beyond the L2, launches
// are replayed as a graph, medians. Tuning times products with a norm before each, without the hints of a step:
// do not give it a server's cache file. The table is of products alone.
//
//   gemm_bench [CACHE_FILE]      a file skips what was tuned before

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <vector>

#include "backend/cuda/cuda_gemm.h"
#include "backend/cuda/cuda_raii.h"
#include "backend/cuda/launch_timing.h"
#include "bench/bench_device.h"
#include "kernels/layer_ops.h"
#include "kernels/skinny_gemm.h"

namespace ekv::bench {
namespace {

constexpr int kRows[] = {1, 8, 16, 32, 64}, kMostRows = 64;
constexpr size_t kRotated = size_t(640) << 20;  // bytes: more than ten times the L2 of an H200
constexpr int kReplays = 31;

struct Case {
  const char* name;
  GemmShape shape;
};
GemmShape half(int outputs, int inputs) {
  return {.outputs = outputs, .inputs = inputs, .max_rows = kMostRows, .out_stride = outputs};
}
GemmShape head(int outputs, int inputs) {
  GemmShape shape = half(outputs, inputs);
  shape.fp32_out = true;
  return shape;
}
const std::vector<Case> kCases{
    {"QKV      Llama-3.1-8B, Qwen3-8B", half(6144, 4096)},
    {"output   both", half(4096, 4096)},
    {"gate, up Llama-3.1-8B", half(28672, 4096)},
    {"down     Llama-3.1-8B", half(4096, 14336)},
    {"gate, up Qwen3-8B", half(24576, 4096)},
    {"down     Qwen3-8B", half(4096, 12288)},
    {"LM head  Llama-3.1-8B", head(128256, 4096)},
    {"LM head  Qwen3-8B", head(151936, 4096)},
};

size_t weight_bytes(const GemmShape& s) { return size_t(s.outputs) * size_t(s.inputs) * sizeof(uint16_t); }

class Bench {
 public:
  Bench() {
    size_t most = kRotated, x = 0, y = 0;
    for (const Case& c : kCases) {
      most = std::max(most, weight_bytes(c.shape));
      x = std::max(x, size_t(c.shape.inputs)), y = std::max(y, size_t(c.shape.out_stride));
      shapes_.push_back(c.shape);
    }
    weights_ = DeviceBuffer<uint16_t>(most / sizeof(uint16_t));
    x_ = DeviceBuffer<uint16_t>(x * kMostRows), y_ = DeviceBuffer<float>(y * kMostRows);
    launch_fill_half(weights_.data(), weights_.size(), stream_.get());
    launch_fill_half(x_.data(), x_.size(), stream_.get());
    cuda_check(cudaStreamSynchronize(stream_.get()));
  }

  int run(const char* cache_file) {
    Result<std::unique_ptr<CudaGemm>> first = CudaGemm::make(shapes_), tuned = CudaGemm::make(shapes_);
    if (!first || !tuned) return log_error((first ? tuned : first).error().message), 1;
    std::vector<GemmOperands> operands;
    for (const GemmShape& shape : shapes_)
      operands.push_back({.weights = matrices(shape), .x = x_.data(), .y = y_.data(), .ahead = norm()});
    (*tuned)->tune(operands, {.cache_file = cache_file, .limit_s = 60}, stream_.get());
    const double ceiling = copy_tb_s();
    fmt::print("copy ceiling {:.2f} TB/s; us, TB/s, share of the ceiling; goal 85 % up to 64 rows\n", ceiling);
    fmt::print("{:34}{:>4}  {:>22}{:>22}{:>22}\n", "product", "rows", "cuBLASLt first", "tuned", "few rows");
    for (size_t i = 0; i < shapes_.size(); ++i)
      for (const int rows : kRows)
        fmt::print("{:34}{:4}  {}{}{}\n", kCases[i].name, rows,
                   cell(time_product(**first, int(i), rows), shapes_[i], ceiling),
                   cell(time_product(**tuned, int(i), rows), shapes_[i], ceiling),
                   cell(time_skinny(shapes_[i], rows), shapes_[i], ceiling));
    return 0;
  }

 private:
  std::function<void(const void*, int, cudaStream_t)> norm() const {
    return [this](const void*, int rows, cudaStream_t stream) {
      launch_rms_norm({.x = x_.data(),
                       .weight = x_.data(),
                       .out = y_.data(),
                       .num_rows = rows,
                       .hidden = 4096,
                       .element = Element::fp16},
                      stream);
    };
  }
  std::vector<const void*> matrices(const GemmShape& s) const {
    std::vector<const void*> all;
    for (size_t at = 0; at + weight_bytes(s) <= weights_.bytes(); at += weight_bytes(s))
      all.push_back(weights_.data() + at / sizeof(uint16_t));
    return all;
  }

  double time_us(const GemmShape& s, const std::function<void(const void* w)>& launch) {
    const std::vector<const void*> all = matrices(s);
    const auto one = [&](int i) { return launch(all[size_t(i) % all.size()]), true; };
    return time_launches(one, std::max(4, int(all.size())), kReplays, stream_.get());
  }
  double time_product(CudaGemm& gemm, int shape, int rows) {
    return time_us(shapes_[size_t(shape)],
                   [&](const void* w) { gemm.multiply(shape, w, x_.data(), y_.data(), rows, stream_.get()); });
  }
  double time_skinny(const GemmShape& s, int rows) {
    double best = std::numeric_limits<double>::infinity();
    for (const int split : find_skinny(rows, s.outputs, s.inputs))
      best = std::min(best, time_us(s, [&](const void* w) {
                        launch_skinny_gemm({.w = w,
                                            .x = x_.data(),
                                            .y = y_.data(),
                                            .rows = rows,
                                            .outputs = s.outputs,
                                            .inputs = s.inputs,
                                            .out_stride = s.out_stride,
                                            .fp32_out = s.fp32_out,
                                            .split = split},
                                           stream_.get());
                      }));
    return best;
  }

  double copy_tb_s() {
    const size_t bytes = weights_.bytes() / 2;
    const auto copy = [&](int) {
      auto* to = reinterpret_cast<uint8_t*>(weights_.data());
      return launch_copy(to, to + bytes, bytes, stream_.get()), true;
    };
    return 2e-6 * double(bytes) / time_launches(copy, 4, kReplays, stream_.get());
  }

  static std::string cell(double us, const GemmShape& s, double ceiling) {
    if (us == std::numeric_limits<double>::infinity()) return fmt::format("{:>22}", "-");
    const double tb_s = 1e-6 * double(weight_bytes(s)) / us;
    return fmt::format("{:9.1f}{:7.2f}{:4.0f} %", us, tb_s, 100 * tb_s / ceiling);
  }

  Stream stream_ = make_stream();
  std::vector<GemmShape> shapes_;
  DeviceBuffer<uint16_t> weights_, x_;
  DeviceBuffer<float> y_;
};

}  // namespace
}  // namespace ekv::bench

int main(int argc, char** argv) { return ekv::bench::Bench().run(argc > 1 ? argv[1] : ""); }
