#pragma once
// block_table.h -- where the KV of one sequence lives, by pairs.

#include <span>
#include <vector>

#include "elastickv/base.h"
#include "elastickv/chain_ref.h"
#include "elastickv/kv_layout.h"

namespace ekv {

// The pairs of one sequence, in order; it holds one reference on each. Pages and fidelity: PairTable.
struct BlockTable {
  std::vector<PairId> pairs;
  int num_blocks = 0;  // covered by pages: the last pair may lack its odd block
  int num_cached = 0;  // leading pairs that are in the prefix cache
  int num_backed = 0;  // leading pairs that are on the host or need not be: sinks; only with writethrough
  // Last pairs that are on their way from the host: nothing of the sequence runs meanwhile.
  int num_loading = 0;
  int num_stored = 0;  // leading pairs that were written to the host; exact_offload only
  StoredRef stored;    // the last of them; also of a preempted sequence that waits
};

// Token-granular write address: page * kBlockTokens + offset in the block. -1: this row is not written.
using Slot = int64_t;

// Flat tables of the sequences of one step, as backends read them.
struct BlockTableView {
  std::span<const PairEntry> entries;  // [sequences][max_pairs]
  int max_pairs = 0;
  std::span<const PairEntry> row(int sequence) const {
    return entries.subspan(size_t(sequence) * max_pairs, size_t(max_pairs));
  }
};

}  // namespace ekv
