#include "backend/sim/cost_model.h"

#include <algorithm>
#include <limits>

#include "elastickv/kv_layout.h"

namespace ekv {
namespace {

int padded(const CostModel& model, int num_tokens) {
  const auto size = std::ranges::lower_bound(model.graph_sizes, num_tokens);
  return size == model.graph_sizes.end() ? num_tokens : *size;
}

double interpolate(const std::vector<TokensPoint>& points, int tokens) {
  if (tokens <= points.front().tokens || points.size() == 1) return points.front().us;
  auto right = std::ranges::lower_bound(points, tokens, {}, &TokensPoint::tokens);
  if (right == points.end()) --right;
  const TokensPoint &a = *std::prev(right), &b = *right;
  return a.us + (b.us - a.us) * double(tokens - a.tokens) / double(b.tokens - a.tokens);
}

bool is_decode(const ChunkWork& chunk) { return chunk.num_tokens == 1; }

}  // namespace

double CostModel::page_bytes() const { return target_bytes_per_token * kBlockTokens; }
size_t CostModel::slot_bytes(HostContent content) const {
  const double less = content == HostContent::low_planes ? base_bytes_per_token : 0;
  return size_t(kPairTokens * (target_bytes_per_token - less));
}
int CostModel::pages_in(size_t pool_bytes) const {
  return int(std::min(double(pool_bytes) / page_bytes(), double(std::numeric_limits<int>::max())));
}

double forward_us(const CostModel& model, int num_tokens) {
  return interpolate(model.forward, padded(model, num_tokens));
}

double all_reduce_us(const CostModel& model, int num_tokens) {
  return model.all_reduce.empty() ? 0 : interpolate(model.all_reduce, padded(model, num_tokens));
}

// Row i of the chunk sees context + i + 1 keys.
double prefill_attention_us(const CostModel& model, const ChunkWork& chunk) {
  const double context = chunk.kv_len - chunk.num_tokens;
  const double keys = chunk.num_tokens * (context + 0.5 * (chunk.num_tokens + 1));
  return model.prefill_per_chunk_us + model.prefill_per_key_us * keys;
}

double decode_attention_us(const CostModel& model, std::span<const ChunkWork> chunks) {
  int64_t target_tokens = 0, base_tokens = 0;
  bool any = false;
  for (const ChunkWork& chunk : chunks) {
    if (!is_decode(chunk)) continue;
    any = true;
    const int base = chunk.num_base_pairs * kPairTokens;
    base_tokens += base;
    target_tokens += chunk.kv_len - base;
  }
  if (!any) return 0;
  const double bytes = model.decode_target_factor * model.target_bytes_per_token * double(target_tokens) +
                       model.decode_base_factor * model.base_bytes_per_token * double(base_tokens);
  return model.decode_fixed_us + bytes / model.decode_bytes_per_us;
}

double step_us(const CostModel& model, const StepWork& work) {
  double us = 0;
  if (!work.chunks.empty()) {
    int num_tokens = 0;
    for (const ChunkWork& chunk : work.chunks) {
      num_tokens += chunk.num_tokens;
      if (!is_decode(chunk)) us += prefill_attention_us(model, chunk);
    }
    us += model.step_fixed_us + model.step_per_seq_us * double(work.chunks.size());
    us += forward_us(model, num_tokens) + all_reduce_us(model, num_tokens);
    us += decode_attention_us(model, work.chunks);
  }
  if (work.num_demoted_pairs > 0)
    us += model.demotion_fixed_us + model.demotion_per_pair_us * work.num_demoted_pairs;
  if (work.num_promoted_pairs > 0)
    us += model.promotion_fixed_us + model.promotion_per_pair_us * work.num_promoted_pairs;
  return us;
}

}  // namespace ekv
