#pragma once
// device_memory.h -- memory of whatever device the kernel tests are linked to: run_cuda_ops.cpp has the GPU's,
// run_cpu_ops.cpp ordinary memory.

#include <cstddef>
#include <vector>

namespace ekv::test {

void* device_alloc(size_t bytes);  // aligned to 256 bytes
void device_free(void* p);
bool device_has(size_t bytes);  // room for so much, without strain
int long_run(int rounds);       // of a long test: fewer where plain loops compute
void copy_to_device(void* to, const void* from, size_t bytes);
void copy_to_host(void* to, const void* from, size_t bytes);  // after all launched work

// A vector on the device.
template <class T>
class DeviceVector {
 public:
  DeviceVector() = default;
  explicit DeviceVector(const std::vector<T>& values) : size_(values.size()) {
    data_ = static_cast<T*>(device_alloc(values.size() * sizeof(T)));
    set(values);
  }
  DeviceVector(size_t count, T value) : DeviceVector(std::vector<T>(count, value)) {}
  DeviceVector(DeviceVector&& o) noexcept { *this = static_cast<DeviceVector&&>(o); }
  DeviceVector& operator=(DeviceVector&& o) noexcept {
    T* const data = o.data_;
    const size_t size = o.size_;
    o.data_ = data_, o.size_ = size_;
    data_ = data, size_ = size;
    return *this;
  }
  ~DeviceVector() { device_free(data_); }

  T* data() const { return data_; }
  size_t size() const { return size_; }
  void set(const std::vector<T>& values) {
    if (!values.empty()) copy_to_device(data_, values.data(), values.size() * sizeof(T));
  }
  std::vector<T> host() const {
    std::vector<T> values(size_);
    if (size_) copy_to_host(values.data(), data_, size_ * sizeof(T));
    return values;
  }

 private:
  T* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace ekv::test
