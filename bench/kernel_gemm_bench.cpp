// kernel_gemm_bench.cpp -- matrix products on this GPU, beside cuBLASLt's first choice and the best of the 16
// that it proposes. Of few rows: the skinny kernel with each of its splits, microseconds, TB/s of all operands,
// share of the copy ceiling of the same run. Of many rows: the tile kernel, gate-up with its activation on both
// sides, TFLOP/s.
//
// Reading and copying as many bytes as a product of few rows has in W is what such a kernel could reach at its
// size.
//
// Launches are graph replays in which each one waits for the one before; weights rotate through 1.5 GB of
// random data. `kernel_gemm_bench PART...` runs the named parts, without PART all but skinny: llama, qwen,
// layer, skinny (llama without cuBLASLt), chain (both kernels for few rows in every way that they have, and a
// layer of the best, as links of a chain with a norm ahead of each product, which is what a decode step has;
// half a minute), tile (many rows; twice in turns, because the device gets slower as it gets hot), hot (the
// products of a layer of 8,192 rows, seconds on end), power (each way to compute one of them, on end: what its
// energy allows under the power cap), ahead (kernel_gemm_ahead.h).

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "bench/bench_device.h"
#include "bench/bench_graph.h"
#include "bench/gemm_library.h"
#include "bench/kernel_gemm_ahead.h"
#include "kernels/layer_ops.h"
#include "kernels/skinny_gemm.h"
#include "kernels/skinny_split.h"
#include "kernels/tile_gemm.h"
#include "tests/support/device_array.h"

namespace ekv::bench {
namespace {

using test::DeviceArray;

constexpr int kRows[] = {1, 8, 16, 32};
constexpr Shape kLlamaHead = {"lm_head", 128256, 4096, true};
constexpr Shape kQwen[] = {
    {"qwen gate_up", 24576, 4096}, {"qwen down", 4096, 12288}, {"qwen lm_head", 151936, 4096, true}};

class Bench {
 public:
  Bench()
      : pool_(kPoolBytes / 2),
        x_(size_t(kMaxSkinnyRows) * 16384),
        y_(size_t(kMaxSkinnyRows) * 2 * 160000),
        workspace_(kWorkspaceBytes) {
    launch_fill_half(pool_.data(), pool_.size(), nullptr);
    launch_fill_half(x_.data(), x_.size(), nullptr);
    DeviceArray<uint32_t> sink(1);
    uint8_t* const bytes = reinterpret_cast<uint8_t*>(pool_.data());
    const size_t half = kPoolBytes / 2;
    const auto read = [&](int, cudaStream_t t) { launch_read(bytes, kPoolBytes, sink.data(), t); };
    const auto copy = [&](int, cudaStream_t t) { launch_copy(bytes + half, bytes, half, t); };
    read_tbs_ = kPoolBytes / time_graph(3, read, 20).median_us / 1e6;
    copy_tbs_ = 2 * half / time_graph(3, copy, 20).median_us / 1e6;
    std::printf("read %.3f TB/s, copy %.3f TB/s\n", read_tbs_, copy_tbs_);
  }

  void header() const {
    std::printf("%-14s %4s | %9s %9s | %9s %6s %6s | us at each split\n", "product", "rows", "Lt first",
                "Lt best", "skinny", "TB/s", "% copy");
  }

  void product(const Shape& s, int rows, bool with_library) const {
    double first = 0, best = 0;
    if (with_library) {
      const Library library(s, rows, workspace_.data());
      first = best = time(s, library_call(library, 0), 40);
      for (int i = 1; i < library.algorithms(); ++i)
        best = std::min(best, time(s, library_call(library, i), 6));
    }
    double skinny = 0;
    std::string all;
    for (int split : find_skinny(rows, s.outputs, s.inputs)) {
      const double us = time(s, skinny_call(s, rows, split), 40);
      skinny = skinny == 0 ? us : std::min(skinny, us);
      char text[32];
      std::snprintf(text, sizeof text, " %d:%.2f", split, us);
      all += text;
    }
    const double tbs = s.bytes(rows) / skinny / 1e6;
    std::printf("%-14s %4d | %9.2f %9.2f | %9.2f %6.3f %5.1f%% |%s\n", s.name, rows, first, best, skinny, tbs,
                100 * tbs / copy_tbs_, all.c_str());
    std::fflush(stdout);
  }

  // The four products of a layer, one after the other; with what lies between them, too.
  void layer(int rows) const {
    double bytes = 0, calls_us[3] = {};
    std::vector<std::unique_ptr<Library>> libraries;
    for (const Shape& s : kLlamaLayer) {
      bytes += s.bytes(rows);
      libraries.push_back(std::make_unique<Library>(s, rows, workspace_.data()));
    }
    constexpr int kLayers = 3;  // 1.3 GB
    const auto place = [](int layer, int product) {
      size_t at = 0;
      for (int i = 0; i < layer * 4 + product; ++i) at += kLlamaLayer[i % 4].weight_bytes();
      return at;
    };
    for (int form = 0; form < 3; ++form) {
      calls_us[form] = time_graph(
                           8 * kLayers,
                           [&](int i, cudaStream_t t) {
                             for (int n = 0; n < 4; ++n) {
                               const Shape& s = kLlamaLayer[n];
                               const void* w = pool_.data() + place(i % kLayers, n) / 2;
                               if (form == 0) libraries[n]->multiply(0, w, x_.data(), y_.data(), t);
                               if (form > 0) skinny(s, rows, find_skinny(rows, s.outputs, s.inputs)[0], w, t);
                               if (form == 2) between(n, rows, t);
                             }
                           },
                           40)
                           .median_us;
    }
    std::printf(
        "layer %2d rows: Lt first %.1f us, skinny %.1f us (%.1f %% of copy), with norms and silu %.1f us\n",
        rows, calls_us[0], calls_us[1], 100 * bytes / calls_us[1] / 1e6 / copy_tbs_, calls_us[2]);
  }

 private:
  using Call = std::function<void(const void* w, cudaStream_t)>;

  Call library_call(const Library& library, int algorithm) const {
    return [&, algorithm](const void* w, cudaStream_t t) {
      library.multiply(algorithm, w, x_.data(), y_.data(), t);
    };
  }
  Call skinny_call(const Shape& s, int rows, int split) const {
    return [&, rows, split](const void* w, cudaStream_t t) { skinny(s, rows, split, w, t); };
  }
  void skinny(const Shape& s, int rows, int split, const void* w, cudaStream_t t) const {
    SkinnyGemmArgs a;
    a.w = w, a.x = x_.data(), a.y = y_.data(), a.rows = rows, a.outputs = s.outputs, a.inputs = s.inputs;
    a.out_stride = s.outputs, a.fp32_out = s.fp32_out, a.split = split;
    launch_skinny_gemm(a, t);
  }
  void between(int product, int rows, cudaStream_t t) const {
    if (product == 2) {
      launch_silu_mul({y_.data(), y_.data() + y_.size() / 2, rows, kWidth, Element::fp16}, t);
    } else if (product % 2) {
      RmsNormArgs a;
      a.x = y_.data(), a.weight = x_.data(), a.out = y_.data() + y_.size() / 2, a.num_rows = rows,
      a.hidden = kHidden;
      a.element = Element::fp16;
      launch_rms_norm(a, t);
    }
  }

  double time(const Shape& s, const Call& call, int replays) const {
    const int count = std::clamp(int(kPoolBytes / s.weight_bytes()), 3, 32);
    const auto launch = [&](int i, cudaStream_t t) { call(weights(pool_, s, i), t); };
    return time_graph(count, launch, replays).median_us;
  }

  DeviceArray<uint16_t> pool_, x_, y_;
  DeviceArray<uint8_t> workspace_;
  double read_tbs_ = 0, copy_tbs_ = 0;
};

// Products of few rows as links of a decode step's chain. Gate-up has its activation: in the wgmma kernel, or
// after the product.
class ChainBench {
 public:
  ChainBench()
      : pool_(kPoolBytes / 2),
        x_(size_t(kMaxSkinnyRows) * 16384),
        y_(size_t(kMaxSkinnyRows) * 32768),
        activated_(size_t(kMaxSkinnyRows) * 16384),
        sink_(1),
        workspace_(kWorkspaceBytes) {
    launch_fill_half(pool_.data(), pool_.size(), nullptr);
    launch_fill_half(x_.data(), x_.size(), nullptr);
    launch_fill_half(y_.data(), y_.size(), nullptr);
    const size_t half = kPoolBytes / 2;
    uint8_t* const bytes = reinterpret_cast<uint8_t*>(pool_.data());
    const auto copy = [&](int, cudaStream_t t) { launch_copy(bytes + half, bytes, half, t); };
    copy_tbs_ = 2 * half / time_graph(3, copy, 20).median_us / 1e6;
    std::printf(
        "copy %.3f TB/s; us of a norm and the product after it; in brackets of the product alone and its share "
        "of the copy ceiling\n%-8s %4s | %-18s | %-12s | %-24s | wgmma, split.tile:us\n",
        copy_tbs_, "product", "rows", "Lt best", "mma best", "wgmma best");
  }

  void run() const {
    for (const Shape& s : kLlamaLayer) print_floors(s);
    for (int rows : {1, 4, 8, 16, 32, 64, 128}) {
      std::vector<std::unique_ptr<Library>> libraries;
      std::vector<Timed> lt, mma, wgmma;
      for (const Shape& s : kLlamaLayer) {
        libraries.push_back(std::make_unique<Library>(s, rows, workspace_.data()));
        lt.push_back(best_of_library(s, rows, *libraries.back()));
        std::string all;
        mma.push_back(best_way(s, rows, SkinnyUnit::mma, nullptr));
        wgmma.push_back(best_way(s, rows, SkinnyUnit::wgmma, &all));
        std::printf("%-8s %4d | %s | %7.2f %4s | %s %4s |%s\n", s.name, rows, with_alone(s, lt.back()).c_str(),
                    mma.back().us, mma.back().name.c_str(), with_alone(s, wgmma.back()).c_str(),
                    wgmma.back().name.c_str(), all.c_str());
        std::fflush(stdout);
      }
      std::printf("layer    %4d | norms and products, us: Lt best %.1f, mma %.1f, wgmma %.1f\n", rows,
                  layer(rows, lt), layer(rows, mma), layer(rows, wgmma));
    }
  }

 private:
  using Launch = std::function<void(const void* w, cudaStream_t)>;
  struct Timed {
    double us = std::numeric_limits<double>::infinity();
    Launch launch;
    std::string name;
  };

  // How close a kernel of this size comes to the ceiling that does nothing but move as many bytes as W has.
  void print_floors(const Shape& s) const {
    const size_t bytes = s.weight_bytes();
    const auto w = [&](int i) {
      return const_cast<uint8_t*>(reinterpret_cast<const uint8_t*>(weights(pool_, s, i)));
    };
    const auto read = [&](int i, cudaStream_t t) { launch_read(w(i), bytes, sink_.data(), t); };
    const auto copy = [&](int i, cudaStream_t t) { launch_copy(w(i) + bytes / 2, w(i), bytes / 2, t); };
    const double read_us = time(s, read, 20), copy_us = time(s, copy, 20);
    std::printf("%-8s      | W read and nothing else %.2f us, %.0f%%; as many bytes copied %.2f us, %.0f%%\n",
                s.name, read_us, share(s, read_us), copy_us, share(s, copy_us));
  }
  // Of the copy ceiling, in percent.
  double share(const Shape& s, double us) const {
    return 100 * double(s.weight_bytes()) / us / 1e6 / copy_tbs_;
  }

  Timed best_of_library(const Shape& s, int rows, const Library& library) const {
    Timed best;
    for (int i = 0; i < library.algorithms(); ++i) {
      const Launch launch = [&, i, rows](const void* w, cudaStream_t t) {
        library.multiply(i, w, x_.data(), y_.data(), t);
        if (is_gated(s)) launch_silu_mul({y_.data(), activated_.data(), rows, kWidth, Element::fp16}, t);
      };
      if (const double us = chain_us(s, rows, launch, 6); us < best.us) best = {us, launch, std::to_string(i)};
    }
    best.us = chain_us(s, rows, best.launch, 20);
    return best;
  }

  Timed best_way(const Shape& s, int rows, SkinnyUnit unit, std::string* all) const {
    Timed best;
    const bool gated = is_gated(s) && unit == SkinnyUnit::wgmma;
    for (const SkinnyWay& way :
         skinny_ways(skinny_device(), rows, gated ? kWidth : s.outputs, s.inputs, gated)) {
      if (way.unit != unit) continue;
      const Launch launch = [&, rows, way](const void* w, cudaStream_t t) { few(s, rows, way, w, t); };
      const double us = chain_us(s, rows, launch, 20);
      const std::string name = std::to_string(way.split) + "." + std::to_string(way.tile);
      char text[32];
      std::snprintf(text, sizeof text, " %s:%.2f", name.c_str(), us);
      if (all) *all += text;
      if (us < best.us) best = {us, launch, name};
    }
    return best;
  }

  void few(const Shape& s, int rows, const SkinnyWay& way, const void* w, cudaStream_t t) const {
    SkinnyGemmArgs a;
    a.gated = is_gated(s) && way.unit == SkinnyUnit::wgmma;
    a.w = w, a.x = x_.data(), a.y = a.gated ? activated_.data() : y_.data(), a.rows = rows, a.inputs = s.inputs;
    a.outputs = a.out_stride = a.gated ? kWidth : s.outputs, a.split = way.split;
    launch_skinny_way(a, way, t);
    if (is_gated(s) && !a.gated)
      launch_silu_mul({y_.data(), activated_.data(), rows, kWidth, Element::fp16}, t);
  }
  void norm(int rows, cudaStream_t t) const {
    RmsNormArgs a;
    a.x = y_.data(), a.weight = pool_.data(), a.out = x_.data(), a.num_rows = rows, a.hidden = kHidden;
    a.element = Element::fp16;
    launch_rms_norm(a, t);
  }

  double time(const Shape& s, const std::function<void(int, cudaStream_t)>& launch, int replays) const {
    return time_graph(std::clamp(int(kPoolBytes / s.weight_bytes()), 3, 32), launch, replays).median_us;
  }
  double chain_us(const Shape& s, int rows, const Launch& product, int replays) const {
    const auto link = [&](int i, cudaStream_t t) { norm(rows, t), product(weights(pool_, s, i), t); };
    return time(s, link, replays);
  }
  std::string with_alone(const Shape& s, const Timed& timed) const {
    if (!timed.launch) return "-";
    const double us = time(
        s, [&](int i, cudaStream_t t) { timed.launch(weights(pool_, s, i), t); }, 20);
    char text[48];
    std::snprintf(text, sizeof text, "%7.2f [%6.2f %3.0f%%]", timed.us, us, share(s, us));
    return text;
  }
  // A layer without attention and KV write: a norm ahead of each product but the last.
  double layer(int rows, const std::vector<Timed>& products) const {
    for (const Timed& product : products)
      if (!product.launch) return std::numeric_limits<double>::quiet_NaN();
    const auto launch = [&](int i, cudaStream_t t) {
      for (size_t n = 0; n < products.size(); ++n) {
        if (n + 1 < products.size()) norm(rows, t);
        products[n].launch(weights(pool_, kLlamaLayer[n], i * 4 + int(n)), t);
      }
    };
    return time_graph(24, launch, 30).median_us;
  }

  DeviceArray<uint16_t> pool_, x_, y_, activated_;
  DeviceArray<uint32_t> sink_;
  DeviceArray<uint8_t> workspace_;
  double copy_tbs_ = 0;
};

// Products of many rows with what a layer makes of them, on both sides: the activation of gate and up, or the
// sum with the residual stream and its norm. x and y have room for kMostTileRows rows of any of a layer's.
class TileBench {
 public:
  TileBench()
      : pool_(kPoolBytes / 2),
        x_(size_t(kMostTileRows) * kWidth),
        y_(size_t(kMostTileRows) * 2 * kWidth),
        activated_(size_t(kMostTileRows) * kWidth),
        residual_(size_t(kMostTileRows) * kHidden),
        workspace_(kWorkspaceBytes) {
    launch_fill_half(pool_.data(), pool_.size(), nullptr);
    launch_fill_half(x_.data(), x_.size(), nullptr);
    launch_fill_half(residual_.data(), residual_.size(), nullptr);
  }

  void table() const {
    std::printf("%-8s %5s | %9s %9s | %9s | %9s %9s | %s\n", "product", "rows", "Lt first", "Lt best", "tile",
                "Lt TF/s", "tile TF/s", "tile / Lt best, two rounds");
    for (const Shape& s : kLlamaLayer)
      for (int rows : {512, 2048, kMostTileRows}) row(s, rows);
  }

  // Milliseconds that the products, activations and norms of all layers of Llama-3.1-8B take, one after the
  // other for `kHotSeconds`.
  void hot() const {
    std::vector<std::unique_ptr<Library>> libraries;
    for (const Shape& s : kLlamaLayer)
      libraries.push_back(std::make_unique<Library>(s, kMostTileRows, workspace_.data()));
    const auto time_layer = [&](const std::function<bool(const Shape&)>& by_tile) {
      const auto layer = [&](int i, cudaStream_t t) {
        for (int n = 0; n < 4; ++n) {
          const Shape& s = kLlamaLayer[n];
          const void* w = weights(pool_, s, i * 4 + n);
          by_tile(s) ? tile(s, kMostTileRows, w, t) : library(*libraries[n], 0, s, kMostTileRows, w, t);
        }
      };
      const double us = time_graph(kHotLayers, layer, 3).median_us;
      return time_graph(kHotLayers, layer, int(kHotSeconds * 1e6 / (us * kHotLayers))).median_us * 32 / 1000;
    };
    double flop = 0;
    for (const Shape& s : kLlamaLayer) flop += 2.0 * kMostTileRows * s.outputs * s.inputs * 32;
    const auto none = [](const Shape&) { return false; };
    const auto all = [](const Shape&) { return true; };
    for (int round = 0; round < 2; ++round) {
      const double library_ms = time_layer(none), gated_ms = time_layer(is_gated), all_ms = time_layer(all);
      std::printf(
          "hot, %d rows, 32 layers: cuBLASLt %.1f ms (%.0f TFLOP/s), gated tile kernel %.1f ms "
          "(%.0f), "
          "tile kernel for all %.1f ms (%.0f)\n",
          kMostTileRows, library_ms, flop / library_ms / 1e9, gated_ms, flop / gated_ms / 1e9, all_ms,
          flop / all_ms / 1e9);
      std::fflush(stdout);
    }
  }

  // Microseconds of every way to compute each product, fastest first; each runs for `kPowerSeconds` before.
  void power() const {
    for (const Shape& s : kLlamaLayer) {
      const Library lt(s, kMostTileRows, workspace_.data());
      std::vector<std::pair<double, std::string>> ways;
      const auto add = [&](const std::string& name, const std::function<void(int, cudaStream_t)>& launch) {
        const double us = time_graph(3, launch, 3).median_us;
        const int replays = int(kPowerSeconds * 1e6 / (3 * us));
        time_graph(3, launch, replays);
        ways.emplace_back(time_graph(3, launch, replays).median_us, name);
      };
      for (int i = 0; i < lt.algorithms(); ++i)
        add(std::to_string(i),
            [&, i](int n, cudaStream_t t) { library(lt, i, s, kMostTileRows, weights(pool_, s, n), t); });
      add("tile", [&](int n, cudaStream_t t) { tile(s, kMostTileRows, weights(pool_, s, n), t); });
      std::ranges::sort(ways);
      std::printf("power, %-8s", s.name);
      for (const auto& [us, name] : ways) std::printf(" %s:%.0f", name.c_str(), us);
      std::printf("\n");
      std::fflush(stdout);
    }
  }

 private:
  static constexpr int kMostTileRows = 8192, kHotLayers = 4;
  static constexpr double kPowerSeconds = 0.12;
  static constexpr double kHotSeconds = 1.5;

  static bool is_normed(const Shape& s) { return s.outputs == kHidden; }

  void row(const Shape& s, int rows) const {
    const Library lt(s, rows, workspace_.data());
    const auto by_library = [&](int algorithm) {
      return
          [&, algorithm](int i, cudaStream_t t) { library(lt, algorithm, s, rows, weights(pool_, s, i), t); };
    };
    const auto by_tile = [&](int i, cudaStream_t t) { tile(s, rows, weights(pool_, s, i), t); };
    const int count = rows > 2048 ? 3 : 6;
    const double first = time_graph(count, by_library(0), 9).median_us;
    int best = 0;
    double best_us = first;
    for (int i = 1; i < lt.algorithms(); ++i)
      if (const double us = time_graph(count, by_library(i), 3).median_us; us < best_us) best = i, best_us = us;
    double lt_us[2], tile_us[2];
    for (int round = 0; round < 2; ++round) {
      lt_us[round] = time_graph(count, by_library(best), 15).median_us;
      tile_us[round] = time_graph(count, by_tile, 15).median_us;
    }
    const double flop = 2.0 * rows * s.outputs * s.inputs;
    std::printf("%-8s %5d | %9.1f %9.1f | %9.1f | %9.0f %9.0f | %.3f %.3f\n", s.name, rows, first, lt_us[1],
                tile_us[1], flop / lt_us[1] / 1e6, flop / tile_us[1] / 1e6, tile_us[0] / lt_us[0],
                tile_us[1] / lt_us[1]);
    std::fflush(stdout);
  }

  void library(const Library& lt, int algorithm, const Shape& s, int rows, const void* w,
               cudaStream_t t) const {
    const bool add = is_normed(s);
    lt.multiply(algorithm, w, x_.data(), add ? residual_.data() : y_.data(), t, add);
    if (is_gated(s)) launch_silu_mul({y_.data(), activated_.data(), rows, kWidth, Element::fp16}, t);
    if (add) norm(rows, t);
  }
  void norm(int rows, cudaStream_t t) const {  // of the residual stream, which has the product
    RmsNormArgs a;
    a.x = residual_.data(), a.weight = x_.data(), a.out = activated_.data();
    a.num_rows = rows, a.hidden = kHidden, a.element = Element::fp16;
    launch_rms_norm(a, t);
  }
  void tile(const Shape& s, int rows, const void* w, cudaStream_t t) const {
    TileGemmArgs a;
    a.x = x_.data(), a.w = w, a.rows = rows, a.inputs = s.inputs, a.gated = is_gated(s);
    a.add = is_normed(s), a.outputs = a.gated ? kWidth : s.outputs;
    a.out = a.gated ? activated_.data() : a.add ? residual_.data() : y_.data();
    launch_tile_gemm(a, t);
    if (a.add) norm(rows, t);
  }

  DeviceArray<uint16_t> pool_, x_, y_, activated_, residual_;
  DeviceArray<uint8_t> workspace_;
};

void run_chain(const std::function<bool(const char*)>& wanted) {
  if (wanted("chain")) ChainBench().run();
}

void run_tile(const std::function<bool(const char*)>& wanted) {
  if (!wanted("tile") && !wanted("hot") && !wanted("power")) return;
  if (!has_tile_gemm(14336, 4096)) {
    std::printf("no tile kernel for this device\n");
    return;
  }
  const TileBench bench;
  if (wanted("tile")) bench.table();
  if (wanted("hot")) bench.hot();
  if (wanted("power")) bench.power();
}

void run(const std::function<bool(const char*)>& wanted) {
  if (!wanted("llama") && !wanted("skinny") && !wanted("qwen") && !wanted("layer")) return;
  const Bench bench;
  bench.header();
  const bool llama = wanted("llama");
  for (const Shape& s : kLlamaLayer)
    for (int rows : kRows)
      if (llama || wanted("skinny")) bench.product(s, rows, llama);
  for (int rows : kRows)
    if (llama) bench.product(kLlamaHead, rows, true);
  for (const Shape& s : kQwen)
    for (int rows : kRows)
      if (wanted("qwen")) bench.product(s, rows, true);
  for (int rows : kRows)
    if (wanted("layer")) bench.layer(rows);
}

// Whether all of them are parts; says which are.
bool known_parts(int count, char** names) {
  constexpr const char* kParts[] = {"llama", "qwen", "layer", "skinny", "chain",
                                    "tile",  "hot",  "power", "ahead"};
  for (int i = 0; i < count; ++i) {
    if (std::ranges::find(kParts, std::string(names[i])) != std::end(kParts)) continue;
    std::fprintf(stderr, "no part '%s'; there are:", names[i]);
    for (const char* part : kParts) std::fprintf(stderr, " %s", part);
    std::fprintf(stderr, "\n");
    return false;
  }
  return true;
}

}  // namespace
}  // namespace ekv::bench

int main(int argc, char** argv) {
  if (!ekv::bench::known_parts(argc - 1, argv + 1)) return 1;
  const auto wanted = [&](const char* part) {
    const bool named =
        std::any_of(argv + 1, argv + argc, [&](const char* a) { return std::strcmp(a, part) == 0; });
    return named || (argc == 1 && std::strcmp(part, "skinny") != 0);
  };
  ekv::bench::run(wanted);
  ekv::bench::run_chain(wanted);
  ekv::bench::run_tile(wanted);
  if (wanted("ahead")) ekv::bench::run_ahead();
  return 0;
}
