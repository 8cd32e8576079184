#pragma once
// sampling_definition.h -- the rule of sampling_rule.h in double, for tests of every backend's sampler.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/sampling.h"

namespace ekv::test {

inline double penalised_by_definition(double x, int generated, bool in_prompt, const RowSampling& p) {
  if (generated == 0 && !in_prompt) return x;
  x = x > 0 ? x / p.repetition : x * p.repetition;
  return x - (double(p.frequency) * generated + (generated > 0 ? p.presence : 0));
}

// The least z that is kept; `slack` loosens (or, negative, tightens) what is decided by arithmetic.
inline double cut_of(std::vector<double> z, const RowSampling& p, double slack) {
  std::sort(z.begin(), z.end(), std::greater<>());
  const double top = z[0], tie = slack * (1 + std::fabs(top));  // tokens so close may count as equal
  double cut = p.min_p > 0 ? top + std::log(double(p.min_p)) - tie : -INFINITY;
  if (p.top_k > 0 && size_t(p.top_k) < z.size()) cut = std::max(cut, z[p.top_k - 1] - tie);
  if (p.top_p >= 1) return cut;
  double mass = 0;
  for (double v : z)
    if (v >= cut) mass += std::exp(v - top);
  const double wanted = mass * (double(p.top_p) + slack);
  double above = 0;
  for (size_t i = 0; i < z.size() && z[i] >= cut;) {
    if (i > 0 && above >= wanted) return z[i - 1] - tie;
    for (const double same = z[i]; i < z.size() && z[i] == same; ++i) above += std::exp(same - top);
  }
  return cut;
}

inline double race_of(double z, const RowSampling& p, int token) {
  const uint32_t word = sampling::word_of(sampling::draw_words(p.seed, token / 4, p.output_index), token);
  const float v = std::min((float(word) + 0.5f) * 0x1p-32f, 1.0f - 0x1p-24f);
  return z - std::log(-std::log1p(-double(v)));
}

// By how much races of a row with these z may be wrong (sampling_rule.h).
inline double race_margin(const std::vector<double>& z) {
  double size = 0;
  for (double v : z)
    if (std::isfinite(v)) size = std::max(size, std::fabs(v));
  return 4e-6 + 0x1p-21 * size;
}

// Is `token` a right answer? Where the definition's own margins are below the arithmetic's error, either is.
// `exact`: z is the logits as they came, so that a greedy row has one answer.
inline testing::AssertionResult right_token(const std::vector<double>& z, const RowSampling& p, int token,
                                            bool exact) {
  if (token < 0 || token >= int(z.size())) return testing::AssertionFailure() << "token " << token;
  const double top = *std::max_element(z.begin(), z.end()), close = race_margin(z);
  if (p.greedy()) {
    const int want = int(std::max_element(z.begin(), z.end()) - z.begin());
    if (exact && token != want)
      return testing::AssertionFailure() << "greedy token " << token << ", want " << want;
    return z[token] >= top - close
               ? testing::AssertionSuccess()
               : testing::AssertionFailure() << "not the largest: " << z[token] << " of " << top;
  }
  const double loose = cut_of(z, p, 1e-6), tight = cut_of(z, p, -1e-6);
  if (z[token] < loose)
    return testing::AssertionFailure() << "cut token " << token << ": " << z[token] << " < " << loose;
  const double own = race_of(z[token], p, token);
  for (int i = 0; i < int(z.size()); ++i)
    if (z[i] >= tight && z[i] > -INFINITY && race_of(z[i], p, i) > own + close)
      return testing::AssertionFailure()
             << "token " << token << " races " << own << ", token " << i << " " << race_of(z[i], p, i) << "; z "
             << z[token] << " and " << z[i] << ", cut " << tight;
  return testing::AssertionSuccess();
}

// Pearson's statistic of `seen` draws against softmax(z) of the kept tokens, in standard deviations from what a
// right sampler gives on average. A token that was cut and drawn makes it infinite.
inline double chi_square_excess(const std::vector<double>& z, double cut, const std::vector<int>& seen) {
  double sum = 0, draws = 0, chi = 0, kept = -1;
  const double top = *std::max_element(z.begin(), z.end());
  for (size_t i = 0; i < z.size(); ++i) sum += z[i] >= cut ? std::exp(z[i] - top) : 0, draws += seen[i];
  for (size_t i = 0; i < z.size(); ++i) {
    const double expected = z[i] >= cut ? draws * std::exp(z[i] - top) / sum : 0;
    if (expected == 0 && seen[i] > 0) return INFINITY;
    if (expected > 0) chi += (seen[i] - expected) * (seen[i] - expected) / expected, ++kept;
  }
  return (chi - kept) / std::sqrt(2 * std::max(kept, 1.0));
}

// Of a drawn seed: an upper bound of the chance that a right sampler's draws are as far as `seen` from
// softmax(z) of the kept tokens, or farther; 0 when a token that was cut was drawn. Of k tokens, for their
// divergence D = sum of seen ln(seen / expected) above k - 1 the chance is at most exp(-D) (e D / (k - 1))^(k -
// 1): it holds for any number of draws and however rare a token is (R. Agrawal, Finite-sample concentration of
// the multinomial in relative entropy, 2020), which the chi-square distribution does not.
inline double chance_of(const std::vector<double>& z, double cut, const std::vector<int>& seen) {
  double sum = 0, draws = 0, divergence = 0, free = -1;
  const double top = *std::max_element(z.begin(), z.end());
  for (size_t i = 0; i < z.size(); ++i) {
    if (z[i] >= cut && z[i] > -INFINITY) sum += std::exp(z[i] - top), ++free;
    draws += seen[i];
  }
  for (size_t i = 0; i < z.size(); ++i) {
    if (seen[i] == 0) continue;
    if (z[i] < cut || z[i] == -INFINITY) return 0;
    divergence += seen[i] * std::log(seen[i] * sum / (draws * std::exp(z[i] - top)));
  }
  free = std::max(free, 1.0);
  if (divergence <= free) return 1;
  return std::exp(free * (1 + std::log(divergence / free)) - divergence);
}

constexpr double kNoChance = 1e-9;  // once in so many runs a right sampler may fail

}  // namespace ekv::test
