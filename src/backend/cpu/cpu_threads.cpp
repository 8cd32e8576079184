#include "backend/cpu/cpu_threads.h"

#include <sched.h>

#include <algorithm>
#include <utility>

namespace ekv {
namespace {

// Loops of one step follow each other within microseconds; a worker that sleeps between them costs more than
// the loop. 2,000 turns are about 50 us: long enough for the gaps inside a step, too short to burn an idle
// core.
constexpr int kSpinTurns = 2000;

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0)
    return int(std::max(1u, std::thread::hardware_concurrency()));
  return std::max(1, CPU_COUNT(&set));
}

void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

template <class T>
void wait_while_equal(const std::atomic<T>& value, T old) {
  for (int i = 0; i < kSpinTurns; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    pause_core();
  }
  value.wait(old, std::memory_order_acquire);
}

}  // namespace

CpuThreads::CpuThreads(int threads) {
  const int count = threads > 0 ? threads : usable_cores();
  for (int i = 1; i < count; ++i) workers_.emplace_back([this, i] { work(i); });
}

CpuThreads::~CpuThreads() {
  stopping_.store(true);
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void CpuThreads::run(const Loop& loop) {
  loop_ = loop;
  next_item_.store(0, std::memory_order_relaxed);
  busy_.store(int(workers_.size()), std::memory_order_relaxed);
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  take_items(0);
  for (int busy = busy_.load(std::memory_order_acquire); busy != 0;
       busy = busy_.load(std::memory_order_acquire)) {
    wait_while_equal(busy_, busy);
  }
  if (failed_.exchange(false)) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void CpuThreads::take_items(int thread) noexcept {
  try {
    for (int item; (item = next_item_.fetch_add(1, std::memory_order_relaxed)) < loop_.items;) {
      loop_.call(loop_.context, item, thread);
    }
  } catch (...) {
    if (!failed_.exchange(true)) failure_ = std::current_exception();
    next_item_.store(loop_.items, std::memory_order_relaxed);  // nobody starts another item
  }
}

void CpuThreads::work(int thread) {
  for (uint32_t seen = 0;;) {
    wait_while_equal(generation_, seen);
    seen = generation_.load(std::memory_order_acquire);
    if (stopping_.load()) return;
    take_items(thread);
    if (busy_.fetch_sub(1, std::memory_order_acq_rel) == 1) busy_.notify_one();
  }
}

}  // namespace ekv
