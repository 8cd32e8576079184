#include "elastickv/host_store.h"

#include <gtest/gtest.h>

namespace ekv {
namespace {

using Tokens = std::array<TokenId, kPairTokens>;
Tokens pair_of(TokenId first) {
  Tokens tokens;
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = first + TokenId(i);
  return tokens;
}

struct HostStoreTest : testing::Test {
  HostStore host{4};
  StoredPair* store(StoredPair* parent, TokenId first, bool arrives = true) {
    StoredPair* entry = host.begin_store(parent, pair_of(first), "");
    if (entry && arrives) host.store_done(entry->slot);
    host.check_integrity();
    return entry;
  }
  bool has(const StoredPair* parent, TokenId first) const {
    return host.find(parent, pair_of(first), "") != nullptr;
  }
};

TEST_F(HostStoreTest, APairIsKnownByItsTokensWhatStandsBeforeItAndTheSalt) {
  StoredPair* a = store(nullptr, 1);
  StoredPair* b = store(a, 50);
  EXPECT_EQ(host.find(nullptr, pair_of(1), ""), a);
  EXPECT_EQ(host.find(a, pair_of(50), ""), b);
  EXPECT_EQ(host.find(a, pair_of(50), "salt"), b) << "only first pairs carry the salt";
  EXPECT_FALSE(host.find(nullptr, pair_of(1), "salt"));
  EXPECT_FALSE(host.find(nullptr, pair_of(50), ""));
  EXPECT_FALSE(host.find(b, pair_of(50), ""));
  EXPECT_FALSE(host.find(a, pair_of(1), ""));
}

TEST(HostStore, EqualHashesDoNotMakeEqualPairs) {
  HostStore host(4, [](uint64_t, std::span<const TokenId>) { return uint64_t(7); });
  StoredPair* a = host.begin_store(nullptr, pair_of(1), "");
  StoredPair* b = host.begin_store(a, pair_of(1), "");
  EXPECT_EQ(host.find(nullptr, pair_of(1), ""), a);
  EXPECT_EQ(host.find(a, pair_of(1), ""), b);
  EXPECT_FALSE(host.find(nullptr, pair_of(2), ""));
  EXPECT_FALSE(host.find(nullptr, pair_of(1), "s"));
  host.check_integrity();
}

TEST_F(HostStoreTest, TheLeastRecentlyUsedGoesFirstAndAChainFromItsEnd) {
  StoredPair* a = store(nullptr, 1);
  StoredPair* a2 = store(a, 2);
  StoredPair* b = store(nullptr, 100);
  StoredPair* b2 = store(b, 101);
  host.touch(*a2);
  store(nullptr, 200);  // b2 goes: it and b were used longest ago
  EXPECT_FALSE(has(b, 101));
  EXPECT_TRUE(has(nullptr, 100));
  store(nullptr, 201);  // then b
  EXPECT_FALSE(has(nullptr, 100));
  EXPECT_TRUE(has(nullptr, 1) && has(a, 2));
  EXPECT_EQ(host.num_used(), 4);
  (void)b2;
}

TEST_F(HostStoreTest, UsingAPairKeepsWhatStandsBeforeIt) {
  StoredPair* a = store(nullptr, 1);
  StoredPair* a2 = store(a, 2);
  store(nullptr, 100);
  store(nullptr, 101);
  host.touch(*a2);
  store(nullptr, 102), store(nullptr, 103);  // in the places of 100 and 101
  EXPECT_TRUE(has(nullptr, 1) && has(a, 2));
  EXPECT_FALSE(has(nullptr, 100) || has(nullptr, 101));
  store(nullptr, 104);
  EXPECT_TRUE(has(nullptr, 1));
  EXPECT_FALSE(has(a, 2));
}

TEST_F(HostStoreTest, WhatIsUnderWayStaysAndWithoutASlotNothingIsStored) {
  StoredPair* a = store(nullptr, 1, false);
  StoredPair* b = store(nullptr, 2);
  host.begin_load(*b);
  StoredPair* c = store(nullptr, 3, false);
  store(nullptr, 4, false);
  EXPECT_FALSE(store(nullptr, 5));
  EXPECT_EQ(host.num_used(), 4);
  host.load_done(b->slot);
  host.begin_load(*b), host.begin_load(*b), host.load_done(b->slot);
  EXPECT_FALSE(store(nullptr, 5)) << "it is loaded for two and one has it";
  host.load_done(b->slot);
  EXPECT_TRUE(store(nullptr, 5));
  EXPECT_FALSE(has(nullptr, 2));
  host.store_done(c->slot), host.store_done(a->slot);
  StoredPair* d = store(nullptr, 6);
  EXPECT_FALSE(has(nullptr, 1)) << "it was stored before the other, whatever arrived first";
  EXPECT_TRUE(has(nullptr, 3));
  EXPECT_TRUE(d);
}

TEST_F(HostStoreTest, APairIsNotEvictedForTheOneThatFollowsIt) {
  HostStore tiny(1);
  StoredPair* a = tiny.begin_store(nullptr, pair_of(1), "");
  tiny.store_done(a->slot);
  EXPECT_FALSE(tiny.begin_store(a, pair_of(2), ""));
  EXPECT_EQ(tiny.find(nullptr, pair_of(1), ""), a);
  EXPECT_TRUE(tiny.begin_store(nullptr, pair_of(3), ""));
  tiny.check_integrity();
}

TEST_F(HostStoreTest, AReferenceTellsWhenItsPairHasGone) {
  StoredPair* a = store(nullptr, 1);
  const StoredRef ref(*a);
  EXPECT_TRUE(ref.is_there());
  EXPECT_FALSE(StoredRef().is_there());
  for (TokenId t = 2; t < 6; ++t) store(nullptr, t);
  EXPECT_FALSE(ref.is_there()) << "the place has other content";
  EXPECT_EQ(host.num_used(), 4);
}

TEST_F(HostStoreTest, ClearForgetsAllButWhatIsUnderWayAndWhatThatContinues) {
  StoredPair* a = store(nullptr, 1);
  StoredPair* a2 = store(a, 2, false);
  store(nullptr, 100);
  host.clear();
  host.check_integrity();
  EXPECT_TRUE(has(nullptr, 1) && has(a, 2));
  EXPECT_FALSE(has(nullptr, 100));
  host.store_done(a2->slot);
  host.clear();
  EXPECT_EQ(host.num_used(), 0);
}

TEST(HostStore, WithoutSlotsItHoldsNothing) {
  HostStore host(0);
  EXPECT_FALSE(host.begin_store(nullptr, pair_of(1), ""));
  host.clear();
  host.check_integrity();
}

using HostStoreDeathTest = HostStoreTest;
TEST_F(HostStoreDeathTest, NothingIsLoadedBeforeItHasArrived) {
  StoredPair* a = store(nullptr, 1, false);
  EXPECT_DEATH(host.begin_load(*a), "only what has arrived");
}

}  // namespace
}  // namespace ekv
