#pragma once
// step_memory.h -- the small arrays of a step: pinned host memory and its image on the device, filled from the
// front, so that all of them cross in one copy.
//
// The device has one image, which the order of the compute stream protects: the copy of a step comes after all
// work of the steps before. So places depend on the order and the sizes of the arrays alone, and a captured
// graph serves every step. The host has a copy per step in flight, taken in turns: it may be filled again once
// its step was collected.

#include <algorithm>
#include <span>
#include <vector>

#include "backend/cuda/cuda_raii.h"
#include "elastickv/backend.h"

namespace ekv {

template <class T>
struct StepArray {
  T* host = nullptr;    // to be filled before upload(), or read after download()
  T* device = nullptr;  // aligned to 256 bytes
  size_t size = 0;
};

class StepMemory {
 public:
  explicit StepMemory(size_t bytes) : device_(bytes) {
    for (int i = 0; i < kMostStepsInFlight; ++i) hosts_.emplace_back(bytes);
  }

  // The next host copy, empty.
  void begin_step() { turn_ = (turn_ + 1) % hosts_.size(), used_ = 0; }
  // The same copy once more, when the device has read it.
  void clear() { used_ = 0; }

  // Room for `count` elements, not initialised. The sizes of CudaSizes cover every step that its limits allow.
  template <class T>
  StepArray<T> take(size_t count) {
    const size_t at = used_;
    used_ += bytes_for<T>(count);
    EKV_CHECK(used_ <= device_.size(), "a step larger than the limits it was sized for");
    return {reinterpret_cast<T*>(hosts_[turn_].data() + at), at_device<T>(at), count};
  }
  template <class T>
  StepArray<T> put(std::span<const T> values) {
    StepArray<T> array = take<T>(values.size());
    std::copy(values.begin(), values.end(), array.host);
    return array;
  }
  // `values`, then `padding` up to `count` elements.
  template <class T>
  StepArray<T> put_padded(std::span<const T> values, size_t count, T padding) {
    StepArray<T> array = take<T>(count);
    std::fill(std::copy(values.begin(), values.end(), array.host), array.host + count, padding);
    return array;
  }

  // The device's place of the array that `bytes` of other arrays were taken before.
  template <class T>
  T* at_device(size_t bytes) const {
    return reinterpret_cast<T*>(device_.data() + bytes);
  }

  void upload(const Stream& stream) {
    copy(device_.data(), hosts_[turn_].data(), cudaMemcpyHostToDevice, stream);
  }
  void download(const Stream& stream) {
    copy(hosts_[turn_].data(), device_.data(), cudaMemcpyDeviceToHost, stream);
  }

  // What an array of `count` elements takes.
  template <class T>
  static constexpr size_t bytes_for(size_t count) {
    return (count * sizeof(T) + 255) / 256 * 256;
  }

 private:
  void copy(void* to, const void* from, cudaMemcpyKind kind, const Stream& stream) {
    if (used_ > 0) cuda_check(cudaMemcpyAsync(to, from, used_, kind, stream.get()));
  }

  DeviceBuffer<std::byte> device_;
  std::vector<PinnedBuffer<std::byte>> hosts_;
  size_t turn_ = 0, used_ = 0;
};

}  // namespace ekv
