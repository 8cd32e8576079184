// Attention over BASE pairs equals attention over an unpacked fp16 cache with the values that BASE stands for,
// bit for bit: every mixture, every path, packed or masked.

#include <gtest/gtest.h>

#include <array>
#include <cstdio>

#include "backend/cpu/cpu_attention.h"
#include "support/backend_driver.h"
#include "support/base_pages.h"
#include "support/seed.h"

namespace ekv::test {
namespace {

constexpr int kMaxPairs = 26, kPages = 2 * kMaxPairs, kLayer = 1, kRows = 40;

struct AttentionShape {
  int heads, kv_heads, dim;
  BaseFormat format;
  BaseFill fill;
};
void PrintTo(const AttentionShape& s, std::ostream* out) {
  *out << "d" << s.dim << (s.format == BaseFormat::fixed8 ? " fixed8" : " e5m2") << int(s.fill);
}

enum class Cache { packed, masked, unpacked };

// One sequence of kMaxPairs pairs in shuffled pages; run() takes a prefix of it and a set of BASE pairs.
class BaseAttention : public testing::TestWithParam<AttentionShape> {
 protected:
  void SetUp() override {
    const unsigned seed = drawn_seed();
    rng_.seed(seed);
    std::vector<int32_t> pages = all_pages(kPages);
    std::shuffle(pages.begin(), pages.end(), rng_);
    for (int pair = 0; pair < kMaxPairs; ++pair) {
      pairs_.push_back({pages[size_t(2 * pair)], pages[size_t(2 * pair + 1)]});
      for (int page : {pairs_.back().even, pairs_.back().odd}) write_block(page);
    }
    const std::vector<std::byte> bytes = pool_bytes(target_);
    std::copy(bytes.begin(), bytes.end(), packed_.slot(0, 0, 0));
    for (const PairEntry& pair : pairs_) {
      for (int head = 0; head < shape_.kv_heads; ++head) {
        packed_.pack(kLayer, head, pair.even, pair.odd, nullptr, true);
        for (int page : {pair.even, pair.odd}) unpack_base(page, head);
      }
      poison_page(packed_, pair.odd);
    }
    q_.resize(size_t(kRows * shape_.heads * shape_.dim));
    for (float& x : q_) x = std::normal_distribution<float>(0, 1)(rng_);
  }

  void write_block(int page) {
    std::vector<float> x(size_t(shape_.dim));
    for (int row = 0; row < 2 * kBlockTokens * shape_.kv_heads; ++row) {
      for (float& v : x) v = std::normal_distribution<float>(0, row % 2 ? 1.0f : 1.5f)(rng_);
      ASSERT_TRUE(target_.write(kLayer, row / (2 * kBlockTokens), row % 2 ? kValue : kKey,
                                Slot(page) * kBlockTokens + row / 2 % kBlockTokens, x.data()));
    }
  }

  void unpack_base(int page, int head) {
    for (int row = 0; row < 2 * kBlockTokens; ++row) {
      const SplitRow split =
          split_row(get_row(target_, kLayer, page, head, row % 2, row / 2), shape_.format, shape_.fill);
      for (int dim = 0; dim < shape_.dim; ++dim) {
        set_half(unpacked_, kLayer, page, head, row % 2, row / 2, dim, split.reads[size_t(dim)]);
      }
    }
  }

  // The pool that attention reads takes each pair from the pool that has it in the wanted form.
  std::vector<float> run(int keys, int rows, const std::vector<int>& base, Cache cache, KvPath at_least,
                         KvPath* path = nullptr) {
    CpuKvPool mixed({2, kPages, shape_.kv_heads, shape_.dim}, shape_.format, best_cpu_kernels(), shape_.fill,
                    cache == Cache::masked);
    std::vector<PairEntry> table = pairs_;
    for (int pair = 0; pair < kMaxPairs; ++pair) {
      const bool is_base = std::count(base.begin(), base.end(), pair) > 0;
      const CpuKvPool& from = !is_base || cache == Cache::masked ? target_
                              : cache == Cache::packed           ? packed_
                                                                 : unpacked_;
      PairEntry& entry = table[size_t(pair)];
      for (int page : {entry.even, entry.odd}) {
        std::memcpy(mixed.slot(kLayer, page, 0), from.slot(kLayer, page, 0),
                    mixed.shape().slot_bytes() * size_t(shape_.kv_heads));
      }
      if (!is_base || cache == Cache::unpacked) continue;
      entry.even = int32_t(uint32_t(entry.even) | kBasePair);
      if (cache == Cache::packed) entry.odd = -1;
    }
    const std::array<int32_t, 2> q_start{0, rows};
    StepInput input;
    input.q_start = q_start;
    input.kv_len = {&keys, 1};
    input.block_table = {table, kMaxPairs};
    input.path = at_least;
    CpuAttention attention(best_cpu_kernels(), mixed.shape(), shape_.heads, threads_.size());
    std::vector<float> out(size_t(rows * shape_.heads * shape_.dim), NAN);
    const BaseRun found = find_base(table);
    if (keys % 3 == 0) input.base_runs = {&found, 1};  // from the engine, or found by the backend
    attention.plan(input);
    if (path != nullptr) *path = attention.path();
    attention.run(mixed, threads_, kLayer, input, q_.data(), int64_t(shape_.heads) * shape_.dim, out.data());
    return out;
  }

  const AttentionShape shape_ = GetParam();
  CpuThreads threads_{2};
  std::mt19937 rng_;
  CpuKvPool target_{{2, kPages, shape_.kv_heads, shape_.dim}, shape_.format, best_cpu_kernels()};
  CpuKvPool packed_{{2, kPages, shape_.kv_heads, shape_.dim}, shape_.format, best_cpu_kernels()};
  CpuKvPool unpacked_{{2, kPages, shape_.kv_heads, shape_.dim}, shape_.format, best_cpu_kernels()};
  std::vector<PairEntry> pairs_;
  std::vector<float> q_;
};

std::vector<int> run_of(int first, int count) {
  std::vector<int> pairs;
  for (int i = 0; i < count; ++i) pairs.push_back(first + i);
  return pairs;
}

// TARGET, BASE, TARGET of all lengths up to 8 pairs, decode and a chunk, the last pair whole or not.
TEST_P(BaseAttention, TargetBaseTarget) {
  for (int n0 = 0; n0 <= 8; ++n0) {
    for (int n1 = 0; n1 <= 8; ++n1) {
      for (int n2 = n0 + n1 == 0 ? 1 : 0; n2 <= 8; ++n2) {
        const int missing = n2 == 0 ? 0 : int(rng_() % kPairTokens),
                  keys = (n0 + n1 + n2) * kPairTokens - missing;
        // As in a real step, the rows of a chunk lie in TARGET pairs.
        const int rows = n2 == 0 ? 1 : std::min({1 + int(rng_() % 3) * 13, keys, n2 * kPairTokens - missing});
        const std::vector<int> base = run_of(n0, n1);
        KvPath path{};
        const std::vector<float> got = run(keys, rows, base, Cache::packed, KvPath::native, &path);
        ASSERT_EQ(path, n1 == 0 ? KvPath::native : KvPath::structured);
        ASSERT_EQ(got, run(keys, rows, base, Cache::unpacked, KvPath::native)) << n0 << " " << n1 << " " << n2;
        if ((n0 + n1 + n2) % 3 != 0) continue;
        ASSERT_EQ(got, run(keys, rows, base, Cache::packed, KvPath::general, &path))
            << n0 << " " << n1 << " " << n2;
        ASSERT_EQ(path, KvPath::general);
        ASSERT_EQ(got, run(keys, rows, base, Cache::masked, KvPath::native)) << n0 << " " << n1 << " " << n2;
      }
    }
  }
}

TEST_P(BaseAttention, AnyMixture) {
  int general = 0;
  for (int round = 0; round < 60; ++round) {
    const int pairs = 1 + int(rng_() % kMaxPairs);
    const int missing = int(rng_() % kPairTokens), keys = pairs * kPairTokens - missing;
    const int rows = std::min(keys, 1 + int(rng_() % kRows));
    std::vector<int> base;
    for (int pair = 0; pair < (missing == 0 && rows == 1 ? pairs : (keys - rows) / kPairTokens); ++pair) {
      if (rng_() % 2) base.push_back(pair);
    }
    KvPath path{};
    const std::vector<float> got = run(keys, rows, base, Cache::packed, KvPath::native, &path);
    general += path == KvPath::general;
    ASSERT_EQ(got, run(keys, rows, base, Cache::unpacked, KvPath::native))
        << keys << " keys, " << rows << " rows";
    ASSERT_EQ(got, run(keys, rows, base, Cache::masked, KvPath::general))
        << keys << " keys, " << rows << " rows";
  }
  EXPECT_GT(general, 10);
}

// Were BASE values equal to TARGET ones, nothing above would mean anything.
TEST_P(BaseAttention, BaseMakesADifference) {
  const int keys = kMaxPairs * kPairTokens;
  EXPECT_NE(run(keys, 1, run_of(0, 20), Cache::packed, KvPath::native),
            run(keys, 1, {}, Cache::packed, KvPath::native));
}

INSTANTIATE_TEST_SUITE_P(Shapes, BaseAttention,
                         testing::Values(AttentionShape{3, 1, 64, BaseFormat::fixed8, BaseFill::mid},
                                         AttentionShape{4, 2, 80, BaseFormat::fixed8, BaseFill::mid},
                                         AttentionShape{2, 2, 128, BaseFormat::fixed8, BaseFill::mid},
                                         AttentionShape{3, 1, 64, BaseFormat::e5m2, BaseFill::zero},
                                         AttentionShape{2, 1, 96, BaseFormat::e5m2, BaseFill::mid}));

TEST(KvPathChoice, TheLeastGeneralThatCoversEverySequence) {
  const auto span = [](std::vector<int> base) {
    std::vector<PairEntry> pairs(9, PairEntry{3, 4});
    for (int pair : base) pairs[size_t(pair)] = {int32_t(3 | kBasePair), -1};
    return find_base(pairs);
  };
  const BaseRun none = span({}), one = span({4}), run = span({1, 2, 3}), all = span(run_of(0, 9)),
                holes = span({1, 3});
  EXPECT_EQ(choose_path(std::array{none, none}, KvPath::native), KvPath::native);
  EXPECT_EQ(choose_path({}, KvPath::native), KvPath::native);
  EXPECT_EQ(choose_path(std::array{none, run, all, one}, KvPath::native), KvPath::structured);
  EXPECT_EQ(choose_path(std::array{run, holes, none}, KvPath::native), KvPath::general);
  EXPECT_EQ(choose_path(std::array{none}, KvPath::structured), KvPath::structured);
  EXPECT_EQ(choose_path(std::array{run}, KvPath::general), KvPath::general);
}

}  // namespace
}  // namespace ekv::test
