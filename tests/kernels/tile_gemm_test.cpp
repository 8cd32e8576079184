// Products of many rows, plain and gated, against their formulas: in numbers whose sums are exact in any order,
// and in real ones. Linked to plain loops, to the GPU, and to the kernel's own code on an emulated cluster.

#include "kernels/tile_gemm.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "kernels/layer_ops.h"
#include "kernels/tile_order.h"
#include "support/seed.h"
#include "tests/support/device_memory.h"
#include "tests/support/number_formats.h"

namespace ekv::test {
namespace {

constexpr uint16_t kPoison = 0xffff;     // NaN in fp16 and bf16
constexpr double kArithmetic = 0x1p-20;  // of the activation before its rounding, relative (layer_ops.h)
constexpr int kGuardRows = 40;           // behind `out`, more than a box is high
constexpr int kGuard = 256;              // elements before and behind everything

struct Product {
  int rows, outputs, inputs;
  bool gated;
  Element element;
  int matrix_rows() const { return gated ? 2 * outputs : outputs; }
  size_t out_size() const { return size_t(rows) * size_t(outputs); }
};

std::string name_of(const Product& c) {
  return std::string(c.gated ? "gated_" : "plain_") + (c.element == Element::bf16 ? "bf16_" : "fp16_") +
         std::to_string(c.rows) + "x" + std::to_string(c.outputs) + "x" + std::to_string(c.inputs);
}

// A tensor with poison around it.
class Guarded {
 public:
  Guarded(const std::vector<uint16_t>& values, size_t behind = 0)
      : size_(values.size()), memory_(surrounded(values, behind)) {}
  uint16_t* data() const { return memory_.data() + kGuard; }
  // The tensor; fails where the poison has changed.
  std::vector<uint16_t> host() const {
    const std::vector<uint16_t> all = memory_.host();
    for (size_t i = 0; i < all.size(); ++i)
      if ((i < kGuard || i >= kGuard + size_) && all[i] != kPoison) {
        ADD_FAILURE() << "written outside, element " << int64_t(i) - kGuard << " of " << size_;
        break;
      }
    return {all.begin() + kGuard, all.begin() + kGuard + ptrdiff_t(size_)};
  }

 private:
  static std::vector<uint16_t> surrounded(const std::vector<uint16_t>& values, size_t behind) {
    std::vector<uint16_t> all(kGuard, kPoison);
    all.insert(all.end(), values.begin(), values.end());
    all.resize(all.size() + behind + kGuard, kPoison);
    return all;
  }
  size_t size_;
  DeviceVector<uint16_t> memory_;
};

struct Data {
  std::vector<uint16_t> x, w;
  std::vector<double> values;  // of all 65,536 bit patterns
};

std::vector<double> all_values(Element e) {
  std::vector<double> values(0x10000);
  for (size_t bits = 0; bits < values.size(); ++bits) values[bits] = decode(e, uint16_t(bits));
  return values;
}

// Multiples of 2^-6 in W: sums are exact in fp32, and activations neither vanish nor overflow.
Data whole_numbers(const Product& c, unsigned seed) {
  uint32_t state = seed * 2654435761u + 1;
  const auto fill = [&](size_t count, double unit) {
    uint16_t values[7];
    for (int i = 0; i < 7; ++i) values[i] = encode(c.element, (i - 3) * unit);
    std::vector<uint16_t> bits(count);
    for (uint16_t& b : bits) b = values[(state = state * 1664525u + 1013904223u) % 1000003 % 7];
    return bits;
  };
  return {fill(size_t(c.rows) * c.inputs, 1), fill(size_t(c.matrix_rows()) * c.inputs, 0x1p-6),
          all_values(c.element)};
}

Data real_numbers(const Product& c, unsigned seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<double> normal;
  const auto fill = [&](size_t count, double scale) {
    std::vector<uint16_t> bits(count);
    for (uint16_t& b : bits) b = encode(c.element, normal(rng) * scale * (rng() % 64 ? 1 : 8));  // outliers
    return bits;
  };
  return {fill(size_t(c.rows) * c.inputs, 1), fill(size_t(c.matrix_rows()) * c.inputs, 0.06),
          all_values(c.element)};
}

// x and W on the device.
class Operands {
 public:
  Operands(const Product& c, const Data& d) : c_(c), x_(d.x), w_(d.w) {}
  const uint16_t* x() const { return x_.data(); }
  const uint16_t* w() const { return w_.data(); }
  // Of `rows` rows from `first` on.
  std::vector<uint16_t> multiply(int first, int rows) const {
    Guarded out(std::vector<uint16_t>(size_t(rows) * size_t(c_.outputs), kPoison),
                size_t(kGuardRows) * size_t(c_.outputs));
    TileGemmArgs a;
    a.x = x_.data() + size_t(first) * size_t(c_.inputs), a.w = w_.data(), a.out = out.data();
    a.rows = rows, a.outputs = c_.outputs, a.inputs = c_.inputs, a.gated = c_.gated, a.element = c_.element;
    launch_tile_gemm(a, nullptr);
    return out.host();
  }
  std::vector<uint16_t> multiply() const { return multiply(0, c_.rows); }

 private:
  Product c_;
  Guarded x_, w_;
};

struct Sum {
  double value = 0, magnitude = 0;
};
Sum exact_sum(const Product& c, const Data& d, int row, int matrix_row) {
  Sum s;
  for (int i = 0; i < c.inputs; ++i) {
    const double term =
        d.values[d.x[size_t(row) * c.inputs + i]] * d.values[d.w[size_t(matrix_row) * c.inputs + i]];
    s.value += term, s.magnitude += std::fabs(term);
  }
  return s;
}
double silu(double x) { return x / (1 + std::exp(-x)); }

void expect_exact(const Product& c, const Data& d, const std::vector<uint16_t>& out, int row, int output) {
  const uint16_t got = out[size_t(row) * c.outputs + output];
  const uint16_t first = encode(c.element, exact_sum(c, d, row, output).value);
  if (!c.gated) {
    ASSERT_EQ(got, first) << "row " << row << " output " << output;
    return;
  }
  const uint16_t up = encode(c.element, exact_sum(c, d, row, c.outputs + output).value);
  const double want = silu(decode(c.element, first)) * decode(c.element, up);
  ASSERT_NEAR(decode(c.element, got), want,
              half_step(c.element, want) * (1 + 1e-6) + kArithmetic * std::fabs(want))
      << "row " << row << " output " << output;
}

// What a sum in fp32, rounded to the element, may be off by.
double sum_bound(const Product& c, const Sum& s) {
  const double before = (c.inputs * 0x1p-24 + 0x1p-20) * s.magnitude;
  return before + half_step(c.element, std::fabs(s.value) + before);
}

void expect_near(const Product& c, const Data& d, const std::vector<uint16_t>& out, int row, int output) {
  const double got = decode(c.element, out[size_t(row) * c.outputs + output]);
  const Sum gate = exact_sum(c, d, row, output);
  const double gate_bound = sum_bound(c, gate);
  if (!c.gated) {
    ASSERT_NEAR(got, gate.value, gate_bound) << "row " << row << " output " << output;
    return;
  }
  const Sum up = exact_sum(c, d, row, c.outputs + output);
  const double up_bound = sum_bound(c, up), want = silu(gate.value) * up.value;
  constexpr double kSteepest = 1.1;  // of x / (1 + exp(-x))
  const double before = kSteepest * gate_bound * (std::fabs(up.value) + up_bound) +
                        std::fabs(silu(gate.value)) * up_bound + kArithmetic * std::fabs(want);
  ASSERT_NEAR(got, want, before + half_step(c.element, std::fabs(want) + before))
      << "row " << row << " output " << output;
}

class TileGemmKernel : public testing::Test {
 protected:
  void SetUp() override {
    if (!has_tile_gemm(8, 8)) GTEST_SKIP() << "no tile kernel for this device";
  }
};
class TileGemm : public TileGemmKernel, public testing::WithParamInterface<Product> {};
class TileGemmLarge : public TileGemmKernel, public testing::WithParamInterface<Product> {};
using TileGemmRandom = TileGemmKernel;
using TileGemmRows = TileGemmKernel;
using TileGemmChain = TileGemmKernel;
using TileGemmFind = TileGemmKernel;

// Every output, with expect_exact() or expect_near().
template <class Expect>
void expect_all(const Product& c, const Data& d, const Expect& expect) {
  const std::vector<uint16_t> out = Operands(c, d).multiply();
  for (int row = 0; row < c.rows; ++row)
    for (int output = 0; output < c.outputs; ++output) {
      expect(c, d, out, row, output);
      if (testing::Test::HasFatalFailure()) return;
    }
}

TEST_P(TileGemm, WholeNumbersAreExactOnceRounded) {
  expect_all(GetParam(), whole_numbers(GetParam(), 1), expect_exact);
}

TEST_P(TileGemm, RealNumbersAreWithinTheBound) {
  expect_all(GetParam(), real_numbers(GetParam(), 2), expect_near);
}

// The activation of a separate kernel has the same bits.
TEST_P(TileGemm, GatedIsPlainThenActivation) {
  Product c = GetParam();
  if (!c.gated) GTEST_SKIP() << "a plain product";
  const Operands operands(c, real_numbers(c, 3));
  const std::vector<uint16_t> fused = operands.multiply();
  Guarded both(std::vector<uint16_t>(2 * c.out_size(), kPoison)),
      out(std::vector<uint16_t>(c.out_size(), kPoison));
  TileGemmArgs a;
  a.x = operands.x(), a.w = operands.w(), a.out = both.data();
  a.rows = c.rows, a.outputs = 2 * c.outputs, a.inputs = c.inputs, a.element = c.element;
  launch_tile_gemm(a, nullptr);
  launch_silu_mul({both.data(), out.data(), c.rows, c.outputs, c.element}, nullptr);
  EXPECT_EQ(out.host(), fused);
}

// What was there is rounded once more with the rounded product.
TEST_P(TileGemm, AddsToWhatIsThere) {
  const Product c = GetParam();
  if (c.gated) GTEST_SKIP() << "a gated product";
  const Data d = whole_numbers(c, 9);
  const Operands operands(c, d);
  const std::vector<uint16_t> product = operands.multiply();
  std::mt19937 rng(10);
  std::normal_distribution<double> normal;
  std::vector<uint16_t> before(c.out_size());
  for (uint16_t& b : before) b = encode(c.element, 30 * normal(rng));
  Guarded out(before, size_t(kGuardRows) * size_t(c.outputs));
  TileGemmArgs a;
  a.x = operands.x(), a.w = operands.w(), a.out = out.data();
  a.rows = c.rows, a.outputs = c.outputs, a.inputs = c.inputs, a.add = true, a.element = c.element;
  launch_tile_gemm(a, nullptr);
  const std::vector<uint16_t> after = out.host();
  for (size_t i = 0; i < after.size(); ++i)
    ASSERT_EQ(after[i], encode(c.element, d.values[before[i]] + d.values[product[i]])) << "element " << i;
}

std::string case_name(const testing::TestParamInfo<Product>& info) { return name_of(info.param); }
constexpr Element kFp16 = Element::fp16, kBf16 = Element::bf16;

INSTANTIATE_TEST_SUITE_P(
    Tails, TileGemm,
    testing::Values(Product{1, 8, 8, true, kFp16},         // smaller than everything
                    Product{63, 72, 64, true, kBf16},      // one stage
                    Product{128, 128, 136, true, kFp16},   // a tile; two stages and a rest
                    Product{129, 136, 320, true, kFp16},   // one more: every stage once, one twice
                    Product{257, 264, 200, true, kBf16},   // a second cluster tile of one row
                    Product{600, 400, 456, true, kFp16},   // several tiles for every cluster
                    Product{1, 8, 8, false, kBf16},        //
                    Product{63, 264, 72, false, kFp16},    //
                    Product{128, 256, 256, false, kBf16},  //
                    Product{300, 520, 328, false, kFp16},  //
                    Product{600, 776, 200, false, kBf16}),
    case_name);

TEST_F(TileGemmRandom, WholeNumbersAreExactOnceRounded) {
  const unsigned seed = drawn_seed();
  std::mt19937 rng(seed);
  for (int round = 0; round < std::max(4, long_run(100)); ++round) {
    const Product c{1 + int(rng() % 700), 8 * (1 + int(rng() % 50)), 8 * (1 + int(rng() % 60)), rng() % 2 == 0,
                    rng() % 2 ? kFp16 : kBf16};
    SCOPED_TRACE(name_of(c));
    const Data d = whole_numbers(c, rng());
    const std::vector<uint16_t> out = Operands(c, d).multiply();
    for (int row = 0; row < c.rows; row += 1 + int(rng() % 3))
      for (int output = 0; output < c.outputs; output += 1 + int(rng() % 3)) {
        expect_exact(c, d, out, row, output);
        if (HasFatalFailure()) return;
      }
  }
}

// A row's bits are the same alone, among others, and in another place of the batch, whatever those hold.
TEST_F(TileGemmRows, DoNotDependOnEachOther) {
  const Product all{410, 200, 264, true, kFp16};
  Data d = real_numbers(all, 4);
  for (int i = 0; i < all.inputs; ++i) d.x[size_t(200) * all.inputs + i] = i % 2 ? 0x7c00 : 0x7e00;  // inf, NaN
  const Operands operands(all, d);
  const std::vector<uint16_t> out = operands.multiply();
  for (const auto& [first, rows] : {std::pair{0, 1}, {0, 129}, {64, 130}, {201, 209}, {409, 1}}) {
    const std::vector<uint16_t> some = operands.multiply(first, rows);
    for (size_t i = 0; i < some.size(); ++i) {
      const size_t row = size_t(first) + i / all.outputs, at = size_t(first) * all.outputs + i;
      if (row != 200) {
        ASSERT_EQ(some[i], out[at]) << rows << " rows from " << first << ", element " << i;
      }
    }
  }
}

TEST_F(TileGemmRows, TwentyRepeatsHaveTheSameBits) {
  const Product c{long_run(3000) > 1000 ? 3000 : 300, 136, 520, true, kBf16};
  const Operands operands(c, real_numbers(c, 5));
  const std::vector<uint16_t> first = operands.multiply();
  for (int i = 1; i < std::max(3, long_run(20)); ++i) ASSERT_EQ(operands.multiply(), first) << "repeat " << i;
}

// Each product reads what the one before has written: permutations, one after the other, move values and round
// none.
TEST_F(TileGemmChain, WaitsForWhatIsAhead) {
  const int size = long_run(50) > 1 ? 2048 : 136, rows = 300, products = std::max(4, long_run(40));
  std::mt19937 rng(6);
  std::vector<int> from(static_cast<size_t>(size));
  for (int i = 0; i < size; ++i) from[size_t(i)] = i;
  std::shuffle(from.begin(), from.end(), rng);
  std::vector<uint16_t> w(size_t(size) * size, half_bits(0)), x;
  for (int o = 0; o < size; ++o) w[size_t(o) * size + from[size_t(o)]] = half_bits(1);
  for (int i = 0; i < rows * size; ++i) x.push_back(half_bits(int(rng() % 2000)));
  const DeviceVector<uint16_t> d_w(w);
  DeviceVector<uint16_t> d_x[2] = {DeviceVector<uint16_t>(x), DeviceVector<uint16_t>(x.size(), kPoison)};
  std::vector<uint16_t> want = x;
  for (int n = 0; n < products; ++n) {
    TileGemmArgs a;
    a.x = d_x[n % 2].data(), a.w = d_w.data(), a.out = d_x[1 - n % 2].data();
    a.rows = rows, a.outputs = a.inputs = size;
    launch_tile_gemm(a, nullptr);
    const std::vector<uint16_t> before = want;
    for (int i = 0; i < rows * size; ++i)
      want[size_t(i)] = before[size_t(i / size * size + from[size_t(i % size)])];
  }
  ASSERT_EQ(d_x[products % 2].host(), want);
}

TEST_F(TileGemmFind, SaysWhatItDoesNotDo) {
  EXPECT_TRUE(has_tile_gemm(14336, 4096));
  EXPECT_TRUE(has_tile_gemm(8, 8));
  EXPECT_FALSE(has_tile_gemm(14336, 4092));
  EXPECT_FALSE(has_tile_gemm(14334, 4096));
  EXPECT_FALSE(has_tile_gemm(0, 4096));
}

TEST(TileOrder, EveryTileOnceAndNeighboursTogether) {
  for (int rows = 1; rows <= 40; ++rows)
    for (int columns : {1, 2, 7, 112}) {
      const int band = 1 + rows * 7 % 9;
      const TileOrder order = TileOrder::make(rows, columns, band);
      std::vector<int> seen(size_t(rows * columns));
      ASSERT_EQ(order.count(), rows * columns);
      for (int i = 0; i < order.count(); ++i) {
        const TilePlace at = order.at(i);
        ASSERT_TRUE(at.row >= 0 && at.row < rows && at.column >= 0 && at.column < columns) << i;
        ASSERT_EQ(seen[size_t(at.row * columns + at.column)]++, 0) << "twice: " << at.row << ", " << at.column;
        if (i == 0) continue;
        // Down a column of the band, to the top of the next one, or to the next band.
        const TilePlace before = order.at(i - 1);
        const int down = at.row - before.row, right = at.column - before.column;
        ASSERT_TRUE((right == 0 && down == 1) || (right == 1 && down <= 0 && -down < band) ||
                    (right == 1 - columns && down == 1))
            << i << ": " << down << " down and " << right << " to the right";
      }
    }
}

// The shapes of Llama-3.1-8B, on a GPU only: samples of every tile's corners and inside, the guard around all
// of it, and every row against the same row in a smaller batch.
TEST_P(TileGemmLarge, SamplesAreExactAndRowsRepeat) {
  const Product c = GetParam();
  const size_t bytes = 2 * (size_t(c.matrix_rows()) * c.inputs + size_t(c.rows) * (c.inputs + c.outputs));
  if (long_run(50) <= 1 || !device_has(bytes)) GTEST_SKIP() << "too large for this target";
  const Data d = whole_numbers(c, 7);
  const Operands operands(c, d);
  const std::vector<uint16_t> out = operands.multiply();
  std::mt19937 rng(8);
  for (int i = 0; i < 3000; ++i) {
    const int row = i % 3 ? int(rng() % c.rows) : std::min(c.rows - 1, int(rng() % 65) * 128 - int(rng() % 2));
    const int output =
        i % 5 ? int(rng() % c.outputs) : std::min(c.outputs - 1, int(rng() % 113) * 128 - int(rng() % 2));
    expect_exact(c, d, out, std::max(row, 0), std::max(output, 0));
    if (HasFatalFailure()) return;
  }
  for (int first = 0; first < c.rows; first += 1000) {
    const int rows = std::min(1000, c.rows - first);
    const std::vector<uint16_t> some = operands.multiply(first, rows);
    ASSERT_TRUE(std::equal(some.begin(), some.end(), out.begin() + ptrdiff_t(first) * c.outputs))
        << rows << " rows from " << first;
  }
}

INSTANTIATE_TEST_SUITE_P(
    GateUp, TileGemmLarge,
    testing::Values(Product{1, 14336, 4096, true, kFp16}, Product{63, 14336, 4096, true, kBf16},
                    Product{128, 14336, 4096, true, kFp16}, Product{129, 14336, 4096, true, kBf16},
                    Product{1000, 14336, 4096, true, kFp16}, Product{8191, 14336, 4096, true, kFp16},
                    Product{8191, 14336, 4096, true, kBf16}),
    case_name);
INSTANTIATE_TEST_SUITE_P(Others, TileGemmLarge,
                         testing::Values(Product{8191, 6144, 4096, false, kFp16},
                                         Product{1000, 4096, 4096, false, kBf16},
                                         Product{8191, 4096, 14336, false, kFp16}),
                         case_name);

}  // namespace
}  // namespace ekv::test
