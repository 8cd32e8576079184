#include "elastickv/sequence.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <set>
#include <tuple>

namespace ekv {
namespace {

Request request(int64_t arrival_us, int64_t priority = 0) {
  return {.prompt = {1, 2, 3},
          .sampling = {.max_tokens = 4},
          .priority = priority,
          .cache_salt = {},
          .arrival_us = arrival_us};
}

std::vector<uint64_t> ids(std::span<const Sequence* const> queue) {
  std::vector<uint64_t> out;
  for (const Sequence* s : queue) out.push_back(uint64_t(s->id));
  return out;
}

using Ids = std::vector<uint64_t>;

TEST(Sequence, StartsWaitingWithItsPrompt) {
  SequenceTable table(SchedulingPolicy::fcfs);
  const Sequence& s = table.add(SeqId{7}, request(5));
  EXPECT_EQ(s.tokens, (std::vector<TokenId>{1, 2, 3}));
  EXPECT_EQ(s.state, SeqState::waiting);
  EXPECT_EQ(s.num_prompt(), 3);
  EXPECT_EQ(s.num_output(), 0);
  EXPECT_EQ(s.stats.num_prompt, 3);
  EXPECT_EQ(s.stats.arrival_us, 5);
  EXPECT_EQ(table.find(SeqId{7}), &s);
  EXPECT_EQ(table.find(SeqId{8}), nullptr);
}

TEST(Sequence, FcfsOrdersByArrivalThenIdAndIgnoresPriority) {
  SequenceTable table(SchedulingPolicy::fcfs);
  table.add(SeqId{1}, request(30, -5));
  table.add(SeqId{2}, request(10, 9));
  table.add(SeqId{4}, request(20));
  table.add(SeqId{3}, request(20));
  EXPECT_EQ(ids(table.waiting()), (Ids{2, 3, 4, 1}));
}

TEST(Sequence, PriorityOrdersByPriorityThenArrivalThenId) {
  SequenceTable table(SchedulingPolicy::priority);
  table.add(SeqId{1}, request(30, -5));
  table.add(SeqId{2}, request(10, 9));
  table.add(SeqId{4}, request(20));
  table.add(SeqId{3}, request(20));
  EXPECT_EQ(ids(table.waiting()), (Ids{1, 3, 4, 2}));
}

TEST(Sequence, APreemptedSequenceWaitsInFrontOfLaterOnes) {
  SequenceTable table(SchedulingPolicy::fcfs);
  for (uint64_t id = 1; id <= 4; ++id) table.add(SeqId{id}, request(int64_t(id)));
  for (uint64_t id = 1; id <= 3; ++id) table.admit(SeqId{id});
  table.preempt(SeqId{2});
  table.preempt(SeqId{3});
  EXPECT_EQ(ids(table.running()), (Ids{1}));
  EXPECT_EQ(ids(table.waiting()), (Ids{2, 3, 4}));
  EXPECT_EQ(table[SeqId{2}].state, SeqState::waiting);
}

TEST(Sequence, RunningStandsInTheSameOrderHoweverItWasAdmitted) {
  SequenceTable table(SchedulingPolicy::priority);
  table.add(SeqId{1}, request(1, 5));
  table.admit(SeqId{1});
  table.add(SeqId{2}, request(2, 0));
  table.admit(SeqId{2});
  EXPECT_EQ(ids(table.running()), (Ids{2, 1}));  // 1 ranks last and is preempted first
}

TEST(Sequence, ErasesFromEitherQueue) {
  SequenceTable table(SchedulingPolicy::fcfs);
  for (uint64_t id = 1; id <= 3; ++id) table.add(SeqId{id}, request(int64_t(id)));
  table.admit(SeqId{1});
  table.erase(SeqId{2});
  table.erase(SeqId{1});
  EXPECT_EQ(ids(table.waiting()), (Ids{3}));
  EXPECT_TRUE(table.running().empty());
  table.erase(SeqId{3});
  EXPECT_TRUE(table.empty());
}

TEST(Sequence, AdmissionMakesRoomForTheOutput) {
  SequenceTable table(SchedulingPolicy::fcfs);
  Request long_output = request(1);
  long_output.sampling.max_tokens = 1000;
  Sequence& s = table.add(SeqId{1}, std::move(long_output));
  table.admit(SeqId{1});
  EXPECT_GE(s.tokens.capacity(), 1003u);
  EXPECT_GE(s.blocks.pairs.capacity(), 32u);
}

TEST(Sequence, AnUnreachableOutputLimitCostsNoMemory) {
  SequenceTable table(SchedulingPolicy::fcfs);
  Request endless = request(1);
  endless.sampling.max_tokens = std::numeric_limits<int>::max();
  Sequence& s = table.add(SeqId{1}, std::move(endless));
  table.admit(SeqId{1});
  EXPECT_LE(s.tokens.capacity(), 8192u);
}

TEST(SequenceDeathTest, MisuseIsABug) {
  SequenceTable table(SchedulingPolicy::fcfs);
  Sequence& s = table.add(SeqId{1}, request(1));
  EXPECT_DEATH(table.add(SeqId{1}, request(2)), "ids are used once");
  EXPECT_DEATH(table.add(SeqId{2}, Request{}), "at least one token");
  EXPECT_DEATH(table[SeqId{9}], "no sequence has this id");
  EXPECT_DEATH(table.preempt(SeqId{1}), "only a running sequence");
  table.admit(SeqId{1});
  EXPECT_DEATH(table.admit(SeqId{1}), "only a waiting sequence");
  s.blocks.pairs.emplace_back();
  EXPECT_DEATH(table.preempt(SeqId{1}), "has released its pages");
  EXPECT_DEATH(table.erase(SeqId{1}), "has released its pages");
}

// Against two ordered sets.
TEST(Sequence, QueuesBehaveLikeSortedSets) {
  using Key = std::tuple<int64_t, int64_t, uint64_t>;
  for (unsigned seed = 0; seed < 40; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 rng(seed);
    const bool by_priority = seed % 2;
    SequenceTable table(by_priority ? SchedulingPolicy::priority : SchedulingPolicy::fcfs);
    std::set<Key> waiting, running;
    const auto pick = [&](const std::set<Key>& from) {
      return *std::next(from.begin(), long(rng() % from.size()));
    };
    for (uint64_t step = 1; step <= 500; ++step) {
      const unsigned op = rng() % 5;
      if (op <= 1) {
        const Request r = request(rng() % 20, int64_t(rng() % 3));
        waiting.insert({by_priority ? r.priority : 0, r.arrival_us, step});
        table.add(SeqId{step}, r);
      } else if (op == 2 && !waiting.empty()) {
        const Key key = pick(waiting);
        table.admit(SeqId{std::get<2>(key)});
        waiting.erase(key), running.insert(key);
      } else if (op == 3 && !running.empty()) {
        const Key key = pick(running);
        table.preempt(SeqId{std::get<2>(key)});
        running.erase(key), waiting.insert(key);
      } else if (op == 4 && !running.empty()) {
        const Key key = pick(running);
        table.erase(SeqId{std::get<2>(key)});
        running.erase(key);
      }
      const auto expect_equal = [](std::span<const Sequence* const> queue, const std::set<Key>& model) {
        ASSERT_TRUE(
            std::equal(queue.begin(), queue.end(), model.begin(), model.end(),
                       [](const Sequence* s, const Key& key) { return uint64_t(s->id) == std::get<2>(key); }));
      };
      expect_equal(table.waiting(), waiting);
      expect_equal(table.running(), running);
    }
  }
}

}  // namespace
}  // namespace ekv
