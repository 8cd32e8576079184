#include "elastickv/page_pool.h"

namespace ekv {

PagePool::PagePool(int num_pages) {
  EKV_CHECK(num_pages > 0, "a pool has at least one page");
  references_.assign(size_t(num_pages), 0);
  free_.reserve(size_t(num_pages));
  for (int page = num_pages - 1; page >= 0; --page) free_.push_back(PageId(page));
}

int PagePool::references(PageId page) const {
  EKV_CHECK(int(page) >= 0 && int(page) < num_pages(), "the page lies in the pool");
  return references_[size_t(page)];
}

std::optional<PageId> PagePool::acquire() {
  if (free_.empty()) return std::nullopt;
  const PageId page = free_.back();
  free_.pop_back();
  references_[size_t(page)] = 1;
  return page;
}

void PagePool::retain(PageId page) {
  EKV_CHECK(references(page) > 0, "only a page in use can be shared");
  ++references_[size_t(page)];
}

void PagePool::release(PageId page) {
  EKV_CHECK(references(page) > 0, "a page is released once per reference");
  if (--references_[size_t(page)] == 0) free_.push_back(page);
}

void PagePool::check_integrity() const {
  std::vector<bool> listed(references_.size(), false);
  for (PageId page : free_) {
    EKV_CHECK(references(page) == 0, "a page on the free list has no references");
    EKV_CHECK(!listed[size_t(page)], "a page is on the free list once");
    listed[size_t(page)] = true;
  }
  for (size_t page = 0; page < listed.size(); ++page)
    EKV_CHECK(listed[page] || references_[page] > 0, "a page without references is on the free list");
}

}  // namespace ekv
