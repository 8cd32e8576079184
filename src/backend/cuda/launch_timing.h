#pragma once
// launch_timing.h -- how long launches take as they run in a step: one after the other in a graph.

#include <cuda_runtime_api.h>

#include <functional>

namespace ekv {

// Captures launch(0) .. launch(count - 1), replays them `replays` times after once for warmth, and gives the
// median time of a launch in microseconds. Infinity when a launch returned false. `stream` has nothing to do.
double time_launches(const std::function<bool(int i)>& launch, int count, int replays, cudaStream_t stream);

}  // namespace ekv
