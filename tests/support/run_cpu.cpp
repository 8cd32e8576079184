// run_cpu.cpp -- attention over pages with plain loops: the twin that CI runs where there is no GPU.

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "tests/support/number_formats.h"
#include "tests/support/run_attention.h"

namespace ekv::test {
namespace {

// One number of the cache, whatever the fidelity of its pair.
float read_value(const AttnInput& in, const PairEntry& entry, const uint8_t* slot, int part, int token,
                 int dim) {
  const KvShape& s = in.shape;
  if (!entry.is_base()) {
    const uint8_t* bytes = slot + s.target_at(part, token % kBlockTokens, dim);
    return float(half_value(uint16_t(bytes[0] | bytes[1] << 8)));
  }
  const uint8_t byte = slot[s.base_at(part, token % kPairTokens, dim)];
  if (in.format == BaseFormat::e5m2) return float(half_value(uint16_t(byte << 8 | e5m2::kFill)));
  const int k = int8_t(slot[s.exponent_at(part, token % kPairTokens)]);
  return int8_t(byte) * fixed8::power_of_two(k - 7);
}

// K or V of one sequence and KV head: [kv_len][head_dim].
std::vector<float> read_part(const AttnInput& in, int seq, int head, int part) {
  std::vector<float> x;
  for (int token = 0; token < in.kv_len[seq]; ++token) {
    const PairEntry entry = in.tables[size_t(seq) * in.max_pairs + token / kPairTokens];
    const bool odd = token / kBlockTokens % 2 == 1;
    const int page = odd && !entry.is_base() ? entry.odd : entry.even_page();
    const auto found = in.pages.find(page);
    if (found == in.pages.end()) throw std::out_of_range("a page that holds nothing: " + std::to_string(page));
    const uint8_t* slot = found->second.data() + head * in.shape.slot_bytes();
    for (int d = 0; d < in.shape.head_dim; ++d) x.push_back(read_value(in, entry, slot, part, token, d));
  }
  return x;
}

// `at`: index of (row, head).
void attend(const AttnInput& in, size_t at, int visible, const std::vector<float>& k,
            const std::vector<float>& v, Element element, AttnOutput& result) {
  const int dim = in.shape.head_dim;
  std::vector<float> q(dim), acc(dim, 0.0f);
  for (int d = 0; d < dim; ++d) q[d] = float(half_value(in.q[at * dim + d]));
  float top = -INFINITY, sum = 0;
  for (size_t token = 0; token < size_t(visible); ++token) {
    float score = 0;
    for (int d = 0; d < dim; ++d) score += q[d] * k[token * dim + d];
    score *= in.scale;
    const float raised = std::max(top, score), shrink = std::exp(top - raised), p = std::exp(score - raised);
    top = raised;
    sum = sum * shrink + p;
    for (int d = 0; d < dim; ++d) acc[d] = acc[d] * shrink + p * v[token * dim + d];
  }
  for (int d = 0; d < dim; ++d) result.out[at * dim + d] = encode(element, acc[d] / sum);
  result.lse[at] = top + std::log(sum);
}

}  // namespace

AttnOutput run_attention(const AttnInput& in, const AttnRun& run) {
  AttnOutput result;
  result.out.assign(in.q.size(), kUntouched);
  result.lse.assign(size_t(in.rows()) * in.heads, NAN);
  const int group = in.heads / in.shape.kv_heads;
  for (int seq = 0; seq < in.num_seqs(); ++seq) {
    const int first = in.q_start[seq], rows = in.q_start[seq + 1] - first;
    if (in.kv_len[seq] == 0) continue;
    for (int kv_head = 0; kv_head < in.shape.kv_heads; ++kv_head) {
      const std::vector<float> k = read_part(in, seq, kv_head, kKey), v = read_part(in, seq, kv_head, kValue);
      for (int i = 0; i < rows; ++i)
        for (int head = kv_head * group; head < (kv_head + 1) * group; ++head)
          attend(in, size_t(first + i) * in.heads + head, in.kv_len[seq] - rows + i + 1, k, v, run.out, result);
    }
  }
  return result;
}

std::vector<AttnOutput> run_attention_replayed(const std::vector<AttnInput>& inputs, const AttnRun& run) {
  size_t values = 0, rows = 0;
  for (const AttnInput& in : inputs) {
    values = std::max(values, in.q.size());
    rows = std::max(rows, size_t(in.rows()) * in.heads);
  }
  std::vector<AttnOutput> results;
  for (const AttnInput& in : inputs) {
    results.push_back(run_attention(in, run));
    results.back().out.resize(values, kUntouched);
    results.back().lse.resize(rows, NAN);
  }
  return results;
}

std::string attention_target() { return "cpu"; }

}  // namespace ekv::test
