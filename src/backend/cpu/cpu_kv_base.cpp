// The packed form of a pair: TARGET to BASE and low bytes, back, and what BASE would read computed from TARGET.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "backend/cpu/cpu_kv.h"

namespace ekv {
namespace {

constexpr int kMaxHeadDim = 256;
// The two TARGET slots of a pair, or the BASE slot and the low bytes: read whole before anything is written.
constexpr size_t kMaxSlotBytes = KvShape{1, 1, 1, kMaxHeadDim}.slot_bytes();
struct SlotCopy {
  alignas(64) std::array<std::byte, kMaxSlotBytes> bytes;
};

// base and low byte of each value of a row; returns the exponent.
int split_fixed8(const CpuKernels& kernels, const uint16_t* half, int n, uint8_t* base, uint8_t* low) {
  std::array<float, kMaxHeadDim> x;
  kernels.half_to_float(half, x.data(), n);
  const int k = fixed8::exponent(kernels.max_abs(x.data(), n));
  const float up = fixed8::power_of_two(15 - k);
  for (int i = 0; i < n; ++i) {
    const int u = int(x[size_t(i)] * up) + 128;  // an integer already
    base[i] = uint8_t(u >> 8);
    low[i] = uint8_t(u & 255);
  }
  return k;
}

void join_fixed8(const CpuKernels& kernels, const uint8_t* base, const uint8_t* low, int n, int k,
                 uint16_t* half) {
  std::array<float, kMaxHeadDim> x;
  const float down = fixed8::power_of_two(k - 15);
  for (int i = 0; i < n; ++i) x[size_t(i)] = float(256 * int(int8_t(base[i])) + int(low[i]) - 128) * down;
  kernels.float_to_half(x.data(), half, n);
}

// Bytes of one row, in the order of its dims, to and from their chunks of a BASE slot or a low plane.
void scatter_row(const uint8_t* row, int part, const uint32_t* chunk_at, int n, std::byte* to) {
  for (int dim = 0; dim < n; ++dim) {
    to[chunk_at[dim / kBaseChunk] + size_t(KvShape::in_chunk(part, dim % kBaseChunk))] = std::byte(row[dim]);
  }
}
void gather_row(const std::byte* from, int part, const uint32_t* chunk_at, int n, uint8_t* row) {
  for (int dim = 0; dim < n; ++dim) {
    row[dim] = uint8_t(from[chunk_at[dim / kBaseChunk] + size_t(KvShape::in_chunk(part, dim % kBaseChunk))]);
  }
}

}  // namespace

void CpuKvPool::pack(int layer, int head, int even, int odd, std::byte* low, bool in_place) {
  SlotCopy source[2];
  std::memcpy(source[0].bytes.data(), slot(layer, even, head), shape_.slot_bytes());
  std::memcpy(source[1].bytes.data(), slot(layer, odd, head), shape_.slot_bytes());
  std::byte* packed = in_place ? slot(layer, even, head) : nullptr;
  const int n = shape_.head_dim, target_chunks = n / kChunk, base_chunks = n / kBaseChunk;
  std::array<uint16_t, kMaxHeadDim> half;
  std::array<uint8_t, kMaxHeadDim> base_row, low_row;
  for (int part : {kKey, kValue}) {
    for (int token = 0; token < kPairTokens; ++token) {
      const std::byte* from = source[token / kBlockTokens].bytes.data();
      const uint32_t* at = offsets_[part].data() + token % kBlockTokens * target_chunks;
      for (int chunk = 0; chunk < target_chunks; ++chunk) {
        std::memcpy(half.data() + chunk * kChunk, from + at[chunk], kChunk * sizeof(uint16_t));
      }
      if (format_ == BaseFormat::fixed8) {
        const int k = split_fixed8(kernels_, half.data(), n, base_row.data(), low_row.data());
        if (packed != nullptr) packed[shape_.exponent_at(part, token)] = std::byte(int8_t(k));
      } else {
        for (size_t i = 0; i < size_t(n); ++i) base_row[i] = uint8_t(half[i] >> 8);
        for (size_t i = 0; i < size_t(n); ++i) low_row[i] = uint8_t(half[i] & 255);
      }
      const uint32_t* to = base_offsets_[part].data() + token * base_chunks;
      if (packed != nullptr) scatter_row(base_row.data(), part, to, n, packed);
      if (low != nullptr) scatter_row(low_row.data(), part, to, n, low);
    }
  }
}

void CpuKvPool::unpack(int layer, int head, int even, int odd, const std::byte* low) {
  SlotCopy source;
  std::memcpy(source.bytes.data(), slot(layer, even, head), shape_.slot_bytes());
  std::byte* target[2] = {slot(layer, even, head), slot(layer, odd, head)};
  const int n = shape_.head_dim, target_chunks = n / kChunk, base_chunks = n / kBaseChunk;
  std::array<uint16_t, kMaxHeadDim> half;
  std::array<uint8_t, kMaxHeadDim> base_row, low_row;
  for (int part : {kKey, kValue}) {
    for (int token = 0; token < kPairTokens; ++token) {
      const uint32_t* from = base_offsets_[part].data() + token * base_chunks;
      gather_row(source.bytes.data(), part, from, n, base_row.data());
      gather_row(low, part, from, n, low_row.data());
      if (format_ == BaseFormat::fixed8) {
        const auto k = int8_t(source.bytes[shape_.exponent_at(part, token)]);
        join_fixed8(kernels_, base_row.data(), low_row.data(), n, k, half.data());
      } else {
        for (size_t i = 0; i < size_t(n); ++i) half[i] = uint16_t(base_row[i] << 8 | low_row[i]);
      }
      const uint32_t* at = offsets_[part].data() + token % kBlockTokens * target_chunks;
      for (int chunk = 0; chunk < target_chunks; ++chunk) {
        std::memcpy(target[token / kBlockTokens] + at[chunk], half.data() + chunk * kChunk,
                    kChunk * sizeof(uint16_t));
      }
    }
  }
}

namespace {

// One value of a row whose exponent is k, as BASE reads it. All products are exact.
struct Fixed8Mask {
  float up, down;
  explicit Fixed8Mask(float max_abs) {
    const int k = fixed8::exponent(max_abs);
    up = fixed8::power_of_two(7 - k);
    down = fixed8::power_of_two(k - 7);
  }
  float operator()(float x) const { return std::floor(x * up + 0.5f) * down; }
};

void mask_e5m2(const CpuKernels& kernels, uint8_t fill, float* x, int n) {
  std::array<uint16_t, kMaxHeadDim> half;
  kernels.float_to_half(x, half.data(), n);
  for (int i = 0; i < n; ++i) half[size_t(i)] = uint16_t((half[size_t(i)] & 0xff00) | fill);
  kernels.half_to_float(half.data(), x, n);
}

}  // namespace

void CpuKvPool::mask_tile(PairTile& tile) const {
  const int n = shape_.head_dim, panels = ceil_div(n, kPanelCols);
  if (format_ == BaseFormat::e5m2) {
    for (int dim = 0; dim < n; ++dim)
      mask_e5m2(kernels_, fill_, tile.keys.data() + dim * kPairTokens, kPairTokens);
    for (int row = 0; row < panels * kPairTokens; ++row) {
      mask_e5m2(kernels_, fill_, tile.values.data() + row * kPanelCols,
                std::min(kPanelCols, n - row / kPairTokens * kPanelCols));
    }
    return;
  }
  for (int token = 0; token < kPairTokens; ++token) {
    float key_max = 0, value_max = 0;
    const auto value = [&](int dim) -> float& {
      return tile.values[(size_t(dim / kPanelCols) * kPairTokens + size_t(token)) * kPanelCols +
                         size_t(dim % kPanelCols)];
    };
    for (int dim = 0; dim < n; ++dim) {
      key_max = std::max(key_max, std::fabs(tile.keys[size_t(dim) * kPairTokens + size_t(token)]));
      value_max = std::max(value_max, std::fabs(value(dim)));
    }
    const Fixed8Mask key_mask(key_max), value_mask(value_max);
    for (int dim = 0; dim < n; ++dim) {
      float& key = tile.keys[size_t(dim) * kPairTokens + size_t(token)];
      key = key_mask(key);
      value(dim) = value_mask(value(dim));
    }
  }
}

}  // namespace ekv
