// Norm, activation and row copies against their formulas in double.

#include "kernels/layer_ops.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "elastickv/base.h"
#include "tests/support/device_memory.h"
#include "tests/support/number_formats.h"

namespace ekv::test {
namespace {

constexpr uint16_t kPoison = 0xffff;     // NaN in fp16 and bf16
constexpr double kArithmetic = 0x1p-20;  // what layer_ops.h allows before rounding, relative

std::vector<double> normal(std::mt19937& rng, size_t count, double scale, double offset = 0) {
  std::normal_distribution<double> distribution(offset, scale);
  std::vector<double> x(count);
  for (double& v : x) v = distribution(rng);
  return x;
}

struct NormCase {
  int rows, hidden;
  Element element;
  bool residual, in_place;
};

class RmsNorm : public testing::TestWithParam<NormCase> {};

TEST_P(RmsNorm, MatchesDefinition) {
  const NormCase c = GetParam();
  const size_t count = size_t(c.rows) * c.hidden;
  std::mt19937 rng(1);
  std::vector<double> values = normal(rng, count, 1);
  for (size_t i = 0; i < count; i += 61) values[i] *= 100;  // outlier channels
  const std::vector<uint16_t> x = encode_all(c.element, values);
  const std::vector<uint16_t> residual = encode_all(c.element, normal(rng, count, 3));
  const std::vector<uint16_t> weight = encode_all(c.element, normal(rng, c.hidden, 0.3, 1));

  // One row more than is asked for, poisoned: it must stay so.
  DeviceVector<uint16_t> d_x(x), d_weight(weight), d_out(count + c.hidden, kPoison);
  std::vector<uint16_t> residual_and_guard = residual;
  residual_and_guard.resize(count + c.hidden, kPoison);
  DeviceVector<uint16_t> d_residual(residual_and_guard);
  RmsNormArgs a;
  a.x = d_x.data(), a.weight = d_weight.data();
  a.out = c.in_place ? d_x.data() : d_out.data();
  if (c.residual) a.residual = d_residual.data();
  a.num_rows = c.rows, a.hidden = c.hidden, a.epsilon = 1e-5f, a.element = c.element;
  launch_rms_norm(a, nullptr);

  std::vector<uint16_t> out = c.in_place ? d_x.host() : d_out.host();
  const std::vector<uint16_t> sums = d_residual.host();
  for (int r = 0; r < c.rows; ++r) {
    std::vector<double> sum(c.hidden);
    double squares = 0;
    for (int i = 0; i < c.hidden; ++i) {
      const size_t at = size_t(r) * c.hidden + i;
      sum[i] = decode(c.element, x[at]);
      if (c.residual) {
        const uint16_t want = encode(c.element, sum[i] + decode(c.element, residual[at]));
        ASSERT_EQ(sums[at], want) << "residual, row " << r << " column " << i;
        sum[i] = decode(c.element, want);
      }
      squares += sum[i] * sum[i];
    }
    const double scale = 1 / std::sqrt(squares / c.hidden + double(1e-5f));
    for (int i = 0; i < c.hidden; ++i) {
      const double want = sum[i] * scale * decode(c.element, weight[i]);
      ASSERT_NEAR(decode(c.element, out[size_t(r) * c.hidden + i]), want,
                  half_step(c.element, want) * (1 + 1e-6) + kArithmetic * std::fabs(want))
          << "row " << r << " column " << i;
    }
  }
  for (size_t i = count; i < count + c.hidden; ++i) {
    ASSERT_EQ(c.in_place ? kPoison : out[i], kPoison);
    ASSERT_EQ(sums[i], kPoison);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, RmsNorm,
    testing::Values(NormCase{1, 8, Element::bf16, true, false}, NormCase{5, 576, Element::bf16, true, false},
                    NormCase{3, 960, Element::fp16, false, false}, NormCase{2, 1536, Element::bf16, true, true},
                    NormCase{7, 2048, Element::fp16, true, false},
                    NormCase{2, 2056, Element::bf16, true, false},
                    NormCase{64, 4096, Element::bf16, true, false},
                    NormCase{3, 4104, Element::fp16, true, true}, NormCase{2, 8192, Element::bf16, false, true},
                    NormCase{3, 12288, Element::bf16, true, false},
                    NormCase{2, 32768, Element::fp16, true, false}),
    [](const auto& info) {
      return std::string(info.param.element == Element::bf16 ? "bf16_" : "fp16_") +
             std::to_string(info.param.hidden) + (info.param.residual ? "_residual" : "") +
             (info.param.in_place ? "_in_place" : "");
    });

// A hint changes no bit, whatever its size, at the beginning of some memory and at its end.
TEST(RmsNormNext, ChangesNothing) {
  const int rows = 5, hidden = 2056;
  std::mt19937 rng(7);
  const std::vector<uint16_t> x = encode_all(Element::fp16, normal(rng, size_t(rows) * hidden, 1));
  const std::vector<uint16_t> weight = encode_all(Element::fp16, normal(rng, hidden, 0.3, 1));
  const DeviceVector<uint16_t> d_x(x), d_weight(weight), matrix(std::vector<uint16_t>(1 << 20, kPoison));
  const auto run = [&](const ReadNext& next) {
    DeviceVector<uint16_t> out(size_t(rows) * hidden, kPoison);
    RmsNormArgs a;
    a.x = d_x.data(), a.weight = d_weight.data(), a.out = out.data(), a.num_rows = rows, a.hidden = hidden;
    a.element = Element::fp16, a.next = next;
    launch_rms_norm(a, nullptr);
    return out.host();
  };
  const std::vector<uint16_t> want = run({});
  const uint32_t all = uint32_t(matrix.size() * sizeof(uint16_t));
  for (const uint32_t bytes :
       {uint32_t(0), uint32_t(16), uint32_t(16 * 33), uint32_t(16 * 4097), all - 16, all}) {
    EXPECT_EQ(run({matrix.data(), bytes}), want) << bytes;
    EXPECT_EQ(run({matrix.data() + (all - bytes) / sizeof(uint16_t), bytes}), want) << bytes << " at the end";
  }
  EXPECT_EQ(matrix.host(), std::vector<uint16_t>(matrix.size(), kPoison));
}

// epsilon decides where a row is small: 1e-5 against a mean square of 1e-6, and a row of zeros.
TEST(RmsNormEpsilon, HoldsUpSmallRows) {
  const int hidden = 576;
  std::mt19937 rng(5);
  std::vector<double> values = normal(rng, hidden, 1e-3);
  values.resize(2 * hidden, 0.0);
  const std::vector<uint16_t> x = encode_all(Element::bf16, values);
  DeviceVector<uint16_t> d_x(x), weight(hidden, bf16_bits(1)), out(2 * hidden, kPoison);
  RmsNormArgs a;
  a.x = d_x.data(), a.weight = weight.data(), a.out = out.data();
  a.num_rows = 2, a.hidden = hidden, a.epsilon = 1e-5f, a.element = Element::bf16;
  launch_rms_norm(a, nullptr);
  double squares = 0;
  for (int i = 0; i < hidden; ++i) squares += std::pow(bf16_value(x[i]), 2);
  const std::vector<uint16_t> got = out.host();
  for (int i = 0; i < hidden; ++i) {
    const double want = bf16_value(x[i]) / std::sqrt(squares / hidden + double(1e-5f));
    ASSERT_NEAR(bf16_value(got[i]), want,
                half_step(Element::bf16, want) * (1 + 1e-6) + kArithmetic * std::fabs(want));
    ASSERT_EQ(got[hidden + i], 0) << "column " << i;
  }
}

class SiluMul : public testing::TestWithParam<Element> {};

TEST_P(SiluMul, MatchesDefinition) {
  const Element e = GetParam();
  std::mt19937 rng(2);
  for (const auto& [rows, width] : {std::pair{1, 8}, {3, 1536}, {33, 1000}, {5, 14336}}) {
    std::vector<double> values = normal(rng, size_t(2) * rows * width, 3);
    const double extremes[] = {0, -0.0, 1e-6, -1e-6, 20, -20, 88, -88, 104, -104, 5000, -5000};
    for (int r = 0; r < rows; ++r)
      for (size_t i = 0; i < std::size(extremes) && i < size_t(width); ++i)
        values[size_t(2) * r * width + i] = extremes[i];
    const std::vector<uint16_t> gate_up = encode_all(e, values);
    DeviceVector<uint16_t> d_in(gate_up), d_out(size_t(rows + 1) * width, kPoison);
    SiluMulArgs a;
    a.gate_up = d_in.data(), a.out = d_out.data();
    a.num_rows = rows, a.width = width, a.element = e;
    launch_silu_mul(a, nullptr);
    const std::vector<uint16_t> out = d_out.host();
    for (int r = 0; r < rows; ++r)
      for (int i = 0; i < width; ++i) {
        const double gate = decode(e, gate_up[size_t(2) * r * width + i]);
        const double up = decode(e, gate_up[(size_t(2) * r + 1) * width + i]);
        const double want = gate / (1 + std::exp(-gate)) * up;
        // Below 2^-125 the reciprocal of 1 + exp(-gate) is flushed; no 16-bit product of it is worth a
        // tolerance.
        ASSERT_NEAR(decode(e, out[size_t(r) * width + i]), want,
                    half_step(e, want) * (1 + 1e-6) + kArithmetic * std::fabs(want) + 0x1p-110)
            << "row " << r << " column " << i << " gate " << gate << " up " << up;
      }
    for (int i = 0; i < width; ++i) ASSERT_EQ(out[size_t(rows) * width + i], kPoison);
  }
}

INSTANTIATE_TEST_SUITE_P(Elements, SiluMul, testing::Values(Element::bf16, Element::fp16),
                         [](const auto& info) { return info.param == Element::bf16 ? "bf16" : "fp16"; });

std::vector<uint16_t> random_bits(std::mt19937& rng, size_t count) {
  std::vector<uint16_t> bits(count);
  for (uint16_t& b : bits) b = uint16_t(rng());
  return bits;
}

TEST(Embed, CopiesRowsOfItsShardAndZerosOthers) {
  std::mt19937 rng(3);
  for (const int hidden : {8, 576, 4096}) {
    const int first = 100, count = 50;
    const std::vector<uint16_t> table = random_bits(rng, size_t(count) * hidden);
    const std::vector<int32_t> tokens = {100, 149, 99, 150, 0, 120, 120, -1, 2000000000, 101};
    DeviceVector<uint16_t> d_table(table), d_out((tokens.size() + 1) * hidden, kPoison);
    DeviceVector<int32_t> d_tokens(tokens);
    EmbedArgs a;
    a.table = d_table.data(), a.tokens = d_tokens.data(), a.out = d_out.data();
    a.num_rows = int(tokens.size()), a.hidden = hidden, a.first_token = first, a.num_tokens = count;
    launch_embed(a, nullptr);
    std::vector<uint16_t> want;
    for (int32_t t : tokens)
      for (int i = 0; i < hidden; ++i)
        want.push_back(first <= t && t < first + count ? table[size_t(t - first) * hidden + i] : 0);
    want.resize(want.size() + hidden, kPoison);
    EXPECT_EQ(d_out.host(), want) << "hidden " << hidden;
  }
}

TEST(Embed, PendingTokensAreThoseOfTheStepBefore) {
  std::mt19937 rng(31);
  const int hidden = 576, first = 100, count = 50;
  const std::vector<uint16_t> table = random_bits(rng, size_t(count) * hidden);
  const std::vector<int32_t> previous = {120, 99, -1, 149, 150};
  const std::vector<int32_t> tokens = {
      pending_token(3), 101, pending_token(0), pending_token(1), pending_token(2), pending_token(4),
      pending_token(3)};
  DeviceVector<uint16_t> d_table(table), d_out(tokens.size() * hidden, kPoison);
  DeviceVector<int32_t> d_tokens(tokens), d_previous(previous);
  EmbedArgs a;
  a.table = d_table.data(), a.tokens = d_tokens.data(), a.previous = d_previous.data(), a.out = d_out.data();
  a.num_rows = int(tokens.size()), a.hidden = hidden, a.first_token = first, a.num_tokens = count;
  launch_embed(a, nullptr);
  std::vector<uint16_t> want;
  for (const int32_t t : {149, 101, 120, 0, 0, 0, 149})
    for (int i = 0; i < hidden; ++i) want.push_back(t > 0 ? table[size_t(t - first) * hidden + i] : 0);
  EXPECT_EQ(d_out.host(), want);
}

TEST(GatherRows, CopiesBitsAndLeavesPaddingAlone) {
  std::mt19937 rng(4);
  for (const int hidden : {8, 960, 4096}) {
    const std::vector<uint16_t> in = random_bits(rng, size_t(40) * hidden);
    const std::vector<int32_t> rows = {39, 0, -1, 7, 7, -5, 12};
    DeviceVector<uint16_t> d_in(in), d_out((rows.size() + 1) * hidden, kPoison);
    DeviceVector<int32_t> d_rows(rows);
    GatherRowsArgs a;
    a.in = d_in.data(), a.rows = d_rows.data(), a.out = d_out.data();
    a.num_rows = int(rows.size()), a.hidden = hidden;
    launch_gather_rows(a, nullptr);
    std::vector<uint16_t> want;
    for (int32_t r : rows)
      for (int i = 0; i < hidden; ++i) want.push_back(r < 0 ? kPoison : in[size_t(r) * hidden + i]);
    want.resize(want.size() + hidden, kPoison);
    EXPECT_EQ(d_out.host(), want) << "hidden " << hidden;
  }
}

TEST(LayerOps, NoRowsLaunchNothing) {
  RmsNormArgs norm;
  norm.hidden = 8;
  launch_rms_norm(norm, nullptr);
  SiluMulArgs silu;
  silu.width = 8;
  launch_silu_mul(silu, nullptr);
  EmbedArgs embed;
  embed.hidden = 8;
  launch_embed(embed, nullptr);
  GatherRowsArgs gather;
  gather.hidden = 8;
  launch_gather_rows(gather, nullptr);
}

}  // namespace
}  // namespace ekv::test
