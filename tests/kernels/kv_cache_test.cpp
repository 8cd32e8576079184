// KV write and the conversions of pairs, against the definitions of kernels/kv_cache.h and kv_layout.h in
// double.

#include "kernels/kv_cache.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "tests/support/device_memory.h"
#include "tests/support/kv_definition.h"
#include "tests/support/number_formats.h"

namespace ekv::test {
namespace {

constexpr uint8_t kPoison = 0xff;  // as fp16: NaN
constexpr uint16_t kPoisonHalf = 0xffff;

using Bytes = std::vector<uint8_t>;

uint16_t get_half(const Bytes& pool, size_t at) { return uint16_t(pool[at] | pool[at + 1] << 8); }
void put_half(Bytes& pool, size_t at, uint16_t bits) {
  pool[at] = uint8_t(bits), pool[at + 1] = uint8_t(bits >> 8);
}

struct WriteCase {
  const char* name;
  int head_dim, heads, kv_heads, layers, layer;
  Element element;
  BaseFormat format;
  bool bias, norm, rope;
};

constexpr WriteCase kWriteCases[] = {
    {"llama8b_bf16", 128, 32, 8, 2, 1, Element::bf16, BaseFormat::fixed8, false, false, true},
    {"qwen2_bias_fp16", 128, 12, 2, 3, 0, Element::fp16, BaseFormat::fixed8, true, false, true},
    {"qwen3_norm_bf16", 128, 16, 8, 2, 1, Element::bf16, BaseFormat::fixed8, false, true, true},
    {"all_features_d64", 64, 9, 3, 2, 1, Element::bf16, BaseFormat::fixed8, true, true, true},
    {"odd_heads_share_a_warp_d64", 64, 3, 1, 1, 0, Element::fp16, BaseFormat::fixed8, true, true, true},
    {"blocks_of_16_d80", 80, 4, 2, 2, 0, Element::bf16, BaseFormat::fixed8, true, true, true},
    {"blocks_of_32_d96", 96, 5, 1, 2, 1, Element::fp16, BaseFormat::fixed8, true, true, true},
    {"gemma_d256", 256, 4, 1, 2, 1, Element::bf16, BaseFormat::fixed8, false, true, true},
    {"no_rope_d128", 128, 4, 4, 1, 0, Element::bf16, BaseFormat::fixed8, true, false, false},
    {"e5m2_d128", 128, 8, 2, 2, 1, Element::bf16, BaseFormat::e5m2, true, true, true},
    {"e5m2_d80", 80, 3, 3, 1, 0, Element::fp16, BaseFormat::e5m2, true, false, true},
};

// Everything of one kv_write call on the host. Three sequences: a decode row, a chunk that crosses a block, a
// decode row; a padding row between and after them.
struct Write {
  WriteCase c;
  KvShape shape;
  int rows = 24;
  std::vector<uint16_t> qkv, bias, q_norm, k_norm;
  std::vector<float> cos, sin;
  std::vector<int32_t> positions, slots, q_start;

  int per_row() const { return c.heads + 2 * c.kv_heads; }

  Write(const WriteCase& c, std::mt19937& rng) : c(c), shape{c.layers, 7, c.kv_heads, c.head_dim} {
    const size_t d = c.head_dim;
    std::normal_distribution<double> normal;
    const auto random = [&](size_t count, double scale, double offset) {
      std::vector<double> x(count);
      for (double& v : x) v = offset + scale * normal(rng);
      return encode_all(c.element, x);
    };
    qkv = random(rows * per_row() * d, 2, 0);
    for (size_t i = 0; i < qkv.size(); i += 97)
      qkv[i] = encode(c.element, 60 * normal(rng));  // outlier channels
    bias = random(per_row() * d, 3, 0);
    q_norm = random(d, 0.2, 1), k_norm = random(d, 0.2, 1);
    const int max_positions = 4096;
    for (int p = 0; p < max_positions; ++p)
      for (size_t i = 0; i < d / 2; ++i) {
        const double angle = p * std::pow(10000.0, -2.0 * double(i) / double(d));
        cos.push_back(float(std::cos(angle))), sin.push_back(float(std::sin(angle)));
      }
    const std::vector<int32_t> pages = {5, 2, 6, 0};
    for (int r = 0; r < rows; ++r) {
      const bool padding = r == 1 || r == rows - 1;
      positions.push_back(padding ? 1 << 30 : r == 0 ? 4095 : r == rows - 2 ? 77 : 100 + r);
      slots.push_back(padding         ? -1 - r
                      : r == 0        ? pages[0] * 16 + 15
                      : r == rows - 2 ? pages[1] * 16
                                      : (r < 12 ? pages[2] : pages[3]) * 16 + (r + 4) % 16);
    }
    q_start = {0, 1, 1, rows - 2, rows - 1};
    q_start[2] = 2;  // row 1 belongs to an empty slot of the batch that is padding too
  }

  // The vector before it meets its number format, and its size before the rotation's last rounding.
  std::vector<double> vector(int row, int head) const {
    const int d = c.head_dim;
    std::vector<double> x(d);
    for (int i = 0; i < d; ++i) {
      x[i] = decode(c.element, qkv[(size_t(row) * per_row() + head) * d + i]);
      if (c.bias) x[i] += decode(c.element, bias[size_t(head) * d + i]);
    }
    if (head >= c.heads + c.kv_heads) return x;
    if (c.norm) {
      double squares = 0;
      for (double v : x) squares += v * v;
      const std::vector<uint16_t>& w = head < c.heads ? q_norm : k_norm;
      for (int i = 0; i < d; ++i) x[i] = x[i] / std::sqrt(squares / d + 1e-6) * decode(c.element, w[i]);
    }
    if (c.rope) {
      const std::vector<double> y = x;
      for (int i = 0; i < d / 2; ++i) {
        const size_t at = size_t(positions[row]) * (d / 2) + i;
        x[i] = y[i] * cos[at] - y[i + d / 2] * sin[at];
        x[i + d / 2] = y[i + d / 2] * cos[at] + y[i] * sin[at];
      }
    }
    return c.format == BaseFormat::fixed8 ? rotated(x) : x;
  }
};

struct WriteResult {
  Bytes pool;
  std::vector<uint16_t> q;
  uint32_t clamped;
  std::vector<uint32_t> non_finite;
};

WriteResult run(const Write& w) {
  DeviceVector<uint16_t> qkv(w.qkv), bias(w.bias), q_norm(w.q_norm), k_norm(w.k_norm);
  DeviceVector<float> cos(w.cos), sin(w.sin);
  DeviceVector<int32_t> positions(w.positions), slots(w.slots), q_start(w.q_start);
  DeviceVector<uint8_t> pool(w.shape.page_bytes() * w.shape.pages, kPoison);
  DeviceVector<uint16_t> q(size_t(w.rows) * w.c.heads * w.c.head_dim, kPoisonHalf);
  DeviceVector<uint32_t> clamped(1, 0), non_finite(w.q_start.size() - 1, 0);
  KvWriteArgs a;
  a.qkv = qkv.data();
  if (w.c.bias) a.bias = bias.data();
  if (w.c.norm) a.q_norm = q_norm.data(), a.k_norm = k_norm.data();
  if (w.c.rope) a.rope_cos = cos.data(), a.rope_sin = sin.data();
  a.positions = positions.data(), a.slot_mapping = slots.data(), a.q_start = q_start.data();
  a.num_rows = w.rows, a.num_seqs = int(w.q_start.size()) - 1, a.heads = w.c.heads, a.element = w.c.element;
  a.shape = w.shape, a.layer = w.c.layer, a.format = w.c.format;
  a.pool = pool.data(), a.q = q.data(), a.clamped = clamped.data(), a.non_finite = non_finite.data();
  launch_kv_write(a, nullptr);
  return {pool.host(), q.host(), clamped.host()[0], non_finite.host()};
}

class KvWrite : public testing::TestWithParam<WriteCase> {};

// |got - want| for a K or V vector: one step of the grid rounded both ways, and the fp32 chain before it.
double grid_tolerance(double x, double norm, double max_abs) {
  const int k = exponent_of(max_abs * (1 + 4e-6));  // a maximum on the edge may take either exponent
  const double t = std::ldexp(std::fabs(x), 15 - k);
  return std::ldexp(0.5 + (t > 2048 ? std::ldexp(0.5, std::ilogb(t) - 10) : 0), k - 15) + 24 * 0x1p-24 * norm;
}

double norm_of(const std::vector<double>& x) {
  double squares = 0;
  for (double v : x) squares += v * v;
  return std::sqrt(squares);
}

TEST_P(KvWrite, MatchesDefinitionAndTouchesNothingElse) {
  std::mt19937 rng(7);
  const Write w(GetParam(), rng);
  const WriteResult got = run(w);
  const int d = w.c.head_dim;
  Bytes untouched = got.pool;  // with every written value poisoned again
  for (int row = 0; row < w.rows; ++row)
    for (int head = 0; head < w.per_row(); ++head) {
      const bool padding = w.slots[row] < 0;
      for (int i = 0; i < d && head < w.c.heads && padding; ++i)
        ASSERT_EQ(got.q[(size_t(row) * w.c.heads + head) * d + i], kPoisonHalf);
      if (padding) continue;
      const std::vector<double> x = w.vector(row, head);
      const double norm = norm_of(x), max_abs = largest(x);
      if (head < w.c.heads) {
        for (int i = 0; i < d; ++i)
          ASSERT_NEAR(half_value(got.q[(size_t(row) * w.c.heads + head) * d + i]), x[i],
                      half_step(Element::fp16, x[i]) + 24 * 0x1p-24 * norm)
              << "row " << row << " query head " << head << " dim " << i;
        continue;
      }
      const int part = head < w.c.heads + w.c.kv_heads ? kKey : kValue;
      const int kv_head = (head - w.c.heads) % w.c.kv_heads;
      for (int i = 0; i < d; ++i) {
        const size_t at = w.shape.slot_at(w.c.layer, w.slots[row] / 16, kv_head) +
                          w.shape.target_at(part, w.slots[row] % 16, i);
        const double tolerance = w.c.format == BaseFormat::fixed8
                                     ? grid_tolerance(x[i], norm, max_abs)
                                     : half_step(Element::fp16, x[i]) + 24 * 0x1p-24 * norm;
        ASSERT_NEAR(half_value(get_half(got.pool, at)), x[i], tolerance)
            << "row " << row << (part == kKey ? " key" : " value") << " head " << kv_head << " dim " << i;
        put_half(untouched, at, kPoisonHalf);
      }
    }
  EXPECT_EQ(untouched, Bytes(untouched.size(), kPoison));
  EXPECT_EQ(got.clamped, 0u);
  EXPECT_EQ(got.non_finite, std::vector<uint32_t>(4, 0));
}

// K after rotation lies on some grid of the format: exactly representable, its exponent found again.
TEST_P(KvWrite, EveryStoredVectorIsOnItsOwnGrid) {
  if (GetParam().format != BaseFormat::fixed8) return;
  std::mt19937 rng(8);
  const Write w(GetParam(), rng);
  const WriteResult got = run(w);
  for (int row = 0; row < w.rows; ++row)
    for (int part = 0; part < 2; ++part)
      for (int head = 0; head < w.c.kv_heads && w.slots[row] >= 0; ++head) {
        std::vector<double> x;
        for (int i = 0; i < w.c.head_dim; ++i)
          x.push_back(half_value(get_half(got.pool, w.shape.slot_at(w.c.layer, w.slots[row] / 16, head) +
                                                        w.shape.target_at(part, w.slots[row] % 16, i))));
        const int k = exponent_of(largest(x));
        for (double v : x) ASSERT_EQ(on_grid(v, k), v) << "row " << row << " exponent " << k;
      }
}

INSTANTIATE_TEST_SUITE_P(Cases, KvWrite, testing::ValuesIn(kWriteCases),
                         [](const auto& info) { return std::string(info.param.name); });

// Values of V pass without rotation, so their bits are defined exactly. Rows whose maximum sits on, just below
// and just above every boundary of the exponent; fp16 plus fp16 bias gives sums with more bits than the grid.
TEST(KvWriteFormat, BitForBitAtEveryBoundary) {
  std::mt19937 rng(9);
  std::uniform_real_distribution<double> uniform(-1, 1);
  WriteCase c{"", 64, 1, 40, 1, 0, Element::fp16, BaseFormat::fixed8, true, false, false};
  Write w(c, rng);
  for (size_t i = 0; i < w.bias.size(); ++i) w.bias[i] = half_bits(0);
  const double edges[] = {32632, 32631.99, 32624,   32616, 32608, 16320, 16316,
                          16312, 16304,    16383.5, 2049,  1,     0.5};
  for (int row = 0; row < w.rows; ++row)
    for (int head = 0; head < c.kv_heads; ++head) {
      const size_t at = (size_t(row) * w.per_row() + c.heads + c.kv_heads + head) * 64;
      const size_t bias_at = size_t(c.heads + c.kv_heads + head) * 64;
      const int k = head % 27 - 11;  // also exponents below and at the top of the range
      const double top = std::ldexp(edges[row % std::size(edges)], k - 15);
      for (int i = 0; i < 64; ++i) {
        w.qkv[at + i] = half_bits(uniform(rng) * top * 0.9);
        if (row == 0) w.bias[bias_at + i] = half_bits(std::ldexp(uniform(rng), k - 15));  // below one grid step
      }
      w.qkv[at + row % 64] = half_bits(row % 2 ? -top : top);
      w.qkv[at + (row + 7) % 64] = half_bits(-0.0);
      w.qkv[at + (row + 9) % 64] = 0x0001;  // the least denormal
    }
  const WriteResult got = run(w);
  for (int row = 0; row < w.rows; ++row)
    for (int head = 0; head < c.kv_heads && w.slots[row] >= 0; ++head) {
      const std::vector<double> x = w.vector(row, c.heads + c.kv_heads + head);
      const int k = exponent_of(largest(x));
      for (int i = 0; i < 64; ++i)
        ASSERT_EQ(get_half(got.pool, w.shape.slot_at(0, w.slots[row] / 16, head) +
                                         w.shape.target_at(kValue, w.slots[row] % 16, i)),
                  stored_bits(x[i], k))
            << "row " << row << " head " << head << " dim " << i << " value " << x[i] << " exponent " << k;
    }
}

TEST(KvWriteFormat, ClampsAreCountedAndStayFinite) {
  for (const BaseFormat format : {BaseFormat::fixed8, BaseFormat::e5m2}) {
    std::mt19937 rng(10);
    WriteCase c{"", 128, 2, 2, 1, 0, Element::bf16, format, false, false, false};
    Write w(c, rng);
    const auto value = [&](int row, int head, int i) -> uint16_t& {
      return w.qkv[(size_t(row) * w.per_row() + head) * 128 + i];
    };
    value(0, 4, 3) = bf16_bits(1e6);                                                // V beyond the format
    value(0, 4, 5) = bf16_bits(-1e30);                                              // and far beyond
    value(0, 5, 0) = bf16_bits(format == BaseFormat::fixed8 ? 32512 : 61184);       // the last bf16 that fits
    value(22, 5, 127) = bf16_bits(format == BaseFormat::fixed8 ? -32768 : -61440);  // the first that does not
    value(1, 4, 3) = bf16_bits(1e9);                                                // padding: does not count
    const WriteResult got = run(w);
    EXPECT_EQ(got.clamped, 3u);
    EXPECT_EQ(got.non_finite, std::vector<uint32_t>(4, 0));
    const auto stored = [&](int row, int head, int i) {
      return half_value(get_half(got.pool, w.shape.slot_at(0, w.slots[row] / 16, head) +
                                               w.shape.target_at(kValue, w.slots[row] % 16, i)));
    };
    const double bound = format == BaseFormat::fixed8 ? 32624 : 61408;
    EXPECT_EQ(stored(0, 0, 3), bound);
    EXPECT_EQ(stored(0, 0, 5), -bound);
    EXPECT_EQ(stored(0, 1, 0), format == BaseFormat::fixed8 ? 32512 : 61184);
    EXPECT_EQ(stored(22, 1, 127), -bound);
  }
}

TEST(KvWriteFormat, QueriesBeyondHalfAreClampedAndCounted) {
  std::mt19937 rng(11);
  WriteCase c{"", 64, 2, 1, 1, 0, Element::bf16, BaseFormat::e5m2, false, false, false};
  Write w(c, rng);
  w.qkv[size_t(22) * w.per_row() * 64 + 64 + 9] = bf16_bits(-70000);
  const WriteResult got = run(w);
  EXPECT_EQ(got.clamped, 1u);
  EXPECT_EQ(half_value(got.q[(size_t(22) * 2 + 1) * 64 + 9]), -65504);
}

TEST(KvWriteFormat, ANonFiniteVectorIsStoredAsZerosAndFlagsItsSequenceOnly) {
  struct Fault {
    int row, head, sequence;
    double value;
  };
  for (const Fault f :
       {Fault{0, 1, 0, NAN}, {5, 4, 2, INFINITY}, {2, 9, 2, -INFINITY}, {21, 5, 2, NAN}, {22, 8, 3, NAN}}) {
    std::mt19937 rng(12);
    WriteCase c{"", 128, 4, 3, 1, 0, Element::bf16, BaseFormat::fixed8, false, false, true};
    Write w(c, rng);
    w.qkv[(size_t(f.row) * w.per_row() + f.head) * 128 + 77] = bf16_bits(f.value);
    w.qkv[(size_t(1) * w.per_row() + f.head) * 128 + 77] = bf16_bits(NAN);  // padding flags nobody
    const WriteResult got = run(w);
    std::vector<uint32_t> flags(4, 0);
    flags[f.sequence] = 1;
    EXPECT_EQ(got.non_finite, flags) << "row " << f.row;
    Write clean = w;
    for (int i = 0; i < 128; ++i) clean.qkv[(size_t(f.row) * w.per_row() + f.head) * 128 + i] = 0;
    const WriteResult want = run(clean);
    EXPECT_EQ(got.pool, want.pool) << "row " << f.row;
    EXPECT_EQ(got.q, want.q) << "row " << f.row;
  }
}

TEST(KvWriteFormat, AnOverflowOfTheArithmeticIsNonFiniteToo) {
  std::mt19937 rng(13);
  WriteCase c{"", 64, 1, 1, 1, 0, Element::bf16, BaseFormat::fixed8, false, false, false};
  Write w(c, rng);
  for (int i = 0; i < 64; ++i)
    w.qkv[(size_t(22) * w.per_row() + 1) * 64 + i] = bf16_bits(3e38);  // K: the sum is inf
  EXPECT_EQ(run(w).non_finite, (std::vector<uint32_t>{0, 0, 0, 1}));
}

// ---- pairs

struct PairCase {
  int head_dim, layers, kv_heads;
  BaseFormat format;
};

// A pool of random bits; in `fixed8` every TARGET vector of the given pages is one that kv_write can store.
Bytes random_pool(const KvShape& s, BaseFormat format, std::mt19937& rng) {
  Bytes pool(s.page_bytes() * s.pages);
  for (uint8_t& b : pool) b = uint8_t(rng());
  if (format == BaseFormat::e5m2) return pool;
  std::normal_distribution<double> normal;
  for (int layer = 0; layer < s.layers; ++layer)
    for (int page = 0; page < s.pages; ++page)
      for (int head = 0; head < s.kv_heads; ++head)
        for (int part = 0; part < 2; ++part)
          for (int token = 0; token < kBlockTokens; ++token) {
            std::vector<double> x(s.head_dim);
            const double scale = std::ldexp(1.0, int(rng() % 32) - 18);
            for (double& v : x) v = rng() % 16 ? normal(rng) * scale : 0;
            const int k = exponent_of(largest(x));
            for (int i = 0; i < s.head_dim; ++i)
              put_half(pool, s.slot_at(layer, page, head) + s.target_at(part, token, i), stored_bits(x[i], k));
          }
  return pool;
}

// Demotion by definition: the pool and the low planes [num_jobs] after it.
void define_demote(const KvShape& s, BaseFormat format, const std::vector<PairJob>& jobs, Bytes& pool,
                   Bytes& low) {
  const Bytes before = pool;
  low.assign(jobs.size() * s.low_pair_bytes(), 0);
  for (size_t j = 0; j < jobs.size(); ++j)
    for (int layer = 0; layer < s.layers; ++layer)
      for (int head = 0; head < s.kv_heads; ++head)
        for (int part = 0; part < 2; ++part)
          for (int token = 0; token < kPairTokens; ++token) {
            const size_t base = s.slot_at(layer, jobs[j].even, head);
            const size_t target = s.slot_at(layer, token < 16 ? jobs[j].even : jobs[j].odd, head);
            std::vector<uint16_t> bits;
            std::vector<double> x;
            for (int i = 0; i < s.head_dim; ++i) {
              bits.push_back(get_half(before, target + s.target_at(part, token % 16, i)));
              x.push_back(half_value(bits[i]));
            }
            const int k = format == BaseFormat::fixed8 ? exponent_of(largest(x)) : 0;
            for (int i = 0; i < s.head_dim; ++i) {
              const int u = format == BaseFormat::fixed8 ? int(std::ldexp(x[i], 15 - k)) + 128 : bits[i];
              pool[base + s.base_at(part, token, i)] = uint8_t(u >> 8);
              low[j * s.low_pair_bytes() + s.low_at(layer, head, part, token, i)] = uint8_t(u);
            }
            if (format == BaseFormat::fixed8) pool[base + s.exponent_at(part, token)] = uint8_t(int8_t(k));
          }
}

class Pairs : public testing::TestWithParam<PairCase> {
 protected:
  // Jobs out of order, neighbouring pages unused, the last page of the pool in use.
  const std::vector<PairJob> jobs_ = {{7, 2}, {4, 0}, {5, 8}};
  KvShape shape() const { return {GetParam().layers, 9, GetParam().kv_heads, GetParam().head_dim}; }
};

TEST_P(Pairs, DemoteExtractAndPromoteMatchTheirDefinition) {
  std::mt19937 rng(20);
  const KvShape s = shape();
  const BaseFormat format = GetParam().format;
  const Bytes before = random_pool(s, format, rng);
  Bytes demoted = before, low;
  define_demote(s, format, jobs_, demoted, low);

  DeviceVector<uint8_t> pool(before), staging(5 * s.low_pair_bytes(), 0xa5);
  DeviceVector<PairJob> jobs(jobs_);
  DeviceVector<int32_t> places(std::vector<int32_t>{3, 0, 1});
  Bytes staged(staging.size(), 0xa5);  // job 0 at place 3, job 1 at 0, job 2 at 1; 2 and 4 stay as they are
  const auto put = [&](int job, int place) {
    std::copy_n(low.begin() + job * s.low_pair_bytes(), s.low_pair_bytes(),
                staged.begin() + place * s.low_pair_bytes());
  };
  put(0, 3), put(1, 0), put(2, 1);

  PairArgs a{pool.data(), staging.data(), places.data(), jobs.data(), int(jobs_.size()), s, format};
  launch_extract_low(a, nullptr);
  EXPECT_EQ(pool.host(), before);
  EXPECT_EQ(staging.host(), staged);

  staging.set(Bytes(staging.size(), 0xa5));
  launch_demote(a, nullptr);
  EXPECT_EQ(pool.host(), demoted);
  EXPECT_EQ(staging.host(), staged);

  pool.set(before);  // written through before, so without a low plane now
  a.low = nullptr;
  launch_demote(a, nullptr);
  EXPECT_EQ(pool.host(), demoted);

  // The odd pages have been given away meanwhile; promotion takes others.
  const std::vector<PairJob> back = {{7, 1}, {4, 3}, {5, 6}};
  Bytes promoted = demoted;
  for (size_t j = 0; j < back.size(); ++j)
    for (int layer = 0; layer < s.layers; ++layer)
      for (int head = 0; head < s.kv_heads; ++head) {
        const size_t bytes = s.low_slot_bytes();  // TARGET has no tail
        std::copy_n(before.begin() + s.slot_at(layer, jobs_[j].even, head), bytes,
                    promoted.begin() + s.slot_at(layer, back[j].even, head));
        std::copy_n(before.begin() + s.slot_at(layer, jobs_[j].odd, head), bytes,
                    promoted.begin() + s.slot_at(layer, back[j].odd, head));
      }
  jobs.set(back);
  a.low = staging.data();
  launch_promote(a, nullptr);
  EXPECT_EQ(pool.host(), promoted);
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, Pairs,
    testing::Values(PairCase{64, 3, 3, BaseFormat::fixed8}, PairCase{80, 2, 2, BaseFormat::fixed8},
                    PairCase{96, 2, 1, BaseFormat::fixed8}, PairCase{128, 3, 2, BaseFormat::fixed8},
                    PairCase{256, 2, 2, BaseFormat::fixed8}, PairCase{64, 2, 3, BaseFormat::e5m2},
                    PairCase{80, 2, 2, BaseFormat::e5m2}, PairCase{96, 2, 1, BaseFormat::e5m2},
                    PairCase{128, 3, 2, BaseFormat::e5m2}, PairCase{256, 1, 2, BaseFormat::e5m2}),
    [](const auto& info) {
      return std::string(info.param.format == BaseFormat::fixed8 ? "fixed8_d" : "e5m2_d") +
             std::to_string(info.param.head_dim);
    });

// Demotes and promotes pages 0 .. 2n - 1 as pairs and returns how many bytes of the slots' values changed.
size_t round_trip_errors(const KvShape& s, BaseFormat format, const Bytes& before) {
  const int pairs = s.pages / 2;
  std::vector<PairJob> list;
  for (int p = 0; p < pairs; ++p) list.push_back({2 * p, 2 * p + 1});
  DeviceVector<uint8_t> pool(before), low(pairs * s.low_pair_bytes(), 0);
  DeviceVector<PairJob> jobs(list);
  const PairArgs a{pool.data(), low.data(), nullptr, jobs.data(), pairs, s, format};
  launch_demote(a, nullptr);
  launch_promote(a, nullptr);
  const Bytes after = pool.host();
  size_t errors = 0;
  for (int page = 0; page < s.pages; ++page)
    for (size_t i = 0; i < s.low_slot_bytes(); ++i)
      errors += after[s.slot_at(0, page, 0) + i] != before[s.slot_at(0, page, 0) + i];
  return errors;
}

// Every number t that the format can hold, both signs, at every exponent, in every dim of K and of V.
TEST(RoundTrip, EveryStorableValueInEveryLane) {
  std::vector<int> numbers;
  for (int t = -32624; t <= 32624; ++t)
    if (round_to_half(t) == t) numbers.push_back(t);
  const int count = int(numbers.size()), dim = 64, rows = (count + kPairTokens - 1) / kPairTokens * kPairTokens;
  const KvShape s{1, rows / kBlockTokens, 1, dim};
  size_t checked = 0;
  for (int k = fixed8::kMinExponent; k <= fixed8::kMaxExponent; ++k) {
    std::vector<uint16_t> codes;
    for (int t : numbers) codes.push_back(half_bits(std::ldexp(double(t), k - 15)));
    const uint16_t tops[] = {half_bits(std::ldexp(-32624.0, k - 15)), half_bits(std::ldexp(16320.0, k - 15))};
    for (int pass = 0; pass < 2; ++pass) {  // each row has a dim that fixes its exponent, another in each pass
      Bytes pool(s.page_bytes() * s.pages, 0);
      for (int row = 0; row < rows; ++row)
        for (int i = 0; i < dim; ++i) {
          const bool fixes = i == (row + pass * dim / 2) % dim;
          const uint16_t bits = fixes ? tops[row % 2] : codes[(row + i * 191) % count];
          for (int part = 0; part < 2; ++part)
            put_half(pool, s.slot_at(0, row / kBlockTokens, 0) + s.target_at(part, row % kBlockTokens, i),
                     bits);
        }
      ASSERT_EQ(round_trip_errors(s, BaseFormat::fixed8, pool), 0u) << "exponent " << k << " pass " << pass;
      checked += size_t(2) * rows * dim;
    }
  }
  EXPECT_GT(checked, size_t(70) << 20);
}

// Below the least exponent rows have no member that reaches the upper half of the range.
TEST(RoundTrip, SmallVectorsAtTheLeastExponent) {
  const KvShape s{1, 2 * 4096 / kPairTokens, 1, 64};
  Bytes pool(s.page_bytes() * s.pages, 0);
  for (int row = 0; row < s.pages * kBlockTokens; ++row)
    for (int i = 0; i < 64; ++i) {
      const uint16_t bits = half_bits(std::ldexp(double((row + i) % 4096 - 2048), -24));
      for (int part = 0; part < 2; ++part)
        put_half(pool, s.slot_at(0, row / 16, 0) + s.target_at(part, row % 16, i), bits == 0x8000 ? 0 : bits);
    }
  EXPECT_EQ(round_trip_errors(s, BaseFormat::fixed8, pool), 0u);
}

TEST(RoundTrip, AllCodesOfE5m2InEveryLane) {
  for (const int dim : {64, 80, 96, 128, 256}) {
    const KvShape s{1, 65536 / kBlockTokens, 1, dim};
    Bytes pool(s.page_bytes() * s.pages, 0);
    for (int row = 0; row < 65536; ++row)
      for (int i = 0; i < dim; ++i)
        for (int part = 0; part < 2; ++part)
          put_half(pool, s.slot_at(0, row / 16, 0) + s.target_at(part, row % 16, i), uint16_t(row + i * 257));
    EXPECT_EQ(round_trip_errors(s, BaseFormat::e5m2, pool), 0u) << "head_dim " << dim;
  }
}

// A pool larger than 4 GiB: offsets need 64 bits.
TEST(RoundTrip, PagesBeyondFourGigabytes) {
  const KvShape s{1, 530000, 1, 128};
  std::mt19937 rng(21);
  if (!device_has(s.page_bytes() * s.pages)) GTEST_SKIP() << "the device has less than 5 GB free";
  const KvShape small{1, 2, 1, 128};
  const Bytes values = random_pool(small, BaseFormat::fixed8, rng);
  uint8_t* pool = static_cast<uint8_t*>(device_alloc(s.page_bytes() * s.pages));
  const PairJob job{s.pages - 1, 262500};  // the even page ends the pool, the odd one lies beyond 2 GiB
  copy_to_device(pool + s.slot_at(0, job.even, 0), values.data(), s.slot_bytes());
  copy_to_device(pool + s.slot_at(0, job.odd, 0), values.data() + s.slot_bytes(), s.slot_bytes());
  DeviceVector<PairJob> jobs(std::vector<PairJob>{job});
  DeviceVector<uint8_t> low(s.low_pair_bytes(), 0);
  const PairArgs a{pool, low.data(), nullptr, jobs.data(), 1, s, BaseFormat::fixed8};
  launch_demote(a, nullptr);
  launch_promote(a, nullptr);
  Bytes after(2 * s.slot_bytes());
  copy_to_host(after.data(), pool + s.slot_at(0, job.even, 0), s.slot_bytes());
  copy_to_host(after.data() + s.slot_bytes(), pool + s.slot_at(0, job.odd, 0), s.slot_bytes());
  device_free(pool);
  for (int half = 0; half < 2; ++half)
    EXPECT_EQ(std::memcmp(after.data() + half * s.slot_bytes(), values.data() + half * s.slot_bytes(),
                          s.low_slot_bytes()),
              0);
}

TEST(RoundTrip, NothingToDoLaunchesNothing) {
  KvWriteArgs write;
  write.shape = {1, 1, 1, 128};
  launch_kv_write(write, nullptr);
  PairArgs pairs;
  pairs.shape = write.shape;
  launch_demote(pairs, nullptr);
  launch_extract_low(pairs, nullptr);
  launch_promote(pairs, nullptr);
}

}  // namespace
}  // namespace ekv::test
