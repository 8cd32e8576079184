#pragma once
// tile_map.cuh -- the layout's swizzle with everything but the lane known at compile time.

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace ekv {

// Rows of kRowBytes, kRows of them per tile (kv_layout.h); a group is 16 dims: 32 bytes of fp16 or one chunk of
// BASE.
template <int kRows, int kRowBytes, int kGroupBytes>
struct TileMap {
  static constexpr int tile(int g) { return g * kGroupBytes / 128; }
  static constexpr int width(int g) { return std::min(128, kRowBytes - tile(g) * 128); }
  static constexpr int chunk(int g) { return g * kGroupBytes % 128 / 16; }
  static constexpr bool swizzled(int g) { return (width(g) & (width(g) - 1)) == 0; }
  // Byte of chunk `upper` (0 or 1) of group g in `row`. Tiles of one width share the lane's part of it.
  template <int g>
  __device__ static uint32_t at(int row, int upper) {
    constexpr int kWidth = width(g), kChunks = kWidth / 16;
    constexpr int kRowsPerLine = 8 / (kChunks < 8 ? kChunks : 8);
    const int turn = swizzled(g) ? (row / kRowsPerLine) & (kChunks - 1) : 0;
    const uint32_t lane_part = row * kWidth + ((upper ^ turn) * 16);
    const uint32_t in_tile = swizzled(g) ? lane_part ^ (chunk(g) * 16) : lane_part + chunk(g) * 16;
    return tile(g) * 128 * kRows + in_tile;
  }
};

// Calls f(integral_constant<0>) .. f(integral_constant<n - 1>).
template <int n, class F>
__device__ __forceinline__ void unroll(F&& f) {
  [&]<int... i>(std::integer_sequence<int, i...>) { (f(std::integral_constant<int, i>{}), ...); }
  (std::make_integer_sequence<int, n>{});
}

}  // namespace ekv
