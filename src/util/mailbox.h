#pragma once
// mailbox.h -- many threads put, one thread takes all at once. The only way into the engine thread.

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>
#include <vector>

namespace ekv {

template <class T>
class Mailbox {
 public:
  void put(T item) {
    {
      const std::lock_guard lock(mutex_);
      items_.push_back(std::move(item));
    }
    arrived_.notify_one();
  }

  // Moves everything that has arrived into `out`, in order of arrival; `out` is cleared first.
  void take_all(std::vector<T>& out) {
    out.clear();
    const std::lock_guard lock(mutex_);
    std::swap(out, items_);
  }

  void wait_for(std::chrono::milliseconds at_most) {
    std::unique_lock lock(mutex_);
    arrived_.wait_for(lock, at_most, [&] { return !items_.empty(); });
  }

  bool empty() const {
    const std::lock_guard lock(mutex_);
    return items_.empty();
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable arrived_;
  std::vector<T> items_;
};

}  // namespace ekv
