// skinny_wgmma.cpp -- links tests/kernels/skinny_gemm_test.cpp to the device code of kernels/skinny_wgmma.cuh,
// compiled as plain C++ and run on the emulated cluster. x arrives when the kernels ahead end, at any time
// after the product has begun, and until then the product may write nothing.

#include "kernels/skinny_wgmma.cuh"

#include <algorithm>
#include <cstring>
#include <vector>

namespace ekv {
namespace {

unsigned next_seed = 1;  // another order in every launch, the same ones in every run

size_t y_bytes(const SkinnyGemmArgs& a) {
  return (size_t(a.rows - 1) * size_t(a.out_stride) + size_t(a.outputs)) * (a.fp32_out ? 4 : 2);
}

template <class T, int kRows, int kTile>
void run_grid(const SkinnyGemmArgs& a) {
  const size_t values = size_t(a.rows) * size_t(a.inputs);
  const auto* given = static_cast<const uint16_t*>(a.x);
  const auto* y = static_cast<const std::byte*>(a.y);
  std::vector<uint4> memory(values / 8);  // for its alignment
  auto* x = reinterpret_cast<uint16_t*>(memory.data());
  SkinnyGemmArgs late = a;
  late.x = x;
  const SkinnyParams p = make_skinny_params(late, kRows);
  const int grid = skinny_grid(a, kTile);
  for (int first = 0; first < grid; first += a.split) {
    std::fill_n(x, values, uint16_t(0x7fff));  // NaN of both types
    const std::vector<std::byte> before(y, y + y_bytes(a));
    emulator::ClusterShape shape;
    shape.ctas = a.split, shape.threads = kSkinnyThreads;
    shape.shared_bytes = SkinnyShared<kRows, kTile>::bytes();
    shape.first_block = unsigned(first), shape.grid = unsigned(grid);
    shape.kernels_ahead = [&] {
      EKV_CHECK(std::equal(before.begin(), before.end(), y),
                "y was written before the kernels ahead had ended");
      std::copy_n(given, values, x);
    };
    emulator::run_cluster(shape, next_seed++, [&](std::byte* shared) {
      skinny_wgmma<T, kRows, kTile>(p, *reinterpret_cast<SkinnyShared<kRows, kTile>*>(shared));
    });
  }
}

template <class T, int kTile>
void run_rows(const SkinnyGemmArgs& a) {
  if (a.rows <= 8) return run_grid<T, 8, kTile>(a);
  if (a.rows <= 16) return run_grid<T, 16, kTile>(a);
  if (a.rows <= 32) return run_grid<T, 32, kTile>(a);
  if (a.rows <= 64) return run_grid<T, 64, kTile>(a);
  run_grid<T, 128, kTile>(a);
}
template <class T>
void run_tile(const SkinnyGemmArgs& a, int tile) {
  if (tile == kWgmmaOutputs) return run_rows<T, kWgmmaOutputs>(a);
  run_rows<T, kHalfWgmmaOutputs>(a);
}

}  // namespace

SkinnyDevice skinny_device() {
  return {.wgmma_rows = kMaxSkinnyRows, .cluster = kMaxSkinnySplit, .multiprocessors = 132};
}

void launch_skinny_way(const SkinnyGemmArgs& a, const SkinnyWay& way, cudaStream_t) {
  check_skinny(a, way, skinny_device());
  if (a.element == Element::bf16) return run_tile<__nv_bfloat16>(a, way.tile);
  run_tile<__half>(a, way.tile);
}

}  // namespace ekv
