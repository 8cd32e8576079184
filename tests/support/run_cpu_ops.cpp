// run_cpu_ops.cpp -- links tests/kernels to plain C++: every launch_* of kv_cache.h, layer_ops.h and sampling.h
// as its contract reads, at once and in order, on ordinary memory. What CI can run without a GPU.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "elastickv/base.h"
#include "kernels/kv_cache.h"
#include "kernels/layer_ops.h"
#include "kernels/sampling.h"
#include "tests/support/device_memory.h"
#include "tests/support/number_formats.h"

namespace ekv::test {

void* device_alloc(size_t bytes) { return std::aligned_alloc(256, (bytes / 256 + 1) * 256); }
void device_free(void* p) { std::free(p); }
bool device_has(size_t bytes) { return bytes < size_t(1) << 30; }  // CI machines are small
int long_run(int rounds) { return rounds / 50; }
void copy_to_device(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }
void copy_to_host(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }

}  // namespace ekv::test

namespace ekv {
namespace {

using test::decode;
using test::encode;
using test::half_bits;
using test::half_value;

float load(const void* tensor, Element e, size_t i) {
  return e == Element::fp32 ? static_cast<const float*>(tensor)[i]
                            : float(decode(e, static_cast<const uint16_t*>(tensor)[i]));
}
void store(void* tensor, Element e, size_t i, float x) { static_cast<uint16_t*>(tensor)[i] = encode(e, x); }

uint16_t load_half(const uint8_t* p) {
  uint16_t bits;
  std::memcpy(&bits, p, 2);
  return bits;
}
void store_half(uint8_t* p, uint16_t bits) { std::memcpy(p, &bits, 2); }

// ---- kv_cache.h

void normalise(std::vector<float>& x, const void* weight, const KvWriteArgs& a) {
  float squares = 0;
  for (float v : x) squares += v * v;
  const float scale = 1 / std::sqrt(squares / x.size() + a.norm_epsilon);
  for (size_t i = 0; i < x.size(); ++i) x[i] *= scale * load(weight, a.element, i);
}

void rotate_position(std::vector<float>& x, const float* cos, const float* sin) {
  const size_t half = x.size() / 2;
  for (size_t i = 0; i < half; ++i) {
    const float lower = x[i], upper = x[i + half];
    x[i] = lower * cos[i] - upper * sin[i];
    x[i + half] = upper * cos[i] + lower * sin[i];
  }
}

void hadamard(std::vector<float>& x) {
  const size_t block = x.size() == 80 ? 16 : x.size() == 96 ? 32 : x.size();
  for (size_t step = 1; step < block; step *= 2)
    for (size_t i = 0; i < x.size(); ++i)
      if (!(i & step)) {
        const float sum = x[i] + x[i + step];
        x[i + step] = x[i] - x[i + step];
        x[i] = sum;
      }
  for (float& v : x) v /= std::sqrt(float(block));
}

// What the format stores for x, as fp16 bits.
std::vector<uint16_t> stored(const std::vector<float>& x, BaseFormat format, uint32_t& clamped) {
  std::vector<uint16_t> bits;
  float max_abs = 0;
  for (float v : x) max_abs = std::max(max_abs, std::abs(v));
  const int k = fixed8::exponent(max_abs);
  for (float v : x) {
    if (format == BaseFormat::e5m2) {
      clamped += std::abs(v) > 61408;
      bits.push_back(half_bits(std::clamp(v, -61408.0f, 61408.0f)));
      continue;
    }
    clamped += std::abs(v) >= fixed8::kBound;
    const float grid = std::clamp(std::rint(std::ldexp(v, 15 - k)), -fixed8::kClamp, fixed8::kClamp);
    const double t = half_value(half_bits(grid));
    bits.push_back(half_bits(t == 0 ? 0.0 : std::ldexp(t, k - 15)));
  }
  return bits;
}

// The vector of one row and head, with bias, norm, RoPE and rotation.
std::vector<float> prepared(const KvWriteArgs& a, int row, int head) {
  const int dim = a.shape.head_dim, per_row = a.heads + 2 * a.shape.kv_heads;
  std::vector<float> x(dim);
  for (int i = 0; i < dim; ++i) {
    x[i] = load(a.qkv, a.element, (size_t(row) * per_row + head) * dim + i);
    if (a.bias) x[i] += load(a.bias, a.element, size_t(head) * dim + i);
  }
  const bool query = head < a.heads, key = !query && head < a.heads + a.shape.kv_heads;
  if (!query && !key) return x;
  if (a.q_norm) normalise(x, query ? a.q_norm : a.k_norm, a);
  const size_t at = size_t(a.positions[row]) * (dim / 2);
  if (a.rope_cos) rotate_position(x, a.rope_cos + at, a.rope_sin + at);
  if (a.format == BaseFormat::fixed8) hadamard(x);
  return x;
}

void write_vector(const KvWriteArgs& a, int row, int head) {
  const int dim = a.shape.head_dim, kv_heads = a.shape.kv_heads;
  std::vector<float> x = prepared(a, row, head);
  if (!std::all_of(x.begin(), x.end(), [](float v) { return std::isfinite(v); })) {
    std::fill(x.begin(), x.end(), 0.0f);
    for (int s = 0; s < a.num_seqs; ++s)
      if (a.q_start[s] <= row && row < a.q_start[s + 1]) a.non_finite[s] = 1;
  }
  if (head < a.heads) {
    uint16_t* q = static_cast<uint16_t*>(a.q) + (size_t(row) * a.heads + head) * dim;
    for (int i = 0; i < dim; ++i) {
      *a.clamped += std::abs(x[i]) > 65504;
      q[i] = half_bits(std::clamp(x[i], -65504.0f, 65504.0f));
    }
    return;
  }
  const int part = head < a.heads + kv_heads ? kKey : kValue;
  const int kv_head = head - a.heads - (part == kKey ? 0 : kv_heads), token = a.slot_mapping[row];
  const std::vector<uint16_t> bits = stored(x, a.format, *a.clamped);
  uint8_t* slot = a.pool + a.shape.slot_at(a.layer, token / kBlockTokens, kv_head);
  for (int i = 0; i < dim; ++i) store_half(slot + a.shape.target_at(part, token % kBlockTokens, i), bits[i]);
}

// Calls f(even slot, odd slot, low plane or nullptr) for every job, layer and KV head.
template <class F>
void for_each_pair(const PairArgs& a, F f) {
  const KvShape& s = a.shape;
  for (int job = 0; job < a.num_jobs; ++job)
    for (int layer = 0; layer < s.layers; ++layer)
      for (int head = 0; head < s.kv_heads; ++head) {
        uint8_t* even = a.pool + s.slot_at(layer, a.jobs[job].even, head);
        uint8_t* odd = a.pool + s.slot_at(layer, a.jobs[job].odd, head);
        uint8_t* low = a.low ? a.low + size_t(a.low_place ? a.low_place[job] : job) * s.low_pair_bytes() +
                                   s.low_at(layer, head, 0, 0, 0)
                             : nullptr;
        f(even, odd, low);
      }
}

// The number u of a stored value, from whose bytes BASE and the low plane are made.
uint16_t to_word(uint16_t half, int k, BaseFormat format) {
  if (format == BaseFormat::e5m2) return half;
  return uint16_t(int(std::ldexp(half_value(half), 15 - k)) + 128);
}
uint16_t from_word(uint16_t word, int k, BaseFormat format) {
  if (format == BaseFormat::e5m2) return word;
  const int t = 256 * int8_t(word >> 8) + (word & 255) - 128;
  return half_bits(std::ldexp(float(t), k - 15));
}

void split_pair(const PairArgs& a, bool write_base) {
  const KvShape& s = a.shape;
  for_each_pair(a, [&](uint8_t* even, const uint8_t* odd, uint8_t* low) {
    std::vector<uint8_t> base(even, even + s.slot_bytes());
    for (int part = 0; part < 2; ++part)
      for (int token = 0; token < kPairTokens; ++token) {
        const uint8_t* slot = token < kBlockTokens ? even : odd;
        const auto value = [&](int i) { return load_half(slot + s.target_at(part, token % kBlockTokens, i)); };
        uint16_t largest = 0;  // magnitudes of finite halves order like their bits
        for (int i = 0; i < s.head_dim; ++i) largest = std::max<uint16_t>(largest, value(i) & 0x7fff);
        const int k = a.format == BaseFormat::fixed8 ? fixed8::exponent(float(half_value(largest))) : 0;
        for (int i = 0; i < s.head_dim; ++i) {
          const uint16_t word = to_word(value(i), k, a.format);
          base[s.base_at(part, token, i)] = uint8_t(word >> 8);
          if (low) low[s.base_at(part, token, i)] = uint8_t(word);
        }
        if (a.format == BaseFormat::fixed8) base[s.exponent_at(part, token)] = uint8_t(int8_t(k));
      }
    if (write_base) std::copy(base.begin(), base.end(), even);
  });
}

}  // namespace

void launch_kv_write(const KvWriteArgs& args, cudaStream_t) {
  for (int row = 0; row < args.num_rows; ++row)
    for (int head = 0; head < args.heads + 2 * args.shape.kv_heads && args.slot_mapping[row] >= 0; ++head)
      write_vector(args, row, head);
}

void launch_demote(const PairArgs& args, cudaStream_t) { split_pair(args, true); }

void launch_extract_low(const PairArgs& args, cudaStream_t) { split_pair(args, false); }

void launch_promote(const PairArgs& args, cudaStream_t) {
  const KvShape& s = args.shape;
  for_each_pair(args, [&](uint8_t* even, uint8_t* odd, const uint8_t* low) {
    const std::vector<uint8_t> base(even, even + s.slot_bytes());
    for (int part = 0; part < 2; ++part)
      for (int token = 0; token < kPairTokens; ++token)
        for (int i = 0; i < s.head_dim; ++i) {
          const size_t at = s.base_at(part, token, i);
          const int k = int8_t(base[s.exponent_at(part, token)]);
          store_half((token < kBlockTokens ? even : odd) + s.target_at(part, token % kBlockTokens, i),
                     from_word(uint16_t(base[at] << 8 | low[at]), k, args.format));
        }
  });
}

// ---- layer_ops.h

void launch_rms_norm(const RmsNormArgs& a, cudaStream_t) {
  std::vector<float> x(a.hidden);
  for (int r = 0; r < a.num_rows; ++r) {
    const size_t row = size_t(r) * a.hidden;
    double squares = 0;  // a sum in a row; the error of fp32 would show
    for (int i = 0; i < a.hidden; ++i) {
      x[i] = load(a.x, a.element, row + i);
      if (a.residual) {
        store(a.residual, a.element, row + i, x[i] + load(a.residual, a.element, row + i));
        x[i] = load(a.residual, a.element, row + i);
      }
      squares += double(x[i]) * x[i];
    }
    const float scale = float(1 / std::sqrt(squares / a.hidden + a.epsilon));
    for (int i = 0; i < a.hidden; ++i)
      store(a.out, a.element, row + i, x[i] * scale * load(a.weight, a.element, i));
  }
}

void launch_silu_mul(const SiluMulArgs& a, cudaStream_t) {
  for (int r = 0; r < a.num_rows; ++r)
    for (int i = 0; i < a.width; ++i) {
      const float gate = load(a.gate_up, a.element, size_t(2) * r * a.width + i);
      const float up = load(a.gate_up, a.element, (size_t(2) * r + 1) * a.width + i);
      store(a.out, a.element, size_t(r) * a.width + i, gate / (1 + std::exp(-gate)) * up);
    }
}

void launch_embed(const EmbedArgs& a, cudaStream_t) {
  const size_t bytes = a.hidden * element_bytes(a.element);
  for (int r = 0; r < a.num_rows; ++r) {
    const bool pending = is_pending(a.tokens[r]) && a.previous;
    const TokenId token = pending ? a.previous[pending_row(a.tokens[r])] : a.tokens[r];
    const int64_t from = token < 0 ? -1 : int64_t(token) - a.first_token;
    char* out = static_cast<char*>(a.out) + r * bytes;
    if (0 <= from && from < a.num_tokens)
      std::memcpy(out, static_cast<const char*>(a.table) + from * bytes, bytes);
    else
      std::memset(out, 0, bytes);
  }
}

void launch_gather_rows(const GatherRowsArgs& a, cudaStream_t) {
  const size_t bytes = a.hidden * element_bytes(a.element);
  for (int r = 0; r < a.num_rows; ++r)
    if (a.rows[r] >= 0)
      std::memcpy(static_cast<char*>(a.out) + r * bytes, static_cast<const char*>(a.in) + a.rows[r] * bytes,
                  bytes);
}

// ---- sampling.h

namespace {

// z of the contract for every token of a row.
std::vector<float> adjusted(const SampleArgs& a, const RowSampling& p, std::vector<float> x) {
  for (int i = p.bias_begin; i < p.bias_end; ++i) x[a.bias_tokens[i]] += a.bias_values[i];
  if (p.count_slot >= 0 && a.counts)
    for (int i = 0; i < a.vocab; ++i)
      x[i] = sampling::penalised(x[i], a.counts[size_t(p.count_slot) * count_stride(a.vocab) + i], p.repetition,
                                 p.frequency, p.presence);
  if (!p.greedy())
    for (float& v : x) v = sampling::scaled(v, 1.0f / p.temperature);
  return x;
}

// The least z that survives min-p, top-k and top-p.
float cut_of(const std::vector<float>& z, const RowSampling& p) {
  std::vector<float> kept = z;
  std::sort(kept.begin(), kept.end(), std::greater<>());
  float cut = p.min_p > 0 ? kept[0] + std::log(p.min_p) : -INFINITY;
  if (p.top_k > 0 && size_t(p.top_k) < kept.size()) cut = std::max(cut, kept[p.top_k - 1]);
  while (kept.back() < cut) kept.pop_back();
  if (p.top_p >= 1) return cut;
  double mass = 0, above = 0;
  for (float v : kept) mass += std::exp(double(v) - kept[0]);
  for (size_t i = 0; i < kept.size();) {
    if (above >= double(p.top_p) * mass) return kept[i - 1];
    for (const float same = kept[i]; i < kept.size() && kept[i] == same; ++i)
      above += std::exp(double(same) - kept[0]);
  }
  return kept.back();
}

int draw(const std::vector<float>& z, const RowSampling& p) {
  const float cut = cut_of(z, p);
  int best = -1;
  float best_race = -INFINITY;
  for (int i = 0; i < int(z.size()); ++i) {
    if (z[i] < cut || z[i] == -INFINITY) continue;
    const sampling::Words words =
        sampling::draw_words(p.seed, uint32_t(i) / sampling::kDrawTokens, p.output_index);
    const float race = sampling::race(z[i], sampling::word_of(words, i));
    if (best < 0 || race > best_race) best = i, best_race = race;
  }
  return best;
}

void write_logprobs(const SampleArgs& a, const RowSampling& p, const std::vector<float>& raw, int r) {
  double sum = 0;
  const double top = *std::max_element(raw.begin(), raw.end());
  for (float v : raw) sum += std::exp(v - top);
  const double log_sum = top + std::log(sum);
  a.logprobs[r] = float(raw[a.tokens[r]] - log_sum);
  std::vector<int> order(raw.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = int(i);
  const int n = std::min(p.num_top, a.vocab);
  std::partial_sort(order.begin(), order.begin() + n, order.end(),
                    [&](int x, int y) { return raw[x] != raw[y] ? raw[x] > raw[y] : x < y; });
  for (int i = 0; i < p.num_top; ++i) {
    a.top_tokens[size_t(r) * kMaxTopLogprobs + i] = i < n ? order[i] : -1;
    a.top_logprobs[size_t(r) * kMaxTopLogprobs + i] = i < n ? float(raw[order[i]] - log_sum) : -INFINITY;
  }
}

}  // namespace

size_t sampling_workspace_bytes(int, int) { return 256; }

void launch_sample(const SampleArgs& a, cudaStream_t) {
  for (int r = 0; r < a.num_rows; ++r) {
    const RowSampling& p = a.params[r];
    std::vector<float> raw(a.vocab);
    for (int i = 0; i < a.vocab; ++i) raw[i] = load(a.logits, a.element, size_t(r) * a.row_stride + i);
    const bool finite = std::all_of(raw.begin(), raw.end(), [](float v) { return v < INFINITY; });
    const std::vector<float> z = adjusted(a, p, raw);
    const auto best = std::max_element(z.begin(), z.end());
    a.status[r] = !finite              ? SampleStatus::non_finite
                  : *best == -INFINITY ? SampleStatus::nothing_left
                                       : SampleStatus::ok;
    a.tokens[r] = -1;
    if (a.status[r] != SampleStatus::ok) continue;
    a.tokens[r] = p.greedy() ? int(best - z.begin()) : draw(z, p);
    if (p.num_top >= 0) write_logprobs(a, p, raw, r);
  }
}

void launch_count_tokens(const CountArgs& a, cudaStream_t) {
  for (int n = 0; n < a.num_updates; ++n) {
    const CountUpdate& u = a.updates[n];
    uint16_t* counts = a.counts + size_t(u.slot) * count_stride(a.vocab);
    if (u.clear) std::fill(counts, counts + count_stride(a.vocab), uint16_t(0));
    for (int i = u.begin; i < u.end; ++i) {
      const bool pending = is_pending(a.tokens[i]) && a.previous;
      const TokenId token = pending ? a.previous[pending_row(a.tokens[i])] : a.tokens[i];
      if (token < 0 || token >= a.vocab) continue;
      uint16_t& count = counts[token];
      count = uint16_t(sampling::counted(count, i < u.prompt_end));
    }
  }
}

}  // namespace ekv
