// host_attention.cpp -- the launchers of kernels/attention.h with plain loops over the pool in ordinary memory.

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "elastickv/base.h"
#include "kernels/attention.h"
#include "tests/support/host_cuda.h"
#include "tests/support/number_formats.h"

namespace ekv {
namespace {

float half_value(uint16_t bits) {
  static const std::vector<float> values = [] {
    std::vector<float> all;
    for (int i = 0; i < 1 << 16; ++i) all.push_back(float(test::half_value(uint16_t(i))));
    return all;
  }();
  return values[bits];
}

float read_value(const AttnArgs& a, const PairEntry& entry, const uint8_t* slot, int part, int token, int dim) {
  const KvShape& s = a.shape;
  if (!entry.is_base()) {
    const uint8_t* bytes = slot + s.target_at(part, token % kBlockTokens, dim);
    return half_value(uint16_t(bytes[0] | bytes[1] << 8));
  }
  const uint8_t byte = slot[s.base_at(part, token % kPairTokens, dim)];
  if (a.format == BaseFormat::e5m2) return half_value(uint16_t(byte << 8 | e5m2::kFill));
  const int k = int8_t(slot[s.exponent_at(part, token % kPairTokens)]);
  return int8_t(byte) * fixed8::power_of_two(k - 7);
}

// K or V of one sequence and KV head: [kv_len][head_dim].
std::vector<float> read_part(const AttnArgs& a, int seq, int head, int part, KvPath path) {
  std::vector<float> x;
  x.reserve(size_t(a.kv_len[seq]) * size_t(a.shape.head_dim));
  for (int token = 0; token < a.kv_len[seq]; ++token) {
    const PairEntry entry = a.tables[size_t(seq) * size_t(a.max_pairs) + size_t(token / kPairTokens)];
    EKV_CHECK(!entry.is_base() || path != KvPath::native, "the native path reads no BASE pair");
    const bool odd = token / kBlockTokens % 2 == 1;
    const int page = odd && !entry.is_base() ? entry.odd : entry.even_page();
    EKV_CHECK(page >= 0 && page < a.shape.pages, "a page that does not exist");
    const uint8_t* slot = a.pool + a.shape.slot_at(a.layer, page, head);
    for (int d = 0; d < a.shape.head_dim; ++d) x.push_back(read_value(a, entry, slot, part, token, d));
  }
  return x;
}

void attend(const AttnArgs& a, size_t at, int visible, const std::vector<float>& k,
            const std::vector<float>& v) {
  const size_t dim = size_t(a.shape.head_dim);
  std::vector<float> q(dim), acc(dim, 0.0f), score(static_cast<size_t>(visible));
  for (size_t d = 0; d < dim; ++d) q[d] = half_value(a.q[at * dim + d]);
  float top = -INFINITY, sum = 0;
  for (size_t token = 0; token < score.size(); ++token) {
    for (size_t d = 0; d < dim; ++d) score[token] += q[d] * k[token * dim + d];
    top = std::max(top, score[token] *= a.scale);
  }
  for (size_t token = 0; token < score.size(); ++token) {
    const float p = std::exp(score[token] - top);
    sum += p;
    for (size_t d = 0; d < dim; ++d) acc[d] += p * v[token * dim + d];
  }
  for (size_t d = 0; d < dim; ++d) a.out[at * dim + d] = test::encode(a.out_element, acc[d] / sum);
}

void attend_sequences(const AttnArgs& a, KvPath path, bool decodes) {
  const int group = a.heads / a.shape.kv_heads;
  for (int seq = 0; seq < a.num_seqs; ++seq) {
    const int first = a.q_start[seq], rows = a.q_start[seq + 1] - first;
    if (a.kv_len[seq] == 0 || rows == 0 || (rows == 1) != decodes) continue;
    for (int kv_head = 0; kv_head < a.shape.kv_heads; ++kv_head) {
      const std::vector<float> k = read_part(a, seq, kv_head, kKey, path),
                               v = read_part(a, seq, kv_head, kValue, path);
      for (int i = 0; i < rows; ++i)
        for (int head = kv_head * group; head < (kv_head + 1) * group; ++head)
          attend(a, size_t(first + i) * size_t(a.heads) + size_t(head), a.kv_len[seq] - rows + i + 1, k, v);
    }
  }
}

}  // namespace

DecodeWorkspace decode_workspace(const KvShape& shape, int heads, int max_seqs, int max_pairs, int num_ctas) {
  return {nullptr, 256, num_ctas, max_seqs, max_pairs, shape.kv_heads, heads, shape.head_dim};
}
PrefillWorkspace prefill_workspace(const KvShape& shape, int heads, int max_rows, int max_seqs, int max_pairs,
                                   int scratch_pairs) {
  return {nullptr, 1024, max_rows, max_seqs, max_pairs, scratch_pairs, shape.kv_heads, heads, shape.head_dim};
}

namespace {

// A plan leaves the table that it was made for, so that a launch without its plan is seen.
void plan(const AttnArgs& args, uint8_t* memory, cudaStream_t stream) {
  test::enqueue(stream, [=] { *reinterpret_cast<const PairEntry**>(memory) = args.tables; });
}
void attend_planned(const AttnArgs& args, KvPath path, bool decodes, uint8_t* memory, cudaStream_t stream) {
  test::enqueue(stream, [=] {
    EKV_CHECK(*reinterpret_cast<const PairEntry**>(memory) == args.tables, "a launch without its plan");
    attend_sequences(args, path, decodes);
  });
}

void check_scratch(const AttnArgs& args, int scratch_pairs) {
  int base_pairs = 0;
  for (int seq = 0; seq < args.num_seqs; ++seq)
    if (args.q_start[seq + 1] - args.q_start[seq] > 1)
      for (int pair = 0; pair * kPairTokens < args.kv_len[seq]; ++pair)
        base_pairs += args.tables[size_t(seq) * size_t(args.max_pairs) + size_t(pair)].is_base();
  EKV_CHECK(base_pairs <= scratch_pairs, "more BASE pairs than the scratch of prefill has room for");
}

}  // namespace

void launch_decode_plan(const AttnArgs& args, KvPath, const DecodeWorkspace& w, cudaStream_t stream) {
  EKV_CHECK(args.num_seqs <= w.max_seqs && args.max_pairs <= w.max_pairs, "batch larger than its workspace");
  plan(args, w.memory, stream);
}
void launch_decode(const AttnArgs& args, KvPath path, const DecodeWorkspace& w, cudaStream_t stream) {
  test::note_code("decode, path " + std::to_string(int(path)));
  attend_planned(args, path, true, w.memory, stream);
}
void launch_prefill_plan(const AttnArgs& args, const PrefillWorkspace& w, cudaStream_t stream) {
  EKV_CHECK(args.num_seqs <= w.max_seqs && args.max_pairs <= w.max_pairs && args.rows <= w.max_rows,
            "batch larger than its workspace");
  test::enqueue(stream, [args, room = w.scratch_pairs] { check_scratch(args, room); });
  plan(args, w.memory, stream);
}
void launch_prefill(const AttnArgs& args, KvPath path, const PrefillWorkspace& w, cudaStream_t stream,
                    MatrixUnit) {
  test::note_code(path == KvPath::native ? "prefill" : "prefill over BASE");
  attend_planned(args, path, false, w.memory, stream);
}

const PrefillKernel* find_prefill(int, MatrixUnit) {
  static constexpr PrefillKernel kAny{MatrixUnit::mma, 0, nullptr, "host"};
  return &kAny;
}
const DecodeKernel* find_decode(KvPath, BaseFormat, int, int group) {
  static constexpr DecodeKernel kAny{KvPath::general, BaseFormat::fixed8, 0, 16, nullptr, "host"};
  return group <= kAny.max_group ? &kAny : nullptr;
}

}  // namespace ekv
