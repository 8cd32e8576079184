#include "backend/cuda/launch_timing.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "backend/cuda/cuda_graphs.h"

namespace ekv {
namespace {

Event make_timed_event() {
  cudaEvent_t raw = nullptr;
  cuda_check(cudaEventCreate(&raw));
  return Event(raw);
}

}  // namespace

double time_launches(const std::function<bool(int)>& launch, int count, int replays, cudaStream_t stream) {
  const auto launch_all = [&] {
    bool ok = true;
    for (int i = 0; i < count && ok; ++i) ok = launch(i);
    return ok;
  };
  const GraphExec graph = capture_graph(launch_all, stream);
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
