#pragma once
// bench_graph.h -- times launches as a CUDA graph: `count` launches captured, the graph replayed, microseconds
// per launch.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "kernels/cuda_check.h"

namespace ekv::bench {

struct Timing {
  double median_us = 0, p95_us = 0;
};

// `launch(i, stream)` is the i-th launch; it should walk through buffers that together exceed the L2.
inline Timing time_graph(int count, const std::function<void(int, cudaStream_t)>& launch, int replays = 60) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  cuda_check(cudaStreamCreate(&stream));
  cuda_check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < count; ++i) launch(i, stream);
  cuda_check(cudaStreamEndCapture(stream, &graph));
  cuda_check(cudaGraphInstantiate(&exec, graph, 0));
  std::vector<cudaEvent_t> marks(replays + 1);
  for (cudaEvent_t& mark : marks) cuda_check(cudaEventCreate(&mark));
  for (int i = 0; i < 3; ++i) cuda_check(cudaGraphLaunch(exec, stream));
  cuda_check(cudaEventRecord(marks[0], stream));
  for (int i = 0; i < replays; ++i) {
    cuda_check(cudaGraphLaunch(exec, stream));
    cuda_check(cudaEventRecord(marks[i + 1], stream));
  }
  cuda_check(cudaStreamSynchronize(stream));
  std::vector<float> us;
  for (int i = 0; i < replays; ++i) {
    float ms;
    cuda_check(cudaEventElapsedTime(&ms, marks[i], marks[i + 1]));
    us.push_back(1000 * ms / count);
  }
  for (cudaEvent_t mark : marks) cuda_check(cudaEventDestroy(mark));
  cuda_check(cudaGraphExecDestroy(exec));
  cuda_check(cudaGraphDestroy(graph));
  cuda_check(cudaStreamDestroy(stream));
  std::sort(us.begin(), us.end());
  return {us[us.size() / 2], us[us.size() * 95 / 100]};
}

}  // namespace ekv::bench
