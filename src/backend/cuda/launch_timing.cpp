#include "backend/cuda/launch_timing.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "backend/cuda/cuda_raii.h"

namespace ekv {
namespace {

Event make_timed_event() {
  cudaEvent_t raw = nullptr;
  cuda_check(cudaEventCreate(&raw));
  return Event(raw);
}

// No graph: a launch failed.
GraphExec capture(const std::function<bool(int)>& launch, int count, cudaStream_t stream) {
  cuda_check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  bool ok = true;
  for (int i = 0; i < count && ok; ++i) ok = launch(i);
  cudaGraph_t raw = nullptr;
  const cudaError_t ended = cudaStreamEndCapture(stream, &raw);
  const Graph graph(raw);
  if (!ok) {
    cudaGetLastError();  // of the launch or of the capture that it ended
    return {};
  }
  cuda_check(ended);
  cudaGraphExec_t exec = nullptr;
  cuda_check(cudaGraphInstantiate(&exec, graph.get(), 0));
  return GraphExec(exec);
}

}  // namespace

double time_launches(const std::function<bool(int)>& launch, int count, int replays, cudaStream_t stream) {
  const GraphExec graph = capture(launch, count, stream);
  if (!graph.get()) return std::numeric_limits<double>::infinity();
  std::vector<Event> marks;
  for (int i = 0; i <= replays; ++i) marks.push_back(make_timed_event());
  cuda_check(cudaGraphLaunch(graph.get(), stream));
  cuda_check(cudaEventRecord(marks[0].get(), stream));
  for (int i = 0; i < replays; ++i) {
    cuda_check(cudaGraphLaunch(graph.get(), stream));
    cuda_check(cudaEventRecord(marks[size_t(i) + 1].get(), stream));
  }
  cuda_check(cudaStreamSynchronize(stream));
  std::vector<float> ms(static_cast<size_t>(replays));
  for (size_t i = 0; i < ms.size(); ++i)
    cuda_check(cudaEventElapsedTime(&ms[i], marks[i].get(), marks[i + 1].get()));
  std::ranges::nth_element(ms, ms.begin() + replays / 2);
  return 1000 * double(ms[size_t(replays) / 2]) / count;
}

}  // namespace ekv
