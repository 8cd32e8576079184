#include "backend/cpu/cpu_threads.h"

#include <gtest/gtest.h>

#include <numeric>
#include <stdexcept>

namespace ekv {
namespace {

TEST(CpuThreads, EachItemOnceWhateverTheirNumber) {
  CpuThreads threads(4);
  for (int items : {0, 1, 2, 3, 100, 1000}) {
    std::vector<int> visits(static_cast<size_t>(items));
    threads.for_each(items, [&](int item, int thread) {
      EXPECT_GE(thread, 0);
      EXPECT_LT(thread, threads.size());
      ++visits[size_t(item)];
    });
    EXPECT_EQ(visits, std::vector<int>(size_t(items), 1)) << items << " items";
  }
}

// An allocation that fails in a worker must reach the engine as it would from its own thread.
TEST(CpuThreads, WhatABodyThrowsReachesTheCaller) {
  CpuThreads threads(4);
  for (int thrower = 0; thrower < 64; ++thrower) {
    std::atomic<int> inside = 0;
    EXPECT_THROW(threads.for_each(64,
                                  [&](int item, int) {
                                    ++inside;
                                    if (item == thrower) throw std::runtime_error("planned");
                                    --inside;
                                  }),
                 std::runtime_error);
    EXPECT_EQ(inside, 1) << "somebody is still in the body after the loop has ended";
    std::atomic<int> sum = 0;
    threads.for_each(10, [&](int item, int) { sum += item; });
    EXPECT_EQ(sum, 45) << "the loop after a failed one";
  }
}

TEST(CpuThreads, ManyFailuresAtOnceAreOne) {
  CpuThreads threads(4);
  for (int round = 0; round < 200; ++round)
    EXPECT_THROW(threads.for_each(4, [](int, int) { throw std::bad_alloc(); }), std::bad_alloc);
}

}  // namespace
}  // namespace ekv
