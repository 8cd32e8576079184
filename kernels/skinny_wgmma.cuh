#pragma once
// skinny_wgmma.cuh -- what a CTA of a product of few rows does on sm_90a: y^T = W x^T, with W as the operand of
// 64 rows of wgmma and the rows of x as its columns.
//
// A CTA has 128 outputs and one part of the inputs. One warp loads W, one loads x, a warpgroup multiplies. Each
// loader keeps a ring of stages of 64 inputs full. The ring of W is filled before anything is waited for, so
// that W is on its way while the kernels ahead still run; then the CTA waits for them and for x. Two CTAs lie
// on a multiprocessor, or one beside the last one of another kernel: 128 to 160 KiB of W under way on each,
// against the 32 or so that latency times bandwidth asks for (H200).
//
// A cluster is `split` parts of the inputs times `columns` neighbouring tiles of outputs. CTAs of one part need
// the same x: each loads a slice of its rows for all of them, which halves what is read of the L2 beside W. The
// parts add up their sums at the end, in their order, each for its share of the outputs.

#include <cstddef>

#include "elastickv/base.h"
#include "kernels/device.cuh"
#include "kernels/skinny_split.h"
#include "kernels/tensor_map.h"
#include "kernels/vec8.cuh"
#include "kernels/wgmma.cuh"

namespace ekv {

constexpr int kSkinnyGroup = 128;                            // threads of the warpgroup that multiplies
constexpr int kSkinnyWeightWarp = kSkinnyGroup / kWarpSize;  // loads W
constexpr int kSkinnyRowsWarp = kSkinnyWeightWarp + 1;       // loads x
constexpr int kSkinnyThreads = (kSkinnyRowsWarp + 1) * kWarpSize;
constexpr int kSkinnyRowBytes = kWgmmaInputs * 2;                    // of a stage: the width of the swizzle
constexpr int kSkinnyWeightBytes = kWgmmaOutputs * kSkinnyRowBytes;  // of a stage
constexpr int kSkinnyHalf = 64, kSkinnyHalves = kWgmmaOutputs / kSkinnyHalf;  // rows of W of one wgmma

// Where a sum is, in floats. Rows of a whole number of lines of 128 bytes, so that what a CTA reads of
// another's row is no more lines than it must be; inside a line the 16-byte chunks are swapped by the row, so
// that the 32 stores of a warp of SkinnySums hit 32 banks, and so do eight threads of SkinnyShare with 16 bytes
// each.
constexpr int skinny_swap(int row) { return (row & 6) * 4 ^ (row & 1) * 16; }
constexpr int skinny_place(int row, int output) { return row * kWgmmaOutputs + (output ^ skinny_swap(row)); }

// kRows: the width of wgmma, at least the rows of the product.
template <int kRows>
struct SkinnyStages {
  static constexpr int kXBytes = kRows * kSkinnyRowBytes;
  static constexpr int kW = kRows <= 32 ? 6 : kRows == 64 ? 5 : 4;
  static constexpr int kX = kRows <= 16 ? 6 : kRows <= 64 ? 4 : 3;  // from the L2, which is nearer
};

template <int kRows>
struct SkinnyShared {
  using Stages = SkinnyStages<kRows>;
  alignas(1024) uint8_t w[Stages::kW][kSkinnyWeightBytes];
  alignas(1024) uint8_t x[Stages::kX][Stages::kXBytes];
  uint64_t w_full[Stages::kW], w_empty[Stages::kW], x_full[Stages::kX], x_empty[Stages::kX];

  // Without what the alignment adds at the end.
  static constexpr unsigned bytes() { return offsetof(SkinnyShared, x_empty) + sizeof(x_empty); }

  // At skinny_place(), of this part, in place of the stages when all have been read.
  __device__ float* sums() { return reinterpret_cast<float*>(w); }
  static constexpr size_t kSumBytes = size_t(kRows) * kWgmmaOutputs * sizeof(float);
};
// Two CTAs on a multiprocessor of 228 KiB, of which each takes 1 KiB for the system.
template <int kRows>
constexpr bool kSkinnyFitsTwice = 2 * (SkinnyShared<kRows>::bytes() + 1024) <= 228 * 1024;
static_assert(kSkinnyFitsTwice<8> && kSkinnyFitsTwice<16> && kSkinnyFitsTwice<32> && kSkinnyFitsTwice<64> &&
              kSkinnyFitsTwice<128>);
static_assert(SkinnyShared<128>::kSumBytes <= offsetof(SkinnyShared<128>, w_full));

// Outputs of a CTA: of a gated product half of its rows of W are of gate, half of up.
constexpr int skinny_outputs(const SkinnyGemmArgs& a) { return a.gated ? kSkinnyHalf : kWgmmaOutputs; }
constexpr int skinny_grid(const SkinnyGemmArgs& a, int columns) {
  return ceil_div(ceil_div(a.outputs, skinny_outputs(a)), columns) * columns * a.split;
}

struct SkinnyParams {
  CUtensorMap w;  // [outputs, gated twice as many][inputs], boxes of kSkinnyHalf x kWgmmaInputs
  CUtensorMap x;  // [rows][inputs], boxes of kRows / columns x kWgmmaInputs
  SkinnyGemmArgs a;
  int columns;
  bool whole_quads;  // four neighbouring outputs from a multiple of four on exist together and are stored at
                     // once
};

inline SkinnyParams make_skinny_params(const SkinnyGemmArgs& a, int columns, int room) {
  const uint64_t inputs = uint64_t(a.inputs), outputs = uint64_t(a.outputs), rows = uint64_t(a.rows);
  SkinnyParams p{};
  p.w = make_tensor_map(a.element, a.w, {inputs, outputs * (a.gated ? 2 : 1)}, {kWgmmaInputs, kSkinnyHalf});
  p.x = make_tensor_map(a.element, a.x, {inputs, rows}, {kWgmmaInputs, uint32_t(room / columns)});
  p.a = a, p.columns = columns;
  const size_t quad_bytes = 4 * (a.fp32_out ? sizeof(float) : sizeof(uint16_t));
  p.whole_quads =
      a.outputs % 4 == 0 && a.out_stride % 4 == 0 && reinterpret_cast<uintptr_t>(a.y) % quad_bytes == 0;
  return p;
}

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

enum SkinnyBarrier : int { kSkinnyAllRead = 1, kSkinnyAllWritten };

// What of the product this CTA has.
struct SkinnyPart {
  int part, column;         // in the cluster, whose CTA part * columns + column this is
  int first_output;         // of the CTA
  int first_block, blocks;  // of kWgmmaInputs

  __device__ explicit SkinnyPart(const SkinnyParams& p) {
    const int ctas = p.a.split * p.columns, rank = int(blockIdx.x) % ctas,
              all = ceil_div(p.a.inputs, kWgmmaInputs);
    part = rank / p.columns, column = rank % p.columns;
    first_output = (int(blockIdx.x) / ctas * p.columns + column) * skinny_outputs(p.a);
    first_block = all * part / p.a.split;
    blocks = all * (part + 1) / p.a.split - first_block;
  }
};

// Of a ring whose stages are filled by one thread, and free when `readers` have signalled.
template <int kStages>
__device__ __forceinline__ void init_skinny_ring(uint64_t (&full)[kStages], uint64_t (&empty)[kStages],
                                                 int readers) {
  for (int i = 0; i < kStages; ++i) {
    mbarrier_init(shared_address(&full[i]), 1);
    mbarrier_init(shared_address(&empty[i]), readers);
  }
  mbarrier_init_fence();
  fence_proxy_async();
}

// Keeps the ring of W full. One thread.
template <int kRows>
class SkinnyWeights {
 public:
  __device__ SkinnyWeights(const SkinnyParams& p, const SkinnyPart& part, SkinnyShared<kRows>& shared)
      : p_(p), part_(part), shared_(shared) {}

  // Before any other thread knows the barriers: fills the ring.
  __device__ void start() {
    init_skinny_ring(shared_.w_full, shared_.w_empty, 1);
    for (; next_ < min(kStages, part_.blocks); ++next_) load();
  }
  __device__ void run() {
    for (; next_ < part_.blocks; ++next_) {
      mbarrier_wait(shared_address(&shared_.w_empty[place_.stage]), place_.phase ^ 1);
      load();
    }
  }

 private:
  static constexpr int kStages = SkinnyStages<kRows>::kW;

  // Outputs and inputs that do not exist are zeros, and are counted.
  __device__ void load() {
    const uint32_t full = shared_address(&shared_.w_full[place_.stage]);
    mbarrier_arrive_expect(full, kSkinnyWeightBytes);
    for (int half = 0; half < kSkinnyHalves; ++half)
      tensor_load_once(shared_address(shared_.w[place_.stage] + half * kSkinnyHalf * kSkinnyRowBytes), &p_.w,
                       full, (part_.first_block + next_) * kWgmmaInputs,
                       part_.first_output + half * (p_.a.gated ? p_.a.outputs : kSkinnyHalf));
    place_.advance();
  }

  const SkinnyParams& p_;
  const SkinnyPart& part_;
  SkinnyShared<kRows>& shared_;
  int next_ = 0;
  Place<kStages> place_;
};

// Keeps the rings of x of all CTAs of the part full, each of them with its slice of the rows. One thread.
template <int kRows>
class SkinnyRows {
 public:
  __device__ SkinnyRows(const SkinnyParams& p, const SkinnyPart& part, SkinnyShared<kRows>& shared)
      : p_(p), part_(part), shared_(shared) {}

  __device__ void start() {
    init_skinny_ring(shared_.x_full, shared_.x_empty, p_.columns);
    prefetch_tensor_map(&p_.x);
  }
  // After the kernels ahead have ended. A stage is free when the warpgroups of all CTAs of the part have read
  // it, and full when the slices of all have arrived; another's may come before this thread has announced it,
  // but the phase cannot end without the announcement.
  __device__ void run() {
    const int rows = kRows / p_.columns, first = rows * part_.column;
    const uint16_t ctas = uint16_t(((1 << p_.columns) - 1) << (part_.part * p_.columns));
    for (int block = 0; block < part_.blocks; ++block) {
      const uint32_t full = shared_address(&shared_.x_full[place_.stage]);
      const uint32_t to = shared_address(shared_.x[place_.stage]) + first * kSkinnyRowBytes;
      const int input = (part_.first_block + block) * kWgmmaInputs;
      mbarrier_wait(shared_address(&shared_.x_empty[place_.stage]), place_.phase ^ 1);
      mbarrier_arrive_expect(full, SkinnyStages<kRows>::kXBytes);
      if (p_.columns == 1)
        tensor_load(to, &p_.x, full, input, 0);
      else
        tensor_load_multicast(to, &p_.x, full, input, first, ctas);
      place_.advance();
    }
  }

 private:
  static constexpr int kStages = SkinnyStages<kRows>::kX;

  const SkinnyParams& p_;
  const SkinnyPart& part_;
  SkinnyShared<kRows>& shared_;
  Place<kStages> place_;
};

// The sums of the part. One warpgroup.
//
// Lane (i, j) = (lane % 4, lane / 4) holds outputs j and j + 8 of its warp's 16 of each half, rows 2i and 2i +
// 1 of each 8.
template <class T, int kRows>
class SkinnySums {
 public:
  __device__ SkinnySums(const SkinnyParams& p, const SkinnyPart& part, SkinnyShared<kRows>& shared)
      : part_(part), shared_(shared), warp_(threadIdx.x / kWarpSize), lane_(threadIdx.x % kWarpSize) {
    signals_ = warp_ < p.columns && lane_ == 0;
    const uint32_t own = shared_address(shared.x_empty);
    x_empty_ = p.columns == 1 ? own : cluster_address(own, part.part * p.columns + warp_ % p.columns);
  }

  // Leaves the sums in shared memory.
  __device__ void run() {
    for (int block = 0; block < part_.blocks; ++block) add(block);
    named_sync(kSkinnyAllRead, kSkinnyGroup);  // the sums take the place of the stages
    float* const sums = shared_.sums();
    // Eight outputs more, or one row more, change bits that the swapping changes, too; all else is added.
    const int first = skinny_place(lane_ % 4 * 2, warp_ * 16 + lane_ / 4);
#pragma unroll
    for (int half = 0; half < kSkinnyHalves; ++half)
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) {
        const int row = i / 4 * 8 + i % 2, output = half * kSkinnyHalf;
        sums[row * kWgmmaOutputs + output + (first ^ i % 4 / 2 * 8 ^ skinny_swap(i % 2))] = sums_[half][i];
      }
  }

 private:
  using Stages = SkinnyStages<kRows>;

  // A stage is free as soon as it has been read: the ring being full is worth more than the next products
  // beginning before these have ended.
  __device__ void add(int block) {
    mbarrier_wait(shared_address(&shared_.w_full[w_.stage]), w_.phase);
    mbarrier_wait(shared_address(&shared_.x_full[x_.stage]), x_.phase);
    const uint32_t w = shared_address(shared_.w[w_.stage]);
    const uint64_t x = wgmma_tile(shared_address(shared_.x[x_.stage]));
#pragma unroll
    for (int half = 0; half < kSkinnyHalves; ++half) wgmma_pin(sums_[half]);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kWgmmaInputs / 16; ++step)
#pragma unroll
      for (int half = 0; half < kSkinnyHalves; ++half)
        wgmma_shared<T>(sums_[half], wgmma_at(wgmma_tile(w + half * kSkinnyHalf * kSkinnyRowBytes), step * 32),
                        wgmma_at(x, step * 32), block > 0 || step > 0);
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int half = 0; half < kSkinnyHalves; ++half) wgmma_pin(sums_[half]);
    if (threadIdx.x == 0) mbarrier_arrive(shared_address(&shared_.w_empty[w_.stage]));
    // Only what a loader waits for: then none of these is still on its way to a CTA that has left.
    if (signals_ && block + Stages::kX < part_.blocks)
      mbarrier_arrive_cluster(x_empty_ + x_.stage * uint32_t(sizeof(uint64_t)));
    w_.advance(), x_.advance();
  }

  const SkinnyPart& part_;
  SkinnyShared<kRows>& shared_;
  const int warp_, lane_;
  bool signals_;
  uint32_t x_empty_;  // barriers of the CTA that this thread signals
  Place<Stages::kW> w_;
  Place<Stages::kX> x_;
  float sums_[kSkinnyHalves][kRows / 2];
};

template <class T>
__device__ __forceinline__ void store_skinny(const SkinnyParams& p, int row, int output, float4 sum) {
  const size_t at = size_t(row) * p.a.out_stride + output;
  float* const y32 = static_cast<float*>(p.a.y) + at;
  T* const y16 = static_cast<T*>(p.a.y) + at;
  if (p.whole_quads && output < p.a.outputs) {
    if (p.a.fp32_out)
      *reinterpret_cast<float4*>(y32) = sum;
    else
      *reinterpret_cast<uint2*>(y16) = make_uint2(Pair16<T>::pack(sum.x, sum.y), Pair16<T>::pack(sum.z, sum.w));
    return;
  }
  const float each[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (output + i >= p.a.outputs) break;
    if (p.a.fp32_out)
      y32[i] = each[i];
    else
      y16[i] = Pair16<T>::round(each[i]);
  }
}

template <class T>
__device__ __forceinline__ float gate_skinny(float gate, float up) {
  using Type = Pair16<T>;
  return silu_mul(Type::value(Type::round(gate)), Type::value(Type::round(up)));
}

// Threads of a CTA that finish its outputs. Without parts to add, those that wrote the sums: a barrier among
// them is enough.
template <int kSplit>
constexpr int kSkinnyFinishers = kSplit == 1 ? kSkinnyGroup : kSkinnyThreads;

// The CTA's share of the outputs, four at a time. A thread has the same four of every row that is its own.
//
// What another CTA holds comes over the network of the cluster, which takes long to answer: the sums of several
// rows are asked for before the first are added.
template <class T, int kRows, int kSplit, bool kGated>
class SkinnyShare {
 public:
  // `sums`: of this part.
  __device__ SkinnyShare(const SkinnyParams& p, const SkinnyPart& part, float* sums)
      : p_(p),
        first_row_(int(threadIdx.x) / kQuads),
        first_output_(part.first_output),
        output_(part.part * kOutputs + int(threadIdx.x) % kQuads * 4) {
#pragma unroll
    for (int n = 0; n < kSplit; ++n)
      from_[n] = n == part.part ? sums : shared_of(n * p.columns + part.column, sums);
  }

  // Every sum that a thread has asked for goes into an output that it stores: none is still on its way from
  // another CTA when the thread returns.
  __device__ void finish() const {
    if (first_output_ + output_ >= p_.a.outputs) return;
#pragma unroll 1
    for (int first = 0; first_row_ + first < p_.a.rows; first += kAtOnce * kRowStep) {
      Sums sums[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (row(first, i) < p_.a.rows) ask(row(first, i), sums[i]);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (row(first, i) < p_.a.rows)
          store_skinny<T>(p_, row(first, i), first_output_ + output_, result(sums[i]));
    }
  }

 private:
  static constexpr int kOutputs = (kGated ? kSkinnyHalf : kWgmmaOutputs) / kSplit, kQuads = kOutputs / 4;
  static constexpr int kRowStep = kSkinnyFinishers<kSplit> / kQuads;  // between the rows of a thread
  static_assert(kSkinnyFinishers<kSplit> % kQuads == 0);
  static constexpr int kHalves = kGated ? kSkinnyHalves : 1;
  static constexpr int kItems = ceil_div(kRows, kRowStep);     // rows of a thread
  static constexpr int kMostAtOnce = 16 / (kSplit * kHalves);  // 64 registers
  static constexpr int kTurns = ceil_div(kItems, kMostAtOnce);
  static constexpr int kAtOnce = ceil_div(kItems, kTurns);
  using Sums = float4[kHalves][kSplit];

  __device__ int row(int first, int i) const { return first_row_ + first + i * kRowStep; }
  __device__ void ask(int row, Sums& sums) const {
    const int place = skinny_place(row, output_);
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
#pragma unroll
      for (int n = 0; n < kSplit; ++n)
        sums[half][n] = *reinterpret_cast<const float4*>(from_[n] + place + half * kSkinnyHalf);
  }
  // In the order of the parts.
  __device__ static float4 added(const float4 (&of_part)[kSplit]) {
    float4 sum = of_part[0];
#pragma unroll
    for (int n = 1; n < kSplit; ++n)
      sum.x += of_part[n].x, sum.y += of_part[n].y, sum.z += of_part[n].z, sum.w += of_part[n].w;
    return sum;
  }
  __device__ static float4 result(const Sums& sums) {
    const float4 sum = added(sums[0]);
    if constexpr (kGated) {
      const float4 up = added(sums[1]);
      return {gate_skinny<T>(sum.x, up.x), gate_skinny<T>(sum.y, up.y), gate_skinny<T>(sum.z, up.z),
              gate_skinny<T>(sum.w, up.w)};
    }
    return sum;
  }

  const SkinnyParams& p_;
  const int first_row_, first_output_,
      output_;                 // the first of the thread; of the CTA; of the thread in the CTA
  const float* from_[kSplit];  // sums of the parts
};

// After the sums of this part have been written to shared memory. A barrier of the cluster costs a fence of the
// device: there is one where parts are added, and the second, which keeps a CTA from leaving while its sums are
// read, orders no memory. The barrier of the CTA would not be needed there: racecheck sees no order between a
// write and a read by a loader's warp, which came to the barrier between them long before, if that is the only
// one.
template <class T, int kRows, int kSplit, bool kGated>
__device__ __forceinline__ void finish_skinny_split(const SkinnyParams& p, const SkinnyPart& part,
                                                    float* sums) {
  const SkinnyShare<T, kRows, kSplit, kGated> share(p, part, sums);
  if constexpr (kSplit == 1) {
    if (threadIdx.x >= kSkinnyFinishers<kSplit>) return;
    named_sync(kSkinnyAllWritten, kSkinnyFinishers<kSplit>);
    share.finish();
  } else {
    __syncthreads();
    cluster_barrier();
    share.finish();
    __syncwarp();
    cluster_arrive_relaxed();
    cluster_wait();
  }
}
template <class T, int kRows, int kSplit>
__device__ __forceinline__ void finish_skinny_split(const SkinnyParams& p, const SkinnyPart& part,
                                                    float* sums) {
  if (p.a.gated)
    finish_skinny_split<T, kRows, kSplit, true>(p, part, sums);
  else
    finish_skinny_split<T, kRows, kSplit, false>(p, part, sums);
}
template <class T, int kRows>
__device__ __forceinline__ void finish_skinny(const SkinnyParams& p, const SkinnyPart& part, float* sums) {
  static_assert(kMaxSkinnySplit == 8);
  if (p.a.split == 1) return finish_skinny_split<T, kRows, 1>(p, part, sums);
  if (p.a.split == 2) return finish_skinny_split<T, kRows, 2>(p, part, sums);
  if (p.a.split == 4) return finish_skinny_split<T, kRows, 4>(p, part, sums);
  finish_skinny_split<T, kRows, 8>(p, part, sums);
}

// All threads of a CTA of a cluster of split * columns.
template <class T, int kRows>
__device__ __forceinline__ void skinny_wgmma(const SkinnyParams& p, SkinnyShared<kRows>& shared) {
  const SkinnyPart part(p);
  const int warp = threadIdx.x / kWarpSize;
  const bool first_lane = threadIdx.x % kWarpSize == 0;
  let_next_kernel_begin();
  SkinnyWeights<kRows> weights(p, part, shared);
  SkinnyRows<kRows> rows(p, part, shared);
  if (warp == kSkinnyWeightWarp && first_lane) weights.start();
  if (warp == kSkinnyRowsWarp && first_lane) rows.start();
  __syncwarp();
  cluster_arrive_relaxed();  // mbarrier_init_fence() orders what others must see
  cluster_wait();
  if (warp == kSkinnyWeightWarp) {
    if (first_lane) weights.run();
  } else {
    wait_for_kernels_ahead();
    if (warp < kSkinnyWeightWarp) SkinnySums<T, kRows>(p, part, shared).run();
    if (warp == kSkinnyRowsWarp && first_lane) rows.run();
  }
  __syncwarp();
  finish_skinny<T, kRows>(p, part, shared.sums());
}

#endif

}  // namespace ekv
