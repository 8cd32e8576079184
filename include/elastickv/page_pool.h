#pragma once
// page_pool.h -- a fixed set of places, each free or in use: the pages of the device, the slots of the host. No
// policy and no sharing: who is evicted is decided elsewhere, who shares a pair is counted in pair_table.h.

#include <vector>

#include "elastickv/base.h"

namespace ekv {

enum class HostSlot : int32_t {};  // host memory for the low bytes of a pair
constexpr HostSlot kNoHostSlot{-1};

// Not thread-safe; engine thread only.
template <class Id>
class FreeList {
 public:
  explicit FreeList(int count) : in_use_(size_t(count), false) {
    free_.reserve(size_t(count));
    for (int id = count - 1; id >= 0; --id) free_.push_back(Id(id));
  }
  int size() const { return int(in_use_.size()); }
  int num_free() const { return int(free_.size()); }
  bool in_use(Id id) const {
    EKV_CHECK(int(id) >= 0 && int(id) < size(), "the place lies in the pool");
    return in_use_[size_t(id)];
  }

  std::optional<Id> acquire() {
    if (free_.empty()) return std::nullopt;
    const Id id = free_.back();
    free_.pop_back();
    in_use_[size_t(id)] = true;
    return id;
  }
  void release(Id id) {
    EKV_CHECK(in_use(id), "a place is released once");
    in_use_[size_t(id)] = false;
    free_.push_back(id);
  }

  // Each place is on the free list exactly when it is not in use; aborts when that does not hold.
  void check_integrity() const {
    std::vector<bool> listed(in_use_.size(), false);
    for (Id id : free_) {
      EKV_CHECK(!in_use(id), "a place on the free list is not in use");
      EKV_CHECK(!listed[size_t(id)], "a place is on the free list once");
      listed[size_t(id)] = true;
    }
    for (size_t id = 0; id < listed.size(); ++id)
      EKV_CHECK(listed[id] || in_use_[id], "a place that is not in use is on the free list");
  }

 private:
  std::vector<bool> in_use_;
  std::vector<Id> free_;  // reused last in, first out: its lines may still be in a cache
};

using PagePool = FreeList<PageId>;

}  // namespace ekv
