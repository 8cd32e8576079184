#include "backend/cuda/cuda_graphs.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

namespace ekv {
namespace {

constexpr const char* kPathNames[] = {"native", "structured", "general"};

}  // namespace

GraphExec capture_graph(const std::function<bool()>& launch, cudaStream_t stream) {
  cuda_check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  const bool ok = launch();
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

CudaGraphs::Entry* CudaGraphs::find(const GraphForm& form) {
  const auto at = std::ranges::find(entries_, form, &Entry::form);
  return at == entries_.end() ? nullptr : &*at;
}

// In place of the one that was longest out of use, when there is no room. That one may still run.
CudaGraphs::Entry& CudaGraphs::add(const GraphForm& form, const Stream& stream) {
  if (entries_.size() < most_) return entries_.emplace_back(Entry{.form = form});
  cuda_check(cudaStreamSynchronize(stream.get()));
  Entry& oldest = *std::ranges::min_element(entries_, {}, &Entry::last_run);
  return oldest = Entry{.form = form};
}

void CudaGraphs::run(const GraphForm& form, const Stream& stream, const std::function<void()>& launch) {
  if (most_ == 0) return launch();
  Entry* known = find(form);
  if (known && !known->graph.get()) capture(*known, stream, launch);
  Entry& entry = known ? *known : add(form, stream);
  entry.last_run = ++runs_;
  if (!known) return launch();
  cuda_check(cudaGraphLaunch(entry.graph.get(), stream.get()));
}

void CudaGraphs::prepare(const GraphForm& form, const Stream& stream, const std::function<void()>& launch) {
  Entry* known = find(form);
  if (most_ == 0 || (known && known->graph.get())) return;
  Entry& entry = known ? *known : add(form, stream);
  entry.last_run = ++runs_;
  capture(entry, stream, launch);
}

void CudaGraphs::capture(Entry& entry, const Stream& stream, const std::function<void()>& launch) {
  const auto start = std::chrono::steady_clock::now();
  entry.graph = capture_graph([&] { return launch(), true; }, stream.get());
  const double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  ++num_captured_, capture_ms_ += ms;
  log_debug(fmt::format("captured a CUDA graph for decodes of {} sequences, {} path, in {:.1f} ms",
                        entry.form.batch, kPathNames[size_t(entry.form.path)], ms));
}

}  // namespace ekv
