#pragma once
// tile_gemm.cuh -- what a CTA of a matrix product of many rows does (sm_90a): one thread loads, two warpgroups
// of 64 rows each multiply and store.
//
// A tile is 128 rows of x by 256 of W. Each of its warpgroup products m64n256k16 reads 10 KiB of shared memory
// for 2^18 multiplications, less than any other shape does, and the sums take 128 registers of a thread. The
// gated product takes its 256 rows of W as 128 of gate and the same 128 of up. So sum i and sum 64 + i of a
// thread are gate and up of one output, and the activation needs no exchange.
//
// Two CTAs, a cluster, compute the tiles of two neighbouring blocks of rows and read the same rows of W, of
// which each loads one half for both: 32 KiB instead of 48 come from the L2 for a stage. A stage is therefore
// free only when all warps of both CTAs have read it.
//
// Nobody waits for a tile to be stored: a warpgroup that has finished its sums frees the last stage, and the
// other warpgroup has the matrix unit for itself while this one computes activations. To that end warpgroup 1
// starts when warpgroup 0 has started kLead stages of the first tile. It is two stages behind then, because a
// stage is started when the last but one has been read; and it stays so, since who stores gives the other the
// same time that it gets back when that one stores. By a model of the unit (activations of 1,200 to 2,500
// cycles, loads of 900 to 1,800, 4,096 inputs) it stands still for 1.6 to 3.4 % of the time without a lead and
// for 0.4 to 3.1 % with this one, the most that the ring allows.

#include "elastickv/base.h"
#include "kernels/device.cuh"
#include "kernels/tensor_map.h"
#include "kernels/tile_gemm.h"
#include "kernels/tile_order.h"
#include "kernels/vec8.cuh"
#include "kernels/wgmma.cuh"

namespace ekv {

constexpr int kTileRows = 128, kTileColumns = 256, kTileInputs = 64;  // of a CTA and a stage
constexpr int kTileCtas = 2;                                          // of a cluster
constexpr int kStageRowBytes = kTileInputs * 2;                       // 128: the width of the swizzle
constexpr int kTileStages = 4;
constexpr int kPartColumns = 128;  // of W that a CTA loads for both, and of `out` that are stored at once
constexpr int kXBytes = kTileRows * kStageRowBytes, kPartBytes = kPartColumns * kStageRowBytes;
constexpr int kWarpRows = 16;  // of a warpgroup's 64
constexpr int kBoxColumns = 64, kBoxBytes = kWarpRows * kBoxColumns * 2;
constexpr int kTileGroups = 2, kGroupThreads = 128;  // warpgroups that multiply
constexpr int kTileConsumers = kTileGroups * kGroupThreads, kTileThreads = kTileConsumers + kGroupThreads;
constexpr int kTileLoaderRegisters = 40, kTileConsumerRegisters = 232;
constexpr int kLead = kTileStages;
constexpr int kBandRows = 8;  // of cluster tiles: with the 66 clusters of an H200 about a square

// Columns of `out` of a tile.
constexpr int tile_outputs(bool gated) { return gated ? kPartColumns : kTileColumns; }

struct TileGemmParams {
  CUtensorMap x;    // [rows][inputs], boxes of kTileRows x kTileInputs
  CUtensorMap w;    // [1 or 2][outputs][inputs], boxes of 1 x kPartColumns x kTileInputs
  CUtensorMap out;  // [rows][outputs], boxes of kWarpRows x kBoxColumns
  TileOrder order;  // of tiles of a cluster, which are kTileCtas * kTileRows high
  int blocks;       // of kTileInputs
  bool add;         // to what `out` holds
};

inline TileGemmParams make_tile_gemm_params(const TileGemmArgs& a) {
  const uint64_t rows = uint64_t(a.rows), outputs = uint64_t(a.outputs), inputs = uint64_t(a.inputs);
  const uint64_t parts = a.gated ? 2 : 1;
  TileGemmParams p{};
  p.x = make_tensor_map(a.element, a.x, {inputs, rows}, {kTileInputs, kTileRows});
  p.w = make_tensor_map(a.element, a.w, {inputs, outputs, parts}, {kTileInputs, kPartColumns, 1});
  p.out = make_tensor_map(a.element, a.out, {outputs, rows}, {kBoxColumns, kWarpRows});
  p.order = TileOrder::make(ceil_div(a.rows, kTileCtas * kTileRows), ceil_div(a.outputs, tile_outputs(a.gated)),
                            kBandRows);
  p.blocks = ceil_div(a.inputs, kTileInputs);
  p.add = a.add;
  return p;
}

struct TileGemmShared {
  alignas(1024) uint8_t x[kTileStages][kXBytes];
  alignas(1024) uint8_t w[kTileStages][kTileCtas][kPartBytes];
  alignas(1024) uint8_t out[kTileConsumers / kWarpSize][2][kBoxBytes];  // of each warp, two boxes side by side
  uint64_t full[kTileStages], empty[kTileStages];
};

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

enum TileGemmBarrier : int { kLeadTaken = 1 };

// Both CTAs of a cluster walk over the same tiles.
struct TileWalk {
  int rank, first, step;
  __device__ TileWalk()
      : rank(int(blockIdx.x % kTileCtas)),
        first(int(blockIdx.x / kTileCtas)),
        step(int(gridDim.x / kTileCtas)) {}
  __device__ int row(TilePlace at) const { return (at.row * kTileCtas + rank) * kTileRows; }
};

// Fills the ring. One thread.
template <bool kGated>
class TileLoader {
 public:
  __device__ TileLoader(const TileGemmParams& p, TileGemmShared& shared) : p_(p), shared_(shared) {}

  __device__ void run() {
    for (int tile = walk_.first; tile < p_.order.count(); tile += walk_.step) {
      const TilePlace at = p_.order.at(tile);
      const int column = at.column * tile_outputs(kGated) + (kGated ? 0 : walk_.rank * kPartColumns);
      for (int block = 0; block < p_.blocks; ++block) load(block * kTileInputs, walk_.row(at), column);
    }
  }

 private:
  // Zeros for what does not exist are counted, too, so a stage always has the same number of bytes. The other
  // CTA's half of W may arrive before this thread has announced it: the phase cannot end without the
  // announcement.
  __device__ void load(int input, int row, int column) {
    const uint32_t full = shared_address(&shared_.full[place_.stage]);
    mbarrier_wait(shared_address(&shared_.empty[place_.stage]), place_.phase ^ 1);
    mbarrier_arrive_expect(full, kXBytes + kTileCtas * kPartBytes);
    tensor_load(shared_address(shared_.x[place_.stage]), &p_.x, full, input, row);
    tensor_load_multicast(shared_address(shared_.w[place_.stage][walk_.rank]), &p_.w, full, input, column,
                          kGated ? walk_.rank : 0, (1 << kTileCtas) - 1);
    place_.advance();
  }

  const TileGemmParams& p_;
  TileGemmShared& shared_;
  const TileWalk walk_;
  Place<kTileStages> place_;
};

// 64 rows of every tile. One warpgroup.
//
// Lane (i, j) = (lane % 4, lane / 4) holds rows j and j + 8 of its warp's 16, columns 2i and 2i + 1 of each 8.
template <class T, bool kGated>
class TileRows {
 public:
  __device__ TileRows(const TileGemmParams& p, TileGemmShared& shared)
      : p_(p),
        shared_(shared),
        group_(threadIdx.x / kGroupThreads),
        lane_(threadIdx.x % kWarpSize),
        warp_(threadIdx.x / kWarpSize) {
    empty_ = cluster_address(shared_address(shared.empty), lane_ % kTileCtas);
    // Lane i gives stmatrix the address of row i % 8 of matrix i / 8: upper and lower rows of a chunk of 8
    // columns, then of the next one.
    const int matrix = lane_ / 8, row = matrix % 2 * 8 + lane_ % 8;
    chunk_ = (matrix / 2) ^ (lane_ % 8);
    out_ = shared_address(shared.out[warp_]) + row * kStageRowBytes;
  }

  __device__ void run() {
    if (group_ == 1) named_sync(kLeadTaken, kTileConsumers);
    int lead = group_ == 0 ? min(kLead, p_.blocks) : 0;
    for (int tile = walk_.first; tile < p_.order.count(); tile += walk_.step) {
      multiply(lead);
      lead = 0;
      store(p_.order.at(tile));
    }
    if (lane_ == 0) tensor_store_wait();
  }

 private:
  static constexpr int kSums = kTileColumns / 2, kPartSums = kSums / 2;  // of a thread
  static constexpr int kParts = kGated ? 1 : 2;                          // that are stored one after the other

  // Stage by stage; one is being read while the next one is started. After `lead` stages, if that is not 0, the
  // other warpgroup may begin.
  __device__ void multiply(int lead) {
    int before = 0;
    for (int block = 0; block < p_.blocks; ++block) {
      mbarrier_wait(shared_address(&shared_.full[place_.stage]), place_.phase);
      const uint64_t x = wgmma_tile(shared_address(shared_.x[place_.stage]) + group_ * 64 * kStageRowBytes);
      const uint64_t w = wgmma_tile(shared_address(shared_.w[place_.stage][0]));
      wgmma_pin(sums_);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kTileInputs / 16; ++step)
        wgmma_shared<T>(sums_, wgmma_at(x, step * 32), wgmma_at(w, step * 32), block > 0 || step > 0);
      wgmma_commit();
      wgmma_wait<1>();
      wgmma_pin(sums_);
      if (block > 0) free_stage(before);
      if (block + 1 == lead) named_arrive(kLeadTaken, kTileConsumers);
      before = place_.stage;
      place_.advance();
    }
    wgmma_wait<0>();
    free_stage(before);
    wgmma_wait<0>();  // waits for nothing: without it ptxas put the arrival behind all of the activations
    wgmma_pin(sums_);
  }

  // One arrival of each warp at each CTA of the cluster: a warp knows of its own reads only.
  __device__ void free_stage(int stage) {
    if (lane_ < kTileCtas) mbarrier_arrive_cluster(empty_ + stage * uint32_t(sizeof(uint64_t)));
  }

  // Through the warp's own 4 KiB, which its last store has read by then.
  __device__ void store(TilePlace at) {
    const int row = walk_.row(at) + warp_ * kWarpRows, column = at.column * tile_outputs(kGated);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (lane_ == 0) tensor_store_wait_read();
      __syncwarp();
#pragma unroll
      for (int chunk = 0; chunk < kPartColumns / 8; chunk += 2) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = result(part, (chunk + i / 2) * 4 + i % 2 * 2);
        stmatrix_x4(out_ + chunk / 8 * kBoxBytes + (chunk_ ^ (chunk % 8)) * 16, words);
      }
      fence_proxy_async();
      __syncwarp();
      if (lane_ == 0) send(column + part * kPartColumns, row);
    }
  }

  // The warp's two boxes.
  __device__ void send(int column, int row) {
    for (int box = 0; box < 2; ++box) {
      const uint32_t from = shared_address(shared_.out[warp_][box]);
      if (!kGated && p_.add)
        tensor_add(&p_.out, from, column + box * kBoxColumns, row);
      else
        tensor_store(&p_.out, from, column + box * kBoxColumns, row);
    }
    tensor_store_commit();
  }

  // Two neighbouring outputs from sums i and i + 1 of the part.
  __device__ uint32_t result(int part, int i) const {
    if constexpr (!kGated) return Pair16<T>::pack(sums_[part * kPartSums + i], sums_[part * kPartSums + i + 1]);
    const float2 gate = Pair16<T>::unpack(Pair16<T>::pack(sums_[i], sums_[i + 1]));
    const float2 up = Pair16<T>::unpack(Pair16<T>::pack(sums_[kPartSums + i], sums_[kPartSums + i + 1]));
    return Pair16<T>::pack(silu_mul(gate.x, up.x), silu_mul(gate.y, up.y));
  }

  const TileGemmParams& p_;
  TileGemmShared& shared_;
  const TileWalk walk_;
  const int group_, lane_, warp_;
  uint32_t empty_;  // barriers of the CTA that this lane signals
  uint32_t out_;
  int chunk_;
  Place<kTileStages> place_;
  float sums_[kSums];
};

// All threads of a CTA of a cluster of kTileCtas.
template <class T, bool kGated>
__device__ __forceinline__ void tile_gemm(const TileGemmParams& p, TileGemmShared& shared) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < kTileStages; ++i) {
      mbarrier_init(shared_address(&shared.full[i]), 1);
      mbarrier_init(shared_address(&shared.empty[i]), kTileConsumers / kWarpSize * kTileCtas);
    }
    mbarrier_init_fence();
  }
  cluster_barrier();
  let_next_kernel_begin();
  wait_for_kernels_ahead();
  if (threadIdx.x >= kTileConsumers) {
    shrink_registers<kTileLoaderRegisters>();
    if (threadIdx.x == kTileConsumers) TileLoader<kGated>(p, shared).run();
    __syncwarp();
  } else {
    grow_registers<kTileConsumerRegisters>();
    TileRows<T, kGated>(p, shared).run();
  }
  cluster_barrier();  // nobody leaves while the other CTA may still signal its barriers
}

#endif

}  // namespace ekv
