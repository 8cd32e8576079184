#pragma once
// cuda_graphs.h -- sequences of launches that are recorded once and replayed in one call.
//
// A form of a step is what its launches depend on; all else lies in memory at fixed places, which every graph
// shares: none of them allocates. A form is launched plainly the first time, so that its kernels are loaded and
// rare forms cost nothing, and captured the second time.

#include <cstdint>
#include <functional>
#include <vector>

#include "backend/cuda/cuda_raii.h"
#include "elastickv/kv_path.h"

namespace ekv {

struct GraphForm {
  int batch = 0;  // sequences, with padding
  KvPath path = KvPath::native;
  bool operator==(const GraphForm&) const = default;
};

// Records what `launch` enqueues on the stream; nothing runs. No graph when it returns false.
GraphExec capture_graph(const std::function<bool()>& launch, cudaStream_t stream);

class CudaGraphs {
 public:
  // `most`: graphs kept at once; 0: every run is launched plainly.
  explicit CudaGraphs(size_t most) : most_(most) {}

  // `launch` enqueues the form on the stream and nothing else, the same every time.
  void run(const GraphForm& form, const Stream& stream, const std::function<void()>& launch);
  // Captures the form now; launches nothing, so the form must have run.
  void prepare(const GraphForm& form, const Stream& stream, const std::function<void()>& launch);

  bool enabled() const { return most_ > 0; }
  size_t num_captured() const { return num_captured_; }  // in its life
  double capture_ms() const { return capture_ms_; }      // all of them together

 private:
  struct Entry {
    GraphForm form;
    GraphExec graph;  // none: it ran once
    uint64_t last_run = 0;
  };
  Entry* find(const GraphForm& form);
  Entry& add(const GraphForm& form, const Stream& stream);
  void capture(Entry& entry, const Stream& stream, const std::function<void()>& launch);

  size_t most_;
  std::vector<Entry> entries_;
  uint64_t runs_ = 0;
  size_t num_captured_ = 0;
  double capture_ms_ = 0;
};

}  // namespace ekv
