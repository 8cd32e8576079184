// The skinny product against its formula: in whole numbers, whose sums are exact in any order, and in real
// ones.

#include "kernels/skinny_gemm.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "tests/support/device_memory.h"
#include "tests/support/number_formats.h"

namespace ekv::test {
namespace {

constexpr uint16_t kPoison = 0xffff;  // NaN in fp16; two of them are one in fp32

struct Product {
  int rows, outputs, inputs;
  bool fp32_out;
};

struct Data {
  std::vector<uint16_t> w, x;
};

Data whole_numbers(const Product& c, unsigned seed) {
  std::mt19937 rng(seed);
  const auto fill = [&](size_t count) {
    std::vector<uint16_t> values(count);
    for (uint16_t& v : values) v = half_bits(int(rng() % 7) - 3);
    return values;
  };
  return {fill(size_t(c.outputs) * c.inputs), fill(size_t(c.rows) * c.inputs)};
}

Data real_numbers(const Product& c, unsigned seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<double> normal;
  const auto fill = [&](size_t count, double scale) {
    std::vector<uint16_t> values(count);
    for (uint16_t& v : values) v = half_bits(normal(rng) * scale * (rng() % 64 ? 1 : 30));  // outlier channels
    return values;
  };
  return {fill(size_t(c.outputs) * c.inputs, 0.05), fill(size_t(c.rows) * c.inputs, 1)};
}

// Per row and output.
struct Expected {
  std::vector<double> sum, magnitude;
};

Expected expected(const Product& c, const Data& d) {
  const std::vector<double> w = decode_all(Element::fp16, d.w), x = decode_all(Element::fp16, d.x);
  Expected e;
  for (int r = 0; r < c.rows; ++r)
    for (int o = 0; o < c.outputs; ++o) {
      double sum = 0, magnitude = 0;
      for (int i = 0; i < c.inputs; ++i) {
        const double product = x[size_t(r) * c.inputs + i] * w[size_t(o) * c.inputs + i];
        sum += product, magnitude += std::fabs(product);
      }
      e.sum.push_back(sum), e.magnitude.push_back(magnitude);
    }
  return e;
}

// Rows of y are three elements longer than they need to be and there is one row too many; all of that stays
// poisoned.
std::vector<double> multiply(const Product& c, const Data& d, int split) {
  // Poison behind x: what the kernel reads past its last row must not count.
  std::vector<uint16_t> x = d.x;
  x.resize(x.size() + 64, kPoison);
  const int stride = c.outputs + 3, words = c.fp32_out ? 2 : 1;
  DeviceVector<uint16_t> d_w(d.w), d_x(x), d_y(size_t(c.rows + 1) * stride * words, kPoison);
  SkinnyGemmArgs a;
  a.w = d_w.data(), a.x = d_x.data(), a.y = d_y.data();
  a.rows = c.rows, a.outputs = c.outputs, a.inputs = c.inputs, a.out_stride = stride;
  a.fp32_out = c.fp32_out, a.split = split;
  launch_skinny_gemm(a, nullptr);

  const std::vector<uint16_t> bits = d_y.host();
  std::vector<double> y;
  for (int r = 0; r <= c.rows; ++r) {
    for (int o = 0; o < stride; ++o) {
      const uint16_t* at = &bits[(size_t(r) * stride + o) * words];
      if (r == c.rows || o >= c.outputs) {
        for (int i = 0; i < words; ++i) EXPECT_EQ(at[i], kPoison) << "outside y, row " << r << " output " << o;
        continue;
      }
      float value;
      std::memcpy(&value, at, c.fp32_out ? 4 : 2);
      y.push_back(c.fp32_out ? value : half_value(*at));
    }
  }
  return y;
}

void expect_whole_numbers(const Product& c, unsigned seed) {
  const Data d = whole_numbers(c, seed);
  const Expected e = expected(c, d);
  for (int split : find_skinny(c.rows, c.outputs, c.inputs)) {
    SCOPED_TRACE(testing::Message() << "seed " << seed << " rows " << c.rows << " outputs " << c.outputs
                                    << " inputs " << c.inputs << " fp32 " << c.fp32_out << " split " << split);
    const std::vector<double> y = multiply(c, d, split);
    for (size_t i = 0; i < y.size(); ++i)
      ASSERT_EQ(y[i], c.fp32_out ? e.sum[i] : round_to_half(e.sum[i]))
          << "row " << i / c.outputs << " output " << i % c.outputs;
  }
}

class SkinnyGemm : public testing::TestWithParam<Product> {};

TEST_P(SkinnyGemm, WholeNumbersAreExact) { expect_whole_numbers(GetParam(), 1); }

TEST_P(SkinnyGemm, RealNumbersAreWithinTheBound) {
  const Product c = GetParam();
  const Data d = real_numbers(c, 2);
  const Expected e = expected(c, d);
  for (int split : find_skinny(c.rows, c.outputs, c.inputs)) {
    const std::vector<double> y = multiply(c, d, split);
    for (size_t i = 0; i < y.size(); ++i) {
      const double bound = (c.inputs * 0x1p-27 + 0x1p-20) * e.magnitude[i];
      const double rounding = c.fp32_out ? 0 : half_step(Element::fp16, std::fabs(e.sum[i]) + bound);
      ASSERT_NEAR(y[i], e.sum[i], bound + rounding)
          << "row " << i / c.outputs << " output " << i % c.outputs << " split " << split;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Tails, SkinnyGemm,
                         testing::Values(Product{1, 1, 8, true},         // smaller than everything
                                         Product{3, 65, 264, true},      // one output and one vector too many
                                         Product{8, 63, 248, false},     // one too few
                                         Product{9, 130, 2056, true},    // a tile of rows too many, every split
                                         Product{17, 70, 520, false},    //
                                         Product{32, 129, 1000, true}),  // all rows
                         [](const auto& info) { return "case" + std::to_string(info.index); });
INSTANTIATE_TEST_SUITE_P(Large, SkinnyGemm,
                         testing::Values(Product{1, 576, 1536, false},   // SmolLM2-135M's down
                                         Product{16, 512, 4096, false},  // a slice of Llama-3.1-8B's O
                                         Product{2, 256, 14336, false},  // of its down
                                         Product{5, 1999, 1024, true}),  // LM head of odd size
                         [](const auto& info) { return "case" + std::to_string(info.index); });

TEST(SkinnyGemmRandom, WholeNumbersAreExact) {
  std::mt19937 rng(3);
  for (int round = 0; round < std::max(20, long_run(200)); ++round) {
    const Product c{1 + int(rng() % kMaxSkinnyRows), 1 + int(rng() % 300), 8 * (1 + int(rng() % 300)),
                    rng() % 2 == 0};
    expect_whole_numbers(c, rng());
    if (HasFatalFailure()) return;
  }
}

// A row's bits are the same alone and among others, whatever those hold: also where there are NaN and
// infinities.
TEST(SkinnyGemmRows, DoNotDependOnEachOther) {
  const Product all{kMaxSkinnyRows, 96, 1288, true};
  Data d = real_numbers(all, 4);
  for (int split : find_skinny(all.rows, all.outputs, all.inputs)) {
    const std::vector<double> y = multiply(all, d, split);
    for (int rows : {1, 2, 7, 8, 9, 16, 17, 31}) {
      const Product some{rows, all.outputs, all.inputs, true};
      Data part = d;
      part.x.resize(size_t(rows) * all.inputs);
      if (rows > 2)
        for (int i = 0; i < all.inputs; ++i)
          part.x[size_t(rows - 1) * all.inputs + i] = i % 2 ? 0x7c00 : 0x7e00;
      const std::vector<double> few = multiply(some, part, split);
      for (int i = 0; i < (rows > 2 ? rows - 1 : rows) * all.outputs; ++i)
        ASSERT_EQ(few[i], y[i]) << rows << " rows, split " << split << ", element " << i;
    }
  }
}

// Each product reads what the one before has written: 40 permutations, one after the other, move values and
// round none.
TEST(SkinnyGemmChain, WaitsForWhatIsAhead) {
  constexpr int kSize = 1024, kProducts = 40, kRows = 3;
  std::mt19937 rng(5);
  std::vector<int> from(kSize);
  for (int i = 0; i < kSize; ++i) from[i] = i;
  std::shuffle(from.begin(), from.end(), rng);
  std::vector<uint16_t> w(size_t(kSize) * kSize, half_bits(0)), x;
  for (int o = 0; o < kSize; ++o) w[size_t(o) * kSize + from[o]] = half_bits(1);
  for (int i = 0; i < kRows * kSize; ++i) x.push_back(half_bits(int(rng() % 2000)));
  for (int split : find_skinny(kRows, kSize, kSize)) {
    const DeviceVector<uint16_t> d_w(w);
    DeviceVector<uint16_t> d_x[2] = {DeviceVector<uint16_t>(x), DeviceVector<uint16_t>(x.size(), kPoison)};
    std::vector<uint16_t> want = x;
    for (int n = 0; n < kProducts; ++n) {
      SkinnyGemmArgs a;
      a.w = d_w.data(), a.x = d_x[n % 2].data(), a.y = d_x[1 - n % 2].data();
      a.rows = kRows, a.outputs = a.inputs = a.out_stride = kSize, a.split = split;
      launch_skinny_gemm(a, nullptr);
      const std::vector<uint16_t> before = want;
      for (int i = 0; i < kRows * kSize; ++i) want[i] = before[i / kSize * kSize + from[i % kSize]];
    }
    ASSERT_EQ(d_x[kProducts % 2].host(), want) << "split " << split;
  }
}

TEST(SkinnyGemmFind, SaysWhatItDoesNotDo) {
  EXPECT_FALSE(find_skinny(1, 4096, 4096).empty());
  EXPECT_FALSE(find_skinny(kMaxSkinnyRows, 1, 8).empty());
  EXPECT_TRUE(find_skinny(kMaxSkinnyRows + 1, 4096, 4096).empty());
  EXPECT_TRUE(find_skinny(0, 4096, 4096).empty());
  EXPECT_TRUE(find_skinny(1, 4096, 4092).empty());
  EXPECT_EQ(find_skinny(1, 64, 248), std::vector<int>{1});  // nothing to cut
}

}  // namespace
}  // namespace ekv::test
