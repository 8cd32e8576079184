#include "backend/cpu/cpu_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace ekv {
namespace {

// Query vectors of one item: enough to pay for widening a pair of keys and values, few enough that scores and
// sums stay in the first-level cache with them.
constexpr int kVectorsPerItem = 48;

}  // namespace

CpuAttention::Scratch::Scratch(int vectors, int head_dim)
    : tile(head_dim),
      q(size_t(vectors) * head_dim),
      scores(size_t(vectors) * kPairTokens),
      sum(size_t(vectors) * ceil_div(head_dim, kPanelCols) * kPanelCols),
      softmax(size_t(vectors)) {}

CpuAttention::CpuAttention(const CpuKernels& kernels, const KvShape& shape, int heads, int threads)
    : kernels_(kernels),
      heads_(heads),
      group_(heads / shape.kv_heads),
      head_dim_(shape.head_dim),
      padded_dim_(ceil_div(shape.head_dim, kPanelCols) * kPanelCols),
      kv_heads_(shape.kv_heads),
      rows_per_item_(std::max(1, kVectorsPerItem / group_)),
      scale_(1.0f / std::sqrt(float(shape.head_dim))) {
  for (int i = 0; i < threads; ++i) scratch_.emplace_back(rows_per_item_ * group_, head_dim_);
}

void CpuAttention::run(const CpuKvPool& pool, CpuThreads& threads, int layer, const StepInput& input,
                       const float* q, int64_t ldq, float* out) {
  threads.for_each(int(items_.size()), [&](int index, int thread) {
    attend(pool, items_[index], layer, input, q, ldq, out, scratch_[thread]);
  });
}

void CpuAttention::plan(const StepInput& input) {
  items_.clear();
  base_.assign(input.base_runs.begin(), input.base_runs.end());
  EKV_CHECK(base_.empty() || base_.size() == input.kv_len.size(),
            "base_runs are for every sequence or for none");
  for (int chunk = 0; chunk + 1 < int(input.q_start.size()); ++chunk) {
    const int visible = ceil_div(input.kv_len[chunk], kPairTokens);
    if (input.base_runs.empty())
      base_.push_back(find_base(input.block_table.row(chunk).first(size_t(visible))));
    const int end = input.q_start[chunk + 1];
    for (int row = input.q_start[chunk]; row < end; row += rows_per_item_) {
      for (int head = 0; head < kv_heads_; ++head) {
        items_.push_back({chunk, row, std::min(rows_per_item_, end - row), head});
      }
    }
  }
  // Long items first, so that none is left over at the end. No effect on results.
  std::stable_sort(items_.begin(), items_.end(), [&](const Item& a, const Item& b) {
    return int64_t(a.rows) * input.kv_len[a.chunk] > int64_t(b.rows) * input.kv_len[b.chunk];
  });
  path_ = choose_path(base_, input.path);
}

void CpuAttention::attend(const CpuKvPool& pool, const Item& item, int layer, const StepInput& input,
                          const float* q, int64_t ldq, float* out, Scratch& s) const {
  gather_queries(item, q, ldq, s);
  std::fill(s.sum.begin(), s.sum.end(), 0.0f);
  std::fill(s.softmax.begin(), s.softmax.end(), SoftmaxState{-std::numeric_limits<float>::infinity(), 0.0f});

  const int chunk_rows = input.q_start[item.chunk + 1] - input.q_start[item.chunk];
  const int first_position = input.kv_len[item.chunk] - chunk_rows + item.first_row - input.q_start[item.chunk];
  const int keys = first_position + item.rows;
  const std::span<const PairEntry> pairs = input.block_table.row(item.chunk).first(ceil_div(keys, kPairTokens));
  const int end = int(pairs.size());
  const auto add = [&](int begin, int stop, const auto& load) {
    add_pairs(pool, item, layer, pairs, begin, stop, first_position, s, load);
  };
  const auto target = [&](const PairEntry& pair, int tokens) {
    pool.load_target_pair(layer, item.kv_head, pair, tokens, s.tile);
  };
  const auto base = [&](const PairEntry& pair, int) { pool.load_base_pair(layer, item.kv_head, pair, s.tile); };
  const auto either = [&](const PairEntry& pair, int tokens) {
    pool.load_pair(layer, item.kv_head, pair, tokens, s.tile);
  };
  switch (path_) {
    case KvPath::native:
      add(0, end, target);
      break;
    case KvPath::structured: {
      // The last rows of a chunk see more pairs than this item does: the run is cut to what it sees.
      const BaseRun& run = base_[size_t(item.chunk)];
      const int first = run.count == 0 ? end : std::min(run.first, end);
      const int past = run.count == 0 ? end : std::min(run.end, end);
      add(0, first, target);
      add(first, past, base);
      add(past, end, target);
      break;
    }
    case KvPath::general:
      add(0, end, either);
      break;
  }
  scatter(item, s, out);
}

template <class Load>
void CpuAttention::add_pairs(const CpuKvPool& pool, const Item& item, int layer,
                             std::span<const PairEntry> pairs, int begin, int end, int first_position,
                             Scratch& s, const Load& load) const {
  const int keys = first_position + item.rows;
  for (int pair = begin; pair < end; ++pair) {
    const int first_key = pair * kPairTokens;
    // Pages lie anywhere in memory, so the processor cannot guess the next one; it costs no time to say it.
    if (size_t(pair) + 1 < pairs.size()) pool.prefetch_pair(layer, item.kv_head, pairs[size_t(pair) + 1]);
    load(pairs[size_t(pair)], std::min(kPairTokens, keys - first_key));
    add_pair(item, first_position, first_key, s);
  }
}

void CpuAttention::gather_queries(const Item& item, const float* q, int64_t ldq, Scratch& s) const {
  for (int row = 0; row < item.rows; ++row) {
    const float* from = q + (item.first_row + row) * ldq + int64_t(item.kv_head) * group_ * head_dim_;
    float* to = s.q.data() + int64_t(row) * group_ * head_dim_;
    for (int i = 0; i < group_ * head_dim_; ++i) to[i] = from[i] * scale_;
  }
}

// Adds the tile of 32 keys from `first_key` on to every query vector of the item.
void CpuAttention::add_pair(const Item& item, int first_position, int first_key, Scratch& s) const {
  const int vectors = item.rows * group_;
  kernels_.tile({.x = s.q.data(),
                 .w = s.tile.keys.data(),
                 .y = s.scores.data(),
                 .ldx = head_dim_,
                 .ldy = kPairTokens,
                 .rows = vectors,
                 .k = head_dim_,
                 .panels = 1});
  for (int vector = 0; vector < vectors; ++vector) {
    const int visible = std::clamp(first_position + vector / group_ + 1 - first_key, 0, kPairTokens);
    const float keep = kernels_.softmax_tile(s.scores.data() + int64_t(vector) * kPairTokens, kPairTokens,
                                             visible, s.softmax[vector]);
    if (keep != 1.0f) kernels_.scale(keep, s.sum.data() + int64_t(vector) * padded_dim_, padded_dim_);
  }
  kernels_.tile({.x = s.scores.data(),
                 .w = s.tile.values.data(),
                 .y = s.sum.data(),
                 .ldx = kPairTokens,
                 .ldy = padded_dim_,
                 .rows = vectors,
                 .k = kPairTokens,
                 .panels = padded_dim_ / kPanelCols,
                 .accumulate = true});
}

void CpuAttention::scatter(const Item& item, const Scratch& s, float* out) const {
  for (int vector = 0; vector < item.rows * group_; ++vector) {
    const int64_t row = item.first_row + vector / group_, head = item.kv_head * group_ + vector % group_;
    const float* sum = s.sum.data() + int64_t(vector) * padded_dim_;
    float* to = out + (row * heads_ + head) * head_dim_;
    const float factor = 1.0f / s.softmax[vector].sum;
    for (int i = 0; i < head_dim_; ++i) to[i] = sum[i] * factor;
  }
}

}  // namespace ekv
