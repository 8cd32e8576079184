#pragma once
// page_pool.h -- the pages of the device, reference-counted. No policy: who is evicted is decided elsewhere.

#include <vector>

#include "elastickv/base.h"

namespace ekv {

// Invariant: each page is free exactly when its reference count is 0. Not thread-safe; engine thread only.
class PagePool {
 public:
  explicit PagePool(int num_pages);
  int num_pages() const { return int(references_.size()); }
  int num_free() const { return int(free_.size()); }
  int references(PageId page) const;

  std::optional<PageId> acquire();  // one reference; nullopt when no page is free
  void retain(PageId page);         // one more reference to a page in use
  void release(PageId page);        // the last reference frees it

  // The invariant, recomputed from scratch; aborts with what is wrong.
  void check_integrity() const;

 private:
  std::vector<int32_t> references_;  // [page]
  std::vector<PageId> free_;         // reused last in, first out: its lines may still be in a cache
};

}  // namespace ekv
