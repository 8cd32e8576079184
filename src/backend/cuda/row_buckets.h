#pragma once
// row_buckets.h -- numbers of rows that matrix products and batches are padded to, so that there are few of
// them.

namespace ekv {

// The least bucket that holds `rows`: a power of two up to 16, then a multiple of a sixteenth of the next power
// of two, so that padding costs less than an eighth.
constexpr int row_bucket(int rows) {
  int power = 1;
  while (power < rows) power *= 2;
  const int step = power <= 16 ? power : power / 16;
  return (rows + step - 1) / step * step;
}

// The sequences that a step of decodes only is padded to: 1, 2, 4, then multiples of 8 and, above 128, of a
// sixteenth of the next power of two. Each is a row_bucket(). Below 128 rows a step reads weights, and the
// tensor cores take 8 rows at a time, so padding to 8 costs no time; above, it costs at most an eighth of the
// products. 35 buckets up to 512.
constexpr int decode_bucket(int seqs) {
  int power = 1;
  while (power < seqs) power *= 2;
  const int step = power <= 4 ? power : power / 16 > 8 ? power / 16 : 8;
  return (seqs + step - 1) / step * step;
}

}  // namespace ekv
