// The file that keeps tuned matrix products, and the choice among noisy timings.

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>
#include <random>
#include <set>

#include "backend/cuda/gemm_cache.h"
#include "backend/cuda/gemm_tuner.h"
#include "backend/cuda/row_buckets.h"
#include "support/seed.h"
#include "support/temp_dir.h"

namespace ekv {
namespace {

GemmCache random_cache(std::mt19937& rng) {
  GemmCache cache;
  for (const char* device : {"NVIDIA H200, driver 13000, cuBLASLt 130100", "another, with spaces"})
    for (int i = 0; i < 30; ++i) {
      const GemmKey key{int(1 + rng() % 200000),
                        int(1 + rng() % 20000),
                        int(1 + rng() % 4096),
                        int(1 + rng() % 200000),
                        rng() % 2 ? 16 : 32,
                        int(rng() % 3),
                        rng() % 2 ? Element::fp16 : Element::bf16};
      GemmChoice choice;
      if (rng() % 3 == 0)
        choice.skinny_split = int(1 + rng() % 16);
      else if (rng() % 3 == 0)
        choice.tile = true;
      else
        for (uint64_t& word : choice.algorithm) word = rng() % 4 ? rng() | uint64_t(rng()) << 32 : 0;
      cache.devices[device][key] = choice;
    }
  return cache;
}

TEST(GemmCache, ReadsWhatItWrote) {
  const unsigned seed = test::drawn_seed();
  std::mt19937 rng(seed);
  const GemmCache cache = random_cache(rng);
  const Result<GemmCache> read = parse_gemm_cache(to_text(cache));
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(*read, cache);
  EXPECT_EQ(*parse_gemm_cache(to_text({})), GemmCache{});
}

// Another type is another product: neither takes what was found for the other.
TEST(GemmCache, KeepsTheTypesApart) {
  GemmKey key{4096, 4096, 8, 4096, 16, 0, Element::fp16};
  GemmCache cache;
  cache.devices["d"][key] = {.skinny_split = 4};
  key.element = Element::bf16;
  cache.devices["d"][key] = {.tile = true};
  const std::string text = to_text(cache);
  EXPECT_NE(text.find("\n4096 4096 8 4096 16 0 fp16 skinny 4\n"), std::string::npos) << text;
  EXPECT_NE(text.find("\n4096 4096 8 4096 16 0 bf16 tile\n"), std::string::npos) << text;
  EXPECT_EQ(*parse_gemm_cache(text), cache);
}

TEST(GemmCache, RefusesEveryCutAndEveryChangedByte) {
  std::mt19937 rng(5);
  const std::string text = to_text(random_cache(rng));
  for (size_t cut = 0; cut + 1 < text.size(); ++cut)
    EXPECT_FALSE(parse_gemm_cache(text.substr(0, cut))) << "cut at " << cut;
  for (size_t at = 0; at + 1 < text.size(); ++at) {  // the last line break may be another byte or missing
    std::string changed = text;
    changed[at] = char(changed[at] ^ (1 << rng() % 7));
    const Result<GemmCache> read = parse_gemm_cache(changed);
    // A digit of the checksum may change its case.
    if (read) {
      EXPECT_EQ(to_text(*read), text) << "byte " << at;
    }
  }
}

TEST(GemmCache, RefusesOtherFiles) {
  const auto expect_refused = [](const char* text, const char* why) {
    const Result<GemmCache> read = parse_gemm_cache(text);
    ASSERT_FALSE(read) << text;
    EXPECT_NE(read.error().message.find(why), std::string::npos) << text << ": " << read.error().message;
  };
  for (const char* text : {"", "\n", "{}"}) expect_refused(text, "another version or program");
  // Whole ones of the versions before, each with the checksum of its time.
  for (const char* text :
       {"elastickv gemm cache 1\nend 1 d469b3e8fcd6e122\n", "elastickv gemm cache 2\nend 1 a1c83a4d6ee6cb0\n",
        "elastickv gemm cache 3\nend 1 f38f01f829e7742a\n", "elastickv gemm cache 4\nend 1 814779f0eca59579\n"})
    expect_refused(text, "another version");
  EXPECT_EQ(to_text({}), "elastickv gemm cache 5\nend 1 753ff7fa2db998ed\n");
  for (const char* text :
       {"elastickv gemm cache 5\n", "elastickv gemm cache 5\nend 1 0\n",
        "elastickv gemm cache 5\nend 1 753ff7fa2db998ec\n", "elastickv gemm cache 5\nend 2 753ff7fa2db998ed\n"})
    expect_refused(text, "cut off or changed");
}

TEST(GemmCache, FilesAreWrittenWholeAndBrokenOnesIgnored) {
  const test::TempDir temp;
  const std::filesystem::path& folder = temp.path();
  const auto path = folder / "made" / "on demand.txt";
  std::mt19937 rng(6);
  const GemmCache cache = random_cache(rng);
  EXPECT_EQ(load_gemm_cache(path), GemmCache{});
  EXPECT_EQ(save_gemm_cache(path, cache), std::nullopt);
  EXPECT_EQ(load_gemm_cache(path), cache);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder / "made"), {}), 1) << "nothing is left";
  std::ofstream(path) << "something else\n";
  EXPECT_EQ(load_gemm_cache(path), GemmCache{});
  EXPECT_TRUE(save_gemm_cache(path / "below a file", cache).has_value());
}

// A start can be ended while it saves: what it leaves is taken away later, and nothing else is.
TEST(GemmCache, WhatAKilledProcessLeftIsRemovedWhenItIsOld) {
  const test::TempDir folder;
  const std::filesystem::path path = folder.path() / "cache.txt";
  const auto hour_ago = std::filesystem::file_time_type::clock::now() - std::chrono::hours(1);
  for (const char* name :
       {"cache.txt.new-0a1b2c3d", "cache.txt.old", "other.txt.new-0a1b2c3d", "cache.txt.new-ffffffff"}) {
    std::ofstream(folder.path() / name) << "half of a li";
    if (name != std::string("cache.txt.new-ffffffff"))
      std::filesystem::last_write_time(folder.path() / name, hour_ago);
  }
  EXPECT_EQ(save_gemm_cache(path, {}), std::nullopt);
  std::set<std::string> left;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path()))
    left.insert(entry.path().filename());
  EXPECT_EQ(left, (std::set<std::string>{"cache.txt", "cache.txt.new-ffffffff", "cache.txt.old",
                                         "other.txt.new-0a1b2c3d"}));
  EXPECT_EQ(load_gemm_cache(path), GemmCache{});
}

TEST(GemmTuner, FindsAClearWinner) {
  const std::vector<double> us{10, 11, 9.9, 8, 30, std::numeric_limits<double>::infinity()};
  EXPECT_EQ(choose_candidate(us.size(), kFewRowsEffort, [&](size_t i, bool) { return us[i]; }), 3u);
  EXPECT_EQ(choose_candidate(1, kFewRowsEffort, [&](size_t i, bool) { return us[i]; }), 0u);
  EXPECT_EQ(choose_candidate(3, kFewRowsEffort, [&](size_t i, bool) { return us[i]; }), 0u)
      << "1 % is no reason to change";
  const std::vector<double> none_works{10, us[5], us[5]};
  EXPECT_EQ(choose_candidate(3, kFewRowsEffort, [&](size_t i, bool) { return none_works[i]; }), 0u);
  const std::vector<double> first_fails{us[5], 12, 11};
  EXPECT_EQ(choose_candidate(3, kFewRowsEffort, [&](size_t i, bool) { return first_fails[i]; }), 2u);
}

// All candidates take the same time, with noise of up to 10 %, of which one sample in ten is a lucky one. A
// tuner that trusted the least sample would change in nearly every run.
TEST(GemmTuner, NoiseSeldomReplacesTheFirst) {
  std::mt19937 rng(7);
  std::uniform_real_distribution<double> noise(0, 0.01), lucky(-0.1, 0);
  int changed = 0;
  for (int run = 0; run < 1000; ++run)
    changed += choose_candidate(24, kFewRowsEffort, [&](size_t, bool exact) {
                 return 10 * (1 + noise(rng) + (!exact && rng() % 10 == 0 ? lucky(rng) : 0));
               }) != 0;
  EXPECT_EQ(changed, 0);
  for (int run = 0; run < 1000; ++run)
    changed += choose_candidate(24, kFewRowsEffort, [&](size_t, bool) {
                 return 10 * (1 + noise(rng) + (rng() % 10 == 0 ? lucky(rng) : 0));
               }) != 0;
  EXPECT_LT(changed, 200) << "of 1000";
}

// The device slows down while it is timed: the first, timed early, does not win by that.
TEST(GemmTuner, ADriftOfTheClockDecidesNothing) {
  double clock = 1;
  const auto drifting = [&](size_t i, bool) { return (clock *= 1.002) * (i == 5 ? 9.0 : 10.0); };
  EXPECT_EQ(choose_candidate(8, kFewRowsEffort, drifting), 5u);
}

// `times[round]`: of candidate 1, where candidate 0 takes 10.
size_t chosen_of(const std::vector<double>& times) {
  size_t samples = 0;
  const TuningEffort effort{.finalists = 1, .rounds = int(times.size())};
  return choose_candidate(2, effort, [&](size_t i, bool exact) {
    return i == 0 ? 10 : exact ? times[samples++] : 9;
  });
}

TEST(GemmTuner, ThreeOfFourRoundsAndAllThatWork) {
  constexpr double kFails = std::numeric_limits<double>::infinity();
  EXPECT_EQ(chosen_of({9, 9, 9, 9, 9, 11}), 1u);
  EXPECT_EQ(chosen_of({9, 11, 9, 9, 9, 11}), 0u);
  EXPECT_EQ(chosen_of({9, 11}), 0u) << "of two both count";
  EXPECT_EQ(chosen_of({9, 9, 9, 9, 9, kFails}), 0u);
  const auto all_fail_later = [](size_t, bool exact) { return exact ? kFails : 10; };
  EXPECT_EQ(choose_candidate(3, kUnderPowerEffort, all_fail_later), 0u);
}

TEST(GemmTuner, OnlyWherePowerBindsOneKernelIsWorthMoreThanItsTime) {
  EXPECT_EQ(with_power_credit(100, kFewTuningRows, true), 100);
  EXPECT_EQ(with_power_credit(100, kFewTuningRows + 1, false), 100);
  EXPECT_EQ(with_power_credit(100, kFewTuningRows + 1, true), 95);
}

TEST(GemmTuner, SamplesLastAsLongAsTheyShould) {
  EXPECT_EQ(kFewRowsEffort.replays(1), 5);
  EXPECT_EQ(kUnderPowerEffort.replays(1000), 8);
  EXPECT_EQ(kUnderPowerEffort.replays(6000), 2);
  EXPECT_EQ(kUnderPowerEffort.replays(1), kMostReplays);
  EXPECT_EQ(kUnderPowerEffort.replays(std::numeric_limits<double>::infinity()), 2) << "nothing has worked yet";
}

// Of a cold device another candidate is the fastest than of one that works: the few samples of it do not count.
TEST(GemmTuner, TheClockThatAStepHasDecides) {
  int samples = 0;
  const auto heating = [&](size_t i, bool) {
    const bool cold = ++samples <= 7 + 6;
    return i == 3 ? (cold ? 8.0 : 9.5) : i == 5 ? 9.0 : 10.0;
  };
  EXPECT_EQ(choose_candidate(8, kUnderPowerEffort, heating), 5u);
}

// t: timed, the kernel for many rows won; l: timed, the library did; -: not timed; x: not timed, and not for
// that kernel.
std::vector<size_t> like_neighbours(std::string_view forms) {
  std::vector<TileForm> made;
  for (const char form : forms)
    made.push_back({.timed = form == 't' || form == 'l', .has_tile = form != 'x', .tile = form == 't'});
  return tile_like_neighbours(made);
}

TEST(GemmTuner, RowsThatWereNotTimedFollowBothNeighbours) {
  using Forms = std::vector<size_t>;
  EXPECT_EQ(like_neighbours(""), Forms{});
  EXPECT_EQ(like_neighbours("t--t"), (Forms{1, 2}));
  EXPECT_EQ(like_neighbours("t-l-t"), Forms{}) << "one of them is the library's";
  EXPECT_EQ(like_neighbours("l-t--"), (Forms{3, 4})) << "the last that was timed is enough at the end";
  EXPECT_EQ(like_neighbours("--t"), Forms{}) << "nothing below";
  EXPECT_EQ(like_neighbours("tx-t"), Forms{2});
  EXPECT_EQ(like_neighbours("tlt"), Forms{}) << "a choice that was timed, now or before, stays";
  EXPECT_EQ(like_neighbours("----"), Forms{}) << "the time was too short for any";
}

// What most steps have comes first: single sequences, and prefill as long as it may be. Every step of decodes
// has its turn, other numbers only where they are usual.
TEST(GemmTuner, TheMostUsualFormsComeFirst) {
  EXPECT_EQ(tuning_turn(1, 8192), 0);
  EXPECT_EQ(tuning_turn(8192, 8192), 0);
  EXPECT_EQ(tuning_turn(2560, 2500), 0) << "the bucket of the largest";
  EXPECT_LT(tuning_turn(64, 8192), tuning_turn(2048, 8192));
  EXPECT_LT(tuning_turn(2048, 8192), tuning_turn(40, 8192));
  for (int seqs = 1; seqs <= kFewTuningRows; ++seqs)
    EXPECT_GE(tuning_turn(decode_bucket(seqs), 8192), 0) << seqs;
  EXPECT_EQ(tuning_turn(2560, 8192), -1);
  EXPECT_EQ(tuning_turn(12, 8192), -1) << "steps of 12 decodes have 16 rows";
}

}  // namespace
}  // namespace ekv
