#pragma once
// skinny_wgmma.cuh -- what a CTA of a product of few rows does on sm_90a: y^T = W x^T, with W as the operand of
// 64 rows of wgmma and the rows of x as its columns.
//
// A CTA has a tile of 64 or 128 rows of W and one part of the inputs. One warp loads W, one loads x, a
// warpgroup multiplies. Each loader keeps a ring of stages full. The ring of W is filled before anything is
// waited for, so that W is on its way while the kernels ahead still run; then the CTA waits for them and for x.
//
// How CTAs lie on the device decides how much of W that is. Of a layer's four products and three norms at one
// row, where reading W and nothing else takes 104 us (H200, `kernel_gemm_bench chain`):
//
// * A CTA has a multiprocessor for itself and so the longest ring: 0.2 to 0.7 of what it reads of QKV and
//   output is under way or there when the kernel ahead ends. With two on each, of which one belongs to the
//   next product, that one takes bandwidth when this one needs it: 125 us.
// * Where 64 rows make no more CTAs than there are multiprocessors, that is the tile: as many CTAs in every
//   product, so that each starts where one ends, all at the same time. With half as many, the ones that find a
//   free multiprocessor are ahead of the others, which then take as long as they would alone: 127 us, now 107.
// * Clusters are small, of one or two CTAs: four wait 2 to 3 us until four multiprocessors are free at once.
//
// A cluster is the `split` parts of the inputs. At the end each part sends its sums to the parts that finish
// these outputs, and finishes its own share.

#include <cstddef>

#include "elastickv/base.h"
#include "kernels/device.cuh"
#include "kernels/skinny_split.h"
#include "kernels/tensor_map.h"
#include "kernels/vec8.cuh"
#include "kernels/wgmma.cuh"

namespace ekv {

constexpr int kSkinnyGroup = 128;                       // threads of the warpgroup that multiplies
constexpr int kSkinnyWarps = kSkinnyGroup / kWarpSize;  // of it
constexpr int kSkinnyWeightWarp = kSkinnyWarps;         // loads W
constexpr int kSkinnyRowsWarp = kSkinnyWeightWarp + 1;  // loads x
constexpr int kSkinnyThreads = (kSkinnyRowsWarp + 1) * kWarpSize;
constexpr int kSkinnyBoxInputs = 64;                      // the width of the swizzle
constexpr int kSkinnyRowBytes = kSkinnyBoxInputs * 2;     // of a box
constexpr int kSkinnyHalf = 64;                           // rows of W of one wgmma
constexpr int kSkinnyBlock = kSkinnyHalf / kSkinnyWarps;  // outputs whose sums a warp has of one wgmma

// Stages. x comes out of the L2 when the kernel ahead has ended, and takes a microsecond: a ring that holds
// much of it saves more than one that holds more of W (64 rows, tile of 64: 3, 4, 5 and 6 stages of x beside 8,
// 8, 7 and 6 of W take 11.1, 10.8, 10.7 and 10.9 us).
struct SkinnyRings {
  int w, x;
};
constexpr SkinnyRings skinny_rings(int rows, int tile) {
  if (tile == kHalfWgmmaOutputs)
    return rows <= 8    ? SkinnyRings{11, 16}
           : rows <= 16 ? SkinnyRings{10, 9}
           : rows <= 32 ? SkinnyRings{9, 7}
           : rows <= 64 ? SkinnyRings{7, 5}
                        : SkinnyRings{5, 3};
  return rows <= 8    ? SkinnyRings{12, 12}
         : rows <= 16 ? SkinnyRings{10, 18}
         : rows <= 32 ? SkinnyRings{9, 13}
         : rows <= 64 ? SkinnyRings{7, 9}
                      : SkinnyRings{6, 4};
}

// kRows: the width of wgmma, at least the rows of the product. kTile: rows of W of a CTA.
template <int kRows, int kTile>
struct SkinnyStages {
  static constexpr int kHalves = kTile / kSkinnyHalf, kBlocks = kTile / kSkinnyBlock;
  static constexpr int kWBox = kTile * kSkinnyRowBytes, kXBox = kRows * kSkinnyRowBytes;  // bytes
  static constexpr int kBoxes = kWgmmaOutputs / kTile;  // side by side, of a stage: 16 KiB of W
  static constexpr int kWBytes = kBoxes * kWBox;
  static constexpr int kInputs = kBoxes * kSkinnyBoxInputs;
  static constexpr int kPerUnit = kWgmmaInputs / kInputs;  // stages of the least that a part has
  static constexpr SkinnyRings kRings = skinny_rings(kRows, kTile);
  static constexpr int kW = kRings.w, kX = kRings.x;
};

// Sums of eight rows that a thread has of a block: of each of its two outputs two rows.
using SkinnySum = float4;

template <int kRows, int kTile>
struct SkinnyShared {
  using Stages = SkinnyStages<kRows, kTile>;
  alignas(1024) uint8_t w[Stages::kW][Stages::kBoxes][Stages::kWBox];
  alignas(1024) uint8_t x[Stages::kX][Stages::kBoxes][Stages::kXBox];
  SkinnySum sent[Stages::kBlocks * kRows / 8 * (kMaxWgmmaSplit - 1) / kMaxWgmmaSplit][kWarpSize];
  uint64_t w_full[Stages::kW], w_empty[Stages::kW], x_full[Stages::kX], x_empty[Stages::kX], all_sent;

  // Without what the alignment adds at the end.
  static constexpr unsigned bytes() { return offsetof(SkinnyShared, all_sent) + sizeof(all_sent); }
};
// Of the 228 KiB of a multiprocessor: the rest is for CTAs of a norm, which take 1.2 each and wait there.
constexpr unsigned kMostSkinnyBytes = 217 * 1024;

// Outputs of a CTA: of a gated product half of its rows of W are of gate, half of up.
constexpr int skinny_outputs(const SkinnyGemmArgs& a, int tile) { return a.gated ? tile / 2 : tile; }
constexpr int skinny_grid(const SkinnyGemmArgs& a, int tile) {
  return ceil_div(a.outputs, skinny_outputs(a, tile)) * a.split;
}

struct SkinnyParams {
  CUtensorMap w;  // [outputs, gated twice as many][inputs], boxes of kSkinnyHalf x kSkinnyBoxInputs
  CUtensorMap x;  // [rows][inputs], boxes of kRows x kSkinnyBoxInputs
  SkinnyGemmArgs a;
};

inline SkinnyParams make_skinny_params(const SkinnyGemmArgs& a, int room) {
  const uint64_t inputs = uint64_t(a.inputs), outputs = uint64_t(a.outputs), rows = uint64_t(a.rows);
  SkinnyParams p{};
  p.w = make_tensor_map(a.element, a.w, {inputs, outputs * (a.gated ? 2 : 1)}, {kSkinnyBoxInputs, kSkinnyHalf},
                        L2Fetch::exact);
  p.x = make_tensor_map(a.element, a.x, {inputs, rows}, {kSkinnyBoxInputs, uint32_t(room)});
  p.a = a;
  return p;
}

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

// What of the product this CTA has.
struct SkinnyPart {
  int part;  // in the cluster
  int first_output;
  int first_unit, units;  // of kWgmmaInputs

  __device__ SkinnyPart(const SkinnyGemmArgs& a, int tile) {
    const int all = ceil_div(a.inputs, kWgmmaInputs);
    part = int(blockIdx.x) % a.split;
    first_output = int(blockIdx.x) / a.split * skinny_outputs(a, tile);
    first_unit = all * part / a.split;
    units = all * (part + 1) / a.split - first_unit;
  }
};

// The part that finishes a block, and the block's place in its share. A warp has one block of each half; where
// the halves are gate and up of the same outputs they belong together.
template <int kBlocks, int kSplit, bool kGated>
struct SkinnyOwner {
  static constexpr int kShare = kBlocks / kSplit;  // blocks
  int part, place;

  __device__ SkinnyOwner(int half, int warp) {
    const int block = kGated ? warp * (kBlocks / kSkinnyWarps) + half : half * kSkinnyWarps + warp;
    part = block / kShare, place = block % kShare;
  }
};

// Of a ring whose stages are filled by one thread, and free when one has signalled.
template <int kStages>
__device__ __forceinline__ void init_skinny_ring(uint64_t (&full)[kStages], uint64_t (&empty)[kStages]) {
  for (int i = 0; i < kStages; ++i) {
    mbarrier_init(shared_address(&full[i]), 1);
    mbarrier_init(shared_address(&empty[i]), 1);
  }
  mbarrier_init_fence();
  fence_proxy_async();
}

// Keeps the ring of W full. One thread.
template <int kRows, int kTile>
class SkinnyWeights {
 public:
  __device__ SkinnyWeights(const SkinnyParams& p, const SkinnyPart& part, SkinnyShared<kRows, kTile>& shared)
      : p_(p), part_(part), shared_(shared), stages_(part.units * Stages::kPerUnit) {}

  // Before any other thread knows the barriers: fills the ring.
  __device__ void start() {
    init_skinny_ring(shared_.w_full, shared_.w_empty);
    for (; next_ < min(Stages::kW, stages_); ++next_) load();
  }
  __device__ void run() {
    for (; next_ < stages_; ++next_) {
      mbarrier_wait(shared_address(&shared_.w_empty[place_.stage]), place_.phase ^ 1);
      load();
    }
  }

 private:
  using Stages = SkinnyStages<kRows, kTile>;

  // Outputs and inputs that do not exist are zeros, and are counted.
  __device__ void load() {
    const uint32_t full = shared_address(&shared_.w_full[place_.stage]);
    mbarrier_arrive_expect(full, Stages::kWBytes);
    for (int box = 0; box < Stages::kBoxes; ++box)
      for (int half = 0; half < Stages::kHalves; ++half)
        tensor_load_once(shared_address(shared_.w[place_.stage][box] + half * kSkinnyHalf * kSkinnyRowBytes),
                         &p_.w, full,
                         part_.first_unit * kWgmmaInputs + next_ * Stages::kInputs + box * kSkinnyBoxInputs,
                         part_.first_output + half * (p_.a.gated ? p_.a.outputs : kSkinnyHalf));
    place_.advance();
  }

  const SkinnyParams& p_;
  const SkinnyPart& part_;
  SkinnyShared<kRows, kTile>& shared_;
  const int stages_;
  int next_ = 0;
  Place<Stages::kW> place_;
};

// Keeps the ring of x full. One thread.
template <int kRows, int kTile>
class SkinnyRows {
 public:
  __device__ SkinnyRows(const SkinnyParams& p, const SkinnyPart& part, SkinnyShared<kRows, kTile>& shared)
      : p_(p), part_(part), shared_(shared) {}

  __device__ void start() {
    init_skinny_ring(shared_.x_full, shared_.x_empty);
    prefetch_tensor_map(&p_.x);
  }
  // After the kernels ahead have ended.
  __device__ void run() {
    for (int stage = 0; stage < part_.units * Stages::kPerUnit; ++stage) {
      const uint32_t full = shared_address(&shared_.x_full[place_.stage]);
      mbarrier_wait(shared_address(&shared_.x_empty[place_.stage]), place_.phase ^ 1);
      mbarrier_arrive_expect(full, Stages::kBoxes * Stages::kXBox);
      for (int box = 0; box < Stages::kBoxes; ++box)
        tensor_load(shared_address(shared_.x[place_.stage][box]), &p_.x, full,
                    part_.first_unit * kWgmmaInputs + stage * Stages::kInputs + box * kSkinnyBoxInputs, 0);
      place_.advance();
    }
  }

 private:
  using Stages = SkinnyStages<kRows, kTile>;

  const SkinnyParams& p_;
  const SkinnyPart& part_;
  SkinnyShared<kRows, kTile>& shared_;
  Place<Stages::kX> place_;
};

// The sums of the part, and the outputs of its share. One warpgroup.
//
// Lane (i, j) = (lane % 4, lane / 4) holds outputs j and j + 8 of its warp's block of each half, rows 2i and 2i
// + 1 of each 8.
template <class T, int kRows, int kTile>
class SkinnySums {
 public:
  __device__ SkinnySums(const SkinnyParams& p, const SkinnyPart& part, SkinnyShared<kRows, kTile>& shared)
      : a_(p.a), part_(part), shared_(shared), warp_(threadIdx.x / kWarpSize), lane_(threadIdx.x % kWarpSize) {}

  __device__ void run() {
    for (int stage = 0; stage < part_.units * Stages::kPerUnit; ++stage) add(stage);
    wgmma_wait<0>();
    pin();
    if constexpr (kTile == kWgmmaOutputs) {
      if (a_.gated) return finish<true>();
    }
    finish<false>();
  }

 private:
  using Stages = SkinnyStages<kRows, kTile>;
  static constexpr int kHalves = Stages::kHalves, kEights = kRows / 8;
  template <int kSplit, bool kGated>
  using Owner = SkinnyOwner<Stages::kBlocks, kSplit, kGated>;

  // One stage is being read while the next one is started.
  __device__ void add(int stage) {
    mbarrier_wait(shared_address(&shared_.w_full[w_.stage]), w_.phase);
    mbarrier_wait(shared_address(&shared_.x_full[x_.stage]), x_.phase);
    pin();
    wgmma_fence();
#pragma unroll
    for (int box = 0; box < Stages::kBoxes; ++box) {
      const uint32_t w = shared_address(shared_.w[w_.stage][box]);
      const uint64_t x = wgmma_tile(shared_address(shared_.x[x_.stage][box]));
#pragma unroll
      for (int step = 0; step < kSkinnyBoxInputs / 16; ++step)
#pragma unroll
        for (int half = 0; half < kHalves; ++half)
          wgmma_shared<T>(sums_[half],
                          wgmma_at(wgmma_tile(w + half * kSkinnyHalf * kSkinnyRowBytes), step * 32),
                          wgmma_at(x, step * 32), stage > 0 || box > 0 || step > 0);
    }
    wgmma_commit();
    wgmma_wait<1>();
    pin();
    if (stage > 0 && threadIdx.x == 0) {
      mbarrier_arrive(shared_address(&shared_.w_empty[w_before_]));
      mbarrier_arrive(shared_address(&shared_.x_empty[x_before_]));
    }
    w_before_ = w_.stage, x_before_ = x_.stage;
    w_.advance(), x_.advance();
  }
  __device__ void pin() {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) wgmma_pin(sums_[half]);
  }

  template <bool kGated>
  __device__ void finish() {
    static_assert(kMaxWgmmaSplit == 4 && kMaxWgmmaSplit <= kSkinnyWarps);
    if (a_.split == 1) return finish<1, kGated>();
    if (a_.split == 2) return finish<2, kGated>();
    finish<4, kGated>();
  }
  template <int kSplit, bool kGated>
  __device__ void finish() {
    if constexpr (kSplit > 1) {
#pragma unroll
      for (int half = 0; half < kHalves; ++half) send<kSplit, kGated>(half);
      mbarrier_wait(shared_address(&shared_.all_sent), 0);
    }
#pragma unroll
    for (int half = 0; half < (kGated ? 1 : kHalves); ++half) {
      if (Owner<kSplit, kGated>(half, warp_).part != part_.part) continue;
#pragma unroll
      for (int i = 0; i < kEights; ++i) {
        SkinnySum y = added<kSplit, kGated>(half, i);
        if constexpr (kGated) y = activated(y, added<kSplit, true>(1, i));
        store(half, i, y);
        if constexpr (kRows > 64) __syncwarp();  // keeps the sums of later rows out of registers until then
      }
    }
  }

  // Where a part keeps a block of another one: eights, and of each a line of the lanes' sums.
  template <int kSplit, bool kGated>
  __device__ static int place_of(int from, int to, int place) {
    return ((from - (from > to)) * Owner<kSplit, kGated>::kShare + place) * kEights;
  }
  template <int kSplit, bool kGated>
  __device__ void send(int half) const {
    const Owner<kSplit, kGated> owner(half, warp_);
    if (owner.part == part_.part) return;
    const uint32_t barrier = cluster_address(shared_address(&shared_.all_sent), owner.part);
    const uint32_t to = cluster_address(
        shared_address(&shared_.sent[place_of<kSplit, kGated>(part_.part, owner.part, owner.place)][lane_]),
        owner.part);
#pragma unroll
    for (int i = 0; i < kEights; ++i) send16(to + i * uint32_t(sizeof shared_.sent[0]), sum(half, i), barrier);
  }
  // In the order of the parts.
  template <int kSplit, bool kGated>
  __device__ SkinnySum added(int half, int i) const {
    const int place = Owner<kSplit, kGated>(half, warp_).place;
    SkinnySum total{};
#pragma unroll
    for (int n = 0; n < kSplit; ++n) {
      const SkinnySum one = n == part_.part
                                ? sum(half, i)
                                : shared_.sent[place_of<kSplit, kGated>(n, part_.part, place) + i][lane_];
      total = n == 0 ? one : SkinnySum{total.x + one.x, total.y + one.y, total.z + one.z, total.w + one.w};
    }
    return total;
  }
  __device__ SkinnySum sum(int half, int i) const {
    const float* const s = sums_[half] + 4 * i;
    return {s[0], s[1], s[2], s[3]};
  }

  __device__ static SkinnySum activated(SkinnySum gate, SkinnySum up) {
    const auto one = [](float g, float u) {
      using Type = Pair16<T>;
      return silu_mul(Type::value(Type::round(g)), Type::value(Type::round(u)));
    };
    return {one(gate.x, up.x), one(gate.y, up.y), one(gate.z, up.z), one(gate.w, up.w)};
  }
  __device__ void store(int half, int i, SkinnySum y) const {
    const int row = i * 8 + lane_ % 4 * 2;
    const int output = part_.first_output + half * kSkinnyHalf + warp_ * kSkinnyBlock + lane_ / 4;
    store(row, output, y.x), store(row + 1, output, y.y);
    store(row, output + 8, y.z), store(row + 1, output + 8, y.w);
  }
  __device__ void store(int row, int output, float y) const {
    if (row >= a_.rows || output >= a_.outputs) return;
    const size_t at = size_t(row) * a_.out_stride + output;
    if (a_.fp32_out)
      static_cast<float*>(a_.y)[at] = y;
    else
      static_cast<T*>(a_.y)[at] = Pair16<T>::round(y);
  }

  const SkinnyGemmArgs& a_;
  const SkinnyPart& part_;
  SkinnyShared<kRows, kTile>& shared_;
  const int warp_, lane_;
  int w_before_ = 0, x_before_ = 0;
  Place<Stages::kW> w_;
  Place<Stages::kX> x_;
  float sums_[kHalves][kRows / 2];
};

// Announces what the other parts will send: their sums of this part's share.
template <int kRows, int kTile>
__device__ __forceinline__ void expect_sums(int split, SkinnyShared<kRows, kTile>& shared) {
  constexpr int kBlockBytes = kRows / 8 * int(sizeof shared.sent[0]);
  const int share = SkinnyStages<kRows, kTile>::kBlocks / split;
  const uint32_t barrier = shared_address(&shared.all_sent);
  mbarrier_init(barrier, 1);
  mbarrier_init_fence();
  mbarrier_arrive_expect(barrier, uint32_t((split - 1) * share * kBlockBytes));
}

// All threads of a CTA of a cluster of `split`. A CTA may leave when it has sent and stored: what comes to it
// has come then, and what it sends comes out of registers.
template <class T, int kRows, int kTile>
__device__ __forceinline__ void skinny_wgmma(const SkinnyParams& p, SkinnyShared<kRows, kTile>& shared) {
  const SkinnyPart part(p.a, kTile);
  const int warp = threadIdx.x / kWarpSize;
  const bool first_lane = threadIdx.x % kWarpSize == 0;
  let_next_kernel_begin();
  SkinnyWeights<kRows, kTile> weights(p, part, shared);
  SkinnyRows<kRows, kTile> rows(p, part, shared);
  if (warp == kSkinnyWeightWarp && first_lane) weights.start();
  if (warp == kSkinnyRowsWarp && first_lane) rows.start(), expect_sums<kRows, kTile>(p.a.split, shared);
  __syncwarp();
  cluster_arrive_relaxed();  // mbarrier_init_fence() orders what others must see
  cluster_wait();
  if (warp == kSkinnyWeightWarp) {
    if (first_lane) weights.run();
  } else {
    wait_for_kernels_ahead();
    if (warp < kSkinnyWeightWarp) SkinnySums<T, kRows, kTile>(p, part, shared).run();
    if (warp == kSkinnyRowsWarp && first_lane) rows.run();
  }
}

#endif

}  // namespace ekv
