// decode_general_fixed8.cu -- decode over any mix of TARGET and fixed8 BASE pairs.

#include "kernels/decode_core.cuh"

namespace ekv {

#define EKV_DECODE(head_dim, head_tiles)                                                         \
  template void launch_decode_kernel<KvPath::general, BaseFormat::fixed8, head_dim, head_tiles>( \
      const AttnArgs&, const DecodeWorkspace&, cudaStream_t)

EKV_DECODE(64, 1);
EKV_DECODE(64, 2);
EKV_DECODE(80, 1);
EKV_DECODE(80, 2);
EKV_DECODE(96, 1);
EKV_DECODE(96, 2);
EKV_DECODE(128, 1);
EKV_DECODE(128, 2);
EKV_DECODE(256, 1);
EKV_DECODE(256, 2);

#undef EKV_DECODE

}  // namespace ekv
