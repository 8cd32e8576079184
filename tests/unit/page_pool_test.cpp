#include "elastickv/page_pool.h"

#include <gtest/gtest.h>

#include <set>

namespace ekv {
namespace {

TEST(PagePool, GivesEachPageOnceAndThenNone) {
  PagePool pool(3);
  std::set<PageId> pages;
  for (int i = 0; i < 3; ++i) {
    const std::optional<PageId> page = pool.acquire();
    ASSERT_TRUE(page.has_value());
    EXPECT_GE(int(*page), 0);
    EXPECT_LT(int(*page), 3);
    EXPECT_TRUE(pool.in_use(*page));
    pages.insert(*page);
  }
  EXPECT_EQ(pages.size(), 3u);
  EXPECT_EQ(pool.num_free(), 0);
  EXPECT_FALSE(pool.acquire().has_value());
  pool.check_integrity();
}

TEST(PagePool, ReusesTheLastFreedPageFirst) {
  PagePool pool(4);
  const PageId a = *pool.acquire(), b = *pool.acquire();
  pool.release(b);
  pool.release(a);
  EXPECT_EQ(*pool.acquire(), a);
  EXPECT_EQ(*pool.acquire(), b);
}

TEST(PagePool, MayBeEmpty) {
  FreeList<HostSlot> none(0);
  EXPECT_FALSE(none.acquire().has_value());
  EXPECT_EQ(none.num_free(), 0);
  none.check_integrity();
}

TEST(PagePoolDeathTest, MisuseIsABug) {
  PagePool pool(2);
  const PageId page = *pool.acquire();
  pool.release(page);
  EXPECT_DEATH(pool.release(page), "released once");
  EXPECT_DEATH(pool.in_use(kNoPage), "lies in the pool");
  EXPECT_DEATH(pool.in_use(PageId{2}), "lies in the pool");
}

}  // namespace
}  // namespace ekv
