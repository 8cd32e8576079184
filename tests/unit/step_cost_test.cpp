// What a step costs, from what steps took.

#include "sched/step_cost.h"

#include <gtest/gtest.h>

#include <random>

namespace ekv {
namespace {

StepLoad draw(std::mt19937& rng) {
  const int prefill = rng() % 3 ? 0 : int(rng() % 2000), decodes = int(rng() % 64);
  return {.tokens = prefill + decodes + 1,
          .prefill_keys = int64_t(prefill) * int(rng() % 8000),
          .decode_keys = int64_t(decodes) * int(rng() % 4000)};
}

void expect_near(const StepCost& fitted, const StepCost& truth, double tolerance, std::mt19937& rng) {
  for (int i = 0; i < 100; ++i) {
    const StepLoad load = draw(rng);
    EXPECT_NEAR(fitted.us(load) / truth.us(load), 1, tolerance) << load.tokens;
  }
}

constexpr StepCost kTruth{
    .fixed_us = 900, .per_token_us = 20, .per_prefill_key_us = 1e-3, .per_decode_key_us = 5e-3};

// Adds `count` steps that took what they cost in truth, times `factor(i)`.
template <class Factor>
void add_steps(StepCostFit& fit, int count, std::mt19937& rng, Factor factor) {
  for (int i = 0; i < count; ++i) {
    const StepLoad load = draw(rng);
    fit.add(load, kTruth.us(load) * factor(i));
  }
}
double exactly(int) { return 1; }
double noise(std::mt19937& rng) { return 0.95 + 0.1 * double(rng() % 1000) / 1000; }

TEST(StepCost, IsFoundFromTimes) {
  std::mt19937 rng(1);
  StepCostFit fit;
  EXPECT_EQ(fit.cost().us({.tokens = 100}), 0) << "nothing is known";
  add_steps(fit, 400, rng, exactly);
  expect_near(fit.cost(), kTruth, 0.01, rng);
}

TEST(StepCost, NoiseAndStallsDoNotBendIt) {
  std::mt19937 rng(2);
  StepCostFit fit;
  add_steps(fit, 1000, rng, [&](int) {
    const double usual = noise(rng);
    return rng() % 50 ? usual : 100;
  });
  expect_near(fit.cost(), kTruth, 0.15, rng);
}

// Steps that ended together with the one before are collected at once and seem to have taken nothing.
TEST(StepCost, StepsThatSeemToTakeNothingDoNotBendIt) {
  std::mt19937 rng(5);
  StepCostFit fit;
  add_steps(fit, 1000, rng, [&](int i) {
    const double usual = noise(rng);
    return i < 8 || rng() % 50 ? usual : 0.01;
  });
  expect_near(fit.cost(), kTruth, 0.15, rng);
}

TEST(StepCost, OneLongPrefillThatSeemsToTakeNothingIsOneOfMany) {
  std::mt19937 rng(6);
  StepCostFit fit;
  add_steps(fit, 400, rng, exactly);
  const StepLoad prefill{.tokens = 2048, .prefill_keys = int64_t(2048) * 2048};
  fit.add(prefill, 400);
  EXPECT_NEAR(fit.cost().us(prefill) / kTruth.us(prefill), 1, 0.15);
}

// The first step of a process often is one: it loads code.
TEST(StepCost, AStallAtTheStartIsForgottenAtOnce) {
  std::mt19937 rng(7);
  StepCostFit fit;
  add_steps(fit, 40, rng, [](int i) { return i == 0 ? 100.0 : 1.0; });
  expect_near(fit.cost(), kTruth, 0.1, rng);
}

// Hours of decodes between two prompts.
TEST(StepCost, WhatAPromptCostsIsNotForgotten) {
  std::mt19937 rng(8);
  StepCostFit fit;
  add_steps(fit, 400, rng, [&](int) { return noise(rng); });
  const StepLoad chunk{.tokens = 1500, .prefill_keys = int64_t(1500) * 3000, .decode_keys = 20 * 3000};
  for (int i = 0; i < 5000; ++i) {
    const int batch = 1 + int(rng() % 64);
    const StepLoad decodes{.tokens = batch, .decode_keys = int64_t(batch) * int(rng() % 4000)};
    fit.add(decodes, kTruth.us(decodes) * noise(rng));
    ASSERT_NEAR(fit.cost().us(chunk) / kTruth.us(chunk), 1, 0.1) << "after " << i << " steps of decodes";
  }
}

TEST(StepCost, FollowsAMachineThatChanges) {
  std::mt19937 rng(3);
  for (const double factor : {3.0, 1.0 / 3}) {
    StepCostFit fit;
    StepCost changed = kTruth;
    changed.per_token_us *= factor;
    for (int i = 0; i < 2000; ++i) {
      const StepLoad load = draw(rng);
      fit.add(load, (i < 1000 ? kTruth : changed).us(load));
    }
    expect_near(fit.cost(), changed, 0.02, rng);
  }
}

// Steps that tell nothing about a term leave it at zero or where it was, and never below.
TEST(StepCost, NoTermIsEverNegative) {
  std::mt19937 rng(4);
  StepCostFit fit;
  for (int i = 0; i < 1000; ++i) {
    const int decodes = 1 + int(rng() % 3);
    fit.add({.tokens = decodes, .decode_keys = 1000 * decodes}, 1 + double(rng() % 1000));
    const StepCost& c = fit.cost();
    EXPECT_TRUE(c.fixed_us >= 0 && c.per_token_us >= 0 && c.per_decode_key_us >= 0);
    EXPECT_EQ(c.per_prefill_key_us, 0);
  }
}

}  // namespace
}  // namespace ekv
