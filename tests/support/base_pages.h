#pragma once
// base_pages.h -- pairs of a CpuKvPool by the definition: random contents that the KV write can store, what
// BASE of them reads in fp16.

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "backend/cpu/cpu_kv.h"
#include "support/half.h"

namespace ekv::test {

inline uint16_t get_half(const CpuKvPool& pool, int layer, int page, int head, int part, int token, int dim) {
  uint16_t bits;
  std::memcpy(&bits, pool.slot(layer, page, head) + pool.shape().target_at(part, token, dim), sizeof(bits));
  return bits;
}
inline void set_half(CpuKvPool& pool, int layer, int page, int head, int part, int token, int dim,
                     uint16_t bits) {
  std::memcpy(pool.slot(layer, page, head) + pool.shape().target_at(part, token, dim), &bits, sizeof(bits));
}

inline std::vector<std::byte> pool_bytes(const CpuKvPool& pool) {
  const std::byte* begin = pool.slot(0, 0, 0);
  return {begin, begin + pool.shape().page_bytes() * size_t(pool.shape().pages)};
}

inline void poison_page(CpuKvPool& pool, int page) {
  const KvShape& s = pool.shape();
  for (int layer = 0; layer < s.layers; ++layer) {
    std::memset(pool.slot(layer, page, 0), 0xff, s.slot_bytes() * size_t(s.kv_heads));
  }
}

// Vectors of every size that the format can hold, some with one element far above the others, some zero.
inline void write_random_block(CpuKvPool& pool, int page, std::mt19937& rng, int tokens = kBlockTokens) {
  const KvShape& s = pool.shape();
  std::vector<float> x(size_t(s.head_dim));
  for (int layer = 0; layer < s.layers; ++layer) {
    for (int head = 0; head < s.kv_heads; ++head) {
      for (int row = 0; row < 2 * tokens; ++row) {
        const float sigma = std::ldexp(1.0f, int(rng() % 30) - 16);
        for (float& v : x) v = std::normal_distribution<float>(0, sigma)(rng);
        if (rng() % 8 == 0) x[rng() % x.size()] *= 300;
        if (rng() % 40 == 0) std::fill(x.begin(), x.end(), 0.0f);
        const Slot slot = Slot(page) * kBlockTokens + row / 2;
        EKV_CHECK(pool.write(layer, head, row % 2 ? kValue : kKey, slot, x.data()), "a finite vector");
      }
    }
  }
}

// Base and low byte, and the exponent, of one stored row.
struct SplitRow {
  int exponent = 0;
  std::vector<int> base, low;
  std::vector<uint16_t> reads;  // fp16 that BASE stands for
};
inline SplitRow split_row(const std::vector<uint16_t>& row, BaseFormat format, BaseFill fill) {
  SplitRow out;
  if (format == BaseFormat::e5m2) {
    for (uint16_t bits : row) {
      out.base.push_back(bits >> 8);
      out.low.push_back(bits & 255);
      out.reads.push_back(uint16_t((bits & 0xff00) | (fill == BaseFill::mid ? 0x80 : 0)));
    }
    return out;
  }
  double max = 0;
  for (uint16_t bits : row) max = std::max(max, std::fabs(half_value(bits)));
  out.exponent = -9;
  while (out.exponent < 15 && !(std::ldexp(max, 15 - out.exponent) < 32632)) ++out.exponent;
  for (uint16_t bits : row) {
    const double u = std::ldexp(half_value(bits), 15 - out.exponent) + 128;
    EKV_CHECK(u == std::floor(u), "a stored value lies on the grid");
    const int base = int(std::floor(u / 256));
    out.base.push_back(base & 255);
    out.low.push_back(int(u) - 256 * base);
    out.reads.push_back(half_bits(std::ldexp(base, out.exponent - 7) + 0.0));
  }
  return out;
}

inline std::vector<uint16_t> get_row(const CpuKvPool& pool, int layer, int page, int head, int part,
                                     int token) {
  std::vector<uint16_t> row;
  for (int dim = 0; dim < pool.shape().head_dim; ++dim) {
    row.push_back(get_half(pool, layer, page, head, part, token, dim));
  }
  return row;
}

}  // namespace ekv::test
