#include "backend/cpu/cpu_kv.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

namespace ekv {
namespace {

constexpr int kMaxHeadDim = 256;
constexpr float kE5m2Clamp = 61408.0f;  // largest fp16 whose high byte, rounded up by half a step, is finite

}  // namespace

int hadamard_block(int head_dim) {
  if (head_dim == 80) return 16;
  if (head_dim == 96) return 32;
  return head_dim;
}

void CpuKvPool::Unmap::operator()(std::byte* data) const { munmap(data, bytes); }

std::unique_ptr<std::byte[], CpuKvPool::Unmap> CpuKvPool::map(size_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  EKV_CHECK(data != MAP_FAILED, "the KV pool does not fit into the address space");
  return {static_cast<std::byte*>(data), Unmap{bytes}};
}

CpuKvPool::CpuKvPool(const KvShape& shape, BaseFormat format, const CpuKernels& kernels, BaseFill fill,
                     bool read_mask)
    : shape_(shape),
      format_(format),
      kernels_(kernels),
      fill_(fill == BaseFill::mid ? e5m2::kFill : 0),
      read_mask_(read_mask),
      data_(map(shape.page_bytes() * shape.pages)) {
  EKV_CHECK(shape.head_dim % kChunk == 0 && shape.head_dim <= kMaxHeadDim, "head_dim without a KV layout");
  for (int part : {kKey, kValue}) {
    for (int token = 0; token < kBlockTokens; ++token) {
      for (int dim = 0; dim < shape.head_dim; dim += kChunk) {
        offsets_[part].push_back(uint32_t(shape.target_at(part, token, dim)));
      }
    }
    for (int token = 0; token < kPairTokens; ++token) {
      for (int dim = 0; dim < shape.head_dim; dim += kBaseChunk) {
        base_offsets_[part].push_back(uint32_t(shape.base_at(part, token, dim)));
      }
    }
  }
}

void CpuKvPool::rotate(float* q) const {
  if (rotates()) kernels_.hadamard(q, shape_.head_dim, hadamard_block(shape_.head_dim));
}

// The fp16 bits that a page stores; returns how many values were out of range.
int CpuKvPool::to_half(float* x, float max, uint16_t* half) const {
  const int n = shape_.head_dim;
  if (format_ == BaseFormat::fixed8) return kernels_.grid_fixed8(x, fixed8::exponent(max), half, n);
  int clamped = 0;
  if (max > kE5m2Clamp) {
    clamped = int(std::count_if(x, x + n, [](float v) { return std::fabs(v) > kE5m2Clamp; }));
    for (int i = 0; i < n; ++i) x[i] = std::clamp(x[i], -kE5m2Clamp, kE5m2Clamp);
  }
  kernels_.float_to_half(x, half, n);
  return clamped;
}

bool CpuKvPool::write(int layer, int head, KvPart part, Slot slot, float* x) {
  if (part == kKey) rotate(x);
  const float max = kernels_.max_abs(x, shape_.head_dim);
  if (!std::isfinite(max)) return false;
  std::array<uint16_t, kMaxHeadDim> half;
  if (const int clamped = to_half(x, max, half.data())) clamped_.fetch_add(clamped, std::memory_order_relaxed);

  std::byte* page = this->slot(layer, int(slot / kBlockTokens), head);
  const int chunks = shape_.head_dim / kChunk;
  const uint32_t* offsets = offsets_[part].data() + (slot % kBlockTokens) * chunks;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    std::memcpy(page + offsets[chunk], half.data() + chunk * kChunk, kChunk * sizeof(uint16_t));
  }
  return true;
}

void CpuKvPool::load_target(const std::byte* slot, int first, int tokens, PairTile& tile) const {
  constexpr int kKeysAtOnce = 8;
  const int chunks = shape_.head_dim / kChunk;
  for (int token = 0; token < tokens; token += kKeysAtOnce) {
    kernels_.load_keys(slot, offsets_[kKey].data() + token * chunks, chunks, tile.keys.data() + first + token,
                       kPairTokens);
  }
  for (int token = 0; token < tokens; ++token) {
    kernels_.load_value(slot, offsets_[kValue].data() + token * chunks, chunks,
                        tile.values.data() + size_t(first + token) * kPanelCols, kPairTokens);
  }
}

void CpuKvPool::load_both_targets(int layer, int head, const PairEntry& pair, int tokens,
                                  PairTile& tile) const {
  load_target(slot(layer, pair.even_page(), head), 0, std::min(tokens, kBlockTokens), tile);
  if (tokens > kBlockTokens)
    load_target(slot(layer, pair.odd, head), kBlockTokens, tokens - kBlockTokens, tile);
}

void CpuKvPool::load_base(const std::byte* slot, PairTile& tile) const {
  constexpr int kKeysAtOnce = 8;
  const int chunks = shape_.head_dim / kBaseChunk;
  std::array<float, 2 * kPairTokens> scales;  // [part][token]: value of one step of the base byte
  if (format_ == BaseFormat::fixed8) {
    for (int i = 0; i < 2 * kPairTokens; ++i) {
      const auto k = int8_t(slot[shape_.exponent_at(kKey, 0) + size_t(i)]);
      scales[size_t(i)] = fixed8::power_of_two(k - 7);
    }
  }
  const float* scale = format_ == BaseFormat::fixed8 ? scales.data() : nullptr;
  for (int token = 0; token < kPairTokens; token += kKeysAtOnce) {
    kernels_.load_base_keys(slot, base_offsets_[kKey].data() + token * chunks, chunks,
                            {scale ? scale + token : nullptr, fill_}, tile.keys.data() + token, kPairTokens);
  }
  for (int token = 0; token < kPairTokens; ++token) {
    kernels_.load_base_value(slot, base_offsets_[kValue].data() + token * chunks, chunks,
                             {scale ? scale + kPairTokens + token : nullptr, fill_},
                             tile.values.data() + size_t(token) * kPanelCols, kPairTokens);
  }
}

void CpuKvPool::load_base_pair(int layer, int head, const PairEntry& pair, PairTile& tile) const {
  if (pair.odd < 0) return load_base(slot(layer, pair.even_page(), head), tile);
  EKV_CHECK(read_mask_, "a BASE pair has one page");
  load_both_targets(layer, head, pair, kPairTokens, tile);
  mask_tile(tile);
}

void CpuKvPool::load_target_pair(int layer, int head, const PairEntry& pair, int tokens, PairTile& tile) const {
  load_both_targets(layer, head, pair, tokens, tile);
  if (tokens == kPairTokens) return;
  for (int panel = 0; panel < ceil_div(shape_.head_dim, kPanelCols); ++panel) {
    float* rows = tile.values.data() + size_t(panel) * kPairTokens * kPanelCols;
    std::fill(rows + size_t(tokens) * kPanelCols, rows + size_t(kPairTokens) * kPanelCols, 0.0f);
  }
}

void CpuKvPool::prefetch_pair(int layer, int head, const PairEntry& pair) const {
  constexpr size_t kLine = 64;
  for (int page : {pair.even_page(), int(pair.odd)}) {
    if (page < 0) continue;
    const std::byte* begin = slot(layer, page, head);
    for (size_t at = 0; at < shape_.slot_bytes(); at += kLine) __builtin_prefetch(begin + at);
  }
}

}  // namespace ekv
