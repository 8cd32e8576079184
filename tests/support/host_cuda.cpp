// host_cuda.cpp -- the CUDA runtime as the CUDA backend uses it, on ordinary memory. Links the backend to plain
// C++, so that all of it but the kernels and the matrix library is tested where there is no GPU.
//
// Work runs as late as CUDA's order allows: a copy waits in its stream until a launch on that stream, a wait
// for an event behind it, or a synchronisation asks for it, and an event must be asked for a few times. So a
// wait that is missing, or memory that the host fills again too early, gives wrong bytes.

#include "tests/support/host_cuda.h"

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>

namespace {

constexpr int kQueriesUntilDone = 3;
constexpr size_t kMemory = size_t(8) << 30;
size_t taken = 0;

struct HostStream {
  std::deque<std::function<void()>> work;
  void run_one() {
    const auto next = std::move(work.front());
    work.pop_front();
    next();
  }
};
// One cudaEventRecord.
struct Mark {
  HostStream* stream = nullptr;
  bool reached = false;
  int queries_left = kQueriesUntilDone;
  void reach() {
    while (!reached) stream->run_one();
  }
};
struct HostEvent {
  std::shared_ptr<Mark> last;
};
HostStream* host_stream(cudaStream_t stream) { return reinterpret_cast<HostStream*>(stream); }
HostEvent* host_event(cudaEvent_t event) { return reinterpret_cast<HostEvent*>(event); }

cudaError_t take(void** p, size_t bytes) {
  *p = bytes == 0 ? nullptr : std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (bytes > 0) std::memset(*p, 0x7f, bytes);  // NaN as fp16 and as float: what is read unset shows
  taken += bytes;
  return cudaSuccess;
}

cudaError_t enqueue(cudaStream_t stream, std::function<void()> work) {
  host_stream(stream)->work.push_back(std::move(work));
  return cudaSuccess;
}

}  // namespace

void ekv::test::run_stream(cudaStream_t stream) {
  while (!host_stream(stream)->work.empty()) host_stream(stream)->run_one();
}

extern "C" {

cudaError_t cudaMalloc(void** p, size_t bytes) { return take(p, bytes); }
cudaError_t cudaFree(void* p) { return std::free(p), cudaSuccess; }
cudaError_t cudaMallocHost(void** p, size_t bytes) { return take(p, bytes); }
cudaError_t cudaFreeHost(void* p) { return std::free(p), cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = kMemory, *free = kMemory - taken;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidDevice; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { return *value = 4, cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }  // of use before the first step only
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return "cudaError"; }
const char* cudaGetErrorString(cudaError_t) { return "of the host's stand-in"; }

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = reinterpret_cast<cudaStream_t>(new HostStream);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return delete host_stream(stream), cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return ekv::test::run_stream(stream), cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (!host_event(event)->last) return cudaSuccess;
  return enqueue(stream, [mark = host_event(event)->last] { mark->reach(); });
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new HostEvent);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete host_event(event), cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  auto mark = std::make_shared<Mark>(host_stream(stream));
  host_event(event)->last = mark;
  return enqueue(stream, [mark] { mark->reached = true; });
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const auto& mark = host_event(event)->last;
  if (!mark) return cudaSuccess;
  if (!mark->reached && mark->queries_left-- > 0) return cudaErrorNotReady;
  return mark->reach(), cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (host_event(event)->last) host_event(event)->last->reach();
  return cudaSuccess;
}

cudaError_t cudaMemset(void* p, int value, size_t bytes) { return std::memset(p, value, bytes), cudaSuccess; }
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream) {
  return enqueue(stream, [=] { std::memset(p, value, bytes); });
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  return std::memcpy(to, from, bytes), cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return enqueue(stream, [=] { std::memcpy(to, from, bytes); });
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind, cudaStream_t stream) {
  return enqueue(stream, [=] {
    for (size_t row = 0; row < height; ++row)
      std::memcpy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch,
                  width);
  });
}

}  // extern "C"
