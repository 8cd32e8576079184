// host_cuda.cpp -- the CUDA runtime as the CUDA backend uses it, on ordinary memory. Links the backend to plain
// C++, so that all of it but the kernels and the matrix library is tested where there is no GPU.
//
// Work runs at any time that CUDA's order allows: some streams, drawn again and again, run as far as they get
// as soon as something is enqueued; the others as late as possible, when a synchronisation, an event or a wait
// asks for it. An event must be asked for a few times. So a wait that is missing, or memory that the host fills
// again too early, gives wrong bytes.

#include "tests/support/host_cuda.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "kernels/cuda_check.h"
#include "kernels/layer_ops.h"

namespace {

constexpr int kQueriesUntilDone = 3;
constexpr size_t kMemory = size_t(8) << 30;
size_t taken = 0;

struct HostStream;
// One cudaEventRecord.
struct Mark {
  HostStream* stream = nullptr;
  int uploads = 0;  // of the stream until then
  bool reached = false;
  int queries_left = kQueriesUntilDone;
  void reach();
};
struct HostEvent {
  std::shared_ptr<Mark> last;
};
struct Work {
  std::function<void()> run;
  std::shared_ptr<Mark> after;  // or nullptr
};
using Works = std::vector<std::function<void()>>;
struct HostStream {
  std::deque<Work> work;
  std::unique_ptr<Works> captured;  // work goes here while it is there
  bool eager = false;
  int uploads = 0;                   // copies to the device that were enqueued
  std::shared_ptr<Mark> waited_for;  // last
  void run_one() {
    const Work next = std::move(work.front());
    work.pop_front();
    if (next.after) next.after->reach();
    next.run();
  }
  void run_all() {
    while (!work.empty()) run_one();
  }
  bool can_run() const { return !work.empty() && (!work.front().after || work.front().after->reached); }
};
void Mark::reach() {
  while (!reached) stream->run_one();
}

std::vector<HostStream*> streams;
std::mt19937 draw(1);  // the same draws in every run
int until_draw = 0;
bool lost = false;  // see lose_context()
std::set<std::string> code;
bool refuses_to_lock = false;
ekv::test::HostGpu gpu;
int overtaken = 0;
std::map<const char*, size_t>
    known;  // memory of the device, and page-locked memory: what asynchronous copies take

// What a call returns that has nothing else to say.
cudaError_t done() { return lost ? cudaErrorIllegalAddress : cudaSuccess; }

// After something was enqueued: the eager streams run as far as they get. Most draws last for a few calls, some
// for whole steps, so that a stream can fall behind another by all of one.
void run_eager() {
  if (until_draw-- == 0) {
    until_draw = draw() % 8 == 0 ? 300 : 2;
    for (HostStream* stream : streams) stream->eager = draw() % 2 == 0;
  }
  for (bool any = true; any;) {
    any = false;
    for (HostStream* stream : streams)
      while (stream->eager && stream->can_run()) stream->run_one(), any = true;
  }
}

HostStream* host_stream(cudaStream_t stream) { return reinterpret_cast<HostStream*>(stream); }
HostEvent* host_event(cudaEvent_t event) { return reinterpret_cast<HostEvent*>(event); }

void poison(void* p, size_t bytes) { std::memset(p, 0x7f, bytes); }  // NaN as fp16 and as float: it shows

cudaError_t take(void** p, size_t bytes) {
  *p = bytes == 0 ? nullptr : std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (bytes > 0) poison(*p, bytes), known[static_cast<char*>(*p)] = bytes;
  return done();
}

cudaError_t give_back(void* p) {
  known.erase(static_cast<char*>(p));
  return std::free(p), done();
}

// On a GPU a copy from or to pageable memory waits for all work before it.
void expect_known(const void* begin, size_t bytes) {
  const auto* from = static_cast<const char*>(begin);
  const auto after = known.upper_bound(from);
  if (after == known.begin() || from + bytes > std::prev(after)->first + std::prev(after)->second)
    std::fprintf(stderr, "an asynchronous copy of pageable memory, or beyond a buffer\n"), std::abort();
}

// What ends a capture on a GPU ends the test.
void not_captured(cudaStream_t stream) {
  if (host_stream(stream)->captured) std::fprintf(stderr, "a call that cannot be captured\n"), std::abort();
}

cudaError_t enqueue(cudaStream_t stream, std::function<void()> work, std::shared_ptr<Mark> after = nullptr) {
  if (lost) return done();
  if (Works* captured = host_stream(stream)->captured.get()) {
    if (after) not_captured(stream);
    return captured->push_back(std::move(work)), cudaSuccess;
  }
  host_stream(stream)->work.push_back({std::move(work), std::move(after)});
  run_eager();
  return cudaSuccess;
}

// One engine copies to a device, in the order in which streams come to their copies: what a stream enqueues
// behind an event may come after what another stream enqueues behind the same event.
void note_upload(cudaMemcpyKind kind, cudaStream_t stream) {
  if (kind != cudaMemcpyHostToDevice) return;
  const HostStream* own = host_stream(stream);
  ++host_stream(stream)->uploads;
  if (const auto& mark = own->waited_for; mark && mark->stream != own)
    overtaken += mark->stream->uploads > mark->uploads;
}

}  // namespace

void ekv::test::enqueue(cudaStream_t stream, std::function<void()> work) { ::enqueue(stream, std::move(work)); }

void ekv::test::note_code(const std::string& kernel) { code.insert(kernel); }
const std::set<std::string>& ekv::test::loaded_code() { return code; }
void ekv::test::forget_code() { code.clear(); }

int ekv::test::overtaken_uploads() { return overtaken; }

size_t ekv::test::held_bytes() {
  size_t bytes = 0;
  for (const auto& [begin, size] : known) bytes += size;
  return bytes;
}

void ekv::test::refuse_to_lock(bool refuse) { refuses_to_lock = refuse; }

void ekv::test::show_gpu(const HostGpu& shown) { gpu = shown; }

bool ekv::has_device_code() {
  if (gpu.code == cudaErrorNoKernelImageForDevice) return false;
  cuda_check(gpu.code);
  return true;
}

void ekv::test::lose_context() {
  lost = true;
  for (HostStream* stream : streams) stream->work.clear();
}

extern "C" {

cudaError_t cudaMalloc(void** p, size_t bytes) { return taken += bytes, take(p, bytes); }
cudaError_t cudaFree(void* p) {
  if (const auto it = known.find(static_cast<char*>(p)); it != known.end()) taken -= it->second;
  return give_back(p);
}
cudaError_t cudaMallocHost(void** p, size_t bytes) { return take(p, bytes); }
cudaError_t cudaFreeHost(void* p) { return give_back(p); }
cudaError_t cudaHostRegister(void* p, size_t bytes, unsigned) {
  if (refuses_to_lock) return cudaErrorMemoryAllocation;
  poison(p, bytes);
  return known[static_cast<char*>(p)] = bytes, done();
}
cudaError_t cudaHostUnregister(void* p) {
  return known.erase(static_cast<char*>(p)) == 1 ? done() : cudaErrorHostMemoryNotRegistered;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = kMemory, *free = kMemory - taken;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidDevice; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) { return *count = gpu.count == cudaSuccess, gpu.count; }
cudaError_t cudaDriverGetVersion(int* version) { return *version = gpu.driver, cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  std::strcpy(properties->name, "NVIDIA Stand-in");
  return properties->major = gpu.major, properties->minor = gpu.minor, cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { return *value = 4, cudaSuccess; }
cudaError_t cudaDeviceSynchronize() {
  for (HostStream* stream : streams) stream->run_all();
  return done();
}
cudaError_t cudaGetLastError() { return done(); }
const char* cudaGetErrorName(cudaError_t code) {
  return code == cudaErrorIllegalAddress ? "cudaErrorIllegalAddress" : "cudaError";
}
const char* cudaGetErrorString(cudaError_t) { return "of the host's stand-in"; }

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  streams.push_back(new HostStream);
  *stream = reinterpret_cast<cudaStream_t>(streams.back());
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  std::erase(streams, host_stream(stream));
  return delete host_stream(stream), done();
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  not_captured(stream);
  return host_stream(stream)->run_all(), done();
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (lost || !host_event(event)->last) return done();
  host_stream(stream)->waited_for = host_event(event)->last;
  return enqueue(
      stream, [] {}, host_event(event)->last);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new HostEvent);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete host_event(event), done(); }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  not_captured(stream);
  auto mark = std::make_shared<Mark>(host_stream(stream), host_stream(stream)->uploads);
  host_event(event)->last = mark;
  return enqueue(stream, [mark] { mark->reached = true; });
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const auto& mark = host_event(event)->last;
  if (lost || !mark) return done();
  if (!mark->reached && mark->queries_left-- > 0) return cudaErrorNotReady;
  return mark->reach(), cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (!lost && host_event(event)->last) host_event(event)->last->reach();
  return done();
}

cudaError_t cudaMemset(void* p, int value, size_t bytes) { return std::memset(p, value, bytes), cudaSuccess; }
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream) {
  return enqueue(stream, [=] { std::memset(p, value, bytes); });
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  return std::memcpy(to, from, bytes), cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  expect_known(to, bytes), expect_known(from, bytes);
  note_upload(kind, stream);
  return enqueue(stream, [=] { std::memcpy(to, from, bytes); });
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
  note_upload(kind, stream);
  expect_known(to, to_pitch * (height - 1) + width), expect_known(from, from_pitch * (height - 1) + width);
  return enqueue(stream, [=] {
    for (size_t row = 0; row < height; ++row)
      std::memcpy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch,
                  width);
  });
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  not_captured(stream);
  return host_stream(stream)->captured = std::make_unique<Works>(), cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = reinterpret_cast<cudaGraph_t>(host_stream(stream)->captured.release());
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  *exec = reinterpret_cast<cudaGraphExec_t>(new Works(*reinterpret_cast<Works*>(graph)));
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return delete reinterpret_cast<Works*>(graph), cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) { return delete reinterpret_cast<Works*>(exec), done(); }
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  for (const auto& work : *reinterpret_cast<Works*>(exec)) enqueue(stream, work);
  return done();
}

}  // extern "C"
