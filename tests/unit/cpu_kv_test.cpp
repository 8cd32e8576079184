// KV pages of the CPU backend: the number format as it is defined, values where kv_layout.h says, attention
// over scattered pages against the definition.

#include "backend/cpu/cpu_kv.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <random>

#include "backend/cpu/cpu_attention.h"
#include "support/backend_driver.h"
#include "support/compare.h"
#include "support/reference.h"

namespace ekv::test {
namespace {

constexpr std::array kHeadDims = {64, 80, 96, 128, 256};

// The rule of kv_layout.h in double: what a page holds of `x`, and how many values were out of range.
struct OnGrid {
  std::vector<double> values;
  int clamped = 0;
};
OnGrid fixed8_definition(const std::vector<float>& x) {
  double max = 0;
  for (float v : x) max = std::max(max, std::fabs(double(v)));
  int k = -9;
  while (k < 15 && !(std::ldexp(max, 15 - k) < 32632)) ++k;
  OnGrid out;
  for (float v : x) {
    const double t = std::nearbyint(std::ldexp(double(v), 15 - k));
    out.clamped += std::fabs(t) > 32624;
    out.values.push_back(std::ldexp(round_to_half(std::clamp(t, -32624.0, 32624.0)), k - 15));
  }
  return out;
}

std::vector<float> normal(std::mt19937& rng, int n, float sigma) {
  std::normal_distribution<float> draw(0, sigma);
  std::vector<float> out(static_cast<size_t>(n));
  for (float& x : out) x = draw(rng);
  return out;
}

uint16_t stored_bits(const CpuKvPool& pool, int layer, int page, int head, int part, int token, int dim) {
  uint16_t bits;
  std::memcpy(&bits, pool.slot(layer, page, head) + pool.shape().target_at(part, token, dim), sizeof(bits));
  return bits;
}

void fill_with_nan(CpuKvPool& pool) {
  const KvShape& s = pool.shape();
  std::memset(pool.slot(0, 0, 0), 0xff, s.page_bytes() * size_t(s.pages));
}

TEST(CpuKv, ValuesLieOnTheFixed8Grid) {
  std::mt19937 rng(5);
  for (int dim : kHeadDims) {
    CpuKvPool pool({2, 3, 2, dim}, BaseFormat::fixed8, best_cpu_kernels());
    for (int round = 0; round < 200; ++round) {
      std::vector<float> x = normal(rng, dim, std::ldexp(1.0f, int(rng() % 30) - 16));
      if (round == 0) std::fill(x.begin(), x.end(), -0.0f);
      const OnGrid want = fixed8_definition(x);
      const int layer = int(rng() % 2), head = int(rng() % 2), slot = int(rng() % 48);
      ASSERT_TRUE(pool.write(layer, head, kValue, slot, x.data()));
      for (int d = 0; d < dim; ++d) {
        const uint16_t bits = stored_bits(pool, layer, slot / 16, head, kValue, slot % 16, d);
        ASSERT_EQ(half_value(bits), want.values[size_t(d)]) << "dim " << d << " of " << dim;
        ASSERT_NE(bits, 0x8000) << "minus zero is stored as plus zero";
      }
    }
  }
}

// Around every power of two at which the exponent changes, and around the end of the range.
TEST(CpuKv, ExponentBoundariesAndClamping) {
  constexpr int kDim = 64;
  CpuKvPool pool({1, 2, 1, kDim}, BaseFormat::fixed8, best_cpu_kernels());
  int64_t clamped = 0;
  for (int k = -10; k <= 16; ++k) {
    for (double at : {32624.0, 32631.5, 32632.0, 32640.0, 32767.0}) {
      for (float step : {0.0f, -INFINITY, INFINITY}) {
        const float largest = float(std::ldexp(at, k - 15));
        std::vector<float> x(kDim);
        for (int d = 0; d < kDim; ++d) x[size_t(d)] = largest * float(d) / (2 * kDim);
        x[7] = step == 0 ? largest : std::nextafter(largest, step);
        x[9] = -x[7];
        const OnGrid want = fixed8_definition(x);
        clamped += want.clamped;
        ASSERT_TRUE(pool.write(0, 0, kValue, 5, x.data()));
        for (int d = 0; d < kDim; ++d) {
          ASSERT_EQ(half_value(stored_bits(pool, 0, 0, 0, kValue, 5, d)), want.values[size_t(d)]) << x[7];
        }
        ASSERT_EQ(pool.num_clamped(), clamped) << x[7];
      }
    }
  }
  EXPECT_GT(clamped, 0);
}

TEST(CpuKv, KeysAreRotatedAndTheProductWithARotatedQueryStays) {
  std::mt19937 rng(8);
  for (int dim : kHeadDims) {
    CpuKvPool pool({1, 2, 1, dim}, BaseFormat::fixed8, best_cpu_kernels());
    const std::vector<float> k = normal(rng, dim, 2), q = normal(rng, dim, 2);
    std::vector<float> rotated = k, written = k, rotated_q = q;
    pool.rotate(rotated.data());
    pool.rotate(rotated_q.data());
    ASSERT_TRUE(pool.write(0, 0, kKey, 17, written.data()));
    const OnGrid want = fixed8_definition(rotated);
    double before = 0, after = 0, size = 0;
    for (int d = 0; d < dim; ++d) {
      const double stored = half_value(stored_bits(pool, 0, 1, 0, kKey, 1, d));
      ASSERT_EQ(stored, want.values[size_t(d)]);
      before += double(q[size_t(d)]) * double(k[size_t(d)]);
      after += double(rotated_q[size_t(d)]) * stored;
      size += std::fabs(double(rotated_q[size_t(d)]) * stored);
    }
    EXPECT_NEAR(before, after, size * 0x1p-11);  // half a step of fp16 per key element
  }
}

TEST(CpuKv, E5m2KeepsPlainHalvesWithinItsRange) {
  CpuKvPool pool({1, 2, 1, 64}, BaseFormat::e5m2, best_cpu_kernels());
  std::mt19937 rng(9);
  const std::vector<float> x = normal(rng, 64, 100);
  std::vector<float> copy = x;
  copy[3] = 61500;
  copy[4] = -1e30f;
  ASSERT_TRUE(pool.write(0, 0, kKey, 0, copy.data()));
  for (int d = 0; d < 64; ++d) {
    const double want = d == 3 ? 61408 : d == 4 ? -61408 : round_to_half(double(x[size_t(d)]));
    EXPECT_EQ(half_value(stored_bits(pool, 0, 0, 0, kKey, 0, d)), want);
  }
  EXPECT_EQ(pool.num_clamped(), 2);
}

TEST(CpuKv, NotFiniteIsRefusedAndWritesNothing) {
  for (BaseFormat format : {BaseFormat::fixed8, BaseFormat::e5m2}) {
    CpuKvPool pool({1, 2, 1, 64}, format, best_cpu_kernels());
    for (float bad : {NAN, INFINITY, -INFINITY}) {
      std::vector<float> x(64, 1.0f);
      x[40] = bad;
      EXPECT_FALSE(pool.write(0, 0, kKey, 3, x.data()));
      x.assign(64, 1.0f);
      x[63] = bad;
      EXPECT_FALSE(pool.write(0, 0, kValue, 3, x.data()));
    }
    for (int d = 0; d < 64; ++d) EXPECT_EQ(stored_bits(pool, 0, 0, 0, kValue, 3, d), 0);
  }
}

TEST(CpuKv, AWriteTouchesItsOwnTokenOnly) {
  CpuKvPool pool({2, 3, 2, 80}, BaseFormat::fixed8, best_cpu_kernels());
  const size_t bytes = pool.shape().page_bytes() * 3;
  fill_with_nan(pool);
  std::vector<float> x(80, 0.5f);
  ASSERT_TRUE(pool.write(1, 1, kKey, 2 * 16 + 9, x.data()));
  x.assign(80, 0.5f);
  ASSERT_TRUE(pool.write(1, 1, kValue, 2 * 16 + 9, x.data()));
  size_t changed = 0;
  for (size_t i = 0; i < bytes; ++i) changed += *(pool.slot(0, 0, 0) + i) != std::byte{0xff};
  EXPECT_EQ(changed, size_t(2 * 2 * 80));
}

// Page ids out of order, poison everywhere else, chunks of many lengths in one batch.
struct AttentionCase {
  const char* name;
  int heads, kv_heads, dim;
  std::vector<std::array<int, 2>> chunks;  // keys, query rows
};

void PrintTo(const AttentionCase& c, std::ostream* out) { *out << c.name; }

class CpuAttentionTest : public testing::TestWithParam<AttentionCase> {
 protected:
  struct Chunk {
    int keys, rows;
    std::vector<double> q, k, v;  // as the definition wants them, k and v as stored
  };

  void build(std::mt19937& rng) {
    const AttentionCase& c = GetParam();
    std::vector<int32_t> pages = all_pages(pool_.shape().pages);
    std::shuffle(pages.begin(), pages.end(), rng);
    for (const auto& [keys, rows] : c.chunks) {
      Chunk chunk{keys, rows, {}, {}, {}};
      for (int block = 0; block < ceil_div(keys, kBlockTokens); ++block) {
        const int32_t page = pages.back();
        pages.pop_back();
        if (block % 2 == 0) tables_.push_back({page, -1});
        if (block % 2 != 0) tables_.back().odd = page;
        write_block(rng, chunk, page, std::min(kBlockTokens, keys - block * kBlockTokens));
      }
      while (int(tables_.size()) % kMaxPairs != 0) tables_.push_back({-1, -1});
      const std::vector<float> q = normal(rng, rows * c.heads * c.dim, 1);
      q_.insert(q_.end(), q.begin(), q.end());
      chunk.q.assign(q.begin(), q.end());
      q_start_.push_back(q_start_.back() + rows);
      kv_len_.push_back(keys);
      chunks_.push_back(std::move(chunk));
    }
  }

  void write_block(std::mt19937& rng, Chunk& chunk, int page, int tokens) {
    const AttentionCase& c = GetParam();
    for (int token = 0; token < tokens; ++token) {
      for (KvPart part : {kKey, kValue}) {
        for (int head = 0; head < c.kv_heads; ++head) {
          std::vector<float> x = normal(rng, c.dim, part == kKey ? 1.5f : 1);
          ASSERT_TRUE(pool_.write(kLayer, head, part, Slot(page) * kBlockTokens + token, x.data()));
          for (int d = 0; d < c.dim; ++d) {
            (part == kKey ? chunk.k : chunk.v)
                .push_back(half_value(stored_bits(pool_, kLayer, page, head, part, token, d)));
          }
        }
      }
    }
  }

  static constexpr int kLayer = 1, kMaxPairs = 8;
  CpuKvPool pool_{{2, 48, GetParam().kv_heads, GetParam().dim}, BaseFormat::fixed8, best_cpu_kernels()};
  std::vector<PairEntry> tables_;
  std::vector<float> q_;
  std::vector<int32_t> q_start_{0}, kv_len_;
  std::vector<Chunk> chunks_;
};

TEST_P(CpuAttentionTest, AgreesWithTheDefinition) {
  const AttentionCase& c = GetParam();
  std::mt19937 rng(31);
  fill_with_nan(pool_);
  build(rng);
  CpuThreads threads(2);
  CpuAttention attention(best_cpu_kernels(), pool_.shape(), c.heads, threads.size());
  StepInput input;
  input.q_start = q_start_;
  input.kv_len = kv_len_;
  input.block_table = {tables_, kMaxPairs};
  std::vector<float> out(q_.size(), NAN);
  attention.plan(input);
  attention.run(pool_, threads, kLayer, input, q_.data(), int64_t(c.heads) * c.dim, out.data());

  size_t at = 0;
  for (const Chunk& chunk : chunks_) {
    const RefAttention want = ref_attention(chunk.rows, chunk.keys, c.heads, c.kv_heads, c.dim,
                                            1 / std::sqrt(double(c.dim)), chunk.q, chunk.k, chunk.v);
    const std::vector<float> got(out.begin() + long(at), out.begin() + long(at + chunk.q.size()));
    at += chunk.q.size();
    // fp32: dim roundings in a score shift its exponential by as much; keys roundings in each sum; |v| < 5.
    const double error = 5 * ((c.dim * want.score_size + chunk.keys) * 0x1p-24 + 1e-6);
    EXPECT_TRUE(all_near(got, want.out, [&](size_t) { return error; })) << chunk.keys << " keys";
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, CpuAttentionTest,
    testing::Values(
        AttentionCase{"mixed_gqa3_d64", 9, 3, 64, {{1, 1}, {200, 1}, {33, 33}, {100, 7}, {64, 64}, {16, 1}}},
        AttentionCase{"mha_d80", 3, 3, 80, {{17, 17}, {96, 1}, {31, 2}}},
        AttentionCase{"mqa_d96", 4, 1, 96, {{32, 32}, {33, 1}, {15, 15}}},
        AttentionCase{"gqa6_d128", 12, 2, 128, {{150, 40}, {1, 1}, {129, 1}}},
        AttentionCase{"gqa60_d64", 60, 1, 64, {{50, 5}}},
        AttentionCase{"mha_d256", 2, 2, 256, {{70, 70}, {256, 1}}}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace ekv::test
