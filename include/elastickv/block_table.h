#pragma once
// block_table.h -- where the KV of one sequence lives, by pairs: two pages and a fidelity per pair.

#include <span>
#include <vector>

#include "elastickv/base.h"
#include "elastickv/kv_layout.h"

namespace ekv {

struct CachedPair;  // an entry of the prefix cache; prefix_cache.h

// Holds one pool reference on each of its pages.
struct PairRef {
  PageId even = kNoPage, odd = kNoPage;  // blocks 2p and 2p + 1; BASE lives in `even`, `odd` is then none
  Fidelity fidelity = Fidelity::target;
  CachedPair* cached = nullptr;  // the cache entry with this content, pinned by this sequence; null: none yet
};

struct BlockTable {
  std::vector<PairRef> pairs;
  int num_cached = 0;  // leading pairs that are in the prefix cache

  // Blocks covered by pages. Only the last pair can lack its odd block; a BASE pair holds both in one page.
  int num_blocks() const {
    const bool half =
        !pairs.empty() && pairs.back().fidelity == Fidelity::target && pairs.back().odd == kNoPage;
    return 2 * int(pairs.size()) - half;
  }
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
