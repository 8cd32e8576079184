// tile_gemm.cu -- launches the kernels of tile_gemm.cuh.

#include <algorithm>

#include "kernels/hopper_code.h"
#include "kernels/programmatic.cuh"
#include "kernels/tile_gemm.cuh"
#include "kernels/tile_gemm.h"

namespace ekv {
namespace {

constexpr unsigned kSharedBytes = sizeof(TileGemmShared);
static_assert(kSharedBytes <= 227 * 1024, "more than a CTA of sm_90 can have");

template <class T, bool kGated>
__global__ void __launch_bounds__(kTileThreads, 1) tile_gemm_kernel(const __grid_constant__ TileGemmParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t raw[];
  tile_gemm<T, kGated>(p, *reinterpret_cast<TileGemmShared*>(raw));
#endif
}

using Kernel = void (*)(TileGemmParams);
Kernel kernel_for(const TileGemmArgs& a) {
  if (a.element == Element::bf16)
    return a.gated ? tile_gemm_kernel<__nv_bfloat16, true> : tile_gemm_kernel<__nv_bfloat16, false>;
  return a.gated ? tile_gemm_kernel<__half, true> : tile_gemm_kernel<__half, false>;
}

void allow_shared(Kernel kernel) {
  cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(kSharedBytes)));
}

// Clusters that the device holds at once. The kernels do not differ in what they need.
int find_most_clusters() {
  const Kernel kernel = tile_gemm_kernel<__half, true>;
  allow_shared(kernel);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {kTileCtas, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = kTileCtas;
  config.blockDim = kTileThreads;
  config.dynamicSmemBytes = kSharedBytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  cuda_check(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config));
  return clusters;
}

int most_clusters() {
  static const int most = find_most_clusters();  // of the process's only device
  return most;
}

}  // namespace

// Asks for the clusters, too, so that no launch does for the first time while a graph is captured.
bool has_tile_gemm(int outputs, int inputs) {
  static const bool has_code = is_wgmma_code(tile_gemm_kernel<__half, true>);  // as above
  const bool sizes = outputs > 0 && outputs % 8 == 0 && inputs > 0 && inputs % 8 == 0;
  return sizes && has_code && most_clusters() > 0;
}

void launch_tile_gemm(const TileGemmArgs& a, cudaStream_t stream) {
  EKV_CHECK(a.rows >= 1, "a product without rows");
  EKV_CHECK(a.element != Element::fp32, "products take bf16 or fp16");
  EKV_CHECK(!a.gated || !a.add, "a gated product is not added to anything");
  EKV_CHECK(has_tile_gemm(a.outputs, a.inputs), "has_tile_gemm tells so at start-up");
  const TileGemmParams p = make_tile_gemm_params(a);
  const Kernel kernel = kernel_for(a);
  // A cluster walks over its share of the tiles; one that waits for another to end would take the time of two.
  const int clusters = std::min(p.order.count(), most_clusters());
  allow_shared(kernel);
  launch_programmatic(kernel, unsigned(clusters * kTileCtas), kTileThreads, p, stream,
                      {.shared_bytes = kSharedBytes, .cluster = kTileCtas});
}

}  // namespace ekv
