// run_cuda.cpp -- the same call on the GPU, through the launchers.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/attention.h"
#include "kernels/cuda_check.h"
#include "tests/support/device_array.h"
#include "tests/support/run_attention.h"

namespace ekv::test {
namespace {

KvPath kv_path(Path path) {
  return path == Path::native       ? KvPath::native
         : path == Path::structured ? KvPath::structured
                                    : KvPath::general;
}

int multiprocessors() {
  int device, count;
  cuda_check(cudaGetDevice(&device));
  cuda_check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

size_t most(const std::vector<AttnInput>& inputs, auto size) {
  size_t n = 0;
  for (const AttnInput& in : inputs) n = std::max(n, size_t(size(in)));
  return n;
}

// Device memory for one batch after another, and the launches of a step on it.
class AttnDevice {
 public:
  AttnDevice(const std::vector<AttnInput>& inputs, const AttnRun& run)
      : run_(run),
        rows_(most(inputs, [](const AttnInput& in) { return in.rows(); })),
        pool_(inputs[0].shape.page_bytes() * inputs[0].shape.pages),
        q_(most(inputs, [](const AttnInput& in) { return in.q.size(); })),
        out_(q_.size()),
        lse_(rows_ * inputs[0].heads),
        tables_(inputs[0].tables.size()),
        q_start_(inputs[0].q_start.size()),
        kv_len_(inputs[0].kv_len.size()) {
    const AttnInput& in = inputs[0];
    args_.shape = in.shape;
    args_.layer = in.layer;
    args_.heads = in.heads;
    args_.num_seqs = in.num_seqs();
    args_.max_pairs = in.max_pairs;
    args_.rows = int(rows_);
    args_.scale = in.scale;
    args_.format = in.format;
    args_.out_element = run.out;
    args_.q = q_.data();
    args_.out = out_.data();
    args_.lse = lse_.data();
    args_.pool = pool_.data();
    args_.tables = tables_.data();
    args_.q_start = q_start_.data();
    args_.kv_len = kv_len_.data();
    const int num_ctas = run.num_ctas ? std::min(run.num_ctas, multiprocessors()) : multiprocessors();
    decode_ = decode_workspace(in.shape, in.heads, in.num_seqs(), in.max_pairs, num_ctas);
    decode_.memory = take(decode_.bytes, 0);
    const int base_pairs = int(most(inputs, [](const AttnInput& i) {
      return std::count_if(i.tables.begin(), i.tables.end(), [](PairEntry e) { return e.is_base(); });
    }));
    prefill_ = prefill_workspace(in.shape, in.heads, int(rows_), in.num_seqs(), in.max_pairs, base_pairs);
    prefill_.memory = take(prefill_.bytes, kPoison);
  }

  // The pool gets the listed pages; everything else in it is poison.
  void upload(const AttnInput& in) {
    const KvShape& s = in.shape;
    cuda_check(cudaMemset(pool_.data(), kPoison, pool_.size()));
    for (const auto& [page, bytes] : in.pages)
      cuda_check(cudaMemcpy(pool_.data() + s.slot_at(in.layer, page, 0), bytes.data(), bytes.size(),
                            cudaMemcpyHostToDevice));
    q_.upload(in.q);
    tables_.upload(in.tables);
    q_start_.upload(in.q_start);
    kv_len_.upload(in.kv_len);
    clear_output();
  }
  void clear_output() {
    out_.upload(std::vector<uint16_t>(out_.size(), kUntouched));
    lse_.upload(std::vector<float>(lse_.size(), NAN));
  }
  void plan(cudaStream_t stream) const {
    launch_decode_plan(args_, kv_path(run_.path), decode_, stream);
    launch_prefill_plan(args_, prefill_, stream);
  }
  void attend(cudaStream_t stream) const {
    launch_decode(args_, kv_path(run_.path), decode_, stream);
    launch_prefill(args_, kv_path(run_.path), prefill_, stream,
                   run_.plain_mma ? MatrixUnit::mma : MatrixUnit::wgmma);
  }
  AttnOutput download() const { return {out_.download(), lse_.download()}; }

 private:
  uint8_t* take(size_t bytes, int value) {
    memory_.emplace_back(bytes);
    cuda_check(cudaMemset(memory_.back().data(), value, bytes));
    return memory_.back().data();
  }

  AttnRun run_;
  size_t rows_;
  DeviceArray<uint8_t> pool_;
  DeviceArray<uint16_t> q_, out_;
  DeviceArray<float> lse_;
  DeviceArray<PairEntry> tables_;
  DeviceArray<int32_t> q_start_, kv_len_;
  std::vector<DeviceArray<uint8_t>> memory_;
  AttnArgs args_;
  DecodeWorkspace decode_;
  PrefillWorkspace prefill_;
};

}  // namespace

AttnOutput run_attention(const AttnInput& in, const AttnRun& run) {
  AttnDevice device({in}, run);
  device.upload(in);
  device.plan(nullptr);
  AttnOutput result;
  for (int i = 0; i < run.repeats; ++i) {
    device.clear_output();
    device.attend(nullptr);
    AttnOutput got = device.download();
    got.repeats_equal = i == 0 || (result.repeats_equal && got.out == result.out);
    result = std::move(got);
  }
  return result;
}

std::vector<AttnOutput> run_attention_replayed(const std::vector<AttnInput>& inputs, const AttnRun& run) {
  AttnDevice device(inputs, run);
  device.upload(inputs[0]);
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  cuda_check(cudaStreamCreate(&stream));
  cuda_check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  device.plan(stream);
  device.attend(stream);
  cuda_check(cudaStreamEndCapture(stream, &graph));
  cuda_check(cudaGraphInstantiate(&exec, graph, 0));
  std::vector<AttnOutput> results;
  for (const AttnInput& in : inputs) {
    device.upload(in);
    cuda_check(cudaGraphLaunch(exec, stream));
    cuda_check(cudaStreamSynchronize(stream));
    results.push_back(device.download());
  }
  cuda_check(cudaGraphExecDestroy(exec));
  cuda_check(cudaGraphDestroy(graph));
  cuda_check(cudaStreamDestroy(stream));
  return results;
}

std::string attention_target() {
  cudaDeviceProp properties;
  cuda_check(cudaGetDeviceProperties(&properties, 0));
  return properties.name;
}

}  // namespace ekv::test
