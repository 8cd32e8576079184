#pragma once
// kv_path.h -- how regular the BASE pairs of a batch are, which decides how a kernel finds its slots.

#include <cstdint>

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
};

}  // namespace ekv
