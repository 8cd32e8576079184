#pragma once
// device_array.h -- device memory of a test: allocated, filled and read back with synchronous calls.

#include <cuda_runtime_api.h>

#include <utility>
#include <vector>

#include "kernels/cuda_check.h"

namespace ekv::test {

template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t count) : count_(count) {
    cuda_check(cudaMalloc(reinterpret_cast<void**>(&data_), (count ? count : 1) * sizeof(T)));
  }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) { upload(values); }
  DeviceArray(DeviceArray&& o) noexcept : data_(std::exchange(o.data_, nullptr)), count_(o.count_) {}
  DeviceArray(const DeviceArray&) = delete;
  ~DeviceArray() { cuda_warn(cudaFree(data_)); }

  T* data() const { return data_; }
  size_t size() const { return count_; }
  void upload(const std::vector<T>& values) {
    EKV_CHECK(values.size() <= count_, "upload larger than the array");
    cuda_check(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  std::vector<T> download() const {
    std::vector<T> values(count_);
    cuda_check(cudaMemcpy(values.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  T* data_ = nullptr;
  size_t count_;
};

}  // namespace ekv::test
