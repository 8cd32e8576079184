// attention_select.cpp -- every attention kernel in the binary, one line each. This table is the build-time
// budget: a line more costs compile time in CI, so say in the commit what it buys.
//
//   decode   decode_core.cuh       one row per sequence; contract in attention.h
//   plan     decode_plan.cu        shares of equal bytes, once a step; contract in attention.h
//   prefill  prefill_wgmma.cu      two rows or more per sequence, sm_90a
//            prefill_mma.cu        the same for older devices and for head dims that are no multiple of 64
//            prefill_plan.cu       tiles and BASE pairs, once a step
//            prefill_expand.cu     BASE pairs as TARGET slots, once a layer; two formats of each head_dim

#include <algorithm>

#include "elastickv/base.h"
#include "kernels/decode_plan.h"
#include "kernels/prefill_plan.h"

namespace ekv {
namespace {

// clang-format off
constexpr DecodeKernel kDecodeKernels[] = {
    {KvPath::native, BaseFormat::fixed8, 64, 8, launch_decode_kernel<KvPath::native, BaseFormat::fixed8, 64, 1>, "native_d64_g8"},
    {KvPath::native, BaseFormat::fixed8, 64, 16, launch_decode_kernel<KvPath::native, BaseFormat::fixed8, 64, 2>, "native_d64_g16"},
    {KvPath::native, BaseFormat::fixed8, 80, 8, launch_decode_kernel<KvPath::native, BaseFormat::fixed8, 80, 1>, "native_d80_g8"},
    {KvPath::native, BaseFormat::fixed8, 80, 16, launch_decode_kernel<KvPath::native, BaseFormat::fixed8, 80, 2>, "native_d80_g16"},
    {KvPath::native, BaseFormat::fixed8, 96, 8, launch_decode_kernel<KvPath::native, BaseFormat::fixed8, 96, 1>, "native_d96_g8"},
    {KvPath::native, BaseFormat::fixed8, 96, 16, launch_decode_kernel<KvPath::native, BaseFormat::fixed8, 96, 2>, "native_d96_g16"},
    {KvPath::native, BaseFormat::fixed8, 128, 8, launch_decode_kernel<KvPath::native, BaseFormat::fixed8, 128, 1>, "native_d128_g8"},
    {KvPath::native, BaseFormat::fixed8, 128, 16, launch_decode_kernel<KvPath::native, BaseFormat::fixed8, 128, 2>, "native_d128_g16"},
    {KvPath::native, BaseFormat::fixed8, 256, 8, launch_decode_kernel<KvPath::native, BaseFormat::fixed8, 256, 1>, "native_d256_g8"},
    {KvPath::native, BaseFormat::fixed8, 256, 16, launch_decode_kernel<KvPath::native, BaseFormat::fixed8, 256, 2>, "native_d256_g16"},
    {KvPath::structured, BaseFormat::fixed8, 64, 8, launch_decode_kernel<KvPath::structured, BaseFormat::fixed8, 64, 1>, "structured_fixed8_d64_g8"},
    {KvPath::structured, BaseFormat::fixed8, 64, 16, launch_decode_kernel<KvPath::structured, BaseFormat::fixed8, 64, 2>, "structured_fixed8_d64_g16"},
    {KvPath::structured, BaseFormat::fixed8, 80, 8, launch_decode_kernel<KvPath::structured, BaseFormat::fixed8, 80, 1>, "structured_fixed8_d80_g8"},
    {KvPath::structured, BaseFormat::fixed8, 80, 16, launch_decode_kernel<KvPath::structured, BaseFormat::fixed8, 80, 2>, "structured_fixed8_d80_g16"},
    {KvPath::structured, BaseFormat::fixed8, 96, 8, launch_decode_kernel<KvPath::structured, BaseFormat::fixed8, 96, 1>, "structured_fixed8_d96_g8"},
    {KvPath::structured, BaseFormat::fixed8, 96, 16, launch_decode_kernel<KvPath::structured, BaseFormat::fixed8, 96, 2>, "structured_fixed8_d96_g16"},
    {KvPath::structured, BaseFormat::fixed8, 128, 8, launch_decode_kernel<KvPath::structured, BaseFormat::fixed8, 128, 1>, "structured_fixed8_d128_g8"},
    {KvPath::structured, BaseFormat::fixed8, 128, 16, launch_decode_kernel<KvPath::structured, BaseFormat::fixed8, 128, 2>, "structured_fixed8_d128_g16"},
    {KvPath::structured, BaseFormat::fixed8, 256, 8, launch_decode_kernel<KvPath::structured, BaseFormat::fixed8, 256, 1>, "structured_fixed8_d256_g8"},
    {KvPath::structured, BaseFormat::fixed8, 256, 16, launch_decode_kernel<KvPath::structured, BaseFormat::fixed8, 256, 2>, "structured_fixed8_d256_g16"},
    {KvPath::structured, BaseFormat::e5m2, 64, 8, launch_decode_kernel<KvPath::structured, BaseFormat::e5m2, 64, 1>, "structured_e5m2_d64_g8"},
    {KvPath::structured, BaseFormat::e5m2, 64, 16, launch_decode_kernel<KvPath::structured, BaseFormat::e5m2, 64, 2>, "structured_e5m2_d64_g16"},
    {KvPath::structured, BaseFormat::e5m2, 80, 8, launch_decode_kernel<KvPath::structured, BaseFormat::e5m2, 80, 1>, "structured_e5m2_d80_g8"},
    {KvPath::structured, BaseFormat::e5m2, 80, 16, launch_decode_kernel<KvPath::structured, BaseFormat::e5m2, 80, 2>, "structured_e5m2_d80_g16"},
    {KvPath::structured, BaseFormat::e5m2, 96, 8, launch_decode_kernel<KvPath::structured, BaseFormat::e5m2, 96, 1>, "structured_e5m2_d96_g8"},
    {KvPath::structured, BaseFormat::e5m2, 96, 16, launch_decode_kernel<KvPath::structured, BaseFormat::e5m2, 96, 2>, "structured_e5m2_d96_g16"},
    {KvPath::structured, BaseFormat::e5m2, 128, 8, launch_decode_kernel<KvPath::structured, BaseFormat::e5m2, 128, 1>, "structured_e5m2_d128_g8"},
    {KvPath::structured, BaseFormat::e5m2, 128, 16, launch_decode_kernel<KvPath::structured, BaseFormat::e5m2, 128, 2>, "structured_e5m2_d128_g16"},
    {KvPath::structured, BaseFormat::e5m2, 256, 8, launch_decode_kernel<KvPath::structured, BaseFormat::e5m2, 256, 1>, "structured_e5m2_d256_g8"},
    {KvPath::structured, BaseFormat::e5m2, 256, 16, launch_decode_kernel<KvPath::structured, BaseFormat::e5m2, 256, 2>, "structured_e5m2_d256_g16"},
    {KvPath::general, BaseFormat::fixed8, 64, 8, launch_decode_kernel<KvPath::general, BaseFormat::fixed8, 64, 1>, "general_fixed8_d64_g8"},
    {KvPath::general, BaseFormat::fixed8, 64, 16, launch_decode_kernel<KvPath::general, BaseFormat::fixed8, 64, 2>, "general_fixed8_d64_g16"},
    {KvPath::general, BaseFormat::fixed8, 80, 8, launch_decode_kernel<KvPath::general, BaseFormat::fixed8, 80, 1>, "general_fixed8_d80_g8"},
    {KvPath::general, BaseFormat::fixed8, 80, 16, launch_decode_kernel<KvPath::general, BaseFormat::fixed8, 80, 2>, "general_fixed8_d80_g16"},
    {KvPath::general, BaseFormat::fixed8, 96, 8, launch_decode_kernel<KvPath::general, BaseFormat::fixed8, 96, 1>, "general_fixed8_d96_g8"},
    {KvPath::general, BaseFormat::fixed8, 96, 16, launch_decode_kernel<KvPath::general, BaseFormat::fixed8, 96, 2>, "general_fixed8_d96_g16"},
    {KvPath::general, BaseFormat::fixed8, 128, 8, launch_decode_kernel<KvPath::general, BaseFormat::fixed8, 128, 1>, "general_fixed8_d128_g8"},
    {KvPath::general, BaseFormat::fixed8, 128, 16, launch_decode_kernel<KvPath::general, BaseFormat::fixed8, 128, 2>, "general_fixed8_d128_g16"},
    {KvPath::general, BaseFormat::fixed8, 256, 8, launch_decode_kernel<KvPath::general, BaseFormat::fixed8, 256, 1>, "general_fixed8_d256_g8"},
    {KvPath::general, BaseFormat::fixed8, 256, 16, launch_decode_kernel<KvPath::general, BaseFormat::fixed8, 256, 2>, "general_fixed8_d256_g16"},
    {KvPath::general, BaseFormat::e5m2, 64, 8, launch_decode_kernel<KvPath::general, BaseFormat::e5m2, 64, 1>, "general_e5m2_d64_g8"},
    {KvPath::general, BaseFormat::e5m2, 64, 16, launch_decode_kernel<KvPath::general, BaseFormat::e5m2, 64, 2>, "general_e5m2_d64_g16"},
    {KvPath::general, BaseFormat::e5m2, 80, 8, launch_decode_kernel<KvPath::general, BaseFormat::e5m2, 80, 1>, "general_e5m2_d80_g8"},
    {KvPath::general, BaseFormat::e5m2, 80, 16, launch_decode_kernel<KvPath::general, BaseFormat::e5m2, 80, 2>, "general_e5m2_d80_g16"},
    {KvPath::general, BaseFormat::e5m2, 96, 8, launch_decode_kernel<KvPath::general, BaseFormat::e5m2, 96, 1>, "general_e5m2_d96_g8"},
    {KvPath::general, BaseFormat::e5m2, 96, 16, launch_decode_kernel<KvPath::general, BaseFormat::e5m2, 96, 2>, "general_e5m2_d96_g16"},
    {KvPath::general, BaseFormat::e5m2, 128, 8, launch_decode_kernel<KvPath::general, BaseFormat::e5m2, 128, 1>, "general_e5m2_d128_g8"},
    {KvPath::general, BaseFormat::e5m2, 128, 16, launch_decode_kernel<KvPath::general, BaseFormat::e5m2, 128, 2>, "general_e5m2_d128_g16"},
    {KvPath::general, BaseFormat::e5m2, 256, 8, launch_decode_kernel<KvPath::general, BaseFormat::e5m2, 256, 1>, "general_e5m2_d256_g8"},
    {KvPath::general, BaseFormat::e5m2, 256, 16, launch_decode_kernel<KvPath::general, BaseFormat::e5m2, 256, 2>, "general_e5m2_d256_g16"},
};

constexpr PrefillKernel kPrefillKernels[] = {  // the fastest first
    {MatrixUnit::wgmma, 64, launch_prefill_wgmma<64>, "prefill_wgmma_d64"},
    {MatrixUnit::wgmma, 128, launch_prefill_wgmma<128>, "prefill_wgmma_d128"},
    {MatrixUnit::wgmma, 256, launch_prefill_wgmma<256>, "prefill_wgmma_d256"},
    {MatrixUnit::mma, 64, launch_prefill_mma<64>, "prefill_mma_d64"},
    {MatrixUnit::mma, 80, launch_prefill_mma<80>, "prefill_mma_d80"},
    {MatrixUnit::mma, 96, launch_prefill_mma<96>, "prefill_mma_d96"},
    {MatrixUnit::mma, 128, launch_prefill_mma<128>, "prefill_mma_d128"},
    {MatrixUnit::mma, 256, launch_prefill_mma<256>, "prefill_mma_d256"},
};
// clang-format on

}  // namespace

const PrefillKernel* find_prefill(int head_dim, MatrixUnit at_most) {
  for (const PrefillKernel& k : kPrefillKernels)
    if (k.head_dim == head_dim && k.unit <= at_most && (k.unit == MatrixUnit::mma || device_has_wgmma()))
      return &k;
  return nullptr;
}

const DecodeKernel* find_decode(KvPath path, BaseFormat format, int head_dim, int group) {
  for (const DecodeKernel& k : kDecodeKernels)
    if (k.path == path && (path == KvPath::native || k.format == format) && k.head_dim == head_dim &&
        group <= k.max_group)
      return &k;
  return nullptr;
}

void launch_decode(const AttnArgs& args, KvPath path, const DecodeWorkspace& workspace, cudaStream_t stream) {
  const DecodeKernel* kernel =
      find_decode(path, args.format, args.shape.head_dim, args.heads / args.shape.kv_heads);
  EKV_CHECK(kernel != nullptr, "no decode kernel for this shape; find_decode tells so at start-up");
  kernel->launch(args, workspace, stream);
}

}  // namespace ekv
