#pragma once
// cuda_raii.h -- owners of what the CUDA runtime hands out. Move-only; nothing is shared, no stream is the
// default one. A failed call throws CudaError (kernels/cuda_check.h); destructors only log.

#include <cuda_runtime_api.h>

#include <utility>

#include "kernels/cuda_check.h"

namespace ekv {

template <class H, auto Destroy>
class Handle {
 public:
  Handle() = default;
  explicit Handle(H raw) : raw_(raw) {}
  Handle(Handle&& o) noexcept : raw_(std::exchange(o.raw_, nullptr)) {}
  Handle& operator=(Handle&& o) noexcept {
    std::swap(raw_, o.raw_);
    return *this;
  }
  ~Handle() {
    if (raw_) cuda_warn(Destroy(raw_));
  }
  H get() const { return raw_; }

 private:
  H raw_ = nullptr;
};

using Stream = Handle<cudaStream_t, cudaStreamDestroy>;
using Event = Handle<cudaEvent_t, cudaEventDestroy>;
using Graph = Handle<cudaGraph_t, cudaGraphDestroy>;
using GraphExec = Handle<cudaGraphExec_t, cudaGraphExecDestroy>;

// Work on it runs beside that of every other stream.
inline Stream make_stream() {
  cudaStream_t raw = nullptr;
  cuda_check(cudaStreamCreateWithFlags(&raw, cudaStreamNonBlocking));
  return Stream(raw);
}

// Without a time. Waiting for an event that was never recorded is no wait.
inline Event make_event() {
  cudaEvent_t raw = nullptr;
  cuda_check(cudaEventCreateWithFlags(&raw, cudaEventDisableTiming));
  return Event(raw);
}

inline void record(const Event& event, const Stream& stream) {
  cuda_check(cudaEventRecord(event.get(), stream.get()));
}
inline void wait(const Stream& stream, const Event& event) {
  cuda_check(cudaStreamWaitEvent(stream.get(), event.get(), 0));
}
inline void synchronize(const Event& event) { cuda_check(cudaEventSynchronize(event.get())); }
// Whether everything before the last record has ended.
inline bool has_ended(const Event& event) {
  const cudaError_t code = cudaEventQuery(event.get());
  if (code == cudaErrorNotReady) return false;
  cuda_check(code);
  return true;
}

// Uninitialised device memory, aligned to 256 bytes and sized at start-up.
template <class T>
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  explicit DeviceBuffer(size_t count) : count_(count) {
    if (count == 0) return;
    void* p = nullptr;
    cuda_check(cudaMalloc(&p, bytes()));
    data_ = Handle<void*, cudaFree>(p);
  }
  T* data() const { return static_cast<T*>(data_.get()); }
  size_t size() const { return count_; }
  size_t bytes() const { return count_ * sizeof(T); }
  bool empty() const { return count_ == 0; }

 private:
  Handle<void*, cudaFree> data_;
  size_t count_ = 0;
};

// Page-locked host memory: copies from and to it run beside the host.
template <class T>
class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  explicit PinnedBuffer(size_t count) : count_(count) {
    if (count == 0) return;
    void* p = nullptr;
    cuda_check(cudaMallocHost(&p, count * sizeof(T)));
    data_ = Handle<void*, cudaFreeHost>(p);
  }
  T* data() const { return static_cast<T*>(data_.get()); }
  size_t size() const { return count_; }

 private:
  Handle<void*, cudaFreeHost> data_;
  size_t count_ = 0;
};

}  // namespace ekv
