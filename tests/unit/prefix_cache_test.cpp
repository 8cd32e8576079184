#include "elastickv/prefix_cache.h"

#include <gtest/gtest.h>

#include <vector>

#include "elastickv/kv_manager.h"
#include "support/allocation_counter.h"
#include "support/fake_serving.h"

namespace ekv {
namespace {

using Tokens = std::vector<TokenId>;

Tokens pair_of(TokenId first) {
  Tokens tokens(kPairTokens);
  for (int i = 0; i < kPairTokens; ++i) tokens[size_t(i)] = first + i;
  return tokens;
}

uint64_t always_the_same(uint64_t, std::span<const TokenId>) { return 42; }

// A cache whose entries get pages that only they hold, as if the sequence that made them had gone.
struct Fixture {
  explicit Fixture(int num_pages, PairHash hash = hash_pair) : table(num_pages, 4), cache(table, hash) {}

  PairId new_pair() {
    const PairId pair = table.create(*table.acquire_page());
    table.set_odd(pair, *table.acquire_page());
    return pair;
  }

  // A sequence with these pairs: makes what is missing, and pins all.
  std::vector<CachedPair*> use(const std::vector<Tokens>& pairs, const std::string& salt = "") {
    std::vector<CachedPair*> chain;
    for (const Tokens& tokens : pairs) {
      CachedPair* parent = chain.empty() ? nullptr : chain.back();
      CachedPair* entry = cache.find(parent, tokens, salt);
      const bool is_new = !entry;
      if (is_new) entry = &cache.insert(parent, tokens, salt, new_pair());
      cache.pin(*entry);
      if (!is_new) table.retain(entry->pair);
      chain.push_back(entry);
    }
    cache.check_integrity();
    return chain;
  }

  void leave(const std::vector<CachedPair*>& chain) {
    for (auto entry = chain.rbegin(); entry != chain.rend(); ++entry) {
      table.release((*entry)->pair);
      cache.unpin(**entry);
    }
    cache.check_integrity();
  }

  // Which of the pairs of this chain can still be found, from the first.
  int found(const std::vector<Tokens>& pairs, const std::string& salt = "") const {
    const CachedPair* entry = nullptr;
    int n = 0;
    for (; n < int(pairs.size()); ++n)
      if (!(entry = cache.find(entry, pairs[size_t(n)], salt))) break;
    return n;
  }

  PairTable table;
  PrefixCache cache;
};

TEST(PrefixCache, FindsAPairByItsWholeContentAndItsPast) {
  Fixture f(64);
  const Tokens a = pair_of(0), b = pair_of(100);
  f.use({a, b});
  f.use({b});
  EXPECT_EQ(f.found({a, b}), 2);
  EXPECT_EQ(f.found({b}), 1);
  EXPECT_EQ(f.found({b, a}), 1);
  EXPECT_EQ(f.found({a, a}), 1);
  EXPECT_NE(f.cache.find(nullptr, b, ""), f.cache.find(f.cache.find(nullptr, a, ""), b, ""));
  Tokens almost = a;
  almost.back() += 1;
  EXPECT_EQ(f.found({almost}), 0);
}

TEST(PrefixCache, SaltSeparatesChains) {
  Fixture f(64);
  const Tokens a = pair_of(0), b = pair_of(100);
  f.use({a, b}, "alice");
  EXPECT_EQ(f.found({a, b}, "alice"), 2);
  EXPECT_EQ(f.found({a, b}, "bob"), 0);
  EXPECT_EQ(f.found({a, b}), 0);
  f.use({a}, "bob");
  EXPECT_EQ(f.found({a, b}, "bob"), 1);
}

TEST(PrefixCache, EqualityDecidesWhenAllHashesCollide) {
  Fixture f(64, always_the_same);
  const Tokens a = pair_of(0), b = pair_of(100), c = pair_of(200);
  const auto ab = f.use({a, b}), ba = f.use({b, a}), salted = f.use({a, b}, "salt");
  EXPECT_EQ(f.cache.num_entries(), 6);
  EXPECT_EQ(f.found({a, b}), 2);
  EXPECT_EQ(f.found({b, a}), 2);
  EXPECT_EQ(f.found({a, c}), 1);
  EXPECT_EQ(f.found({c}), 0);
  EXPECT_EQ(f.cache.find(nullptr, a, ""), ab[0]);
  EXPECT_EQ(f.cache.find(nullptr, a, "salt"), salted[0]);
  EXPECT_EQ(f.cache.find(nullptr, a, "pepper"), nullptr);
  EXPECT_EQ(f.cache.find(ba[0], a, ""), ba[1]);
  f.leave(ba);
  EXPECT_TRUE(f.cache.evict_one());  // takes out the right one of six with equal hashes
  EXPECT_EQ(f.found({b, a}), 1);
  EXPECT_EQ(f.found({a, b}), 2);
  EXPECT_EQ(f.found({a, b}, "salt"), 2);
  f.cache.check_integrity();
}

TEST(PrefixCache, AnEntryHoldsItsPagesUntilItIsEvicted) {
  Fixture f(8);
  const auto chain = f.use({pair_of(0)});
  EXPECT_EQ(f.cache.num_idle_pages(), 0);
  f.leave(chain);
  EXPECT_EQ(f.table.num_free_pages(), 6);
  EXPECT_EQ(f.cache.num_idle_pages(), 2);
  EXPECT_TRUE(f.cache.evict_one());
  EXPECT_EQ(f.table.num_free_pages(), 8);
  EXPECT_EQ(f.cache.num_idle_pages(), 0);
  EXPECT_EQ(f.found({pair_of(0)}), 0);
  EXPECT_FALSE(f.cache.evict_one());
}

TEST(PrefixCache, EvictsTheTailBeforeTheHeadAndTheOldestChainFirst) {
  Fixture f(64);
  const std::vector<Tokens> old_chain = {pair_of(0), pair_of(100), pair_of(200)}, new_chain = {pair_of(900)};
  const auto older = f.use(old_chain), newer = f.use(new_chain);
  f.leave(older);
  f.leave(newer);
  for (int left : {2, 1, 0}) {
    ASSERT_TRUE(f.cache.evict_one());
    EXPECT_EQ(f.found(old_chain), left);
    EXPECT_EQ(f.found(new_chain), 1);
    f.cache.check_integrity();
  }
  ASSERT_TRUE(f.cache.evict_one());
  EXPECT_EQ(f.cache.num_entries(), 0);
}

TEST(PrefixCache, UseRenewsAChain) {
  Fixture f(64);
  const std::vector<Tokens> a = {pair_of(0)}, b = {pair_of(100)};
  f.leave(f.use(a));
  f.leave(f.use(b));
  f.leave(f.use(a));
  ASSERT_TRUE(f.cache.evict_one());
  EXPECT_EQ(f.found(a), 1);
  EXPECT_EQ(f.found(b), 0);
}

TEST(PrefixCache, NeverEvictsWhatIsUsedNorItsAncestors) {
  Fixture f(64);
  const Tokens a = pair_of(0), b = pair_of(100), c = pair_of(200);
  const auto used = f.use({a, b});
  f.leave(f.use({a, b, c}));
  EXPECT_EQ(f.cache.num_idle_pages(), 2);
  EXPECT_TRUE(f.cache.evict_one());
  EXPECT_FALSE(f.cache.evict_one());
  EXPECT_EQ(f.found({a, b, c}), 2);
  f.leave(used);
  f.cache.clear();
  EXPECT_EQ(f.cache.num_entries(), 0);
  EXPECT_EQ(f.table.num_free_pages(), 64);
}

TEST(PrefixCache, ClearKeepsWhatIsUsed) {
  Fixture f(64);
  const auto used = f.use({pair_of(0)});
  f.leave(f.use({pair_of(0), pair_of(100)}));
  f.leave(f.use({pair_of(500)}));
  f.cache.clear();
  EXPECT_EQ(f.cache.num_entries(), 1);
  EXPECT_EQ(f.found({pair_of(0), pair_of(100)}), 1);
  f.cache.check_integrity();
}

TEST(PrefixCache, GivesBackAllPagesWhenItEnds) {
  PairTable table(8, 0);
  {
    PrefixCache cache(table);
    const PairId pair = table.create(*table.acquire_page());
    table.set_odd(pair, *table.acquire_page());
    cache.insert(nullptr, pair_of(0), "", pair);
    table.release(pair);
    EXPECT_EQ(table.num_free_pages(), 6);
  }
  EXPECT_EQ(table.num_free_pages(), 8);
}

TEST(PrefixCache, AFullCacheThatTurnsOverAllocatesNothing) {
  Fixture f(64);
  const auto turn_over = [&](int first, int count) {
    for (int i = first; i < first + count; ++i) {
      if (f.table.num_free_pages() < 2) f.cache.evict_one();
      std::array<TokenId, kPairTokens> tokens{};
      tokens[0] = i;
      const PairId pair = f.new_pair();
      f.cache.insert(nullptr, tokens, "a salt that is too long for the string itself", pair);
      f.table.release(pair);
      f.cache.refresh(*f.table[pair].cached);
    }
  };
  turn_over(0, 100);
  const long before = testing::num_allocations;
  turn_over(100, 1000);
  EXPECT_EQ(testing::num_allocations - before, 0);
}

TEST(PrefixCache, ChainsOfCleanAndTaintedKvAreApart) {
  Fixture f(64);
  const Tokens a = pair_of(0), b = pair_of(100);
  const auto clean = f.use({a});
  const PairId pair = f.new_pair();
  f.table.set_tainted(pair);
  CachedPair& tainted = f.cache.insert(clean[0], b, "", pair);
  f.cache.pin(tainted);
  EXPECT_EQ(f.cache.find(clean[0], b, ""), nullptr);
  EXPECT_EQ(f.cache.find(clean[0], b, "", true), &tainted);
  f.use({a, b});
  EXPECT_NE(f.cache.find(clean[0], b, ""), nullptr);
  EXPECT_EQ(f.cache.find(clean[0], b, "", true), &tainted);
  f.cache.check_integrity();
  EXPECT_DEATH(f.cache.insert(&tainted, a, "", f.new_pair()), "what follows tainted KV is tainted");
}

// The chain left first shrinks first, from its beginning to what was recent at its end; eviction goes the other
// way. What a second sequence still uses joins when that one leaves.
TEST(PrefixCache, ChainsShrinkFromTheirBeginning) {
  PairTable table(64, 0);
  PrefixCache cache(table, hash_pair, 2);
  std::vector<std::vector<CachedPair*>> chains(3);  // the second shares two pairs with the first
  for (int c = 0; c < 3; ++c)
    for (int i = 0; i < 5; ++i) {
      CachedPair* parent = i ? chains[size_t(c)].back() : nullptr;
      CachedPair* entry = cache.find(parent, pair_of(1000 * (i < 2 && c == 1 ? 0 : c) + 100 * i), "");
      if (!entry) {
        const PairId pair = table.create(*table.acquire_page());
        table.set_odd(pair, *table.acquire_page());
        entry = &cache.insert(parent, pair_of(1000 * c + 100 * i), "", pair);
        table.release(pair);
      }
      cache.pin(*entry);
      table.retain(entry->pair);
      chains[size_t(c)].push_back(entry);
    }
  ASSERT_EQ(chains[0][1], chains[1][1]);
  const auto leave = [&](int c) {
    for (size_t i = 5; i-- > 0;) table.release(chains[size_t(c)][i]->pair), cache.unpin(*chains[size_t(c)][i]);
  };
  leave(0), leave(2), leave(1);
  cache.check_integrity();
  for (CachedPair* expected : {chains[0][2], chains[2][0], chains[2][1], chains[2][2], chains[1][0]})
    EXPECT_EQ(cache.next_to_shrink(), expected);
  cache.pin(*chains[1][0]), cache.unpin(*chains[1][0]);  // used again: the latest now, and an end of its own
  EXPECT_EQ(cache.next_to_shrink(), chains[1][1]);
  EXPECT_EQ(cache.next_to_shrink(), chains[1][2]);
  EXPECT_EQ(cache.next_to_shrink(), nullptr);
  cache.clear();
  EXPECT_EQ(table.num_free_pages(), 64);
}

// A demoted idle pair frees one page by its eviction, one with a transfer that reads its pages none.
TEST(PrefixCache, IdlePagesFollowTheStateOfThePairs) {
  Fixture f(64);
  const auto chain = f.use({pair_of(0), pair_of(100)});
  f.leave(chain);
  EXPECT_EQ(f.cache.num_idle_pages(), 4);
  EXPECT_EQ(f.cache.next_to_shrink(), chain[0]);
  const DemoteJob job = f.table.demote(chain[1]->pair, true);
  f.cache.refresh(*chain[1]);
  EXPECT_EQ(f.cache.num_idle_pages(), 3);
  EXPECT_EQ(f.cache.num_idle_host_slots(), 0);
  f.table.transfer_done(job.ticket);
  f.cache.refresh(*chain[1]);
  EXPECT_EQ(f.cache.num_idle_host_slots(), 1);
  f.table.restore(chain[1]->pair, *f.table.acquire_page());
  f.cache.refresh(*chain[1]);
  EXPECT_EQ(f.cache.num_idle_pages(), 2);
  f.cache.check_integrity();
  EXPECT_EQ(f.cache.next_to_shrink(), chain[1]);
  EXPECT_EQ(f.cache.next_to_shrink(), nullptr);
  const int free = f.table.num_free_pages();
  EXPECT_TRUE(f.cache.evict_one());  // forgotten, but its pages wait for the transfer
  EXPECT_EQ(f.table.num_free_pages(), free);
  f.table.check_integrity();
  EXPECT_TRUE(f.cache.evict_one());
  EXPECT_EQ(f.table.num_free_pages(), free + 2);
}

TEST(PrefixCacheDeathTest, MisuseIsABug) {
  Fixture f(64);
  const auto chain = f.use({pair_of(0), pair_of(100)});
  f.leave(chain);
  EXPECT_DEATH(f.cache.unpin(*chain[0]), "unpinned once per pin");
  EXPECT_DEATH(f.cache.pin(*chain[1]), "uses its parent");
  EXPECT_DEATH(f.cache.insert(chain[0], pair_of(1), "", f.new_pair()), "uses the parent");
  EXPECT_DEATH(f.cache.find(nullptr, Tokens(kBlockTokens), ""), "whole pairs");
}

// What check_integrity is for: each broken invariant is named.
TEST(PrefixCacheDeathTest, IntegrityCheckNamesWhatIsBroken) {
  Fixture f(64);
  const auto chain = f.use({pair_of(0), pair_of(100)});
  const auto broken = [&](auto spoil, const char* reason) {
    EXPECT_DEATH((spoil(), f.cache.check_integrity()), reason);
  };
  broken([&] { ++chain[0]->children; }, "how many children");
  broken([&] { chain[1]->users = 2; }, "held by it and by its users|uses a child");
  broken([&] { chain[0]->users = 0; }, "idle exactly when");
  broken([&] { chain[1]->tokens[5] = 7; }, "found by its content");
  broken([&] { chain[0]->salt = "other"; }, "found by its content");
  broken([&] { chain[1]->salt = "other"; }, "only first pairs");
  broken([&] { f.table.release(chain[1]->pair); }, "held by it and by its users");
  broken([&] { f.table.set_tainted(chain[0]->pair); }, "a cached pair knows its entry");
  broken([&] { f.table.set_cached(chain[1]->pair, chain[0]); }, "a cached pair knows its entry");
  f.cache.check_integrity();
}

// The prefix as the manager uses it: what a second request gets from the first.

Request request(int num_prompt, int max_tokens = 1, std::string salt = "", TokenId first = 0) {
  Request r{.prompt = {}, .sampling = {.max_tokens = max_tokens}, .cache_salt = std::move(salt)};
  for (int i = 0; i < num_prompt; ++i) r.prompt.push_back(first + i);
  return r;
}

// Runs everything to the end; aborts the test when it does not end.
void run(testing::FakeServing& serving) {
  for (int step = 0; !serving.done(); ++step) {
    ASSERT_LT(step, 10000) << "no end in sight";
    serving.plan_next();
    serving.commit();
    serving.execute();
    serving.kv.check_integrity(serving.sequences.running());
  }
}

int hit(testing::FakeServing& serving, const Request& r) {
  Sequence& sequence = serving.add(r);
  const int tokens = serving.kv.lookup(sequence).num_tokens;
  serving.sequences.erase(sequence.id);
  return tokens;
}

// What is remembered of a sequence that waits changes no result: its chain grows, is cut, and comes back while
// places of the cache go to others; a sequence that was never looked up finds the same.
TEST(PrefixHit, WhoWaitsFindsWhatANewcomerFinds) {
  testing::FakeServing serving({.max_step_tokens = 512}, {}, 20, 97);
  const Request mine = request(260), part = request(100), other = request(200, 40, "", 5000);
  Sequence& waiting = serving.add(mine);
  waiting.request.arrival_us = 1 << 20;  // behind all others
  std::vector<int> found;
  const auto look = [&] {
    const PrefixHit known = serving.kv.lookup(waiting);
    EXPECT_EQ(known.num_tokens, hit(serving, mine));
    EXPECT_EQ(known.num_free_pages, known.num_tokens / kBlockTokens) << "nobody uses it";
    found.push_back(known.num_tokens);
  };
  const auto serve = [&](const Request& r) {
    const SeqId id = serving.add(r).id;  // the sequence ends with its last token
    while (serving.sequences.find(id)) {
      serving.view();
      std::erase_if(serving.waiting, [&](const SeqView& view) { return view.id == waiting.id; });
      plan_step(serving.config, serving.running, serving.waiting, serving.kv.budget(), serving.plan);
      serving.commit(), serving.execute();
    }
  };
  for (int round = 0; round < 3; ++round) {
    serve(part), look(), serve(mine), look();
    serve(other), look(), look();
    serving.kv.reset_prefix_cache(), look();
  }
  EXPECT_EQ(found, (std::vector<int>{96, 256, 64, 64, 0, 96, 256, 64, 64, 0, 96, 256, 64, 64, 0}));
}

// Clean KV that comes later is preferred to tainted KV that was found before.
TEST(PrefixHit, ACleanTwinReplacesATaintedHit) {
  testing::FakeServing serving({}, {}, 64, 97);
  Sequence& waiting = serving.add(request(200));
  waiting.request.arrival_us = 1 << 20;
  const auto compute = [&](bool tainted) {
    Sequence& s = serving.add(request(97, 2));
    serving.plan = {{{s.id, 0, 97, true}}, {s.id}, {}};
    serving.commit();
    s.num_computed = 97;
    if (tainted) s.tainted_from = kPairTokens;
    serving.kv.publish(s);
    serving.end(s);
  };
  const auto num_tainted = [&] {
    int count = 0;
    serving.kv.for_each_hit(waiting, [&](const CachedPair& entry) { count += entry.tainted; });
    return count;
  };
  compute(true);
  EXPECT_EQ(serving.kv.lookup(waiting).num_tokens, 96);
  EXPECT_EQ(num_tainted(), 2);
  serving.kv.lookup(waiting);
  compute(false);
  EXPECT_EQ(serving.kv.lookup(waiting).num_tokens, 96);
  EXPECT_EQ(num_tainted(), 0);
}

TEST(PrefixHit, LeavesAtLeastOneTokenToCompute) {
  for (int n : {1, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96}) {
    SCOPED_TRACE(n);
    testing::FakeServing serving({}, {}, 64, 97);
    for (int time = 0; time < 3; ++time) {
      const int tokens = hit(serving, request(n));
      EXPECT_EQ(tokens, time == 0 ? 0 : (n - 1) / kPairTokens * kPairTokens);
      serving.add(request(n));
      run(serving);
    }
    // Whoever goes on from there finds every whole pair.
    EXPECT_EQ(hit(serving, request(n + 32)), n / kPairTokens * kPairTokens);
  }
}

TEST(PrefixHit, StopsAtTheFirstDifference) {
  testing::FakeServing serving({}, {}, 64, 97);
  serving.add(request(128));
  run(serving);
  Request other = request(128);
  other.prompt[70] = 9999;
  EXPECT_EQ(hit(serving, other), 64);
  EXPECT_EQ(hit(serving, request(128, 1, "salt")), 0);
}

TEST(PrefixHit, NoneForPromptLogprobsNorWhenSwitchedOff) {
  testing::FakeServing serving({}, {}, 64, 97);
  serving.add(request(128));
  run(serving);
  Request r = request(128);
  r.sampling.prompt_logprobs = 0;
  EXPECT_EQ(hit(serving, r), 0);

  testing::FakeServing off({}, {.prefix_cache = false}, 64, 97);
  off.add(request(128));
  run(off);
  EXPECT_EQ(hit(off, request(128)), 0);
  EXPECT_EQ(off.kv.num_free_pages(), 64);
}

TEST(PrefixHit, TheOutputOfOneTurnIsThePromptOfTheNext) {
  testing::FakeServing serving({}, {}, 64, 97);
  const Request first = request(40, 60);
  serving.add(first);
  run(serving);
  Request second{.prompt = testing::solo_run(first, 97), .sampling = {.max_tokens = 1}, .cache_salt = {}};
  EXPECT_EQ(hit(serving, second), 96);  // 100 tokens; the last one was never computed
}

TEST(PrefixHit, TwinsEndUpSharingWhatBothComputed) {
  testing::FakeServing serving({.max_step_tokens = 256}, {}, 16, 97);
  serving.add(request(100, 20)), serving.add(request(100, 20));
  serving.plan_next();
  ASSERT_EQ(serving.plan.admitted.size(), 2u);  // neither finds the other
  serving.commit();
  EXPECT_EQ(serving.kv.num_free_pages(), 16 - 14);
  serving.execute();
  EXPECT_EQ(serving.kv.num_free_pages(), 16 - 8);  // three pairs shared, one block each of their own
  serving.kv.check_integrity(serving.sequences.running());
  run(serving);
  EXPECT_EQ(serving.kv.budget().free_pages, 16);
}

// The second of two twins may grow to the whole pool when the first has left: nothing that only the first
// used stays behind.
TEST(PrefixHit, ATwinLeftAloneMayUseTheWholePool) {
  testing::FakeServing serving({.max_step_tokens = 512}, {}, 16, 97);
  serving.add(request(110, 5));
  serving.add(request(110, 16 * kBlockTokens - 110 + 1));
  run(serving);
  EXPECT_EQ(serving.kv.budget().free_pages, 16);
}

TEST(PrefixHit, PressureForgetsWhatItTakes) {
  testing::FakeServing serving({.max_step_tokens = 512}, {}, 16, 97);
  const Request fact = request(160, 3), pressure = request(200, 20, "", 5000);
  for (int round = 0; round < 50; ++round) {
    serving.add(fact);
    run(serving);  // the device compares every cell it reads
    EXPECT_EQ(hit(serving, fact), 128);
    serving.add(pressure);
    run(serving);
    EXPECT_LT(hit(serving, fact), 128);
    EXPECT_EQ(serving.kv.budget().free_pages, 16);
  }
}

TEST(PrefixHit, ResetForgetsIdlePairsOnly) {
  testing::FakeServing serving({}, {}, 64, 97);
  serving.add(request(100));
  run(serving);
  Sequence& active = serving.add(request(64, 50, "salt"));
  serving.plan_next(), serving.commit(), serving.execute();
  serving.kv.reset_prefix_cache();
  EXPECT_EQ(hit(serving, request(100)), 0);
  EXPECT_EQ(hit(serving, request(65, 1, "salt")), 64);
  serving.kv.check_integrity(serving.sequences.running());
  serving.end(active);
  serving.kv.reset_prefix_cache();
  EXPECT_EQ(serving.kv.num_free_pages(), 64);
}

}  // namespace
}  // namespace ekv
