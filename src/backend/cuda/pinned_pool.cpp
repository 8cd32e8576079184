#include "backend/cuda/pinned_pool.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <thread>
#include <vector>

namespace ekv {
namespace {

constexpr size_t kLargePage = size_t(2) << 20, kSmallPage = 4096;
constexpr size_t kPiece = size_t(64) << 20;  // that a thread takes at a time
constexpr size_t kMostThreads = 8;           // more than these wait for the memory, or for the kernel's locks
constexpr double kReportEvery_s = 2;

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double gib(size_t bytes) { return double(bytes) / (size_t(1) << 30); }

// False: there is no memory. Kernels before 5.14 have no MADV_POPULATE_WRITE and clear a page when it is
// written.
bool take_pages(uint8_t* begin, size_t bytes) {
  if (madvise(begin, bytes, MADV_POPULATE_WRITE) == 0) return true;
  if (errno != EINVAL) return false;
  for (size_t at = 0; at < bytes; at += kSmallPage) *static_cast<volatile uint8_t*>(begin + at) = 0;
  return true;
}

}  // namespace

HostPages::HostPages(size_t bytes) : mapped_bytes_(bytes + kLargePage) {
  void* p = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) cuda_check(cudaErrorMemoryAllocation);
  mapped_ = p;
  const auto address = reinterpret_cast<uintptr_t>(p);
  data_ = static_cast<uint8_t*>(p) + (kLargePage - address % kLargePage) % kLargePage;
  madvise(data_, bytes, MADV_HUGEPAGE);  // where they are switched off it works with small ones
}

HostPages::HostPages(HostPages&& o) noexcept
    : mapped_(std::exchange(o.mapped_, nullptr)),
      mapped_bytes_(std::exchange(o.mapped_bytes_, 0)),
      data_(std::exchange(o.data_, nullptr)) {}

HostPages& HostPages::operator=(HostPages&& o) noexcept {
  std::swap(mapped_, o.mapped_), std::swap(mapped_bytes_, o.mapped_bytes_), std::swap(data_, o.data_);
  return *this;
}

HostPages::~HostPages() {
  if (mapped_) munmap(mapped_, mapped_bytes_);
}

void HostPages::populate(size_t bytes) {
  std::atomic<size_t> next = 0;
  std::atomic<bool> full = false;
  const auto start = std::chrono::steady_clock::now();
  const auto work = [&](bool reports) {
    double report_s = kReportEvery_s;
    for (size_t at = next.fetch_add(kPiece); at < bytes && !full; at = next.fetch_add(kPiece)) {
      if (!take_pages(data_ + at, std::min(kPiece, bytes - at))) full = true;
      if (!reports || seconds_since(start) < report_s) continue;
      log_info(fmt::format("host memory for KV: {:.0f} of {:.0f} GiB taken", gib(at), gib(bytes)));
      report_s = seconds_since(start) + kReportEvery_s;
    }
  };
  const size_t pieces = (bytes + kPiece - 1) / kPiece;
  const size_t count =
      std::min({pieces, kMostThreads, size_t(std::max(1u, std::thread::hardware_concurrency()))});
  {
    std::vector<std::jthread> others;
    try {
      for (size_t i = 1; i < count; ++i) others.emplace_back(work, false);
    } catch (const std::system_error&) {  // no more threads: those that are there take all pieces
    }
    work(true);
  }
  if (full) cuda_check(cudaErrorMemoryAllocation);
}

PinnedPool::PinnedPool(size_t bytes) : size_(bytes) {
  if (bytes == 0) return;
  const auto start = std::chrono::steady_clock::now();
  pages_ = HostPages(bytes);
  pages_.populate(bytes);
  const double taken_s = seconds_since(start);
  cuda_check(cudaHostRegister(pages_.data(), bytes, cudaHostRegisterDefault));
  locked_ = Handle<void*, cudaHostUnregister>(pages_.data());
  log_info(fmt::format("host memory for KV: {:.1f} GiB taken in {:.1f} s, page-locked in another {:.1f} s",
                       gib(bytes), taken_s, seconds_since(start) - taken_s));
}

}  // namespace ekv
