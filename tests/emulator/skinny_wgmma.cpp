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

template <class T, int kRows>
void run_grid(const SkinnyGemmArgs& a, int columns) {
  const size_t values = size_t(a.rows) * size_t(a.inputs);
  const auto* given = static_cast<const uint16_t*>(a.x);
  const auto* y = static_cast<const std::byte*>(a.y);
  std::vector<uint4> memory(values / 8);  // for its alignment
  auto* x = reinterpret_cast<uint16_t*>(memory.data());
  SkinnyGemmArgs late = a;
  late.x = x;
  const SkinnyParams p = make_skinny_params(late, columns, kRows);
  const int cluster = a.split * columns, grid = skinny_grid(a, columns);
  for (int first = 0; first < grid; first += cluster) {
    std::fill_n(x, values, uint16_t(0x7fff));  // NaN of both types
    const std::vector<std::byte> before(y, y + y_bytes(a));
    emulator::ClusterShape shape;
    shape.ctas = cluster, shape.threads = kSkinnyThreads, shape.shared_bytes = SkinnyShared<kRows>::bytes();
    shape.first_block = unsigned(first), shape.grid = unsigned(grid);
    shape.kernels_ahead = [&] {
      EKV_CHECK(std::equal(before.begin(), before.end(), y),
                "y was written before the kernels ahead had ended");
      std::copy_n(given, values, x);
    };
    emulator::run_cluster(shape, next_seed++, [&](std::byte* shared) {
      skinny_wgmma<T, kRows>(p, *reinterpret_cast<SkinnyShared<kRows>*>(shared));
    });
  }
}

template <class T>
void run_rows(const SkinnyGemmArgs& a, int columns) {
  if (a.rows <= 8) return run_grid<T, 8>(a, columns);
  if (a.rows <= 16) return run_grid<T, 16>(a, columns);
  if (a.rows <= 32) return run_grid<T, 32>(a, columns);
  if (a.rows <= 64) return run_grid<T, 64>(a, columns);
  run_grid<T, 128>(a, columns);
}

}  // namespace

SkinnyDevice skinny_device() {
  return {.wgmma_rows = kMaxSkinnyRows, .cluster = kMaxSkinnySplit, .num_ctas = 264};
}

void launch_skinny_way(const SkinnyGemmArgs& a, const SkinnyWay& way, cudaStream_t) {
  check_skinny(a, way, skinny_device());
  if (a.element == Element::bf16) return run_rows<__nv_bfloat16>(a, way.columns);
  run_rows<__half>(a, way.columns);
}

}  // namespace ekv
