// kernel_gemm_ahead.cpp -- chains of a norm and a product, of which the norm asks for the beginning of the W
// that the product reads. They rotate through weights that together exceed the L2 many times.

#include "bench/kernel_gemm_ahead.h"

#include <algorithm>
#include <cstdio>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "bench/bench_device.h"
#include "bench/bench_graph.h"
#include "bench/gemm_library.h"
#include "kernels/layer_ops.h"
#include "kernels/skinny_gemm.h"
#include "kernels/skinny_split.h"
#include "tests/support/device_array.h"

namespace ekv::bench {
namespace {

using test::DeviceArray;

constexpr Shape kQkv = kLlamaLayer[0], kGateUp = kLlamaLayer[2];
constexpr int kLinks = 16, kFewReplays = 8, kReplays = 30, kRounds = 3;
constexpr double kMegabytes[] = {0, 0.5, 1, 2, 4, 6, 8, 12, 16};

// One link: the i-th, whose norm asks for `bytes` of the product's W.
using Link = std::function<void(int i, uint32_t bytes, cudaStream_t)>;

class AheadBench {
 public:
  AheadBench()
      : pool_(kPoolBytes / 2),
        x_(size_t(kMaxSkinnyRows) * kWidth),
        y_(size_t(kMaxSkinnyRows) * kGateUp.outputs),
        workspace_(kWorkspaceBytes) {
    launch_fill_half(pool_.data(), pool_.size(), nullptr);
    launch_fill_half(x_.data(), x_.size(), nullptr);
    launch_fill_half(y_.data(), y_.size(), nullptr);
  }

  void run() const {
    std::printf("us of a link by MB asked for ahead, the least of %d medians\n%-28s rows |", kRounds, "link");
    for (const double megabytes : kMegabytes) std::printf(" %7.1f", megabytes);
    std::printf("\n");
    for (const int rows : {1, 16, 64}) {
      const Library qkv(kQkv, rows, workspace_.data());
      const SkinnyWay qkv_way = best_way(kQkv, rows), gated = best_way(kGateUp, rows);
      const auto norm_and_library = [&](int algorithm) -> Link {
        return [&, rows, algorithm](int i, uint32_t bytes, cudaStream_t t) {
          norm(rows, {weights(pool_, kQkv, i), bytes}, t);
          qkv.multiply(algorithm, weights(pool_, kQkv, i), x_.data(), y_.data(), t);
        };
      };
      print("norm, QKV by Lt", rows, norm_and_library(best_of(qkv.algorithms(), norm_and_library)));
      print("norm, QKV by " + name_of(qkv_way), rows, norm_and_few(kQkv, rows, qkv_way));
      print("norm, gate-up by " + name_of(gated), rows, norm_and_few(kGateUp, rows, gated));
    }
  }

 private:
  static std::string name_of(const SkinnyWay& way) {
    return (way.unit == SkinnyUnit::mma ? "mma " : "wgmma ") + std::to_string(way.split) + "." +
           std::to_string(way.tile);
  }

  void print(const std::string& name, int rows, const Link& link) const {
    std::printf("%-28s %4d |", name.c_str(), rows);
    std::vector<double> least(std::size(kMegabytes), std::numeric_limits<double>::infinity());
    for (int round = 0; round < kRounds; ++round)  // in turns, because the clock changes
      for (size_t i = 0; i < least.size(); ++i)
        least[i] = std::min(least[i], time(link, uint32_t(kMegabytes[i] * (1 << 20)), kReplays));
    for (const double us : least) std::printf(" %7.2f", us);
    std::printf("\n");
    std::fflush(stdout);
  }
  static double time(const Link& link, uint32_t bytes, int replays) {
    const auto launch = [&](int i, cudaStream_t t) { link(i, bytes, t); };
    return time_graph(kLinks, launch, replays).median_us;
  }

  // Chosen without a hint, so that all columns are of the same way.
  int best_of(int count, const std::function<Link(int)>& link) const {
    int best = 0;
    double best_us = std::numeric_limits<double>::infinity();
    for (int i = 0; i < count; ++i)
      if (const double us = time(link(i), 0, kFewReplays); us < best_us) best = i, best_us = us;
    return best;
  }
  SkinnyWay best_way(const Shape& s, int rows) const {
    SkinnyWay best;
    double best_us = std::numeric_limits<double>::infinity();
    for (const SkinnyWay& way :
         skinny_ways(skinny_device(), rows, is_gated(s) ? kWidth : s.outputs, s.inputs, is_gated(s)))
      if (const double us = time(norm_and_few(s, rows, way), 0, kFewReplays); us < best_us)
        best = way, best_us = us;
    return best;
  }

  Link norm_and_few(const Shape& s, int rows, const SkinnyWay& way) const {
    return [this, s, rows, way](int i, uint32_t bytes, cudaStream_t t) {
      norm(rows, {weights(pool_, s, i), bytes}, t);
      few(s, rows, way, weights(pool_, s, i), t);
    };
  }
  void norm(int rows, const ReadNext& next, cudaStream_t t) const {
    RmsNormArgs a;
    a.x = y_.data(), a.weight = pool_.data(), a.out = x_.data(), a.num_rows = rows, a.hidden = kHidden;
    a.element = Element::fp16, a.next = next;
    launch_rms_norm(a, t);
  }
  void few(const Shape& s, int rows, const SkinnyWay& way, const void* w, cudaStream_t t) const {
    SkinnyGemmArgs a;
    a.gated = is_gated(s), a.w = w, a.x = x_.data(), a.y = y_.data(), a.rows = rows, a.inputs = s.inputs;
    a.outputs = a.out_stride = a.gated ? kWidth : s.outputs, a.split = way.split;
    launch_skinny_way(a, way, t);
  }

  DeviceArray<uint16_t> pool_, x_, y_;
  DeviceArray<uint8_t> workspace_;
};

}  // namespace

void run_ahead() {
  if (skinny_device().wgmma_rows == 0)
    std::printf("ahead: no wgmma on this device\n");
  else
    AheadBench().run();
}

}  // namespace ekv::bench
