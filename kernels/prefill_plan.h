#pragma once
// prefill_plan.h -- what the prefill planner leaves for the prefill kernels. Private to kernels/.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/attention.h"

namespace ekv {

// A tile is one sequence's tokens [first, first + tokens per tile) of this batch, for every KV head: the
// group's query heads of these tokens are its rows, row r being token r / group, head r % group.
struct PrefillTile {
  int32_t seq, first;
};
constexpr int prefill_tile_rows(MatrixUnit unit) { return unit == MatrixUnit::wgmma ? 128 : 64; }

struct PrefillCounters {
  int32_t num_tiles[2];  // by MatrixUnit
  int32_t num_base_pairs;
};

struct ScratchJob {
  int32_t page;  // of a BASE pair; the job's index is its place in the scratch
};

struct PrefillPlanView {
  PrefillCounters* counters;
  PrefillTile* tiles[2];   // [max_tiles] by MatrixUnit
  ScratchJob* jobs;        // [scratch_pairs]
  int32_t* scratch_index;  // [max_seqs][max_pairs]: where the scratch has a BASE pair
  uint8_t* scratch;        // [scratch_pairs][2][kv_heads] TARGET slots
};

PrefillPlanView prefill_plan_view(const PrefillWorkspace& workspace, size_t* bytes);
int max_prefill_tiles(const PrefillWorkspace& workspace, MatrixUnit unit, int rows, int seqs);

// Expands the BASE pairs of this layer, unless `path` is native.
void launch_prefill_expand(const AttnArgs& args, KvPath path, const PrefillWorkspace& workspace,
                           cudaStream_t stream);

// One per line of the table in attention_select.cpp.
template <int kHeadDim>
void launch_prefill_mma(const AttnArgs& args, const PrefillWorkspace& workspace, cudaStream_t stream);
template <int kHeadDim>
void launch_prefill_wgmma(const AttnArgs& args, const PrefillWorkspace& workspace, cudaStream_t stream);

// Whether the build's machine code for the current device has wgmma.
bool device_has_wgmma();

}  // namespace ekv
