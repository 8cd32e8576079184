// tile_gemm.cpp -- links tests/kernels/tile_gemm_test.cpp to the device code of kernels/tile_gemm.cuh, compiled
// as plain C++ with the headers beside this file and run on the emulated cluster: coordinates, swizzles,
// descriptors, phases of barriers and everything else but time are those of the GPU.

#include "kernels/tile_gemm.cuh"

#include <algorithm>
#include <new>

namespace ekv {
namespace {

constexpr int kClusters = 3;  // few, so that each walks over several tiles

unsigned next_seed = 1;  // another order in every launch, the same ones in every run

template <class T, bool kGated>
void run_grid(const TileGemmParams& p) {
  const int clusters = std::min(p.order.count(), kClusters);
  for (int cluster = 0; cluster < clusters; ++cluster) {
    emulator::ClusterShape shape;
    shape.ctas = kTileCtas, shape.threads = kTileThreads, shape.shared_bytes = sizeof(TileGemmShared);
    shape.first_block = unsigned(cluster * kTileCtas), shape.grid = unsigned(clusters * kTileCtas);
    emulator::run_cluster(shape, next_seed++, [&](std::byte* shared) {
      tile_gemm<T, kGated>(p, *reinterpret_cast<TileGemmShared*>(shared));
    });
  }
}

}  // namespace

bool has_tile_gemm(int outputs, int inputs) {
  return outputs > 0 && outputs % 8 == 0 && inputs > 0 && inputs % 8 == 0;
}

void launch_tile_gemm(const TileGemmArgs& a, cudaStream_t) {
  EKV_CHECK(a.rows >= 1 && has_tile_gemm(a.outputs, a.inputs), "sizes out of range");
  const TileGemmParams p = make_tile_gemm_params(a);
  if (a.element == Element::bf16)
    a.gated ? run_grid<__nv_bfloat16, true>(p) : run_grid<__nv_bfloat16, false>(p);
  else
    a.gated ? run_grid<__half, true>(p) : run_grid<__half, false>(p);
}

}  // namespace ekv
