#pragma once
// read_next.h -- what a later kernel reads first, to be asked for in the L2 while the memory would idle.
//
// While a norm runs, the memory has next to nothing to do for some 2 us (H200), time for 8 MB. It asks for the
// first bytes of the matrix after it then, and the product begins out of the L2.
//
// A hint: it changes no result, nothing waits for it, and devices before sm_90 ignore it. Nothing under way on
// the stream may write what it names. Every CTA asks for a slice of its own, and none for a byte past the end.

#include <algorithm>
#include <cstdint>

#include "elastickv/base.h"

namespace ekv {

struct ReadNext {
  const void* data = nullptr;  // device memory, aligned to 16 bytes
  uint32_t bytes = 0;          // 0: no hint; at most kMostReadNext, a multiple of 16
};
constexpr uint32_t kMostReadNext = uint32_t(1) << 30;

// Bytes [begin, end).
struct ReadSlice {
  uint32_t begin = 0, end = 0;
};
// Of the CTA `part` of `parts`: whole lines of the L2, but for the end.
constexpr ReadSlice read_slice(const ReadNext& next, uint32_t part, uint32_t parts) {
  constexpr uint32_t kLine = 128;
  const uint32_t lines = (next.bytes + kLine - 1) / kLine, lines_per_part = (lines + parts - 1) / parts;
  const uint32_t begin = std::min(next.bytes, part * lines_per_part * kLine);
  return {begin, std::min(next.bytes, begin + lines_per_part * kLine)};
}

inline void check_read_next(const ReadNext& next) {
  EKV_CHECK(next.bytes == 0 || reinterpret_cast<uintptr_t>(next.data) % 16 == 0,
            "a hint is aligned to 16 bytes");
  EKV_CHECK(next.bytes % 16 == 0 && next.bytes <= kMostReadNext,
            "a hint has a multiple of 16 bytes, kMostReadNext at most");
}

}  // namespace ekv
