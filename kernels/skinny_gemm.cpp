// skinny_gemm.cpp -- the kernels behind skinny_gemm.h on the current device.

#include "kernels/cuda_check.h"
#include "kernels/skinny_split.h"

namespace ekv {

namespace {

SkinnyDevice find_device() {
  int device, multiprocessors;
  cuda_check(cudaGetDevice(&device));
  cuda_check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  return {.mma_rows = kMaxMmaRows,
          .wgmma_rows = device_has_skinny_wgmma() ? kMaxSkinnyRows : 0,
          .cluster = device_has_skinny_clusters() ? kMaxSkinnySplit : 1,
          .multiprocessors = multiprocessors};
}

}  // namespace

SkinnyDevice skinny_device() {
  static const SkinnyDevice found = find_device();  // of the process's only device; asked for at every launch
  return found;
}

void launch_skinny_way(const SkinnyGemmArgs& a, const SkinnyWay& way, cudaStream_t stream) {
  check_skinny(a, way, skinny_device());
  if (way.unit == SkinnyUnit::mma)
    launch_skinny_mma(a, stream);
  else
    launch_skinny_wgmma(a, way.tile, stream);
}

}  // namespace ekv
