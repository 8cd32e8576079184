#pragma once
// decode_producer.cuh -- the ring of slots in shared memory, and the warp that keeps it full.

#include "kernels/base_expansion.cuh"
#include "kernels/kv_cursor.cuh"

namespace ekv {

constexpr int kConsumers = kDecodeWarps * kWarpSize;
constexpr int kDecodeThreads = kConsumers + kWarpSize;
// More stages than this only make later requests wait behind earlier ones; fewer leave the memory idle.
constexpr int kMaxStages = 3 * kDecodeWarps;

struct DecodeParams {
  AttnArgs a;
  DecodePlanView plan;
  int group, stages;
  float scale_log2;  // scale * log2(e)
};

constexpr int kItemBuffers = 4;  // items that the producer may be ahead of the consumers

// Stage c of an item's slots belongs to the consumer that the slot belongs to; stages are taken in the order of
// slots. Every lane that has read or written a stage or an item arrives at its barrier itself: one lane for its
// warp after __syncwarp would do, but racecheck sees no order through that, and it is no faster.
struct RingShared {
  uint64_t full[kMaxStages], empty[kMaxStages];
  int tokens[kMaxStages];  // position of the slot's first token, or kBaseSlot
  uint64_t item_full[kItemBuffers], item_empty[kItemBuffers];
  DecodeItem items[kItemBuffers];  // num_splits 0: no more
};
constexpr int kBaseSlot = -1;

// Arrivals that complete a copy: the copy engine counts bytes, older devices count lanes.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
constexpr int kCopyArrivals = 1;
#else
constexpr int kCopyArrivals = kWarpSize;
#endif

__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t phase) {
#if __CUDA_ARCH__ >= 900
  mbarrier_wait(shared_address(barrier), phase);
#else
  asm volatile(
      "{\n\t.reg .pred done;\n"
      "again:\n\tmbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n\t"
      "@!done bra again;\n\t}" ::"r"(shared_address(barrier)),
      "r"(phase)
      : "memory");
#endif
}
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile(
      "{\n\t.reg .b64 state;\n\tmbarrier.arrive.shared.b64 state, [%0];\n\t}" ::"r"(shared_address(barrier))
      : "memory");
}

__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void init_ring(RingShared& ring, int stages) {
  for (int i = threadIdx.x; i < stages; i += kDecodeThreads) {
    barrier_init(&ring.full[i], kCopyArrivals);
    barrier_init(&ring.empty[i], kWarpSize);
    if (i >= kItemBuffers) continue;
    barrier_init(&ring.item_full[i], kWarpSize);
    barrier_init(&ring.item_empty[i], kConsumers);
  }
#if __CUDA_ARCH__ >= 900
  mbarrier_init_fence();
#endif
  __syncthreads();
}

// A place in a ring of `size`.
struct RingPlace {
  int at = 0;
  uint32_t phase = 0;
  __device__ void advance(int step, int size) {
    at += step;
    while (at >= size) {
      at -= size;
      phase ^= 1;
    }
  }
};

// Copies `bytes`, a multiple of 16; all lanes of a warp take part, and all arrive at `barrier`.
__device__ __forceinline__ void copy_to_ring(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  const int lane = threadIdx.x % kWarpSize;
  const uint32_t shared_to = shared_address(to), shared_barrier = shared_address(barrier);
#if __CUDA_ARCH__ >= 900
  if (lane == 0) {
    mbarrier_arrive_expect(shared_barrier, bytes);
    bulk_copy(shared_to, from, bytes, shared_barrier);
  } else {
    barrier_arrive(barrier);
  }
#else
  for (uint32_t i = lane * 16; i < bytes; i += kWarpSize * 16)
    cp_async16(shared_to + i, static_cast<const uint8_t*>(from) + i);
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_barrier) : "memory");
#endif
}

// The producer warp. All lanes run it together.
template <class Cursor, class Format>
class Producer {
 public:
  // `queries`: kItemBuffers pieces of `query_stride` bytes.
  __device__ Producer(const DecodeParams& p, RingShared& ring, uint8_t* slots, uint8_t* queries,
                      int query_stride)
      : p_(p),
        ring_(ring),
        slots_(slots),
        queries_(queries),
        stride_(p.a.shape.slot_bytes()),
        query_stride_(query_stride),
        lane_(threadIdx.x % kWarpSize) {}

  __device__ void run() {
    const int heads = p_.a.shape.kv_heads;
    for (int task = blockIdx.x; task < p_.plan.num_shares * heads; task += gridDim.x) {
      const DecodeShare& share = p_.plan.shares[task / heads];
      const auto* words = reinterpret_cast<const int32_t*>(&share);
      produce_share(words[lane_ < kShareWords ? lane_ : 0], load_pair(&share.window[lane_]), task % heads);
    }
    produce_end();
  }

 private:
  // `record`: lane i holds word i of the share. `pair`: lane i holds entry i of its window.
  __device__ void produce_share(int32_t record, PairEntry pair, int kv_head) {
    const int begin = __shfl_sync(kAllLanes, record, 0), end = __shfl_sync(kAllLanes, record, 1);
    int32_t word = __shfl_sync(kAllLanes, record, (lane_ + kItemWord) % kWarpSize);
    for (int i = begin; i < end; ++i) {
      // What the next item begins with is under way while this one's slots are.
      const int32_t next_word = i + 1 < end ? item_word(i + 1) : 0;
      const DecodeItem item = open_item(word, kv_head);
      Cursor cursor(PairWindow(p_.a, item, pair), item);
      int slot = produce_batch(cursor, item, item.slot_begin);
      if (i + 1 < end) pair = first_pair(__shfl_sync(kAllLanes, next_word, kSeqWord));
      while (slot < item.slot_end) slot = produce_batch(cursor, item, slot);
      word = next_word;
    }
  }

  __device__ int32_t item_word(int item) const {
    return reinterpret_cast<const int32_t*>(&p_.plan.items[item])[lane_ < kItemWords ? lane_ : 0];
  }
  // This lane's entry of the window of an item that begins its sequence, as all but the first of a share do.
  __device__ PairEntry first_pair(int seq) const {
    return load_pair(p_.a.tables + size_t(seq) * p_.a.max_pairs + min(lane_, p_.a.max_pairs - 1));
  }

  // `word`: lane i holds word i of the item. Hands it and its queries to the consumers.
  __device__ DecodeItem open_item(int32_t word, int kv_head) {
    constexpr int kHeadWord = offsetof(DecodeItem, kv_head) / sizeof(int32_t);
    if (lane_ == kHeadWord) word = kv_head;
    DecodeItem item;
    auto* words = reinterpret_cast<int32_t*>(&item);
#pragma unroll
    for (int i = 0; i < kItemWords; ++i) words[i] = __shfl_sync(kAllLanes, word, i);
    put_item(word);
    const int head_bytes = p_.a.shape.head_dim * 2;
    const size_t row = size_t(item.row) * p_.a.heads + item.kv_head * p_.group;
    copy_to_ring(queries_ + item_place_.at * query_stride_, p_.a.q + row * p_.a.shape.head_dim,
                 p_.group * head_bytes, &ring_.item_full[item_place_.at]);
    item_place_.advance(1, kItemBuffers);
    return item;
  }

  // Starts the copies of up to kBatch slots from `slot` on; returns the slot after them.
  __device__ int produce_batch(Cursor& cursor, const DecodeItem& item, int slot) {
    const SlotRef ref = cursor.next();
    const int count = min(kBatch, item.slot_end - slot);
    copy_slots(ref, count, p_.a.pool + p_.a.shape.slot_at(p_.a.layer, ref.page, item.kv_head));
    place_.advance(count, p_.stages);
    return slot + count;
  }

  // The lane of a slot waits for its stage and starts its copy.
  __device__ void copy_slots(const SlotRef& ref, int count, const uint8_t* from) {
    const bool base = Cursor::kElastic && ref.base;
    const uint32_t values = 4 * kBlockTokens * p_.a.shape.head_dim;
    const uint32_t bytes = base && Format::kTail ? values + uint32_t(p_.a.shape.tail_bytes()) : values;
    RingPlace own = place_;
    own.advance(lane_ % kBatch, p_.stages);
    if (lane_ < count) {
      barrier_wait(&ring_.empty[own.at], own.phase ^ 1);
      ring_.tokens[own.at] = base ? kBaseSlot : ref.token;
#if __CUDA_ARCH__ >= 900
      const uint32_t barrier = shared_address(&ring_.full[own.at]);
      mbarrier_arrive_expect(barrier, bytes);
      bulk_copy_once(shared_address(slots_ + size_t(own.at) * stride_), from, bytes, barrier);
#endif
    }
    __syncwarp();
#if __CUDA_ARCH__ < 900
    for (int i = 0; i < count; ++i) {
      const int at = __shfl_sync(kAllLanes, own.at, i);
      const auto address = __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(from), i);
      copy_to_ring(slots_ + size_t(at) * stride_, reinterpret_cast<const uint8_t*>(address),
                   __shfl_sync(kAllLanes, bytes, i), &ring_.full[at]);
    }
#endif
  }

  __device__ void produce_end() {
    put_item(0);
    barrier_arrive(&ring_.item_full[item_place_.at]);
  }

  __device__ void put_item(int32_t word) {
    barrier_wait(&ring_.item_empty[item_place_.at], item_place_.phase ^ 1);
    if (lane_ < kItemWords) reinterpret_cast<int32_t*>(&ring_.items[item_place_.at])[lane_] = word;
    __syncwarp();
  }

  const DecodeParams& p_;
  RingShared& ring_;
  uint8_t *slots_, *queries_;
  int stride_, query_stride_, lane_;
  RingPlace place_, item_place_;
};

}  // namespace ekv
