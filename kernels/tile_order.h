#pragma once
// tile_order.h -- in which order the tiles of a matrix product are computed. Plain C++, for host and device.
//
// The tiles of neighbouring numbers are computed at the same time and read the L2 together. Tiles are therefore
// numbered in bands of a few rows of tiles, inside a band column by column: what is under way at once is then
// about as high as it is wide, and the rows of x that a band reads stay in the L2 while W passes by.

namespace ekv {

struct TilePlace {
  int row = 0, column = 0;  // in tiles
};

// Bands have at most `most_rows` rows of tiles, and their heights differ by one at most.
struct TileOrder {
  int rows = 0, columns = 0;
  int height = 0, tall = 0;  // of a band; the first `tall` bands have one row more

  static constexpr TileOrder make(int rows, int columns, int most_rows) {
    const int bands = (rows + most_rows - 1) / most_rows;
    return {rows, columns, rows / bands, rows % bands};
  }
  constexpr int count() const { return rows * columns; }
  constexpr TilePlace at(int index) const {
    const int in_tall = tall * (height + 1) * columns;
    const bool is_tall = index < in_tall;
    const int band_rows = height + (is_tall ? 1 : 0), rest = is_tall ? index : index - in_tall;
    const int band = rest / (band_rows * columns), inside = rest % (band_rows * columns);
    const int first = (is_tall ? 0 : tall * (height + 1)) + band * band_rows;
    return {first + inside % band_rows, inside / band_rows};
  }
};

}  // namespace ekv
