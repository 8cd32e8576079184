#pragma once
// decode_core.cuh -- the one main loop of decode: load slots, scores, softmax, values, merge.
//
// One warp of a CTA produces: it walks the CTA's shares (decode_plan.h) and keeps a ring of slots in shared
// memory full. kDecodeWarps warps consume, each every kDecodeWarps-th stage of the ring, without a barrier
// among them until an item ends. Keys and values are the A operand of the tensor cores (16 tokens, or 16 dims),
// query heads lie on N = 8, so a group of 4 wastes half and 8 nothing.

#include <algorithm>
#include <type_traits>

#include "kernels/cuda_check.h"
#include "kernels/decode_merge.cuh"
#include "kernels/device.cuh"
#include "kernels/hopper_code.h"

namespace ekv {

constexpr size_t align_up(size_t x, size_t to) { return (x + to - 1) / to * to; }

// ---- the kernel

// Shared memory: the ring's bookkeeping, the merge buffer, queries, then the slots.
template <int kHeadDim, int kHeadTiles>
struct DecodeShared {
  RingShared ring;
  alignas(16) MergeShared<kHeadDim> merge;
  alignas(128) uint8_t queries[kItemBuffers][kHeadTiles * kHeadTile * kHeadDim * 2];
};
template <int kHeadDim, int kHeadTiles>
constexpr size_t kDecodeHeadBytes = align_up(sizeof(DecodeShared<kHeadDim, kHeadTiles>), 128);

template <class Out, int kHeadDim, bool kElastic, class Format, int kHeadTiles>
__device__ void consume(const DecodeParams& p, DecodeShared<kHeadDim, kHeadTiles>& shared,
                        const uint8_t* slots) {
  const int warp = threadIdx.x / kWarpSize, stride = p.a.shape.slot_bytes();
  RingShared& ring = shared.ring;
  RingPlace place, item_place;  // place: of the item's first slot
  WarpAttention<kHeadDim, kHeadTiles> state;
  while (true) {
    barrier_wait(&ring.item_full[item_place.at], item_place.phase);
    const DecodeItem item = ring.items[item_place.at];
    if (item.num_splits == 0) return;
    state.start(shared.queries[item_place.at], p.group);
    int left = item.slot_end - item.slot_begin - warp;
    place.advance(min(left, 0) + warp, p.stages);
    for (; left > 0; left -= kDecodeWarps) {
      barrier_wait(&ring.full[place.at], place.phase);
      const int token = ring.tokens[place.at];
      uint8_t* slot = const_cast<uint8_t*>(slots) + size_t(place.at) * stride;
      if (kElastic && token == kBaseSlot)
        state.template add_base<Format>(slot, p.scale_log2);
      else
        state.add_target(slot, item.kv_len - token, p.scale_log2);
      barrier_arrive(&ring.empty[place.at]);
      place.advance(min(left, kDecodeWarps), p.stages);
    }
    finish_item<Out>(p, item, state, shared.merge, warp);
    barrier_arrive(&ring.item_empty[item_place.at]);
    item_place.advance(1, kItemBuffers);
  }
}

template <class Out, int kHeadDim, class Cursor, class Format, int kHeadTiles>
__global__ void __launch_bounds__(kDecodeThreads, 1) decode_kernel(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(128) uint8_t raw[];
  auto& shared = *reinterpret_cast<DecodeShared<kHeadDim, kHeadTiles>*>(raw);
  uint8_t* slots = raw + kDecodeHeadBytes<kHeadDim, kHeadTiles>;
  init_ring(shared.ring, p.stages);
  wait_for_kernels_ahead();
  let_next_kernel_begin();  // it waits at this place until this one has ended
  if (threadIdx.x < kConsumers) {
    SplitMerge<Out, kHeadDim> merge(p, shared.merge);
    consume<Out, kHeadDim, Cursor::kElastic, Format, kHeadTiles>(p, shared, slots);
    merge.run();
  } else {
    Producer<Cursor, Format>(p, shared.ring, slots, shared.queries[0], sizeof(shared.queries[0])).run();
  }
}

// ---- the launcher

// Deepest ring that fits beside the rest, in multiples of kDecodeWarps: then a stage belongs to one consumer
// for a whole item, and no consumer can wait on a barrier that is a full turn behind.
template <int kHeadDim, int kHeadTiles>
int ring_stages(const KvShape& shape, int shared_limit) {
  const size_t fit = (shared_limit - kDecodeHeadBytes<kHeadDim, kHeadTiles>) / shape.slot_bytes();
  return std::min<int>(kMaxStages, fit / kDecodeWarps * kDecodeWarps);
}

template <KvPath kPath>
using CursorOf =
    std::conditional_t<kPath == KvPath::native, NativeCursor,
                       std::conditional_t<kPath == KvPath::structured, StructuredCursor, GeneralCursor>>;
template <BaseFormat kFormat>
using FormatOf = std::conditional_t<kFormat == BaseFormat::fixed8, Fixed8, E5m2>;

template <KvPath kPath, BaseFormat kFormat, int kHeadDim, int kHeadTiles>
void launch_decode_kernel(const AttnArgs& args, const DecodeWorkspace& w, cudaStream_t stream) {
  const KvShape& s = args.shape;
  EKV_CHECK(s.head_dim == kHeadDim && args.heads % s.kv_heads == 0, "kernel and shape do not fit");
  EKV_CHECK(args.heads / s.kv_heads <= kHeadTiles * kHeadTile, "group larger than the kernel's");
  EKV_CHECK(w.heads == args.heads && w.kv_heads == s.kv_heads && w.head_dim == kHeadDim,
            "workspace of another model");
  if (args.num_seqs == 0) return;
  EKV_CHECK(args.out_element != Element::fp32, "the output is bf16 or fp16");
  using Cursor = CursorOf<kPath>;
  using Format = FormatOf<kFormat>;
  const auto kernel = args.out_element == Element::bf16
                          ? decode_kernel<__nv_bfloat16, kHeadDim, Cursor, Format, kHeadTiles>
                          : decode_kernel<__half, kHeadDim, Cursor, Format, kHeadTiles>;
  int device, limit, multiprocessors;
  cuda_check(cudaGetDevice(&device));
  cuda_check(cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  cuda_check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  EKV_CHECK(w.num_ctas <= multiprocessors, "CTAs wait for each other: num_ctas must fit on the device at once");
  const int stages = ring_stages<kHeadDim, kHeadTiles>(s, limit);
  EKV_CHECK(stages > 0, "the device's shared memory does not hold a ring of this head_dim");
  const size_t shared = kDecodeHeadBytes<kHeadDim, kHeadTiles> + size_t(stages) * s.slot_bytes();
  cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)));

  const DecodeParams p{args, decode_plan_view(w, nullptr), args.heads / s.kv_heads, stages,
                       args.scale * 1.4426950408889634f};
  // Early: the launch overlaps the end of the kernel before, which is waited for inside; code for older devices
  // does not wait. A cooperative launch, which would bring all CTAs onto the device together, would not overlap
  // (0.5 to 1 us on an H200); that they get there is what num_ctas and the order in attention.h are for.
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  const int tasks = p.plan.num_shares * s.kv_heads;
  cudaLaunchConfig_t config{};
  config.gridDim = std::min(w.num_ctas, tasks);
  config.blockDim = kDecodeThreads;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = is_hopper_code(kernel) ? 1 : 0;
  cuda_check(cudaLaunchKernelEx(&config, kernel, p));
}

}  // namespace ekv
