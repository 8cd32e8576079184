#pragma once
// kv_path.h -- how regular the BASE pairs of a batch are, which decides how a kernel finds its slots.

#include <algorithm>
#include <cstdint>
#include <span>

#include "elastickv/kv_layout.h"

namespace ekv {

// How a decode kernel finds slots; each covers the ones before it and all give the same bits where they
// overlap.
enum class KvPath : uint8_t {
  native,      // no sequence has a BASE pair
  structured,  // the BASE pairs of each sequence form one run
  general,     // any mix
};

// The BASE pairs that one sequence of a batch sees.
struct BaseRun {
  int32_t first = 0, end = 0;  // pairs: they lie in [first, end)
  int32_t count = 0;           // of BASE pairs in there; end - first: it is one run
  bool operator==(const BaseRun&) const = default;

  void add(int32_t pair) {  // pairs come in order
    if (count++ == 0) first = pair;
    end = pair + 1;
  }
};

// The BASE pairs of a row of the block table.
inline BaseRun find_base(std::span<const PairEntry> pairs) {
  BaseRun run;
  for (size_t i = 0; i < pairs.size(); ++i)
    if (pairs[i].is_base()) run.add(int32_t(i));
  return run;
}

// The least general path from `at_least` on that covers every sequence.
inline KvPath choose_path(std::span<const BaseRun> sequences, KvPath at_least) {
  KvPath path = at_least;
  for (const BaseRun& run : sequences)
    if (run.count > 0)
      path = std::max(path, run.count == run.end - run.first ? KvPath::structured : KvPath::general);
  return path;
}

}  // namespace ekv
