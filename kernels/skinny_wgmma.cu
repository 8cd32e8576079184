// skinny_wgmma.cu -- launches the kernels of skinny_wgmma.cuh.

#include "kernels/hopper_code.h"
#include "kernels/programmatic.cuh"
#include "kernels/skinny_wgmma.cuh"

namespace ekv {
namespace {

template <class T, int kRows>
__global__ void __launch_bounds__(kSkinnyThreads, kSkinnyCtasPerMultiprocessor)
    skinny_wgmma_kernel(const __grid_constant__ SkinnyParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t raw[];
  skinny_wgmma<T, kRows>(p, *reinterpret_cast<SkinnyShared<kRows>*>(raw));
#endif
}

template <int kRows>
void launch(const SkinnyGemmArgs& a, int columns, cudaStream_t stream) {
  const auto kernel = a.element == Element::bf16 ? skinny_wgmma_kernel<__nv_bfloat16, kRows>
                                                 : skinny_wgmma_kernel<__half, kRows>;
  constexpr unsigned kBytes = SkinnyShared<kRows>::bytes();
  cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(kBytes)));
  cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared));
  launch_programmatic(kernel, unsigned(skinny_grid(a, columns)), kSkinnyThreads,
                      make_skinny_params(a, columns, kRows), stream,
                      {.shared_bytes = kBytes, .cluster = unsigned(a.split * columns)});
}

}  // namespace

bool device_has_skinny_wgmma() { return is_wgmma_code(skinny_wgmma_kernel<__half, 64>); }

void launch_skinny_wgmma(const SkinnyGemmArgs& a, int columns, cudaStream_t stream) {
  if (a.rows <= 8) return launch<8>(a, columns, stream);
  if (a.rows <= 16) return launch<16>(a, columns, stream);
  if (a.rows <= 32) return launch<32>(a, columns, stream);
  if (a.rows <= 64) return launch<64>(a, columns, stream);
  launch<128>(a, columns, stream);
}

}  // namespace ekv
