#include "sched/plan_fidelity.h"

#include <gtest/gtest.h>

namespace ekv {
namespace {

struct Case {
  const char* what;
  std::vector<FidelitySource> sources;
  int shortage, wanted;
  std::vector<int> takes;
};

FidelitySource source(int num_candidates, int num_base = 0, int num_pairs = 100) {
  return {.seq = SeqId{1}, .num_pairs = num_pairs, .num_base = num_base, .num_candidates = num_candidates};
}
FidelitySource best_effort(FidelitySource s) { return s.tier = KvTier::best_effort, s; }
FidelitySource in_prefill(FidelitySource s) { return s.in_prefill = true, s; }
FidelitySource nearly_done(FidelitySource s) { return s.nearly_done = true, s; }
FidelitySource shared(FidelitySource s, int sharers) { return s.num_sharers = sharers, s; }

TEST(PlanFidelity, Table) {
  const Case cases[] = {
      {"nobody", {}, 3, 16, {}},
      {"nothing wanted", {source(10)}, 0, 0, {0}},
      {"all that one has", {source(10)}, 16, 16, {10}},
      {"evenly", {source(50), source(50), source(50)}, 1, 16, {6, 5, 5}},
      {"the smallest share of BASE first", {source(50, 8), source(50, 0)}, 4, 8, {0, 8}},
      {"until the shares are equal", {source(50, 8), source(50, 0)}, 4, 18, {5, 13}},
      {"a share is of the own pairs", {source(50, 0, 300), source(50, 0, 100)}, 4, 16, {12, 4}},
      {"the rest goes to who still has some", {source(2), source(50)}, 4, 16, {2, 14}},
      {"best effort before elastic", {source(50), best_effort(source(50, 90))}, 4, 16, {0, 16}},
      {"and elastic when that is not enough", {source(50), best_effort(source(5))}, 4, 16, {11, 5}},
      {"those in prefill last", {in_prefill(source(50)), source(10)}, 4, 16, {6, 10}},
      {"tier before prefill", {in_prefill(best_effort(source(50))), source(50)}, 4, 16, {16, 0}},
      {"fewest sharers first", {shared(source(9), 3), shared(source(9), 2), source(9)}, 4, 20, {2, 9, 9}},
      {"prefill before sharers", {in_prefill(source(50)), shared(source(50), 9)}, 4, 16, {0, 16}},
      {"nearly done ones not for the batch", {nearly_done(source(50)), source(10)}, 4, 16, {0, 10}},
      {"but for the shortage itself", {nearly_done(source(50)), source(10)}, 14, 16, {4, 10}},
      {"a shortage above the batch", {source(40), source(40)}, 60, 60, {30, 30}},
  };
  FidelityShares shares;
  for (const Case& c : cases) {
    SCOPED_TRACE(c.what);
    plan_fidelity(c.sources, c.shortage, c.wanted, shares);
    EXPECT_EQ(shares.takes, c.takes);
    int total = 0;
    for (int take : shares.takes) total += take;
    EXPECT_EQ(shares.total, total);
  }
}

}  // namespace
}  // namespace ekv
