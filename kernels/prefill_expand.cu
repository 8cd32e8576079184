// prefill_expand.cu -- BASE pairs of one layer as TARGET slots in the scratch, so that one prefill kernel
// serves both.

#include "kernels/base_expansion.cuh"
#include "kernels/cuda_check.h"
#include "kernels/prefill_plan.h"

namespace ekv {
namespace {

constexpr int kThreads = 256;
constexpr int kCtasPerSm = 8;  // all threads a multiprocessor holds: the loads of some hide those of others

// Byte order of a value's chunk to that of a key's (KvShape::in_chunk).
constexpr uint32_t kValueToKey = 0x3120;

// 16 bytes of a BASE row, dims d .. d + 15, as fp16: the first and the last 8 dims. Exact in both formats.
template <class Format>
__device__ __forceinline__ void expand_chunk(const uint4& raw, int part, float scale, uint4& first,
                                             uint4& last) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
  uint32_t low[4], high[4];
  const __half2 factor = __float2half2_rn(scale), zero = __float2half2_rn(0.0f);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t bytes = part == kKey ? words[i] : __byte_perm(words[i], 0, kValueToKey);
    const HalfPairs pairs = Format::key(bytes);
    low[i] = Format::kTail ? fma_half2(pairs.low, factor, zero) : pairs.low;
    high[i] = Format::kTail ? fma_half2(pairs.high, factor, zero) : pairs.high;
  }
  first = make_uint4(low[0], low[1], low[2], low[3]);
  last = make_uint4(high[0], high[1], high[2], high[3]);
}

// One CTA per (BASE pair, KV head) at a time, one thread per 16 values.
template <int kHeadDim, class Format>
__global__ void __launch_bounds__(kThreads)
    expand_kernel(const __grid_constant__ AttnArgs a, const __grid_constant__ PrefillPlanView plan) {
  constexpr KvShape kSlot{1, 1, 1, kHeadDim};
  constexpr int kChunks = kHeadDim / 16;
  const KvShape& s = a.shape;
  const int units = plan.counters->num_base_pairs * s.kv_heads;
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const int job = unit / s.kv_heads, head = unit % s.kv_heads;
    const uint8_t* from = a.pool + s.slot_at(a.layer, plan.jobs[job].page, head);
#pragma unroll
    for (int i = threadIdx.x; i < 2 * kPairTokens * kChunks; i += kThreads) {
      const int dim = i % kChunks * 16, token = i / kChunks % kPairTokens, part = i / kChunks / kPairTokens;
      const uint4 raw = load16(from + (kSlot.base_at(part, token, dim) & ~size_t(15)));
      const int8_t* tail = reinterpret_cast<const int8_t*>(from + kSlot.exponent_at(part, 0));
      uint4 first, last;
      expand_chunk<Format>(raw, part, Format::key_scale(tail, token), first, last);
      uint8_t* to =
          plan.scratch + (size_t(2 * job + token / kBlockTokens) * s.kv_heads + head) * s.slot_bytes();
      store16(to + kSlot.target_at(part, token % kBlockTokens, dim), first);
      store16(to + kSlot.target_at(part, token % kBlockTokens, dim + 8), last);
    }
  }
}

using Kernel = void (*)(AttnArgs, PrefillPlanView);
struct ExpandKernel {
  int head_dim;
  Kernel fixed8, e5m2;
};
constexpr ExpandKernel kExpandKernels[] = {
    {64, expand_kernel<64, Fixed8>, expand_kernel<64, E5m2>},
    {80, expand_kernel<80, Fixed8>, expand_kernel<80, E5m2>},
    {96, expand_kernel<96, Fixed8>, expand_kernel<96, E5m2>},
    {128, expand_kernel<128, Fixed8>, expand_kernel<128, E5m2>},
    {256, expand_kernel<256, Fixed8>, expand_kernel<256, E5m2>},
};

}  // namespace

void launch_prefill_expand(const AttnArgs& args, KvPath path, const PrefillWorkspace& w, cudaStream_t stream) {
  if (path == KvPath::native || args.rows < 2 || w.scratch_pairs == 0) return;
  int device, multiprocessors;
  cuda_check(cudaGetDevice(&device));
  cuda_check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  for (const ExpandKernel& k : kExpandKernels) {
    if (k.head_dim != args.shape.head_dim) continue;
    const Kernel kernel = args.format == BaseFormat::fixed8 ? k.fixed8 : k.e5m2;
    kernel<<<kCtasPerSm * multiprocessors, kThreads, 0, stream>>>(args, prefill_plan_view(w, nullptr));
    cuda_check(cudaGetLastError());
  }
}

}  // namespace ekv
