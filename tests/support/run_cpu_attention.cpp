// run_cpu_attention.cpp -- the decode launchers of attention.h as plain loops on ordinary memory.

#include <cmath>
#include <vector>

#include "kernels/attention.h"
#include "tests/support/half.h"

namespace ekv {
namespace {

using test::half_bits;
using test::half_value;

float read_value(const AttnArgs& a, int seq, int kv_head, int part, int token, int dim) {
  const KvShape& s = a.shape;
  const PairEntry entry = a.tables[size_t(seq) * a.max_pairs + token / kPairTokens];
  const bool odd = token / kBlockTokens % 2 == 1;
  const int page = odd && !entry.is_base() ? entry.odd : entry.even_page();
  const uint8_t* slot = a.pool + s.slot_at(a.layer, page, kv_head);
  if (!entry.is_base()) {
    const uint8_t* bytes = slot + s.target_at(part, token % kBlockTokens, dim);
    return float(half_value(uint16_t(bytes[0] | bytes[1] << 8)));
  }
  const uint8_t byte = slot[s.base_at(part, token % kPairTokens, dim)];
  if (a.format == BaseFormat::e5m2) return float(half_value(uint16_t(byte << 8 | e5m2::kFill)));
  return int8_t(byte) * fixed8::power_of_two(int8_t(slot[s.exponent_at(part, token % kPairTokens)]) - 7);
}

void attend(const AttnArgs& a, int seq, int head) {
  const int dim = a.shape.head_dim, kv_head = head / (a.heads / a.shape.kv_heads);
  const size_t row = size_t(a.q_start[seq]) * a.heads + head;
  std::vector<float> sum(dim, 0.0f);
  float top = -INFINITY, weights = 0;
  for (int token = 0; token < a.kv_len[seq]; ++token) {
    float score = 0;
    for (int d = 0; d < dim; ++d)
      score += float(half_value(a.q[row * dim + d])) * read_value(a, seq, kv_head, kKey, token, d);
    score *= a.scale;
    const float raised = std::max(top, score), shrink = std::exp(top - raised), p = std::exp(score - raised);
    top = raised;
    weights = weights * shrink + p;
    for (int d = 0; d < dim; ++d) sum[d] = sum[d] * shrink + p * read_value(a, seq, kv_head, kValue, token, d);
  }
  for (int d = 0; d < dim; ++d) a.out[row * dim + d] = half_bits(sum[d] / weights);
  if (a.lse) a.lse[row] = top + std::log(weights);
}

}  // namespace

DecodeWorkspace decode_workspace(const KvShape& shape, int heads, int max_seqs, int max_pairs, int num_ctas) {
  return {nullptr, 256, num_ctas, max_seqs, max_pairs, shape.kv_heads, heads, shape.head_dim};
}

void launch_decode_plan(const AttnArgs&, KvPath, const DecodeWorkspace&, cudaStream_t) {}

void launch_decode(const AttnArgs& args, KvPath, const DecodeWorkspace&, cudaStream_t) {
  for (int seq = 0; seq < args.num_seqs; ++seq) {
    if (args.q_start[seq + 1] - args.q_start[seq] != 1 || args.kv_len[seq] == 0) continue;
    for (int head = 0; head < args.heads; ++head) attend(args, seq, head);
  }
}

}  // namespace ekv
