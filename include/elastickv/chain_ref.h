#pragma once
// chain_ref.h -- names entries of the prefix cache and of the host's store, for as long as they are there.

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ekv {

struct CachedPair;  // an entry of the prefix cache; prefix_cache.h
struct StoredPair;  // a pair that the host holds; host_store.h

// The place of an entry may be given to another one, and stays a place: `version` tells them apart.
template <class Entry>
struct EntryRef {
  EntryRef() = default;
  explicit EntryRef(Entry& to) : entry(&to), version(to.version) {}
  bool is_there() const { return entry && entry->version == version; }

  Entry* entry = nullptr;
  uint32_t version = 0;
};
using StoredRef = EntryRef<StoredPair>;

// The entries of a sequence's leading pairs that have been found by their content, so that they need not be
// searched for again. Clean ones only: a tainted one may get a clean twin, which is preferred to it.
template <class Entry>
class KnownChain {
 public:
  // Before at(): entries may have gone since. Nobody goes before those that continue it.
  void drop_gone() {
    while (!found_.empty() && !found_.back().is_there()) found_.pop_back();
  }
  // The entry of pair `i`, all pairs before which have been asked for: a known one, or what `find()` gives, or
  // null.
  template <class Find>
  Entry* at(int i, Find find) {
    if (i < int(found_.size())) return found_[size_t(i)].entry;
    Entry* entry = find();
    if (entry && !entry->tainted) found_.push_back(EntryRef<Entry>(*entry));
    return entry;
  }

 private:
  std::vector<EntryRef<Entry>> found_;
};

}  // namespace ekv
