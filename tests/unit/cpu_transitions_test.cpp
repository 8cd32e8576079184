// Pairs that change fidelity: bytes by the definition, promote(demote(x)) == x for everything that a page can
// hold, neighbours untouched, host slots and late copies.

#include "backend/cpu/cpu_transitions.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <set>

#include "support/base_pages.h"
#include "support/seed.h"

namespace ekv::test {
namespace {

constexpr int kEven = 4, kOdd = 1, kNewOdd = 5, kPages = 6, kLow = 1, kSlots = 3;
constexpr std::array kHeadDims = {64, 80, 96, 128, 256};

// A pool and its transitions; each call is a step without tokens.
struct Rig {
  Rig(int dim, BaseFormat format, const CpuOptions& options)
      : pool({2, kPages, 2, dim}, format, best_cpu_kernels(), options.base_fill), transitions(pool, options) {}

  std::vector<uint32_t> step(const StepInput& input) {
    std::vector<uint32_t> done;
    transitions.change_fidelity(threads, input);
    transitions.start_transfers(input);
    transitions.finish_transfers(done);
    return done;
  }
  std::vector<uint32_t> demote(const DemoteJob& job) { return step({.demotes = {&job, 1}}); }
  std::vector<uint32_t> promote(const PromoteJob& job) { return step({.promotes = {&job, 1}}); }
  std::vector<uint32_t> transfer(const TransferJob& job) { return step({.transfers = {&job, 1}}); }

  CpuThreads threads{2};
  CpuKvPool pool;
  CpuTransitions transitions;
};

CpuOptions low_planes(int delay = 0) { return {.num_host_slots = kSlots, .transfer_delay = delay}; }

// The pages of the pair in both fidelities; `was` is the pool before the demotion.
void expect_packed(const Rig& rig, const CpuKvPool& was, BaseFormat format, std::span<const std::byte> low,
                   std::set<int>& exponents) {
  const KvShape& s = was.shape();
  for (int layer = 0; layer < s.layers; ++layer) {
    for (int head = 0; head < s.kv_heads; ++head) {
      const std::byte* slot = rig.pool.slot(layer, kEven, head);
      for (int row = 0; row < 2 * kPairTokens; ++row) {
        const int part = row % 2, token = row / 2;
        const SplitRow want = split_row(
            get_row(was, layer, token < kBlockTokens ? kEven : kOdd, head, part, token % kBlockTokens), format,
            BaseFill::mid);
        if (format == BaseFormat::fixed8) {
          exponents.insert(want.exponent);
          ASSERT_EQ(int(int8_t(slot[s.exponent_at(part, token)])), want.exponent);
        }
        for (int d = 0; d < s.head_dim; ++d) {
          ASSERT_EQ(int(slot[s.base_at(part, token, d)]), want.base[size_t(d)])
              << part << " " << token << " " << d;
          ASSERT_EQ(int(low[s.low_at(layer, head, part, token, d)]), want.low[size_t(d)]);
        }
      }
    }
  }
}

// Bytes of pages other than `page`; what a BASE slot holds in its tail stays behind and means nothing
// there.
void expect_same_but(const Rig& rig, const std::vector<std::byte>& before, std::set<int> pages,
                     bool tail_only) {
  const KvShape& s = rig.pool.shape();
  const std::vector<std::byte> now = pool_bytes(rig.pool);
  for (size_t i = 0; i < now.size(); ++i) {
    const size_t slot = i / s.slot_bytes(), in_slot = i % s.slot_bytes();
    const bool mine = pages.contains(int(slot / size_t(s.kv_heads) % size_t(s.pages)));
    if (mine && (!tail_only || in_slot >= s.low_slot_bytes())) continue;
    ASSERT_EQ(now[i], before[i]) << "byte " << in_slot << " of slot " << slot;
  }
}

class Transitions : public testing::TestWithParam<BaseFormat> {};

TEST_P(Transitions, PromotionUndoesDemotionAndNeighboursStay) {
  std::set<int> exponents, of_any_seed;
  for (const unsigned seed : seeds(1)) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 rng(seed);
    for (int run = 0; run < 4 * int(std::size(kHeadDims)); ++run) {
      const int dim = kHeadDims[run / 4];
      Rig rig(dim, GetParam(), low_planes()), was(dim, GetParam(), low_planes());
      for (int page = 0; page < kPages; ++page) poison_page(rig.pool, page);
      write_random_block(rig.pool, kEven, rng);
      write_random_block(rig.pool, kOdd, rng);
      const std::vector<std::byte> before = pool_bytes(rig.pool);
      std::copy(before.begin(), before.end(), was.pool.slot(0, 0, 0));

      EXPECT_EQ(rig.demote({kEven, kOdd, kLow, 77}), std::vector<uint32_t>{77});
      expect_same_but(rig, before, {kEven}, false);
      expect_packed(rig, was.pool, GetParam(), rig.transitions.host_slot(kLow),
                    is_fixed(seed) ? exponents : of_any_seed);
      ASSERT_FALSE(HasFatalFailure()) << "head_dim " << dim;

      poison_page(rig.pool, kOdd);  // somebody else writes there at once
      EXPECT_EQ(rig.transfer({TransferKind::restore_low, kEven, -1, kLow, 78}), std::vector<uint32_t>{78});
      std::fill(rig.transitions.host_slot(kLow).begin(), rig.transitions.host_slot(kLow).end(),
                std::byte{0xee});
      rig.promote({kEven, kNewOdd, kLow});
      for (int layer = 0; layer < 2; ++layer) {
        for (int row = 0; row < 2 * 2 * kBlockTokens; ++row) {
          const int head = row % 2, part = row / 2 % 2, token = row / 4;
          ASSERT_EQ(get_row(rig.pool, layer, kEven, head, part, token),
                    get_row(was.pool, layer, kEven, head, part, token));
          ASSERT_EQ(get_row(rig.pool, layer, kNewOdd, head, part, token),
                    get_row(was.pool, layer, kOdd, head, part, token));
        }
      }
      expect_same_but(rig, before, {kEven, kOdd, kNewOdd}, false);
    }
  }
  if (GetParam() == BaseFormat::fixed8) {
    EXPECT_EQ(exponents.size(), size_t(15 + 9 + 1)) << "an exponent never came up";
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, Transitions, testing::Values(BaseFormat::fixed8, BaseFormat::e5m2),
                         [](const auto& info) { return info.param == BaseFormat::fixed8 ? "fixed8" : "e5m2"; });

// One row per vector: the largest value just below and above each exponent's bound, and the ends of the range.
TEST(TransitionsFixed8, RoundTripAtTheBoundsOfEveryExponent) {
  constexpr int kDim = 64;
  for (int k = -9; k <= 16; ++k) {
    for (double at : {1.0, 127.0, 128.0, 129.0, 16316.0, 32624.0, 32631.5, 32632.0, 32640.0, 32767.0}) {
      Rig rig(kDim, BaseFormat::fixed8, low_planes());
      for (int token = 0; token < kPairTokens; ++token) {
        for (KvPart part : {kKey, kValue}) {
          std::vector<float> x(kDim);
          for (int d = 0; d < kDim; ++d) x[size_t(d)] = float(std::ldexp(at, k - 15)) * float(d - token) / kDim;
          x[size_t(token)] = float(std::ldexp(token % 2 ? at : -at, k - 15));
          const int page = token < kBlockTokens ? kEven : kOdd;
          if (part == kKey) rig.pool.rotate(x.data());  // so that the write's rotation gives x back
          ASSERT_TRUE(rig.pool.write(1, 0, part, Slot(page) * kBlockTokens + token % kBlockTokens, x.data()));
        }
      }
      std::vector<std::vector<uint16_t>> want;
      for (int page : {kEven, kOdd}) {
        for (int row = 0; row < 2 * kBlockTokens; ++row)
          want.push_back(get_row(rig.pool, 1, page, 0, row % 2, row / 2));
      }
      rig.demote({kEven, kOdd, kLow, 1});
      rig.transfer({TransferKind::restore_low, kEven, -1, kLow, 2});
      rig.promote({kEven, kOdd, kLow});
      size_t i = 0;
      for (int page : {kEven, kOdd}) {
        for (int row = 0; row < 2 * kBlockTokens; ++row) {
          ASSERT_EQ(get_row(rig.pool, 1, page, 0, row % 2, row / 2), want[i++])
              << k << " " << at << " row " << row;
        }
      }
    }
  }
}

TEST(TransitionsE5m2, AllCodesSurvive) {
  constexpr int kDim = 128, kPerPair = 2 * 2 * 2 * kPairTokens * kDim;
  static_assert(65536 % kPerPair == 0);
  for (int first = 0; first < 65536; first += kPerPair) {
    Rig rig(kDim, BaseFormat::e5m2, low_planes());
    const auto each = [&](const auto& body) {
      for (int i = 0; i < kPerPair; ++i) {
        const int dim = i % kDim, token = i / kDim % kPairTokens, rest = i / kDim / kPairTokens;
        body(rest & 1, token < kBlockTokens ? kEven : kOdd, rest >> 1 & 1, rest >> 2 & 1, token % kBlockTokens,
             dim, uint16_t(first + i));
      }
    };
    each([&](int l, int p, int h, int part, int t, int d, uint16_t bits) {
      set_half(rig.pool, l, p, h, part, t, d, bits);
    });
    rig.demote({kEven, kOdd, kLow, 1});
    poison_page(rig.pool, kOdd);
    rig.transfer({TransferKind::restore_low, kEven, -1, kLow, 2});
    rig.promote({kEven, kOdd, kLow});
    each([&](int l, int p, int h, int part, int t, int d, uint16_t bits) {
      ASSERT_EQ(get_half(rig.pool, l, p, h, part, t, d), bits);
    });
  }
}

// Write-through: the low bytes are on the host before the demotion, which then copies nothing.
TEST(Transfers, ABackupBeforeTheDemotionServesThePromotion) {
  std::mt19937 rng(drawn_seed());
  for (BaseFormat format : {BaseFormat::fixed8, BaseFormat::e5m2}) {
    Rig rig(80, format, low_planes());
    write_random_block(rig.pool, kEven, rng);
    write_random_block(rig.pool, kOdd, rng);
    const std::vector<std::byte> before = pool_bytes(rig.pool);
    EXPECT_EQ(rig.transfer({TransferKind::backup_low, kEven, kOdd, kLow, 5}), std::vector<uint32_t>{5});
    EXPECT_EQ(pool_bytes(rig.pool), before) << "a backup leaves the pair as it is";
    EXPECT_TRUE(rig.demote({kEven, kOdd, -1, 0}).empty());
    for (int again = 0; again < 2; ++again) {  // the host copy serves every later promotion
      poison_page(rig.pool, kOdd);
      rig.transfer({TransferKind::restore_low, kEven, -1, kLow, 6});
      rig.promote({kEven, kOdd, kLow});
      expect_same_but(rig, before, {kEven, kOdd}, true);
      if (again == 0) rig.demote({kEven, kOdd, -1, 0});
    }
  }
}

TEST(Transfers, WholePairsGoOutAndComeBackToOtherPages) {
  std::mt19937 rng(drawn_seed());
  Rig rig(64, BaseFormat::fixed8, {.num_host_slots = kSlots, .host_content = HostContent::whole_pairs});
  EXPECT_EQ(rig.transitions.host_bytes(), kSlots * 2 * rig.pool.shape().page_bytes());
  write_random_block(rig.pool, kEven, rng);
  write_random_block(rig.pool, kOdd, rng);
  const std::vector<std::byte> before = pool_bytes(rig.pool);
  rig.transfer({TransferKind::store_pair, kEven, kOdd, 2, 1});
  poison_page(rig.pool, kEven);
  poison_page(rig.pool, kOdd);
  rig.transfer({TransferKind::load_pair, kOdd, kEven, 2, 2});  // crosswise
  const std::vector<std::byte> crossed = pool_bytes(rig.pool);
  rig.transfer({TransferKind::store_pair, kOdd, kEven, 0, 3});
  rig.transfer({TransferKind::load_pair, kEven, kOdd, 0, 4});
  EXPECT_NE(crossed, before);
  EXPECT_EQ(pool_bytes(rig.pool), before);
}

// Copies end `delay` steps late, in order, and are made then: what happens to their source until then shows.
TEST(Transfers, EndLateAndInOrder) {
  std::mt19937 rng(drawn_seed());
  Rig rig(64, BaseFormat::fixed8, low_planes(2));
  write_random_block(rig.pool, kEven, rng);
  write_random_block(rig.pool, kOdd, rng);
  EXPECT_TRUE(rig.transfer({TransferKind::backup_low, kEven, kOdd, 0, 10}).empty());
  EXPECT_TRUE(rig.demote({kEven, kOdd, 1, 11}).empty());
  EXPECT_EQ(rig.step({}), std::vector<uint32_t>{10});
  EXPECT_EQ(rig.step({}), std::vector<uint32_t>{11});
  EXPECT_TRUE(rig.step({}).empty());
  const auto a = rig.transitions.host_slot(0), b = rig.transitions.host_slot(1);
  EXPECT_FALSE(std::equal(a.begin(), a.end(), b.begin()))
      << "the backup read BASE bytes: its source was packed too soon";
}

using TransfersDeathTest = testing::Test;
TEST(TransfersDeathTest, BrokenPlansAreBugs) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto rig = [](int delay = 0) {
    return std::make_unique<Rig>(64, BaseFormat::fixed8, low_planes(delay));
  };
  EXPECT_DEATH(rig()->promote({kEven, kOdd, kLow}), "without a finished restore");
  EXPECT_DEATH(rig()->transfer({TransferKind::restore_low, kEven, -1, kLow, 1}), "have not arrived");
  EXPECT_DEATH(rig()->demote({kEven, kOdd, kSlots, 1}), "does not exist");
  EXPECT_DEATH(rig()->transfer({TransferKind::store_pair, kEven, kOdd, kLow, 1}), "other kind of content");
  EXPECT_DEATH(
      {
        auto late = rig(1);
        late->demote({kEven, kOdd, kLow, 1});
        late->demote({kEven, kOdd, kLow, 2});
      },
      "was given away");
}

}  // namespace
}  // namespace ekv::test
