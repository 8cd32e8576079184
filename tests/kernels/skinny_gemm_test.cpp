// The skinny product against its formula: in whole numbers, whose sums are exact in any order, and in real
// ones. Linked to plain loops, to the GPU, and to one of the two kernels' own code on an emulated cluster.
// Every case runs in every way that the device has (skinny_split.h), also where a product would take another.

#include "kernels/skinny_gemm.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/layer_ops.h"
#include "kernels/skinny_split.h"
#include "tests/support/device_memory.h"
#include "tests/support/number_formats.h"

namespace ekv::test {
namespace {

constexpr uint16_t kPoison = 0xffff;  // NaN in fp16 and bf16; two of them are one in fp32

struct Product {
  int rows, outputs, inputs;
  bool fp32_out;
  bool gated = false;
  Element element = Element::fp16;
  int matrix_rows() const { return gated ? 2 * outputs : outputs; }
};

struct Data {
  std::vector<uint16_t> w, x;
};

std::vector<SkinnyWay> ways(const Product& c) {
  return skinny_ways(skinny_device(), c.rows, c.outputs, c.inputs, c.gated);
}
std::string name_of(const SkinnyWay& way) {
  return std::string(way.unit == SkinnyUnit::mma ? "mma" : "wgmma") + ", split " + std::to_string(way.split) +
         ", tile " + std::to_string(way.tile);
}

Data whole_numbers(const Product& c, unsigned seed) {
  std::mt19937 rng(seed);
  const auto fill = [&](size_t count) {
    std::vector<uint16_t> values(count);
    for (uint16_t& v : values) v = encode(c.element, int(rng() % 7) - 3);
    return values;
  };
  return {fill(size_t(c.matrix_rows()) * c.inputs), fill(size_t(c.rows) * c.inputs)};
}

Data real_numbers(const Product& c, unsigned seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<double> normal;
  const auto fill = [&](size_t count, double scale) {
    std::vector<uint16_t> values(count);
    for (uint16_t& v : values)
      v = encode(c.element, normal(rng) * scale * (rng() % 64 ? 1 : 30));  // outlier channels
    return values;
  };
  return {fill(size_t(c.matrix_rows()) * c.inputs, 0.05), fill(size_t(c.rows) * c.inputs, 1)};
}

// Per row of x and of W.
struct Expected {
  std::vector<double> sum, magnitude;
};

Expected expected(const Product& c, const Data& d) {
  const std::vector<double> w = decode_all(c.element, d.w), x = decode_all(c.element, d.x);
  Expected e;
  for (int r = 0; r < c.rows; ++r)
    for (int o = 0; o < c.matrix_rows(); ++o) {
      double sum = 0, magnitude = 0;
      for (int i = 0; i < c.inputs; ++i) {
        const double product = x[size_t(r) * c.inputs + i] * w[size_t(o) * c.inputs + i];
        sum += product, magnitude += std::fabs(product);
      }
      e.sum.push_back(sum), e.magnitude.push_back(magnitude);
    }
  return e;
}

// Rows of y are some elements longer than they need to be and there is one row too many; all of that stays
// poisoned. Where outputs come in fours, so do the rows: then four are stored at once.
std::vector<double> multiply(const Product& c, const Data& d, const SkinnyWay& way) {
  // Poison behind x: what the kernel reads past its last row must not count.
  std::vector<uint16_t> x = d.x;
  x.resize(x.size() + 64, kPoison);
  const int stride = c.outputs + (c.outputs % 4 == 0 ? 4 : 3), words = c.fp32_out ? 2 : 1;
  DeviceVector<uint16_t> d_w(d.w), d_x(x), d_y(size_t(c.rows + 1) * stride * words, kPoison);
  SkinnyGemmArgs a;
  a.w = d_w.data(), a.x = d_x.data(), a.y = d_y.data();
  a.rows = c.rows, a.outputs = c.outputs, a.inputs = c.inputs, a.out_stride = stride;
  a.fp32_out = c.fp32_out, a.gated = c.gated, a.split = way.split, a.element = c.element;
  launch_skinny_way(a, way, nullptr);

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
      y.push_back(c.fp32_out ? value : decode(c.element, *at));
    }
  }
  return y;
}

double round_to(Element e, double x) { return decode(e, encode(e, x)); }

void expect_whole_numbers(const Product& c, unsigned seed) {
  const Data d = whole_numbers(c, seed);
  const Expected e = expected(c, d);
  for (const SkinnyWay& way : ways(c)) {
    SCOPED_TRACE(testing::Message() << "seed " << seed << " rows " << c.rows << " outputs " << c.outputs
                                    << " inputs " << c.inputs << " fp32 " << c.fp32_out << " bf16 "
                                    << (c.element == Element::bf16) << " " << name_of(way));
    const std::vector<double> y = multiply(c, d, way);
    for (size_t i = 0; i < y.size(); ++i)
      ASSERT_EQ(y[i], c.fp32_out ? e.sum[i] : round_to(c.element, e.sum[i]))
          << "row " << i / c.outputs << " output " << i % c.outputs;
  }
}

class SkinnyGemm : public testing::TestWithParam<Product> {};

TEST_P(SkinnyGemm, WholeNumbersAreExact) { expect_whole_numbers(GetParam(), 1); }

TEST_P(SkinnyGemm, RealNumbersAreWithinTheBound) {
  const Product c = GetParam();
  const Data d = real_numbers(c, 2);
  const Expected e = expected(c, d);
  for (const SkinnyWay& way : ways(c)) {
    const std::vector<double> y = multiply(c, d, way);
    for (size_t i = 0; i < y.size(); ++i) {
      const double bound = (c.inputs * 0x1p-27 + 0x1p-20) * e.magnitude[i];
      const double rounding = c.fp32_out ? 0 : half_step(c.element, std::fabs(e.sum[i]) + bound);
      ASSERT_NEAR(y[i], e.sum[i], bound + rounding)
          << "row " << i / c.outputs << " output " << i % c.outputs << " " << name_of(way);
    }
  }
}

std::vector<Product> of_both_types(std::vector<Product> products) {
  for (size_t i = 0, count = products.size(); i < count; ++i) {
    products.push_back(products[i]);
    products.back().element = Element::bf16;
  }
  return products;
}
std::string name_case(const testing::TestParamInfo<Product>& info) {
  return std::string(info.param.element == Element::bf16 ? "bf16_" : "fp16_") + std::to_string(info.index);
}

INSTANTIATE_TEST_SUITE_P(
    Tails, SkinnyGemm,
    testing::ValuesIn(of_both_types({Product{1, 1, 8, true},           // smaller than everything
                                     Product{3, 65, 264, true},        // one output and one vector too many
                                     Product{8, 63, 248, false},       // one too few
                                     Product{9, 130, 2056, true},      // a tile of rows too many, every split
                                     Product{17, 70, 520, false},      //
                                     Product{32, 129, 1000, true},     // all rows of mma
                                     Product{33, 127, 72, false},      // a tile of rows, and inputs, too many
                                     Product{64, 260, 712, false},     // four outputs at a time
                                     Product{12, 132, 200, true},      //
                                     Product{65, 131, 1096, true},     //
                                     Product{97, 140, 584, false},     // goes that are not whole
                                     Product{128, 257, 520, true}})),  // all rows
    name_case);
INSTANTIATE_TEST_SUITE_P(
    Large, SkinnyGemm,
    testing::ValuesIn(of_both_types({Product{1, 576, 1536, false},     // SmolLM2-135M's down
                                     Product{16, 512, 4096, false},    // a slice of Llama-3.1-8B's O
                                     Product{2, 256, 14336, false},    // of its down
                                     Product{5, 1999, 1024, true}})),  // LM head of odd size
    name_case);

TEST(SkinnyGemmRandom, WholeNumbersAreExact) {
  std::mt19937 rng(3);
  for (int round = 0; round < std::max(4, long_run(200)); ++round) {
    const Product c{1 + int(rng() % kMaxSkinnyRows),
                    1 + int(rng() % 300),
                    8 * (1 + int(rng() % 150)),
                    rng() % 2 == 0,
                    false,
                    rng() % 3 ? Element::fp16 : Element::bf16};
    expect_whole_numbers(c, rng());
    if (HasFatalFailure()) return;
  }
}

class SkinnyGemmGated : public testing::Test {
 protected:
  void SetUp() override {
    if (!find_skinny_gated(1)) GTEST_SKIP() << "no gated products on this device";
  }
};

// What launch_silu_mul() makes of the plain product's rounded sums, within its error.
void expect_gated(const Product& c, unsigned seed) {
  Data d = whole_numbers(c, seed);
  // Sums are exact, gates not too large for fp16.
  for (uint16_t& w : d.w) w = encode(c.element, decode(c.element, w) / 32);
  const Expected e = expected(c, d);
  for (const SkinnyWay& way : ways(c)) {
    SCOPED_TRACE(testing::Message() << "seed " << seed << " rows " << c.rows << " outputs " << c.outputs
                                    << " inputs " << c.inputs << " " << name_of(way));
    const std::vector<double> y = multiply(c, d, way);
    for (size_t i = 0; i < y.size(); ++i) {
      const size_t row = i / c.outputs * c.matrix_rows(), output = i % c.outputs;
      const double g = round_to(c.element, e.sum[row + output]);
      const double u = round_to(c.element, e.sum[row + c.outputs + output]);
      const double want = g / (1 + std::exp(-g)) * u;
      ASSERT_NEAR(y[i], want, std::fabs(want) * 0x1p-20 + half_step(c.element, std::fabs(want)))
          << "row " << i / c.outputs << " output " << output;
    }
  }
}

TEST_F(SkinnyGemmGated, MatchesDefinition) {
  for (const Product& c :
       of_both_types({Product{1, 64, 64, false, true}, Product{9, 1, 200, false, true},
                      Product{23, 65, 1032, false, true}, Product{64, 200, 520, false, true},
                      Product{101, 68, 520, false, true}, Product{128, 131, 136, false, true}})) {
    expect_gated(c, unsigned(c.rows));
    if (HasFatalFailure()) return;
  }
}

TEST_F(SkinnyGemmGated, RandomOnesMatchTheDefinition) {
  std::mt19937 rng(7);
  for (int round = 0; round < std::max(4, long_run(100)); ++round) {
    const Product c{1 + int(rng() % kMaxSkinnyRows), 1 + int(rng() % 200), 8 * (1 + int(rng() % 150)), false,
                    true};
    expect_gated(c, rng());
    if (HasFatalFailure()) return;
  }
}

// The activation of a separate kernel, after the plain product of the same split, has the same bits. Widths are
// those that launch_silu_mul() has.
TEST_F(SkinnyGemmGated, IsPlainThenActivation) {
  for (const Product& c :
       of_both_types({Product{1, 64, 1032, false, true}, Product{4, 8, 8, false, true},
                      Product{16, 136, 520, false, true}, Product{33, 72, 264, false, true},
                      Product{64, 200, 520, false, true}, Product{128, 72, 1096, false, true}})) {
    const Data d = real_numbers(c, unsigned(c.rows));
    Product plain{c.rows, 2 * c.outputs, c.inputs, false};
    plain.element = c.element;
    for (const SkinnyWay& way : ways(c)) {
      const DeviceVector<uint16_t> sums(
          encode_all(c.element, multiply(plain, d, {way.unit, way.split, kWgmmaOutputs})));
      const DeviceVector<uint16_t> out(size_t(c.rows) * c.outputs, kPoison);
      launch_silu_mul({sums.data(), out.data(), c.rows, c.outputs, c.element}, nullptr);
      ASSERT_EQ(encode_all(c.element, multiply(c, d, way)), out.host()) << c.rows << " rows, " << name_of(way);
    }
  }
}

// Every tail of a tile of rows; few outputs and inputs, none of them whole.
TEST(SkinnyGemmRows, EveryNumber) {
  for (int rows = 1; rows <= kMaxSkinnyRows; ++rows) {
    Product c{rows, 1 + rows % 3 * 67, 136 + rows % 2 * 64, rows % 5 < 2};
    expect_whole_numbers(c, unsigned(rows));
    c.element = Element::bf16;
    if (rows % 4 == 1) expect_whole_numbers(c, unsigned(rows));  // the type has no part in what rows are whose
    if (testing::Test::HasFatalFailure()) return;
  }
}

// Every split: a thread adds up the parts of some rows at a time, and not always as many the last time.
TEST(SkinnyGemmRows, OfManyEverySplit) {
  for (int rows = 33; rows <= kMaxSkinnyRows; rows += 5) {
    expect_whole_numbers({rows, rows % 4 ? 30 + rows : 132, 520, rows % 3 == 0}, unsigned(rows));
    if (testing::Test::HasFatalFailure()) return;
  }
}

// A row's bits are the same alone and among others, whatever those hold: also where there are NaN and
// infinities. They depend on kernel and split, and on nothing else.
void expect_independent_rows(Element element) {
  for (const SkinnyWay& way : ways({1, 96, 1288, true, false, element})) {
    const int most = way.unit == SkinnyUnit::mma ? kMaxMmaRows : kMaxSkinnyRows;
    const Product all{most, 96, 1288, true, false, element};
    const Data d = real_numbers(all, 4);
    const std::vector<double> y = multiply(all, d, way);
    for (int rows : {1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 64, 65, 127}) {
      if (rows > most) continue;
      const Product some{rows, all.outputs, all.inputs, true, false, element};
      Data part = d;
      part.x.resize(size_t(rows) * all.inputs);
      if (rows > 2)
        for (int i = 0; i < all.inputs; ++i)
          part.x[size_t(rows - 1) * all.inputs + i] = encode(element, i % 2 ? INFINITY : NAN);
      for (const SkinnyWay& same : ways(some)) {
        if (same.unit != way.unit || same.split != way.split) continue;
        const std::vector<double> few = multiply(some, part, same);
        for (int i = 0; i < (rows > 2 ? rows - 1 : rows) * all.outputs; ++i)
          ASSERT_EQ(few[i], y[i]) << rows << " rows, " << name_of(same) << ", element " << i;
      }
    }
  }
}
TEST(SkinnyGemmRows, DoNotDependOnEachOther) { expect_independent_rows(Element::fp16); }
TEST(SkinnyGemmRows, DoNotDependOnEachOtherInBf16) { expect_independent_rows(Element::bf16); }

TEST(SkinnyGemmRows, TwentyRepeatsAreTheSame) {
  const Product c{50, 300, 2056, true};
  const Data d = real_numbers(c, 6);
  for (const SkinnyWay& way : ways(c)) {
    const std::vector<double> first = multiply(c, d, way);
    for (int n = 0; n < std::max(1, long_run(20)); ++n) ASSERT_EQ(multiply(c, d, way), first) << name_of(way);
  }
}

// Each product reads what the one before has written: permutations, one after the other, move values and round
// none.
void expect_chain(int rows, int size, int products) {
  std::mt19937 rng(5);
  std::vector<int> from(static_cast<size_t>(size));
  for (int i = 0; i < size; ++i) from[i] = i;
  std::shuffle(from.begin(), from.end(), rng);
  std::vector<uint16_t> w(size_t(size) * size, half_bits(0)), x;
  for (int o = 0; o < size; ++o) w[size_t(o) * size + from[o]] = half_bits(1);
  for (int i = 0; i < rows * size; ++i) x.push_back(half_bits(int(rng() % 2000)));
  for (const SkinnyWay& way : ways({rows, size, size, false})) {
    const DeviceVector<uint16_t> d_w(w);
    DeviceVector<uint16_t> d_x[2] = {DeviceVector<uint16_t>(x), DeviceVector<uint16_t>(x.size(), kPoison)};
    std::vector<uint16_t> want = x;
    for (int n = 0; n < products; ++n) {
      SkinnyGemmArgs a;
      a.w = d_w.data(), a.x = d_x[n % 2].data(), a.y = d_x[1 - n % 2].data();
      a.rows = rows, a.outputs = a.inputs = a.out_stride = size, a.split = way.split;
      launch_skinny_way(a, way, nullptr);
      const std::vector<uint16_t> before = want;
      for (int i = 0; i < rows * size; ++i) want[i] = before[i / size * size + from[i % size]];
    }
    ASSERT_EQ(d_x[products % 2].host(), want) << name_of(way);
  }
}

TEST(SkinnyGemmChain, WaitsForWhatIsAhead) {
  expect_chain(3, 1024, std::max(2, long_run(40)));
  expect_chain(40, 1024, std::max(2, long_run(40)));
}

TEST(SkinnyGemmFind, SaysWhatItDoesNotDo) {
  const SkinnyDevice device = skinny_device();
  const int most = std::max(device.mma_rows, device.wgmma_rows);
  EXPECT_FALSE(find_skinny(1, 4096, 4096).empty());
  EXPECT_FALSE(find_skinny(most, 1, 8).empty());
  EXPECT_TRUE(find_skinny(most + 1, 4096, 4096).empty());
  EXPECT_TRUE(find_skinny(0, 4096, 4096).empty());
  EXPECT_TRUE(find_skinny(1, 4096, 4092).empty());
  EXPECT_EQ(find_skinny(1, 64, 56), std::vector<int>{1});  // nothing to cut
}

TEST(SkinnyGemmFind, GatedWhereThereIsWgmma) {
  for (int rows : {1, 4, 5, 64, kMaxSkinnyRows}) {
    EXPECT_EQ(find_skinny_gated(rows), skinny_device().wgmma_rows > 0) << rows;
    EXPECT_EQ(find_skinny(rows, 14336, 4096, true).empty(), !find_skinny_gated(rows)) << rows;
  }
  EXPECT_FALSE(find_skinny_gated(kMaxSkinnyRows + 1));
}

TEST(SkinnyGemmFind, EverySplitHasAWay) {
  const SkinnyDevice device = skinny_device();
  for (const bool gated : {false, true})
    for (int rows = 1; rows <= kMaxSkinnyRows; ++rows)
      for (const int split : find_skinny(rows, 4096, 4096, gated)) {
        const std::vector<SkinnyWay> all = skinny_ways(device, rows, 4096, 4096, gated);
        SkinnyGemmArgs a;
        a.rows = rows, a.outputs = a.inputs = 4096, a.split = split, a.gated = gated;
        EXPECT_EQ(std::ranges::count(all, skinny_way(device, a)), 1) << rows << " rows, split " << split;
      }
}

// The rule of skinny_split.cpp on an H200 and on an older device.
TEST(SkinnyGemmFind, SmallTilesWhereTheyAllFitAtOnce) {
  const SkinnyDevice hopper{32, 128, 8, 132}, older{32, 0, 1, 108};
  const auto way = [](const SkinnyDevice& device, int outputs, int split, bool gated = false) {
    SkinnyGemmArgs a;
    a.rows = 1, a.outputs = outputs, a.inputs = 4096, a.split = split, a.gated = gated;
    return skinny_way(device, a);
  };
  EXPECT_EQ(way(hopper, 4096, 2), (SkinnyWay{SkinnyUnit::wgmma, 2, 64}));   // 128 CTAs
  EXPECT_EQ(way(hopper, 4096, 4), (SkinnyWay{SkinnyUnit::wgmma, 4, 128}));  // would be 256
  EXPECT_EQ(way(hopper, 6144, 2), (SkinnyWay{SkinnyUnit::wgmma, 2, 128}));  // would be 192
  EXPECT_EQ(way(hopper, 132 * 64, 1), (SkinnyWay{SkinnyUnit::wgmma, 1, 64}));
  EXPECT_EQ(way(hopper, 132 * 64 + 1, 1), (SkinnyWay{SkinnyUnit::wgmma, 1, 128}));
  EXPECT_EQ(way(hopper, 2048, 2, true), (SkinnyWay{SkinnyUnit::wgmma, 2, 128}));
  EXPECT_EQ(way(older, 4096, 1), (SkinnyWay{SkinnyUnit::mma, 1, 0}));
}

// First the split that a product has that nobody has timed.
TEST(SkinnyGemmFind, FirstTheSplitThatFillsTheDevice) {
  if (skinny_device().multiprocessors != 132 || skinny_device().wgmma_rows == 0)
    GTEST_SKIP() << "another device";
  EXPECT_EQ(find_skinny(1, 4096, 4096)[0], 2);
  EXPECT_EQ(find_skinny(1, 4096, 14336)[0], 2);
  EXPECT_EQ(find_skinny(1, 28672, 4096)[0], 1);
  EXPECT_EQ(find_skinny(1, 14336, 4096, true)[0], 1);
  EXPECT_EQ(find_skinny(1, 128256, 4096)[0], 1);
}

}  // namespace
}  // namespace ekv::test
