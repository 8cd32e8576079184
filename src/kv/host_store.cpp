#include "elastickv/host_store.h"

#include <algorithm>

namespace ekv {

HostStore::HostStore(int num_slots, PairHash hash)
    : slots_(num_slots), entries_(size_t(num_slots)), index_(hash, &memory_) {
  for (size_t i = 0; i < entries_.size(); ++i) entries_[i].slot = HostSlot(i);
  evictable_.older = evictable_.newer = &evictable_;
}

StoredPair* HostStore::begin_store(StoredPair* parent, std::span<const TokenId> tokens, std::string_view salt) {
  if (slots_.num_free() == 0 && !evict_one(parent)) return nullptr;
  StoredPair& entry = at(*slots_.acquire());
  index_.insert(entry, parent, tokens, salt, false);
  entry.arriving = true;
  entry.last_use = ++now_;
  ++num_arriving_;
  if (parent) {
    ++parent->children;
    settle(*parent);
  }
  return &entry;
}

// `keep` is about to get a child.
bool HostStore::evict_one(const StoredPair* keep) {
  StoredPair* entry = evictable_.newer;
  if (entry == keep) entry = entry->newer;
  if (entry == &evictable_) return false;
  unlink(*entry);
  index_.erase(*entry);
  slots_.release(entry->slot);
  if (StoredPair* parent = std::exchange(entry->parent, nullptr)) {
    --parent->children;
    parent->last_use = std::max(parent->last_use, entry->last_use);
    settle(*parent);
  }
  return true;
}

void HostStore::begin_load(StoredPair& entry) {
  EKV_CHECK(slots_.in_use(entry.slot) && !entry.arriving, "only what has arrived can be loaded");
  ++entry.loads, ++num_loads_;
  touch(entry);
}

void HostStore::touch(StoredPair& entry) {
  if (entry.newer) unlink(entry);
  entry.last_use = ++now_;
  settle(entry);
}

void HostStore::store_done(HostSlot slot) {
  EKV_CHECK(at(slot).arriving, "a pair arrives once");
  at(slot).arriving = false;
  --num_arriving_;
  settle(at(slot));
}

void HostStore::load_done(HostSlot slot) {
  EKV_CHECK(at(slot).loads > 0, "a load ends once");
  --at(slot).loads, --num_loads_;
  settle(at(slot));
}

void HostStore::clear() {
  while (evict_one(nullptr)) {
  }
}

void HostStore::settle(StoredPair& entry) {
  const bool linked = entry.newer != nullptr;
  if (linked == is_evictable(entry)) return;
  linked ? unlink(entry) : link(entry);
}

// Copies end soon after they began, and parents follow their children: the place is near one of the ends.
void HostStore::link(StoredPair& entry) {
  const uint64_t oldest = evictable_.newer->last_use, newest = evictable_.older->last_use;
  StoredPair* before = &evictable_;
  if (entry.last_use > oldest && newest - oldest < 2 * (entry.last_use - oldest)) {
    before = evictable_.older;
    while (before != &evictable_ && before->last_use > entry.last_use) before = before->older;
  } else {
    while (before->newer != &evictable_ && before->newer->last_use < entry.last_use) before = before->newer;
  }
  entry.older = before, entry.newer = before->newer;
  before->newer->older = &entry;
  before->newer = &entry;
}

void HostStore::unlink(StoredPair& entry) {
  entry.older->newer = entry.newer;
  entry.newer->older = entry.older;
  entry.older = entry.newer = nullptr;
}

void HostStore::check_integrity() const {
  slots_.check_integrity();
  EKV_CHECK(int(index_.size()) == num_used(), "every stored pair is findable, and nothing else is");
  std::vector<int> children(entries_.size(), 0);
  int arriving = 0, loads = 0, evictable = 0;
  for (const StoredPair& e : entries_) {
    if (!slots_.in_use(e.slot)) {
      EKV_CHECK(!e.newer && !e.in_flight() && e.children == 0, "an empty slot has nothing on its way");
      continue;
    }
    EKV_CHECK(find(e.parent, e.tokens, e.salt) == &e, "a stored pair is found by its content");
    EKV_CHECK(!e.parent || slots_.in_use(e.parent->slot), "the parent of a stored pair is stored");
    EKV_CHECK(!(e.arriving && e.loads > 0), "nothing is loaded before it has arrived");
    EKV_CHECK((e.newer != nullptr) == is_evictable(e), "what may be evicted stands in line for it");
    arriving += e.arriving, loads += e.loads, evictable += is_evictable(e);
    if (e.parent) ++children[size_t(e.parent->slot)];
  }
  for (const StoredPair& e : entries_)
    EKV_CHECK(e.children == children[size_t(e.slot)], "a stored pair knows how many children it has");
  EKV_CHECK(arriving == num_arriving_ && loads == num_loads_, "the counts are those of the entries");
  for (const StoredPair* e = evictable_.newer; e != &evictable_; e = e->newer, --evictable)
    EKV_CHECK(e->newer == &evictable_ || e->last_use < e->newer->last_use,
              "the least recently used goes first");
  EKV_CHECK(evictable == 0, "the line holds all that may be evicted");
}

}  // namespace ekv
