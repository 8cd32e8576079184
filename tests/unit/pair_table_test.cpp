#include "elastickv/pair_table.h"

#include <gtest/gtest.h>

namespace ekv {
namespace {

struct Fixture {
  explicit Fixture(int num_pages = 8, int num_slots = 2) : table(num_pages, num_slots) {}
  PairId whole() {
    const PairId pair = table.create(*table.acquire_page());
    table.set_odd(pair, *table.acquire_page());
    return pair;
  }
  ~Fixture() { table.check_integrity(); }
  PairTable table;
};

TEST(PairTable, DemotionFreesTheOddPageAtOnce) {
  Fixture f;
  const PairId pair = f.whole();
  const PairEntry before = f.table.entry(pair);
  const DemoteJob job = f.table.demote(pair, true);
  EXPECT_EQ(job.even, before.even);
  EXPECT_EQ(job.odd, before.odd);
  EXPECT_GE(job.low, 0);
  EXPECT_GT(job.ticket, 0u);
  EXPECT_EQ(f.table.num_free_pages(), 7);
  EXPECT_TRUE(f.table.is_base(pair));
  EXPECT_EQ(f.table.entry(pair).even_page(), before.even);
  EXPECT_EQ(f.table[pair].transition, Transition::draining);
  EXPECT_FALSE(f.table.may_demote(pair, false));
  const PairTable::Done done = f.table.transfer_done(job.ticket);
  EXPECT_EQ(done.pair, pair);
  EXPECT_EQ(f.table[pair].transition, Transition::none);
  EXPECT_EQ(f.table.num_transfers(), 0);
}

TEST(PairTable, PromotionTakesOnePageWhichIsLockedUntilThen) {
  Fixture f;
  const PairId pair = f.whole();
  f.table.transfer_done(f.table.demote(pair, true).ticket);
  const PageId odd = *f.table.acquire_page();
  const TransferJob restore = f.table.restore(pair, odd);
  EXPECT_EQ(restore.kind, TransferKind::restore_low);
  EXPECT_TRUE(f.table.is_base(pair));
  EXPECT_EQ(f.table.entry(pair).odd, -1) << "nobody reads the page yet";
  EXPECT_EQ(f.table.num_locked_pages(), 1);
  f.table.transfer_done(restore.ticket);
  EXPECT_TRUE(f.table.is_base(pair));
  const PromoteJob job = f.table.promote(pair, false);
  EXPECT_EQ(job.odd, int(odd));
  EXPECT_EQ(job.low, restore.host);
  EXPECT_FALSE(f.table.is_base(pair));
  EXPECT_EQ(f.table.entry(pair).odd, int(odd));
  EXPECT_EQ(f.table.num_locked_pages(), 0);
  EXPECT_EQ(f.table.num_free_host_slots(), 1) << "a demotion of the same step must not get it";
  f.table.free_promoted_slots();
  EXPECT_EQ(f.table.num_free_host_slots(), 2);
  EXPECT_EQ(f.table.num_free_pages(), 6);
}

TEST(PairTable, ABackedPairIsDemotedWithoutATransfer) {
  Fixture f;
  const PairId pair = f.whole();
  EXPECT_FALSE(f.table.may_demote(pair, true));
  const TransferJob backup = f.table.back_up(pair);
  EXPECT_FALSE(f.table.may_demote(pair, true)) << "not before its ticket";
  f.table.transfer_done(backup.ticket);
  EXPECT_TRUE(f.table.may_demote(pair, true));
  const DemoteJob job = f.table.demote(pair, true);
  EXPECT_EQ(job.low, -1);
  EXPECT_EQ(job.ticket, 0u);
  EXPECT_EQ(f.table.num_transfers(), 0);
  EXPECT_EQ(f.table.num_free_host_slots(), 1);
}

// Low bytes on the way to the host hold the slot, not the pages.
TEST(PairTable, ReleasedWhileDrainingItLeavesItsSlotToTheTicket) {
  Fixture f;
  const PairId pair = f.whole();
  const DemoteJob job = f.table.demote(pair, true);
  f.table.release(pair);
  EXPECT_EQ(f.table.num_free_pages(), 8);
  EXPECT_EQ(f.table.num_free_host_slots(), 1);
  EXPECT_EQ(f.table.num_locked_host_slots(), 1);
  f.table.check_integrity();
  EXPECT_EQ(f.table.transfer_done(job.ticket).pair, kNoPair);
  EXPECT_EQ(f.table.num_free_host_slots(), 2);
}

TEST(PairTable, ReleasedWhileItsPagesAreReadItKeepsThemUntilTheTicket) {
  Fixture f;
  const PairId pair = f.whole();
  const TransferJob job = f.table.back_up(pair);
  EXPECT_EQ(f.table.num_releasable_pages(pair), 0);
  f.table.release(pair);
  EXPECT_EQ(f.table.num_free_pages(), 6);
  EXPECT_EQ(f.table.num_locked_pages(), 2);
  EXPECT_EQ(f.table.num_pairs(), 0);
  f.table.check_integrity();
  f.table.transfer_done(job.ticket);
  EXPECT_EQ(f.table.num_free_pages(), 8);
  EXPECT_EQ(f.table.num_free_host_slots(), 2);
}

// What a restore staged on the device is always used up, even for a pair that has gone.
TEST(PairTable, ReleasedWhileRestoringItIsPromotedAndThenFreed) {
  Fixture f;
  const PairId pair = f.whole();
  f.table.transfer_done(f.table.demote(pair, true).ticket);
  const TransferJob job = f.table.restore(pair, *f.table.acquire_page());
  f.table.release(pair);
  EXPECT_EQ(f.table.num_locked_pages(), 2);
  f.table.check_integrity();
  EXPECT_EQ(f.table.transfer_done(job.ticket).pair, pair);
  f.table.check_integrity();
  f.table.promote(pair, true);
  f.table.free_promoted_slots();
  EXPECT_EQ(f.table.num_free_pages(), 8);
  EXPECT_EQ(f.table.num_free_host_slots(), 2);
  EXPECT_EQ(f.table.num_transfers(), 0);
}

TEST(PairTableDeathTest, MisuseIsABug) {
  Fixture f;
  const PairId pair = f.whole(), half = f.table.create(*f.table.acquire_page());
  EXPECT_DEATH(f.table.demote(half, false), "only a whole idle TARGET pair");
  EXPECT_DEATH(f.table.set_odd(pair, PageId{7}), "odd page once");
  EXPECT_DEATH(f.table.restore(pair, PageId{7}), "only an idle BASE pair");
  EXPECT_DEATH(f.table.promote(pair, false), "have arrived");
  EXPECT_DEATH(f.table.transfer_done(1), "only if it was given out");
  const TransferJob job = f.table.back_up(pair);
  EXPECT_DEATH(f.table.demote(pair, false), "only a whole idle TARGET pair");
  EXPECT_DEATH((f.table.transfer_done(job.ticket), f.table.transfer_done(job.ticket)), "reported once");
  EXPECT_DEATH((f.table.release(pair), f.table.release(pair)), "once per reference");
  EXPECT_DEATH(f.table.create(PageId{7}), "that was acquired");
  EXPECT_DEATH(PairTable(0, 0), "at least one page");
}

}  // namespace
}  // namespace ekv
