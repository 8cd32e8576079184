#pragma once
// reference.h -- the definition of attention: contiguous, double, two passes. Not an implementation.

#include <algorithm>
#include <cmath>
#include <vector>

#include "tests/support/number_formats.h"

namespace ekv::test {

struct RefAttention {
  std::vector<double> out;  // [rows][heads][dim]
  std::vector<double> lse;  // [rows][heads]
  double score_size = 0;  // largest scale * sum |q k| of any visible pair: what rounding errors are relative to
};

// q [rows][heads][dim], k and v [keys][kv_heads][dim]. Row i of n sits at position keys - n + i and sees the
// keys up to and including its own.
inline RefAttention ref_attention(int rows, int keys, int heads, int kv_heads, int dim, double scale,
                                  const std::vector<double>& q, const std::vector<double>& k,
                                  const std::vector<double>& v) {
  RefAttention r{std::vector<double>(q.size()), std::vector<double>(size_t(rows) * heads), 0};
  std::vector<double> p(keys);
  for (int i = 0; i < rows; ++i)
    for (int h = 0; h < heads; ++h) {
      const int kh = h / (heads / kv_heads), visible = keys - rows + i + 1;
      const size_t row = size_t(i) * heads + h;
      double top = -INFINITY, sum = 0;
      for (int j = 0; j < visible; ++j) {
        double dot = 0, size = 0;
        for (int d = 0; d < dim; ++d) {
          const double product = q[row * dim + d] * k[(size_t(j) * kv_heads + kh) * dim + d];
          dot += product;
          size += std::fabs(product);
        }
        p[j] = scale * dot;
        top = std::max(top, p[j]);
        r.score_size = std::max(r.score_size, scale * size);
      }
      for (int j = 0; j < visible; ++j) sum += p[j] = std::exp(p[j] - top);
      for (int j = 0; j < visible; ++j)
        for (int d = 0; d < dim; ++d)
          r.out[row * dim + d] += p[j] / sum * v[(size_t(j) * kv_heads + kh) * dim + d];
      r.lse[row] = top + std::log(sum);
    }
  return r;
}

// The contract of attention.h: the output is rounded to `out`, probabilities to fp16; below 2^-14 of the
// maximum a probability is off by up to 2^-25; scores carry the rounding of fp32 sums.
inline double attention_tolerance(const RefAttention& ref, double top_value, int keys, double want,
                                  Element out = Element::fp16) {
  const double rounding = std::ldexp(1, out == Element::bf16 ? -8 : -11),
               score_error = std::ldexp(ref.score_size, -20);
  return rounding * std::fabs(want) + std::ldexp(top_value, -10) +
         top_value * (2 * score_error + std::ldexp(keys, -25)) + std::ldexp(1, -24);
}

}  // namespace ekv::test
