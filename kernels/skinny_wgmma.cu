// skinny_wgmma.cu -- launches the kernels of skinny_wgmma.cuh.

#include "kernels/hopper_code.h"
#include "kernels/programmatic.cuh"
#include "kernels/skinny_wgmma.cuh"

namespace ekv {
namespace {

template <class T, int kRows, int kTile>
__global__ void __launch_bounds__(kSkinnyThreads, 1)
    skinny_wgmma_kernel(const __grid_constant__ SkinnyParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t raw[];
  skinny_wgmma<T, kRows, kTile>(p, *reinterpret_cast<SkinnyShared<kRows, kTile>*>(raw));
#endif
}

template <int kRows, int kTile>
void launch(const SkinnyGemmArgs& a, cudaStream_t stream) {
  const auto kernel = a.element == Element::bf16 ? skinny_wgmma_kernel<__nv_bfloat16, kRows, kTile>
                                                 : skinny_wgmma_kernel<__half, kRows, kTile>;
  constexpr unsigned kBytes = SkinnyShared<kRows, kTile>::bytes();
  static_assert(kBytes <= kMostSkinnyBytes);
  cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(kBytes)));
  launch_programmatic(kernel, unsigned(skinny_grid(a, kTile)), kSkinnyThreads, make_skinny_params(a, kRows),
                      stream, {.shared_bytes = kBytes, .cluster = unsigned(a.split)});
}
template <int kTile>
void launch(const SkinnyGemmArgs& a, cudaStream_t stream) {
  if (a.rows <= 8) return launch<8, kTile>(a, stream);
  if (a.rows <= 16) return launch<16, kTile>(a, stream);
  if (a.rows <= 32) return launch<32, kTile>(a, stream);
  if (a.rows <= 64) return launch<64, kTile>(a, stream);
  launch<128, kTile>(a, stream);
}

}  // namespace

bool device_has_skinny_wgmma() { return is_wgmma_code(skinny_wgmma_kernel<__half, 64, kWgmmaOutputs>); }

void launch_skinny_wgmma(const SkinnyGemmArgs& a, int tile, cudaStream_t stream) {
  if (tile == kWgmmaOutputs) return launch<kWgmmaOutputs>(a, stream);
  launch<kHalfWgmmaOutputs>(a, stream);
}

}  // namespace ekv
