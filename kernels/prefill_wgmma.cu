// prefill_wgmma.cu -- prefill on sm_90a: one warpgroup loads, two of 64 rows each compute.
//
// Slots arrive in pieces of 16 tokens x 64 dims, which the layout has stored as legal wgmma tiles: the loader
// needs no tensor map, only an address per piece. A warpgroup starts the scores of the next key tile, then the
// values of this one, and computes the next tile's softmax while the values run. The warpgroups take turns at
// starting, so that the softmax of one falls into the matrix work of the other (as in FlashAttention-3, arXiv
// 2407.08608).
//
// Lane (i, j) = (lane % 4, lane / 4) holds rows j and j + 8 of its warp's 16, columns 2i and 2i + 1 of each 8.

#include "kernels/cuda_check.h"
#include "kernels/hopper_code.h"
#include "kernels/prefill_core.cuh"
#include "kernels/wgmma.cuh"

namespace ekv {
namespace {

constexpr int kRows = prefill_tile_rows(MatrixUnit::wgmma);
constexpr int kGroupThreads = 128;  // of a warpgroup
constexpr int kConsumers = 2 * kGroupThreads, kThreads = kConsumers + kGroupThreads;
constexpr int kLoaders = kGroupThreads / kWarpSize;
constexpr int kLoaderRegisters = 40, kConsumerRegisters = 232;
constexpr int kPieceRows = kBlockTokens, kRowBytes = 128, kPieceBytes = kPieceRows * kRowBytes;
// Scores may exceed a row's maximum by this (base 2) before its accumulators are rescaled: fp16 holds 2^8.
constexpr float kLazyRescale = 8.0f;

template <int kHeadDim>
struct Shape {
  static constexpr int kColumns = kHeadDim / 64;  // of 64 dims
  static constexpr int kKeys = kHeadDim <= 128 ? 128 : 64;
  static constexpr int kSlots = kKeys / kBlockTokens;
  static constexpr int kPartBytes = kKeys * kHeadDim * 2;  // K, or V, of a key tile: [column][key][64 dims]
  static constexpr int kColumnBytes = kKeys * kRowBytes;
  static constexpr int kOutWidth = kHeadDim < 128 ? kHeadDim : 128;  // of one wgmma on the values
  static constexpr int kOuts = kHeadDim / kOutWidth;
  // A tile takes about as long as a copy from the HBM needs; with three stages nobody waits for it.
  static constexpr int kStages = kHeadDim <= 128 ? 3 : 2;
};

template <int kHeadDim>
struct Shared {
  using S = Shape<kHeadDim>;
  alignas(1024) uint8_t queries[S::kColumns][kRows * kRowBytes];
  alignas(1024) uint8_t keys[S::kStages][S::kPartBytes];
  alignas(1024) uint8_t values[S::kStages][S::kPartBytes];
  uint64_t keys_full[S::kStages], keys_empty[S::kStages], values_full[S::kStages], values_empty[S::kStages];
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

enum NamedBarrier : int { kQueriesReady = 1, kValuesCleared = 2, kTurn = 3 };  // kTurn + warpgroup

// ---- the loader

// Four warps, because issuing a copy takes long enough that one could not keep up. Warp i loads slots i, i + 4,
// ...
template <int kHeadDim>
class Loader {
 public:
  using S = Shape<kHeadDim>;
  __device__ Loader(const PrefillParams& p, const PrefillWork& w, Shared<kHeadDim>& shared)
      : p_(p),
        w_(w),
        shared_(shared),
        num_tiles_((w.keys + S::kKeys - 1) / S::kKeys),
        slot_(threadIdx.x % kGroupThreads / kWarpSize + threadIdx.x % kWarpSize / S::kColumns * kLoaders) {}

  // Keys run one tile ahead of values, as their consumers do.
  __device__ void run() {
    load(0, kKey, keys_);
    for (int tile = 0; tile < num_tiles_; ++tile) {
      if (tile + 1 < num_tiles_) load(tile + 1, kKey, keys_);
      load(tile, kValue, values_);
    }
  }

 private:
  // One lane per piece: pieces of one slot lie side by side in the pool.
  __device__ void load(int tile, int part, Place<S::kStages>& place) {
    const int slots = min(S::kSlots, (w_.keys + 15) / 16 - tile * S::kSlots),
              column = threadIdx.x % S::kColumns;
    const bool mine = slot_ < slots;
    uint64_t* full = part == kKey ? shared_.keys_full : shared_.values_full;
    uint64_t* empty = part == kKey ? shared_.keys_empty : shared_.values_empty;
    const uint8_t* from = mine ? prefill_slot(p_, w_, tile * S::kSlots + slot_) : nullptr;
    const uint32_t barrier = shared_address(&full[place.stage]);
    const int pieces = __popc(__ballot_sync(kAllLanes, mine));
    mbarrier_wait(shared_address(&empty[place.stage]), place.phase ^ 1);
    if (threadIdx.x % kWarpSize == 0) mbarrier_arrive_expect(barrier, pieces * kPieceBytes);
    __syncwarp();
    if (mine) {
      uint8_t* to = part == kKey ? shared_.keys[place.stage] : shared_.values[place.stage];
      bulk_copy(shared_address(to + column * S::kColumnBytes + slot_ * kPieceBytes),
                from + (part * S::kColumns + column) * kPieceBytes, kPieceBytes, barrier);
    }
    place.advance();
  }

  const PrefillParams& p_;
  const PrefillWork& w_;
  Shared<kHeadDim>& shared_;
  int num_tiles_, slot_;
  Place<S::kStages> keys_, values_;
};

// ---- a warpgroup

template <int kHeadDim>
class Rows {
 public:
  using S = Shape<kHeadDim>;

  __device__ Rows(const PrefillParams& p, const PrefillWork& w, Shared<kHeadDim>& shared)
      : p_(p), w_(w), shared_(shared), group_(threadIdx.x / kGroupThreads), lane_(threadIdx.x % kWarpSize) {
    row_ = group_ * 64 + threadIdx.x % kGroupThreads / kWarpSize * 16 + lane_ / 4;
    for (int half = 0; half < 2; ++half) visible_[half] = w.visible(row_ + 8 * half, p.group);
  }

  template <class Out>
  __device__ void run() {
    load_queries();
    const int num_tiles = (w_.keys + S::kKeys - 1) / S::kKeys;
    const int first_masked = (w_.first_key + 1) / S::kKeys;  // the first tile that not every row sees whole
    take_turn();
    start_scores();
    pass_turn();
    finish_scores(0, first_masked);
    softmax();
    pack();
    for (int tile = 0; tile + 1 < num_tiles; ++tile) {
      take_turn();
      start_scores();
      start_values();
      pass_turn();
      wgmma_wait<kOutsInFlight>();
      wgmma_pin(s_);
      free_stage(shared_.keys_empty, keys_);
      if (tile + 1 >= first_masked) mask((tile + 1) * S::kKeys);
      const bool raised = softmax();
      wait_values();
      if (raised) rescale();
      pack();
    }
    clear_values(num_tiles - 1);
    take_turn();
    start_values();
    pass_turn();
    wait_values();
    store<Out>();
  }

 private:
  static constexpr int kOutsInFlight = 1;  // groups committed after the scores
  static constexpr int kChains = 4;

  // The warpgroups start their matrix work in turn; warpgroup 0 begins.
  __device__ void take_turn() { named_sync(kTurn + group_, kConsumers); }
  __device__ void pass_turn() { named_arrive(kTurn + 1 - group_, kConsumers); }

  __device__ void load_queries() {
    const int threads = kGroupThreads, thread = threadIdx.x % kGroupThreads;
    for (int i = thread; i < 64 * kHeadDim / 8; i += threads) {
      const int row = group_ * 64 + i / (kHeadDim / 8), chunk = i % (kHeadDim / 8);
      uint4 x = make_uint4(0, 0, 0, 0);
      if (row < w_.rows) x = load16(p_.a.q + row_offset(p_, w_, row) + chunk * 8);
      store16(shared_.queries[chunk / 8] + row * kRowBytes + ((chunk % 8) ^ (row % 8)) * 16, x);
    }
    fence_proxy_async();
    named_sync(kQueriesReady, kConsumers);
    if (group_ == 1) pass_turn();
  }

  __device__ void start_scores() {
    mbarrier_wait(shared_address(&shared_.keys_full[keys_.stage]), keys_.phase);
    const uint32_t q = shared_address(shared_.queries[0]) + group_ * 64 * kRowBytes;
    const uint32_t k = shared_address(shared_.keys[keys_.stage]);
    wgmma_pin(s_);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      const int column = step / 4, at = step % 4 * 32;
      wgmma_shared<__half>(s_, wgmma_tile(q + column * kRows * kRowBytes + at),
                           wgmma_tile(k + column * S::kColumnBytes + at), step > 0);
    }
    wgmma_commit();
  }

  __device__ void finish_scores(int tile, int first_masked) {
    wgmma_wait<0>();
    wgmma_pin(s_);
    free_stage(shared_.keys_empty, keys_);
    if (tile >= first_masked) mask(tile * S::kKeys);
  }

  __device__ void start_values() {
    mbarrier_wait(shared_address(&shared_.values_full[values_.stage]), values_.phase);
    const uint32_t v = shared_address(shared_.values[values_.stage]);
#pragma unroll
    for (int o = 0; o < S::kOuts; ++o) wgmma_pin(out_[o]);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < S::kKeys / 16; ++step)
#pragma unroll
      for (int o = 0; o < S::kOuts; ++o)
        wgmma_registers(out_[o], p16_[step],
                        wgmma_tile(v + o * 2 * S::kColumnBytes + step * kPieceBytes, S::kColumnBytes));
    wgmma_commit();
  }

  __device__ void wait_values() {
    wgmma_wait<0>();
#pragma unroll
    for (int o = 0; o < S::kOuts; ++o) wgmma_pin(out_[o]);
    free_stage(shared_.values_empty, values_);
  }

  __device__ void free_stage(uint64_t* empty, Place<S::kStages>& place) {
    if (threadIdx.x % kGroupThreads == 0) mbarrier_arrive(shared_address(&empty[place.stage]));
    place.advance();
  }

  // Values past the last key may be anything, and 0 * NaN is NaN. Both warpgroups read what either clears.
  __device__ void clear_values(int tile) {
    const int first = w_.keys - tile * S::kKeys;
    if (first >= S::kKeys) return;
    mbarrier_wait(shared_address(&shared_.values_full[values_.stage]), values_.phase);
    const int chunks = S::kColumns * 8;
    for (int i = threadIdx.x; i < (S::kKeys - first) * chunks; i += kConsumers) {
      const int row = first + i / chunks, chunk = i % chunks;
      store16(shared_.values[values_.stage] + chunk / 8 * S::kColumnBytes + row * kRowBytes + chunk % 8 * 16,
              make_uint4(0, 0, 0, 0));
    }
    fence_proxy_async();
    named_sync(kValuesCleared, kConsumers);
  }

  __device__ void mask(int first_key) {
#pragma unroll
    for (int i = 0; i < S::kKeys / 2; ++i)
      if (first_key + i / 4 * 8 + lane_ % 4 * 2 + i % 2 >= visible_[i % 4 / 2]) s_[i] = -INFINITY;
  }

  // Scores become probabilities; true: a maximum was raised, and shrink_ is what the outputs must be scaled by.
  // Every row sees key 0, so its maximum is finite from the first tile on.
  __device__ bool softmax() {
    // Four chains per row: one would be as long as its latency.
    float part[kChains][2];
#pragma unroll
    for (int i = 0; i < S::kKeys / 2; ++i) {
      float& x = part[i / 4 % kChains][i % 4 / 2];
      x = i < 4 * kChains && i % 2 == 0 ? s_[i] : fmaxf(x, s_[i]);
    }
    float top[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      top[half] =
          fmaxf(fmaxf(fmaxf(part[0][half], part[1][half]), fmaxf(part[2][half], part[3][half])), top_[half]);
    bool raise = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      top[half] = fmaxf(top[half], __shfl_xor_sync(kAllLanes, top[half], 1));
      top[half] = fmaxf(top[half], __shfl_xor_sync(kAllLanes, top[half], 2));
      raise |= (top[half] - top_[half]) * p_.scale_log2 > kLazyRescale;
    }
    raise = __any_sync(kAllLanes, raise);
    if (raise)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        shrink_[half] = exp2_approx((top_[half] - top[half]) * p_.scale_log2);
        top_[half] = top[half];
#pragma unroll
        for (int chain = 0; chain < kChains; ++chain) sum_[chain][half] *= shrink_[half];
      }
    const float shift[2] = {top_[0] * p_.scale_log2, top_[1] * p_.scale_log2};
#pragma unroll
    for (int i = 0; i < S::kKeys / 2; ++i) {
      s_[i] = exp2_approx(s_[i] * p_.scale_log2 - shift[i % 4 / 2]);
      sum_[i / 4 % kChains][i % 4 / 2] += s_[i];
    }
    return raise;
  }

  __device__ void rescale() {
#pragma unroll
    for (int o = 0; o < S::kOuts; ++o)
#pragma unroll
      for (int i = 0; i < S::kOutWidth / 2; ++i) out_[o][i] *= shrink_[i % 4 / 2];
  }

  __device__ void pack() {
#pragma unroll
    for (int step = 0; step < S::kKeys / 16; ++step)
#pragma unroll
      for (int r = 0; r < 4; ++r) p16_[step][r] = pack_half2(s_[step * 8 + 2 * r], s_[step * 8 + 2 * r + 1]);
  }

  template <class Out>
  __device__ void store() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = (sum_[0][half] + sum_[1][half]) + (sum_[2][half] + sum_[3][half]);
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      sum += __shfl_xor_sync(kAllLanes, sum, 2);
      const int row = row_ + 8 * half;
      if (row >= w_.rows) continue;
      const size_t at = row_offset(p_, w_, row);
      const float inverse = 1.0f / sum;
#pragma unroll
      for (int o = 0; o < S::kOuts; ++o)
#pragma unroll
        for (int d = 0; d < S::kOutWidth / 8; ++d)
          *reinterpret_cast<uint32_t*>(p_.a.out + at + o * S::kOutWidth + d * 8 + lane_ % 4 * 2) =
              Pair16<Out>::pack(out_[o][d * 4 + 2 * half] * inverse, out_[o][d * 4 + 2 * half + 1] * inverse);
      if (lane_ % 4 == 0 && p_.a.lse)
        p_.a.lse[at / kHeadDim] = (top_[half] * p_.scale_log2 + log2f(sum)) * kLn2;
    }
  }

  const PrefillParams& p_;
  const PrefillWork& w_;
  Shared<kHeadDim>& shared_;
  int group_, lane_, row_, visible_[2];
  Place<S::kStages> keys_, values_;
  float s_[S::kKeys / 2];
  uint32_t p16_[S::kKeys / 16][4];
  float out_[S::kOuts][S::kOutWidth / 2] = {};
  float top_[2] = {-INFINITY, -INFINITY}, sum_[kChains][2] = {}, shrink_[2] = {1, 1};
};

#endif

template <class Out, int kHeadDim>
__global__ void __launch_bounds__(kThreads, 1) prefill_wgmma_kernel(const __grid_constant__ PrefillParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& shared = *reinterpret_cast<Shared<kHeadDim>*>(raw);
  PrefillWork w;
  if (!prefill_work(p, MatrixUnit::wgmma, w)) return;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shape<kHeadDim>::kStages; ++i) {
      mbarrier_init(shared_address(&shared.keys_full[i]), kLoaders);
      mbarrier_init(shared_address(&shared.values_full[i]), kLoaders);
      mbarrier_init(shared_address(&shared.keys_empty[i]), 2);
      mbarrier_init(shared_address(&shared.values_empty[i]), 2);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x >= kConsumers) {
    shrink_registers<kLoaderRegisters>();
    Loader<kHeadDim>(p, w, shared).run();
  } else {
    grow_registers<kConsumerRegisters>();
    Rows<kHeadDim>(p, w, shared).template run<Out>();
  }
#endif
}

}  // namespace

template <int kHeadDim>
void launch_prefill_wgmma(const AttnArgs& args, const PrefillWorkspace& w, cudaStream_t stream) {
  const KvShape& s = args.shape;
  EKV_CHECK(
      s.head_dim == kHeadDim && w.head_dim == kHeadDim && w.heads == args.heads && w.kv_heads == s.kv_heads,
      "workspace of another model");
  EKV_CHECK(args.out_element != Element::fp32, "the output is bf16 or fp16");
  const int tiles = max_prefill_tiles(w, MatrixUnit::wgmma, args.rows, args.num_seqs);
  if (tiles == 0 || args.rows < 2) return;
  const auto kernel = args.out_element == Element::bf16 ? prefill_wgmma_kernel<__nv_bfloat16, kHeadDim>
                                                        : prefill_wgmma_kernel<__half, kHeadDim>;
  constexpr int kBytes = sizeof(Shared<kHeadDim>);
  cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const PrefillParams p{args, prefill_plan_view(w, nullptr), args.heads / s.kv_heads, args.scale * kLog2E};
  kernel<<<tiles * s.kv_heads, kThreads, kBytes, stream>>>(p);
  cuda_check(cudaGetLastError());
}

bool device_has_wgmma() { return is_wgmma_code(prefill_wgmma_kernel<__half, 128>); }

#define EKV_PREFILL(head_dim) \
  template void launch_prefill_wgmma<head_dim>(const AttnArgs&, const PrefillWorkspace&, cudaStream_t)

EKV_PREFILL(64);
EKV_PREFILL(128);
EKV_PREFILL(256);

#undef EKV_PREFILL

}  // namespace ekv
