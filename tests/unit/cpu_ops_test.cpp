// The inner loops of the CPU backend against their definitions in double, for every instruction set that this
// machine has.

#include "backend/cpu/cpu_ops.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>

#include "backend/cpu/cpu_kv.h"
#include "support/compare.h"

namespace ekv::test {
namespace {

std::vector<float> normal(std::mt19937& rng, size_t n, float sigma = 1) {
  std::normal_distribution<float> draw(0, sigma);
  std::vector<float> out(n);
  for (float& x : out) x = draw(rng);
  return out;
}

class CpuOps : public testing::TestWithParam<CpuIsa> {
 protected:
  void SetUp() override {
    kernels_ = find_cpu_kernels(GetParam());
    if (kernels_ == nullptr) GTEST_SKIP() << "this machine lacks the instruction set";
  }
  const CpuKernels* kernels_ = nullptr;
  std::mt19937 rng_{20};
};

TEST_P(CpuOps, EveryHalfWidensToItsValueAndBack) {
  std::vector<uint16_t> bits(65536);
  for (size_t i = 0; i < bits.size(); ++i) bits[i] = uint16_t(i);
  std::vector<float> values(bits.size());
  std::vector<uint16_t> back(bits.size());
  kernels_->half_to_float(bits.data(), values.data(), int(bits.size()));
  kernels_->float_to_half(values.data(), back.data(), int(bits.size()));
  for (size_t i = 0; i < bits.size(); ++i) {
    const double want = half_value(bits[i]);
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(values[i])) << i;
      continue;
    }
    ASSERT_EQ(double(values[i]), want) << i;
    ASSERT_EQ(back[i], bits[i]) << i;
  }
}

TEST_P(CpuOps, NarrowingRoundsToNearestEven) {
  std::vector<float> values;
  for (uint32_t i = 0; i < 65536; ++i) {  // every half, its neighbours' midpoint, and a float step beside it
    const float h = float(half_value(uint16_t(i)));
    if (!std::isfinite(h)) continue;
    const float next = float(half_value(uint16_t(i + 1)));
    const float middle = std::isfinite(next) ? 0.5f * (h + next) : std::copysign(65520.0f, h);
    for (float x : {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, 2 * middle)})
      values.push_back(x);
  }
  for (int i = 0; i < 20000; ++i) {
    values.push_back(std::ldexp(float(rng_()) - 2e9f, -int(rng_() % 70)));
  }
  values.resize(values.size() / 8 * 8 + 5);  // also the odd end
  std::vector<uint16_t> got(values.size());
  kernels_->float_to_half(values.data(), got.data(), int(values.size()));
  for (size_t i = 0; i < values.size(); ++i) ASSERT_EQ(got[i], half_bits(double(values[i]))) << values[i];
}

TEST_P(CpuOps, RmsNorm) {
  for (int n : {1, 15, 16, 48, 576, 1000}) {
    const std::vector<float> x = normal(rng_, size_t(n), 3), w = normal(rng_, size_t(n));
    std::vector<float> y(size_t(n), NAN);
    kernels_->rms_norm(x.data(), w.data(), y.data(), n, 1e-5f);
    double square = 0;
    for (float v : x) square += double(v) * double(v);
    std::vector<double> want;
    for (int i = 0; i < n; ++i)
      want.push_back(double(x[i]) / std::sqrt(square / n + double(1e-5f)) * double(w[i]));
    // Sum of n squares in 16 lanes: n / 16 roundings of 2^-24 at most, halved by the root; then four more.
    const double error = (n / 32.0 + 6) * 0x1p-24;
    EXPECT_TRUE(all_near(y, want, [&](size_t i) { return error * std::fabs(want[i]) + 1e-30; })) << n;
  }
}

TEST_P(CpuOps, SiluMulAtEveryScaleWithoutOverflow) {
  std::vector<float> gate = {0,  -0.0f, 1e-30f, -1e-30f, 20,   -20,   68,    -68,
                             88, -88,   90,     -90,     1e4f, -1e4f, 1e30f, -1e30f};
  const std::vector<float> more = normal(rng_, 1000, 10);
  gate.insert(gate.end(), more.begin(), more.end());
  const std::vector<float> up = normal(rng_, gate.size());
  std::vector<float> y(gate.size());
  kernels_->silu_mul(gate.data(), up.data(), y.data(), int(gate.size()));
  std::vector<double> want;
  for (size_t i = 0; i < gate.size(); ++i) {
    want.push_back(double(gate[i]) / (1 + std::exp(-double(gate[i]))) * double(up[i]));
  }
  // exp has 2e-7, which below -69 is an absolute 1e-30 of the gate instead.
  EXPECT_TRUE(all_near(y, want, [&](size_t i) {
    return 6e-7 * std::fabs(want[i]) + 1.2e-30 * std::fabs(double(gate[i]) * double(up[i]));
  }));
}

TEST_P(CpuOps, ExpOfEveryExponent) {
  std::vector<float> x;
  for (float v = 0; v > -110; v -= 0.001f) x.push_back(v);
  std::vector<float> y(x.size());
  kernels_->exp_all(x.data(), 0, y.data(), int(x.size()));
  std::vector<double> want;
  for (float v : x) want.push_back(std::exp(double(v)));
  EXPECT_TRUE(all_near(y, want, [&](size_t i) { return x[i] < -69 ? want[i] : 2e-7 * want[i]; }));

  const double sum = kernels_->sum_exp(x.data(), 0, int(x.size()));
  double want_sum = 0;
  for (double w : want) want_sum += w;
  EXPECT_NEAR(sum, want_sum, 3e-6 * want_sum);
}

TEST_P(CpuOps, RopeTurnsPairsByTheAngleOfThePosition) {
  CpuThreads threads(2);
  const CpuContext cpu{*kernels_, threads};
  const std::vector<float> inverse = {1, 0.1f, 0.001f, 1e-6f, 0.7f};
  RopeTable table(inverse);
  const std::vector<int32_t> positions = {0, 1, 31, 4095, 131071};
  table.set_positions(cpu, positions);
  for (size_t row = 0; row < positions.size(); ++row) {
    const std::vector<float> x = normal(rng_, 10);
    std::vector<float> y = x;
    kernels_->rope(table.cosine(int(row)), table.sine(int(row)), y.data(), 5);
    std::vector<double> want(10);
    for (int i = 0; i < 5; ++i) {
      const double angle = double(positions[row]) * double(inverse[i]);
      want[i] = double(x[i]) * std::cos(angle) - double(x[i + 5]) * std::sin(angle);
      want[i + 5] = double(x[i + 5]) * std::cos(angle) + double(x[i]) * std::sin(angle);
    }
    EXPECT_TRUE(all_near(y, want, [&](size_t i) {
      return 4 * 0x1p-24 * (std::fabs(double(x[i % 5])) + std::fabs(double(x[i % 5 + 5])));
    })) << positions[row];
  }
}

TEST_P(CpuOps, HadamardIsTheOrthonormalSylvesterMatrix) {
  for (int n : {64, 80, 96, 128, 256}) {
    const int block = hadamard_block(n);
    ASSERT_EQ(n % block, 0);
    ASSERT_EQ(block & (block - 1), 0);
    const std::vector<float> x = normal(rng_, size_t(n));
    std::vector<float> y = x;
    kernels_->hadamard(y.data(), n, block);
    std::vector<double> want(static_cast<size_t>(n));
    for (int i = 0; i < n; ++i) {
      const int base = i / block * block;
      for (int j = 0; j < block; ++j) {
        const bool negative = std::popcount(unsigned((i - base) & j)) % 2 != 0;
        want[i] += (negative ? -1 : 1) * double(x[base + j]) / std::sqrt(double(block));
      }
    }
    EXPECT_TRUE(all_near(y, want, [](size_t) { return 1e-6 * 8; })) << n;
  }
}

// Tiles of any width of visible keys; the probabilities and the running sum must be those of one softmax.
TEST_P(CpuOps, SoftmaxOverTilesIsTheSoftmaxOverAllKeys) {
  for (int keys : {1, 2, 31, 32, 33, 64, 95}) {
    const std::vector<float> all = normal(rng_, size_t(keys), 12);
    SoftmaxState state{-INFINITY, 0};
    std::vector<double> p(static_cast<size_t>(keys));
    for (int first = 0; first < keys; first += 32) {
      std::vector<float> tile(32, NAN);  // what lies behind the last visible key must not matter
      const int visible = std::min(32, keys - first);
      std::copy_n(all.begin() + first, visible, tile.begin());
      const float keep = kernels_->softmax_tile(tile.data(), 32, visible, state);
      for (int i = 0; i < first; ++i) p[i] *= double(keep);
      for (int i = 0; i < 32; ++i) {
        if (i >= visible) {
          ASSERT_EQ(tile[i], 0.0f);
        } else {
          p[first + i] = double(tile[i]);
        }
      }
    }
    double sum = 0, max = -INFINITY;
    for (float s : all) max = std::max(max, double(s));
    for (float s : all) sum += std::exp(double(s) - max);
    for (int i = 0; i < keys; ++i) {
      EXPECT_NEAR(p[i] / double(state.sum), std::exp(double(all[i]) - max) / sum, 1e-6) << keys << " keys";
    }
    const SoftmaxState before = state;
    std::vector<float> hidden(32, NAN);
    EXPECT_EQ(kernels_->softmax_tile(hidden.data(), 32, 0, state), 1.0f);
    EXPECT_EQ(std::memcmp(&before, &state, sizeof(state)), 0) << "an invisible tile changed the state";
  }
}

TEST_P(CpuOps, MaxAbsSeesNanAndInfinityAnywhere) {
  for (size_t at = 0; at < 37; ++at) {
    std::vector<float> x = normal(rng_, 37);
    x[at] = -50;
    EXPECT_EQ(kernels_->max_abs(x.data(), 37), 50.0f);
    x[at] = -INFINITY;
    EXPECT_TRUE(std::isinf(kernels_->max_abs(x.data(), 37)));
    x[(at + 5) % 37] = NAN;
    EXPECT_TRUE(std::isnan(kernels_->max_abs(x.data(), 37)));
  }
}

std::string isa_name(const testing::TestParamInfo<CpuIsa>& info) {
  return std::array{"generic", "avx2", "avx512"}[size_t(info.param)];
}
INSTANTIATE_TEST_SUITE_P(Isa, CpuOps, testing::Values(CpuIsa::generic, CpuIsa::avx2, CpuIsa::avx512), isa_name);

TEST(CpuOpsRows, EmbedWidensTheRowsOfTheTokens) {
  CpuThreads threads(2);
  const CpuContext cpu{best_cpu_kernels(), threads};
  std::vector<uint16_t> bits(50 * 24);
  for (size_t i = 0; i < bits.size(); ++i) bits[i] = uint16_t(0x3c00 + i);
  const Tensor table{DType::f16, {50, 24}, std::as_bytes(std::span(bits))};
  const std::vector<TokenId> tokens = {49, 0, 7, 7, 23, 1};
  std::vector<float> x(tokens.size() * 24);
  embed(cpu, table, tokens, 24, x.data());
  for (size_t row = 0; row < tokens.size(); ++row) {
    for (size_t i = 0; i < 24; ++i) {
      EXPECT_EQ(double(x[row * 24 + i]), half_value(bits[size_t(tokens[row]) * 24 + i]));
    }
  }
}

TEST(CpuOpsRows, ResidualIsAddedBeforeTheNorm) {
  CpuThreads threads(2);
  const CpuContext cpu{best_cpu_kernels(), threads};
  std::mt19937 rng(3);
  const int rows = 9, n = 40, ld = 64;
  const std::vector<float> delta = normal(rng, size_t(rows) * ld), weight = normal(rng, size_t(n));
  std::vector<float> x = normal(rng, size_t(rows) * n), y(x.size()), sum(x.size()), want(x.size());
  for (int row = 0; row < rows; ++row) {
    for (int i = 0; i < n; ++i) sum[size_t(row * n + i)] = x[size_t(row * n + i)] + delta[size_t(row * ld + i)];
  }
  rms_norm_rows(cpu, sum.data(), weight, 1e-6f, rows, want.data());
  add_rms_norm_rows(cpu, delta.data(), ld, weight, 1e-6f, rows, x.data(), y.data());
  EXPECT_EQ(x, sum);
  EXPECT_EQ(y, want);
}

TEST(CpuThreads, EveryItemRunsOnceWhateverTheTeam) {
  for (int size : {1, 2, 5}) {
    CpuThreads threads(size);
    ASSERT_EQ(threads.size(), size);
    for (int round = 0; round < 300; ++round) {
      const int items = round % 40;
      std::vector<int> runs(size_t(items), 0);  // an item is written by one thread, read after the loop
      threads.for_each(items, [&](int item, int thread) {
        EXPECT_LT(thread, size);
        ++runs[size_t(item)];
      });
      EXPECT_EQ(runs, std::vector<int>(size_t(items), 1));
    }
  }
}

}  // namespace
}  // namespace ekv::test
