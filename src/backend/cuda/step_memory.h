#pragma once
// step_memory.h -- the small arrays of a step: pinned host memory and its image on the device, filled from the
// front, so that all of them cross in one copy. The same places serve every step; the host may fill them again
// once the device has read them, which collect() waits for.

#include <algorithm>
#include <span>

#include "backend/cuda/cuda_raii.h"

namespace ekv {

template <class T>
struct StepArray {
  T* host = nullptr;    // to be filled before upload(), or read after download()
  T* device = nullptr;  // aligned to 256 bytes
  size_t size = 0;
};

class StepMemory {
 public:
  explicit StepMemory(size_t bytes) : host_(bytes), device_(bytes) {}

  void clear() { used_ = 0; }

  // Room for `count` elements, not initialised. The sizes of CudaSizes cover every step that its limits allow.
  template <class T>
  StepArray<T> take(size_t count) {
    const size_t at = used_;
    used_ += bytes_for<T>(count);
    EKV_CHECK(used_ <= host_.size(), "a step larger than the limits it was sized for");
    return {reinterpret_cast<T*>(host_.data() + at), reinterpret_cast<T*>(device_.data() + at), count};
  }
  template <class T>
  StepArray<T> put(std::span<const T> values) {
    StepArray<T> array = take<T>(values.size());
    std::copy(values.begin(), values.end(), array.host);
    return array;
  }

  void upload(const Stream& stream) { copy(device_.data(), host_.data(), cudaMemcpyHostToDevice, stream); }
  void download(const Stream& stream) { copy(host_.data(), device_.data(), cudaMemcpyDeviceToHost, stream); }

  // What an array of `count` elements takes.
  template <class T>
  static constexpr size_t bytes_for(size_t count) {
    return (count * sizeof(T) + 255) / 256 * 256;
  }

 private:
  void copy(void* to, const void* from, cudaMemcpyKind kind, const Stream& stream) {
    if (used_ > 0) cuda_check(cudaMemcpyAsync(to, from, used_, kind, stream.get()));
  }

  PinnedBuffer<std::byte> host_;
  DeviceBuffer<std::byte> device_;
  size_t used_ = 0;
};

}  // namespace ekv
