#pragma once
// cpu_kv.h -- the KV pool in host memory: writes rows in the number format, reads pairs as float.

#include <atomic>
#include <memory>
#include <vector>

#include "backend/cpu/cpu_kernels.h"
#include "elastickv/backend.h"
#include "elastickv/block_table.h"
#include "elastickv/kv_layout.h"

namespace ekv {

// Keys and values of one pair and KV head as float, in the panels that the tile kernel reads.
struct PairTile {
  explicit PairTile(int head_dim)
      : keys(size_t(head_dim) * kPairTokens),
        values(size_t(ceil_div(head_dim, kPanelCols)) * kPairTokens * kPanelCols) {}
  std::vector<float> keys;    // [head_dim][32 tokens]
  std::vector<float> values;  // [head_dim / 32][32 tokens][32]
};

// Size of the blocks of the Hadamard rotation: head_dim, or 16 for 80 and 32 for 96.
int hadamard_block(int head_dim);

class CpuKvPool {
 public:
  // `shape` and `format` as in kv_layout.h. Memory is taken here and touched when a page is first written.
  // `read_mask`: entries with kBasePair may have an `odd` page; they are TARGET and read as their BASE would.
  CpuKvPool(const KvShape& shape, BaseFormat format, const CpuKernels& kernels, BaseFill fill = BaseFill::mid,
            bool read_mask = false);

  const KvShape& shape() const { return shape_; }
  bool rotates() const { return format_ == BaseFormat::fixed8; }
  std::byte* slot(int layer, int page, int head) { return data_.get() + shape_.slot_at(layer, page, head); }
  const std::byte* slot(int layer, int page, int head) const {
    return data_.get() + shape_.slot_at(layer, page, head);
  }

  // Rotates q [head_dim] as the keys were rotated when they were written.
  void rotate(float* q) const;

  // Writes one vector [head_dim] (after RoPE) to token slot % 16 of page slot / 16; overwrites `x`. false: it
  // holds a NaN or an infinity and was not written.
  bool write(int layer, int head, KvPart part, Slot slot, float* x);

  // The first `tokens` tokens of a pair; values of later tokens are set to 0, their keys are unspecified.
  // Attention reads pages through here only; where it knows the fidelity it names it.
  void load_pair(int layer, int head, const PairEntry& pair, int tokens, PairTile& tile) const {
    if (pair.is_base()) return load_base_pair(layer, head, pair, tile);
    load_target_pair(layer, head, pair, tokens, tile);
  }
  void load_target_pair(int layer, int head, const PairEntry& pair, int tokens, PairTile& tile) const;
  void load_base_pair(int layer, int head, const PairEntry& pair, PairTile& tile) const;

  // Reads the TARGET slots of a pair, then writes BASE over the slot of `even` if `in_place`, and the low bytes
  // to `low` [low_slot_bytes] unless it is null.
  void pack(int layer, int head, int even, int odd, std::byte* low, bool in_place);
  // The reverse: reads BASE from `even` and the low bytes, then writes both TARGET slots.
  void unpack(int layer, int head, int even, int odd, const std::byte* low);

  // Starts to bring the pages of a pair into the cache.
  void prefetch_pair(int layer, int head, const PairEntry& pair) const;

  int64_t num_clamped() const { return clamped_.load(std::memory_order_relaxed); }  // values out of range

 private:
  struct Unmap {
    size_t bytes = 0;
    void operator()(std::byte* data) const;
  };
  static std::unique_ptr<std::byte[], Unmap> map(size_t bytes);
  void load_target(const std::byte* slot, int first, int tokens, PairTile& tile) const;
  void load_base(const std::byte* slot, PairTile& tile) const;
  void load_both_targets(int layer, int head, const PairEntry& pair, int tokens, PairTile& tile) const;
  void mask_tile(PairTile& tile) const;
  int to_half(float* x, float max, uint16_t* half) const;

  KvShape shape_;
  BaseFormat format_;
  const CpuKernels& kernels_;
  uint8_t fill_;  // e5m2: the low byte that BASE reads
  bool read_mask_;
  std::vector<uint32_t> offsets_[2];  // [part][16 tokens][head_dim / 8] byte offsets in a TARGET slot
  std::vector<uint32_t>
      base_offsets_[2];  // [part][32 tokens][head_dim / 16] byte offsets of chunks in a BASE slot
  std::unique_ptr<std::byte[], Unmap> data_;
  std::atomic<int64_t> clamped_{0};
};

}  // namespace ekv
