#pragma once
// cpu_threads.h -- a fixed team of threads for data-parallel loops.
//
// Not OpenMP: its barriers are invisible to ThreadSanitizer, its team is global to the process, and it cannot
// be asked for a number of threads per backend without ambient state.

#include <atomic>
#include <exception>
#include <thread>
#include <vector>

namespace ekv {

// One loop at a time, started by the owner's thread, which takes part in it. The owner waits for everybody.
class CpuThreads {
 public:
  explicit CpuThreads(int threads);  // 0: as many as this process may run on
  ~CpuThreads();
  CpuThreads(const CpuThreads&) = delete;
  CpuThreads& operator=(const CpuThreads&) = delete;

  int size() const { return int(workers_.size()) + 1; }

  // Calls body(item, thread) once for each item in [0, items), in no promised order, thread in [0, size()).
  // Items are handed out one by one, so uneven items balance. What an item writes, no other item may touch.
  // What a body throws ends the loop and comes out here, once everybody has stopped; of several, the first.
  template <class Body>
  void for_each(int items, const Body& body) {
    if (items <= 0) return;
    if (items == 1 || workers_.empty()) {
      for (int i = 0; i < items; ++i) body(i, 0);
      return;
    }
    run({[](const void* context, int item, int thread) { (*static_cast<const Body*>(context))(item, thread); },
         &body, items});
  }

 private:
  struct Loop {
    void (*call)(const void* context, int item, int thread) = nullptr;
    const void* context = nullptr;
    int items = 0;
  };
  void run(const Loop& loop);
  void take_items(int thread) noexcept;
  void work(int thread);

  std::vector<std::thread> workers_;
  Loop loop_;
  std::atomic<int> next_item_{0}, busy_{0};
  std::atomic<uint32_t> generation_{0};
  std::atomic<bool> stopping_{false}, failed_{false};
  std::exception_ptr failure_;  // of the thread that set failed_
};

}  // namespace ekv
