#pragma once
// pinned_pool.h -- page-locked host memory of many GiB, quickly: cudaMallocHost clears and locks 4 KiB pages on
// one thread, 1.6 GB/s on an H200's host.
//
// Pages of 2 MiB, where the system gives them, are taken by several threads, then locked in one call. Clearing
// is what takes the time: 3.4 to 4.2 GB/s a thread with such pages, 0.8 with those of 4 KiB (on two cores of an
// EPYC, virtual). 19.7 GiB take 0.7 s, and 1.0 s to lock, on an H200's host.

#include <cstddef>
#include <cstdint>

#include "backend/cuda/cuda_raii.h"

namespace ekv {

// Pages of the process, aligned to 2 MiB. Move-only.
class HostPages {
 public:
  HostPages() = default;
  // Throws CudaError (out of memory) when the system has no addresses left.
  explicit HostPages(size_t bytes);
  HostPages(HostPages&& o) noexcept;
  HostPages& operator=(HostPages&& o) noexcept;
  ~HostPages();
  uint8_t* data() const { return data_; }
  // Takes the memory now, in which every byte is 0. Throws CudaError (out of memory). Logs how far it is.
  void populate(size_t bytes);

 private:
  void* mapped_ = nullptr;
  size_t mapped_bytes_ = 0;
  uint8_t* data_ = nullptr;
};

class PinnedPool {
 public:
  PinnedPool() = default;
  // Throws CudaError: out of memory, or more than may be locked.
  explicit PinnedPool(size_t bytes);
  uint8_t* data() const { return pages_.data(); }
  size_t size() const { return size_; }

 private:
  HostPages pages_;
  Handle<void*, cudaHostUnregister> locked_;  // goes before the pages do
  size_t size_ = 0;
};

}  // namespace ekv
