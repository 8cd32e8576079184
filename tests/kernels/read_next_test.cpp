// read_next_test.cpp -- the slices of a hint: together all of it, none past its end.

#include "kernels/read_next.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "support/seed.h"

namespace ekv::test {
namespace {

void expect_all_once(uint32_t bytes, uint32_t parts) {
  uint32_t covered = 0;
  for (uint32_t part = 0; part < parts; ++part) {
    const ReadSlice slice = read_slice({nullptr, bytes}, part, parts);
    ASSERT_LE(slice.end, bytes) << part;
    ASSERT_LE(slice.begin, slice.end) << part;
    if (slice.begin == slice.end) continue;
    ASSERT_EQ(slice.begin, covered) << part;
    ASSERT_EQ((slice.end - slice.begin) % 16, 0u) << part;
    ASSERT_TRUE(slice.end == bytes || slice.end % 128 == 0) << part;
    covered = slice.end;
  }
  EXPECT_EQ(covered, bytes);
}

TEST(ReadNext, SlicesAreAllOfItOnce) {
  const unsigned seed = drawn_seed();
  std::mt19937 rng(seed);
  std::vector<uint32_t> sizes{
      0, 16, 112, 128, 144, 16 * 1001, 6 << 20, (6 << 20) + 16, kMostReadNext - 16, kMostReadNext};
  for (int i = 0; i < 300; ++i) sizes.push_back(uint32_t(rng() % (1u << (4 + rng() % 26))) / 16 * 16);
  for (const uint32_t bytes : sizes)
    for (const uint32_t parts : {1u, 2u, 3u, 64u, 131u, 132u, 224u, 264u, 1000u}) {
      SCOPED_TRACE(testing::Message() << "seed " << seed << ", " << bytes << " bytes, " << parts << " parts");
      expect_all_once(bytes, parts);
      if (HasFailure()) return;
    }
}

TEST(ReadNextDeath, RefusesWhatTheCopyEngineWould) {
  alignas(16) const char data[32] = {};
  check_read_next({});
  check_read_next({data, 16});
  check_read_next({data, kMostReadNext});
  EXPECT_DEATH(check_read_next({data + 8, 16}), "aligned to 16");
  EXPECT_DEATH(check_read_next({data, 24}), "multiple of 16");
  EXPECT_DEATH(check_read_next({data, kMostReadNext + 16}), "kMostReadNext");
}

}  // namespace
}  // namespace ekv::test
