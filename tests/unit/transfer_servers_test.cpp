// The link to the host against a list of transfers with their start and end written out.

#include "backend/sim/transfer_servers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

namespace ekv {
namespace {

constexpr auto kToHost = TransferDirection::to_host, kFromHost = TransferDirection::from_host;

TEST(TransferServers, OneDirectionIsAQueueAndTheOtherIsItsOwn) {
  TransferServers servers({.bytes_per_us = 10, .latency_us = 5}, {.bytes_per_us = 100, .latency_us = 1});
  EXPECT_EQ(servers.next_done_us(), std::nullopt);
  EXPECT_EQ(servers.start(1000, kToHost, 1000, 1), 1105);
  EXPECT_EQ(servers.start(1000, kToHost, 100, 2), 1120);    // waits for the first
  EXPECT_EQ(servers.start(1000, kFromHost, 100, 3), 1002);  // does not
  EXPECT_EQ(servers.start(1200, kToHost, 10, 4), 1206);     // the link was idle since 1120
  EXPECT_EQ(servers.bytes_in_flight(kToHost), 1110u);
  EXPECT_EQ(servers.next_done_us(), 1002);

  std::vector<uint64_t> done;
  servers.take_done(1001, done);
  EXPECT_TRUE(done.empty());
  servers.take_done(1120, done);
  EXPECT_EQ(done, (std::vector<uint64_t>{3, 1, 2}));
  EXPECT_EQ(servers.bytes_in_flight(kToHost), 10u);
  EXPECT_EQ(servers.bytes_in_flight(kFromHost), 0u);
  EXPECT_EQ(servers.next_done_us(), 1206);
}

TEST(TransferServers, FractionsOfAMicrosecondAddUp) {
  TransferServers servers({.bytes_per_us = 3, .latency_us = 0}, {.bytes_per_us = 1, .latency_us = 0});
  int64_t last_us = 0;
  for (uint64_t i = 0; i < 300; ++i) last_us = servers.start(0, kToHost, 1, i);
  EXPECT_NEAR(double(last_us), 100, 1);
}

TEST(TransferServers, RandomTransfersEndWhenAListSaysSo) {
  struct Entry {
    double end_us;
    uint64_t id;
    int direction;
  };
  for (unsigned seed = 0; seed < 100; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 rng(seed);
    const LinkModel links[2] = {{double(1 + rng() % 50), double(rng() % 20)},
                                {double(1 + rng() % 50), double(rng() % 20)}};
    TransferServers servers(links[0], links[1]);
    std::vector<Entry> pending;
    double free_us[2] = {0, 0};
    int64_t now_us = 0;
    for (uint64_t id = 0; id < 300; ++id) {
      now_us += rng() % 40;
      const int direction = int(rng() % 2);
      const size_t bytes = rng() % 2000;
      free_us[direction] = std::max(free_us[direction], double(now_us)) + links[direction].latency_us +
                           double(bytes) / links[direction].bytes_per_us;
      EXPECT_EQ(servers.start(now_us, TransferDirection(direction), bytes, id),
                int64_t(std::ceil(free_us[direction])));
      pending.push_back({std::ceil(free_us[direction]), id, direction});

      std::vector<uint64_t> done, expected;
      servers.take_done(now_us, done);
      std::ranges::stable_sort(pending, [](const Entry& a, const Entry& b) {
        return std::pair(a.end_us, a.direction) < std::pair(b.end_us, b.direction);
      });
      while (!pending.empty() && pending.front().end_us <= double(now_us)) {
        expected.push_back(pending.front().id);
        pending.erase(pending.begin());
      }
      ASSERT_EQ(done, expected);
      ASSERT_EQ(servers.next_done_us().has_value(), !pending.empty());
      if (pending.empty()) continue;
      ASSERT_EQ(double(*servers.next_done_us()), pending.front().end_us);
    }
  }
}

}  // namespace
}  // namespace ekv
