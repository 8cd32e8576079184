// Sampling on a device against the definition in double.

#include "kernels/sampling.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "elastickv/base.h"
#include "tests/support/device_memory.h"
#include "tests/support/number_formats.h"
#include "tests/support/sampling_definition.h"

namespace ekv::test {
namespace {

// A batch on the host. Rows are padded to row_stride with NaN, which nobody may read as a logit.
struct Batch {
  Element element = Element::fp32;
  int vocab = 0;
  std::vector<std::vector<float>> logits;  // exactly representable in `element`
  std::vector<RowSampling> params;
  std::vector<int32_t> bias_tokens;
  std::vector<float> bias_values;
  std::vector<uint16_t> counts;  // [slots][count_stride(vocab)]

  int stride() const { return (vocab + 7) / 8 * 8 + 8; }
  void add(std::vector<float> row, RowSampling p, const std::map<int, float>& bias = {}) {
    for (float& v : row)
      if (element != Element::fp32) v = float(decode(element, encode(element, v)));
    p.bias_begin = int(bias_tokens.size());
    for (const auto& [token, value] : bias) bias_tokens.push_back(token), bias_values.push_back(value);
    p.bias_end = int(bias_tokens.size());
    logits.push_back(std::move(row)), params.push_back(p);
  }
};

struct Output {
  std::vector<int32_t> tokens;
  std::vector<SampleStatus> status;
  std::vector<float> logprobs;
  std::vector<int32_t> top_tokens;
  std::vector<float> top_logprobs;
};

constexpr int32_t kNoToken = -77;
constexpr float kNoLogprob = 123;

std::vector<uint8_t> packed_logits(const Batch& b) {
  const size_t bytes = element_bytes(b.element), stride = b.stride();
  std::vector<uint8_t> memory(b.logits.size() * stride * bytes, 0xff);  // NaN in all three types
  for (size_t r = 0; r < b.logits.size(); ++r)
    for (int i = 0; i < b.vocab; ++i) {
      uint8_t* at = memory.data() + (r * stride + i) * bytes;
      const uint16_t bits = b.element == Element::fp32 ? 0 : encode(b.element, b.logits[r][i]);
      if (b.element == Element::fp32)
        std::memcpy(at, &b.logits[r][i], 4);
      else
        std::memcpy(at, &bits, 2);
    }
  return memory;
}

Output run(const Batch& b) {
  const int rows = int(b.params.size());
  DeviceVector<uint8_t> logits(packed_logits(b));
  DeviceVector<uint8_t> workspace(sampling_workspace_bytes(rows, b.vocab), 0xff);
  DeviceVector<RowSampling> params(b.params);
  DeviceVector<int32_t> bias_tokens(b.bias_tokens);
  DeviceVector<float> bias_values(b.bias_values);
  DeviceVector<uint16_t> counts(b.counts);
  DeviceVector<int32_t> tokens(rows, kNoToken), top_tokens(size_t(rows) * kMaxTopLogprobs, kNoToken);
  DeviceVector<SampleStatus> status(rows, SampleStatus(9));
  DeviceVector<float> logprobs(rows, kNoLogprob), top_logprobs(size_t(rows) * kMaxTopLogprobs, kNoLogprob);
  SampleArgs a;
  a.logits = logits.data(), a.element = b.element, a.num_rows = rows, a.vocab = b.vocab,
  a.row_stride = b.stride();
  a.params = params.data(), a.bias_tokens = bias_tokens.data(), a.bias_values = bias_values.data();
  a.counts = b.counts.empty() ? nullptr : counts.data();
  a.any_truncates = a.any_top = false;
  for (const RowSampling& p : b.params) a.any_truncates |= p.truncates(), a.any_top |= p.num_top > 0;
  a.workspace = workspace.data();
  a.tokens = tokens.data(), a.status = status.data(), a.logprobs = logprobs.data();
  a.top_tokens = top_tokens.data(), a.top_logprobs = top_logprobs.data();
  launch_sample(a, nullptr);
  return {tokens.host(), status.host(), logprobs.host(), top_tokens.host(), top_logprobs.host()};
}

// z of every token of a row, before the cuts.
std::vector<double> adjusted(const Batch& b, int r) {
  const RowSampling& p = b.params[r];
  std::vector<double> x(b.logits[r].begin(), b.logits[r].end());
  for (int i = p.bias_begin; i < p.bias_end; ++i) x[b.bias_tokens[i]] += b.bias_values[i];
  for (int i = 0; i < b.vocab && p.count_slot >= 0; ++i) {
    const uint16_t count = b.counts[size_t(p.count_slot) * count_stride(b.vocab) + i];
    x[i] = penalised_by_definition(x[i], count & 0x7fff, count & 0x8000, p);
  }
  if (p.temperature >= 1e-5f)
    for (double& v : x) v /= p.temperature;
  return x;
}

testing::AssertionResult right_token(const Batch& b, int r, int token) {
  const RowSampling& p = b.params[r];
  return test::right_token(adjusted(b, r), p, token, p.bias_begin == p.bias_end && p.count_slot < 0);
}

std::vector<float> normal_row(std::mt19937& rng, int vocab, float scale) {
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> row(vocab);
  for (float& v : row) v = normal(rng);
  return row;
}

// A row as models make them: a few likely tokens far above a broad crowd.
std::vector<float> peaked_row(std::mt19937& rng, int vocab) {
  std::vector<float> row = normal_row(rng, vocab, 2);
  for (int i = 0; i < 30; ++i) row[rng() % vocab] += float(rng() % 1000) / 60;
  return row;
}

// ---- tests

TEST(Sampling, GreedyTakesTheFirstLargest) {
  for (const Element e : {Element::fp32, Element::bf16, Element::fp16})
    for (const int vocab : {1, 5, 4095, 4097, 32000, 151936}) {
      Batch b{e, vocab, {}, {}, {}, {}, {}};
      std::mt19937 rng(vocab);
      RowSampling p;
      p.temperature = 0;
      for (int r = 0; r < 5; ++r) {
        std::vector<float> row =
            normal_row(rng, vocab, 3);  // 16-bit rows of large vocabularies are full of ties
        row[rng() % vocab] = 50, row[rng() % vocab] = 50;
        if (r == 3) std::fill(row.begin(), row.end(), -7.0f);
        if (r == 4) row[vocab - 1] = 60;  // the very last token
        b.add(row, p);
      }
      p.temperature = 9e-6f, p.top_k = 3, p.top_p = 0.5f, p.seed = 3;  // still greedy
      b.add(normal_row(rng, vocab, 3), p);
      const Output out = run(b);
      for (size_t r = 0; r < b.params.size(); ++r) {
        EXPECT_EQ(out.status[r], SampleStatus::ok);
        EXPECT_TRUE(right_token(b, int(r), out.tokens[r])) << "vocab " << vocab << " row " << r;
        EXPECT_EQ(out.logprobs[r], kNoLogprob);
      }
    }
}

class SamplingSweep : public testing::TestWithParam<std::tuple<Element, int>> {};

// Every combination of cuts, with bias, bans, penalties and temperatures, many rows in one launch.
TEST_P(SamplingSweep, MatchesDefinition) {
  const auto [element, vocab] = GetParam();
  std::mt19937 rng(100 + vocab);
  Batch b{element, vocab, {}, {}, {}, {}, {}};
  const int slots = 3;
  b.counts.assign(size_t(slots) * count_stride(vocab), 0);
  for (int i = 0; i < 3 * slots * 50; ++i)
    b.counts[rng() % b.counts.size()] = uint16_t(rng() % 5 + (rng() % 2 << 15));
  const int top_ks[] = {0, 1, 2, 40, 1000, 5000, 1 << 30};
  const float top_ps[] = {1, 0.95f, 0.5f, 0.01f, 1e-6f, 0.9999f}, min_ps[] = {0, 0.05f, 0.9f, 1, 1e-7f};
  const float temperatures[] = {1, 0.7f, 0.1f, 2, 1.3f, 0.01f, 0};
  const int rows = vocab > 10000 ? 60 : 200;
  for (int r = 0; r < rows; ++r) {
    RowSampling p;
    p.seed = uint64_t(rng()) << 32 | rng(), p.output_index = rng() % 1000;
    p.temperature = temperatures[rng() % std::size(temperatures)];
    p.top_k = top_ks[rng() % std::size(top_ks)];
    p.top_p = top_ps[rng() % std::size(top_ps)];
    p.min_p = rng() % 2 ? 0 : min_ps[rng() % std::size(min_ps)];
    if (rng() % 3 == 0) {
      p.count_slot = int(rng() % slots), p.repetition = 1.3f;
      p.presence = 0.4f, p.frequency = -0.2f;
    }
    std::map<int, float> bias;
    for (int n = rng() % 3 ? 0 : 20; n > 0; --n)
      bias[rng() % vocab] = rng() % 4 ? float(rng() % 200) / 10 - 10 : -INFINITY;
    std::vector<float> row = rng() % 2 ? peaked_row(rng, vocab) : normal_row(rng, vocab, 1);
    if (rng() % 4 == 0) row[rng() % vocab] = -INFINITY;
    if (bias.size() == 1 && bias.size() == size_t(vocab)) bias.clear();
    b.add(std::move(row), p, bias);
  }
  const Output out = run(b);
  for (int r = 0; r < rows; ++r) {
    const RowSampling& p = b.params[r];
    ASSERT_EQ(out.status[r], SampleStatus::ok) << "row " << r;
    ASSERT_TRUE(right_token(b, r, out.tokens[r]))
        << "row " << r << " temperature " << p.temperature << " top_k " << p.top_k << " top_p " << p.top_p
        << " min_p " << p.min_p << " counts " << p.count_slot << " biases " << p.bias_end - p.bias_begin;
  }
}

INSTANTIATE_TEST_SUITE_P(Vocabularies, SamplingSweep,
                         testing::Combine(testing::Values(Element::fp32, Element::bf16, Element::fp16),
                                          testing::Values(7, 1000, 4097, 49152)),
                         [](const auto& info) {
                           const Element e = std::get<0>(info.param);
                           return std::string(e == Element::fp32   ? "fp32"
                                              : e == Element::bf16 ? "bf16"
                                                                   : "fp16") +
                                  "_vocab" + std::to_string(std::get<1>(info.param));
                         });

// So many tokens in the bins of the cuts that they do not fit in the list of candidates.
TEST(Sampling, CutsInsideACrowd) {
  std::mt19937 rng(5);
  Batch b{Element::fp32, 60000, {}, {}, {}, {}, {}};
  for (int r = 0; r < 12; ++r) {
    std::vector<float> row(b.vocab);
    for (float& v : row) v = r % 2 ? 2.0f : float(rng() % 100000) * 1e-7f;  // all equal; all within 0.01
    RowSampling p;
    p.seed = r, p.top_k = r % 3 ? 20000 : 0, p.top_p = r % 4 == 0 ? 0.3f : 0.8f;
    std::map<int, float> bias;
    if (r > 5) bias = {{17, -INFINITY}, {59999, 1}};
    b.add(std::move(row), p, bias);
  }
  const Output out = run(b);
  for (int r = 0; r < 12; ++r) EXPECT_TRUE(right_token(b, r, out.tokens[r])) << "row " << r;
}

// Equal logits at the cut stand or fall together: with top_k = 2 and three equal seconds, all four can come.
TEST(Sampling, TiesAtTheCutAreKeptTogether) {
  Batch b{Element::bf16, 4096, {}, {}, {}, {}, {}};
  std::vector<float> row(b.vocab, -20.0f);
  row[9] = 1, row[100] = row[2000] = row[4095] = 0.5f, row[50] = 0.25f;
  for (int r = 0; r < 400; ++r) {
    RowSampling p;
    p.seed = r, p.top_k = 2;
    b.add(row, p);
  }
  std::map<int, int> seen;
  for (int t : run(b).tokens) ++seen[t];
  EXPECT_EQ(seen.size(), 4u);
  for (int t : {9, 100, 2000, 4095}) EXPECT_GT(seen[t], 40) << "token " << t;
}

// Ten tokens of nearly equal probability side by side, so that no shortcut can tell them apart, alone on top or
// behind `ahead` others: the k-th largest of the ten still comes, the next one never does.
TEST(Sampling, TopKKeepsExactlyK) {
  for (const int vocab : {300, 5000, 20000})
    for (const int ahead : {0, 120}) {
      const int k = 5, first = vocab / 2 / 32 * 32, rows = ahead ? 1500 : 300;
      Batch b{Element::fp32, vocab, {}, {}, {}, {}, {}};
      std::vector<float> row(vocab);
      for (int i = 0; i < vocab; ++i) row[i] = -12.0f - 1e-4f * float(i);
      for (int i = 0; i < ahead; ++i) row[i] = 1.2f + 1e-4f * float(i);
      for (int i = 0; i < 10; ++i) row[first + i] = 1 - 1e-3f * float(i);
      for (int r = 0; r < rows; ++r) {
        RowSampling p;
        p.seed = r + 1, p.top_k = k + ahead;
        b.add(row, p);
      }
      std::map<int, int> seen;
      for (const int token : run(b).tokens) ++seen[token];
      for (int i = 0; i < 10; ++i)
        EXPECT_EQ(seen.count(first + i), i < k ? 1u : 0u)
            << "vocab " << vocab << " ahead " << ahead << " place " << i;
    }
}

// The draws follow the probabilities: chi-square over 40,000 seeds, with and without cuts.
TEST(Sampling, DrawsFollowTheDistribution) {
  const std::vector<float> row = {1.0f, 0.2f, -0.5f, 2.0f, 0.7f, -1.5f, 0.0f, 1.4f, -3.0f, 0.9f, 0.1f, -0.2f};
  for (const bool cuts : {false, true}) {
    const int draws = 40000;
    Batch b{Element::fp32, int(row.size()), {}, {}, {}, {}, {}};
    for (int i = 0; i < draws; ++i) {
      RowSampling p;
      p.seed = 0x1234567890abcdef + i / 8, p.output_index = i % 8, p.temperature = 1.25f;
      if (cuts) p.top_k = 9, p.top_p = 0.9f;
      b.add(row, p);
    }
    const std::vector<double> z = adjusted(b, 0);
    const double cut = cuts ? cut_of(z, b.params[0], 0) : -INFINITY;
    std::vector<int> seen(row.size());
    for (int t : run(b).tokens) ++seen.at(t);
    const auto kept = std::count_if(z.begin(), z.end(), [cut](double v) { return v >= cut; });
    EXPECT_TRUE(cuts ? kept < 10 : kept == 12) << kept;
    EXPECT_LT(chi_square_excess(z, cut, seen), 5) << kept << " tokens";  // once in 4,000 seeds at 11 degrees
  }
}

// A row gives the same token alone and in any batch, whatever the other rows ask for.
TEST(Sampling, ARowDoesNotDependOnItsBatch) {
  std::mt19937 rng(6);
  const int vocab = 20000;
  Batch all{Element::bf16, vocab, {}, {}, {}, {}, {}};
  for (int r = 0; r < 24; ++r) {
    RowSampling p;
    p.seed = 1000 + r, p.output_index = r, p.temperature = r % 5 == 0 ? 0 : 0.9f;
    p.top_k = r % 3 == 0 ? 50 : 0, p.top_p = r % 2 ? 0.9f : 1, p.num_top = r % 4 - 1;
    all.add(r % 2 ? peaked_row(rng, vocab) : normal_row(rng, vocab, 1), p,
            r % 6 ? std::map<int, float>{} : std::map<int, float>{{r, 5.0f}});
  }
  const Output together = run(all), again = run(all);
  EXPECT_EQ(together.tokens, again.tokens);
  EXPECT_EQ(together.top_logprobs, again.top_logprobs);
  for (int r = 0; r < 24; ++r) {
    Batch one{Element::bf16, vocab, {}, {}, {}, {}, {}};
    std::map<int, float> bias;
    for (int i = all.params[r].bias_begin; i < all.params[r].bias_end; ++i)
      bias[all.bias_tokens[i]] = all.bias_values[i];
    one.add(all.logits[r], all.params[r], bias);
    const Output alone = run(one);
    EXPECT_EQ(alone.tokens[0], together.tokens[r]) << "row " << r;
    EXPECT_EQ(alone.logprobs[0], together.logprobs[r]) << "row " << r;
  }
}

TEST(Sampling, LogprobsAreRaw) {
  for (const auto& [element, vocab] :
       {std::pair{Element::fp32, 13}, {Element::bf16, 5000}, {Element::fp32, 151936}}) {
    std::mt19937 rng(8);
    Batch b{element, vocab, {}, {}, {}, {}, {}};
    for (int r = 0; r < 8; ++r) {
      RowSampling p;
      p.seed = r, p.temperature = r % 2 ? 0.5f : 0, p.num_top = r == 7 ? -1 : r * 3 + (r == 6) * 2;  // up to 20
      p.top_k = r == 3 ? 5 : 0;
      std::vector<float> row = r % 2 ? peaked_row(rng, vocab) : normal_row(rng, vocab, 2);
      if (r == 4) row[vocab / 2] = -INFINITY, row[1] = 3.5f, row[vocab - 1] = 3.5f;
      b.add(std::move(row), p, {{3, 25.0f}, {2, -INFINITY}});  // biases move the token, not its logprob
    }
    const Output out = run(b);
    for (int r = 0; r < 8; ++r) {
      SCOPED_TRACE("row " + std::to_string(r) + " vocab " + std::to_string(vocab));
      const RowSampling& p = b.params[r];
      const std::vector<float>& raw = b.logits[r];
      double sum = 0;
      for (float v : raw) sum += std::exp(double(v));
      std::vector<int> order(vocab);
      for (int i = 0; i < vocab; ++i) order[i] = i;
      std::sort(order.begin(), order.end(),
                [&](int x, int y) { return raw[x] != raw[y] ? raw[x] > raw[y] : x < y; });
      ASSERT_TRUE(right_token(b, r, out.tokens[r]));
      const auto want = [&](int token) { return double(raw[token]) - std::log(sum); };
      if (p.num_top < 0)
        EXPECT_EQ(out.logprobs[r], kNoLogprob);
      else
        EXPECT_NEAR(out.logprobs[r], want(out.tokens[r]), 4e-6 + 0x1p-21 * std::fabs(raw[out.tokens[r]]));
      for (int n = 0; n < kMaxTopLogprobs; ++n) {
        const int at = r * kMaxTopLogprobs + n;
        if (n >= p.num_top) {
          EXPECT_EQ(out.top_tokens[at], kNoToken);
        } else if (n >= vocab) {
          EXPECT_EQ(out.top_tokens[at], -1);
        } else {
          ASSERT_EQ(out.top_tokens[at], order[n]) << "place " << n;
          EXPECT_NEAR(out.top_logprobs[at], want(order[n]), 4e-6 + 0x1p-21 * std::fabs(raw[order[n]]));
        }
      }
    }
  }
}

TEST(Sampling, BrokenRowsAreFlaggedAndTheOthersAreNot) {
  std::mt19937 rng(9);
  const int vocab = 9000;
  for (const bool cuts : {false, true}) {
    Batch b{Element::fp32, vocab, {}, {}, {}, {}, {}};
    RowSampling p;
    p.num_top = 2, p.temperature = 0.8f;
    if (cuts) p.top_k = 10, p.top_p = 0.9f, p.min_p = 0.01f;
    for (int r = 0; r < 6; ++r) {
      std::vector<float> row = normal_row(rng, vocab, 1);
      if (r == 1) row[8999] = NAN;
      if (r == 2) row[0] = INFINITY;
      if (r == 4) std::fill(row.begin(), row.end(), -INFINITY);
      p.seed = r;
      b.add(std::move(row), p);
    }
    std::map<int, float> bans;
    for (int i = 0; i < vocab; ++i) bans[i] = -INFINITY;
    b.add(normal_row(rng, vocab, 1), p, bans);
    bans.erase(8191);
    b.add(normal_row(rng, vocab, 1), p, bans);
    const Output out = run(b);
    const SampleStatus ok = SampleStatus::ok, bad = SampleStatus::non_finite, none = SampleStatus::nothing_left;
    EXPECT_EQ(out.status, (std::vector<SampleStatus>{ok, bad, bad, ok, none, ok, none, ok}));
    for (int r : {1, 2, 4, 6}) {
      EXPECT_EQ(out.tokens[r], -1);
      EXPECT_EQ(out.logprobs[r], kNoLogprob);
    }
    for (int r : {0, 3, 5}) EXPECT_TRUE(right_token(b, r, out.tokens[r])) << "row " << r;
    EXPECT_EQ(out.tokens[7], 8191);
  }
}

TEST(Sampling, ManyRowsOfALargeVocabulary) {
  std::mt19937 rng(11);
  Batch b{Element::bf16, 151936, {}, {}, {}, {}, {}};
  const std::vector<float> shared = normal_row(rng, b.vocab, 1);
  for (int r = 0; r < 24; ++r) {
    RowSampling p;
    p.seed = 77 + r, p.temperature = r % 3 ? 1.0f : 0.6f, p.top_k = r % 2 ? 20 : 0,
    p.top_p = r % 4 > 1 ? 0.95f : 1;
    b.add(shared, p);
  }
  const Output out = run(b);
  for (int r = 0; r < 24; ++r) EXPECT_TRUE(right_token(b, r, out.tokens[r])) << "row " << r;
}

// ---- counts

TEST(Counts, MatchAMapOfTokens) {
  std::mt19937 rng(12);
  const int vocab = 1001, slots = 4, stride = count_stride(vocab);
  std::vector<int32_t> tokens;
  std::vector<CountUpdate> updates;
  std::vector<uint16_t> want(size_t(slots) * stride, 3);
  for (const auto& [slot, prompt, generated, clear] :
       {std::tuple{2, 5000, 700, true}, {0, 0, 1, false}, {3, 10, 0, true}}) {
    CountUpdate u{slot, int(tokens.size()), 0, 0, clear};
    uint16_t* counts = want.data() + size_t(slot) * stride;
    if (clear) std::fill(counts, counts + stride, uint16_t(0));
    for (int i = 0; i < prompt + generated; ++i) {
      const int token = i % 50 == 49 ? (i % 100 == 49 ? -1 : vocab) : int(rng() % (i % 3 ? 20 : vocab));
      tokens.push_back(token);
      if (token < 0 || token >= vocab) continue;
      counts[token] = i < prompt ? counts[token] | 0x8000 : counts[token] + 1;
    }
    u.prompt_end = u.begin + prompt, u.end = int(tokens.size());
    updates.push_back(u);
  }
  DeviceVector<uint16_t> counts(want.size(), 3);
  DeviceVector<int32_t> d_tokens(tokens);
  DeviceVector<CountUpdate> d_updates(updates);
  launch_count_tokens({counts.data(), d_tokens.data(), d_updates.data(), int(updates.size()), vocab}, nullptr);
  EXPECT_EQ(counts.host(), want);
}

TEST(Counts, PendingTokensAreThoseOfTheStepBefore) {
  DeviceVector<uint16_t> counts(8, 0);
  DeviceVector<int32_t> previous(std::vector<int32_t>{6, 2, -1, 9});
  DeviceVector<int32_t> tokens(
      std::vector<int32_t>{3, pending_token(1), 2, pending_token(0), pending_token(2), pending_token(3)});
  DeviceVector<CountUpdate> updates(std::vector<CountUpdate>{{0, 0, 1, 6, true}});
  launch_count_tokens({counts.data(), tokens.data(), updates.data(), 1, 8, previous.data()}, nullptr);
  EXPECT_EQ(counts.host(), (std::vector<uint16_t>{0, 0, 2, 0x8000, 0, 0, 1, 0}));
}

TEST(Counts, StopAtTheLargest) {
  DeviceVector<uint16_t> counts(8, 0);
  DeviceVector<int32_t> tokens(std::vector<int32_t>(40000, 5));
  DeviceVector<CountUpdate> updates(std::vector<CountUpdate>{{0, 0, 1, 40000, true}});
  launch_count_tokens({counts.data(), tokens.data(), updates.data(), 1, 8}, nullptr);
  EXPECT_EQ(counts.host(), (std::vector<uint16_t>{0, 0, 0, 0, 0, 0xffff, 0, 0}));
}

TEST(Sampling, NoRowsLaunchNothing) {
  SampleArgs a;
  a.vocab = a.row_stride = 8, a.any_top = false;
  launch_sample(a, nullptr);
  launch_count_tokens({}, nullptr);
}

}  // namespace
}  // namespace ekv::test
