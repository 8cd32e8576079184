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

// The pool with only the listed pages in it; everything else is poison.
DeviceArray<uint8_t> upload_pool(const AttnInput& in) {
  const KvShape& s = in.shape;
  DeviceArray<uint8_t> pool(s.page_bytes() * s.pages);
  cuda_check(cudaMemset(pool.data(), kPoison, pool.size()));
  for (const auto& [page, bytes] : in.pages)
    cuda_check(cudaMemcpy(pool.data() + s.slot_at(in.layer, page, 0), bytes.data(), bytes.size(),
                          cudaMemcpyHostToDevice));
  return pool;
}

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

}  // namespace

AttnOutput run_attention(const AttnInput& in, const AttnRun& run) {
  const DeviceArray<uint8_t> pool = upload_pool(in);
  const DeviceArray<uint16_t> q(in.q);
  const DeviceArray<PairEntry> tables(in.tables);
  const DeviceArray<int32_t> q_start(in.q_start), kv_len(in.kv_len);
  AttnOutput result;
  result.out.assign(in.q.size(), kUntouched);
  result.lse.assign(size_t(in.rows()) * in.heads, NAN);
  const std::vector<uint16_t> untouched_out = result.out;
  const std::vector<float> untouched_lse = result.lse;
  DeviceArray<uint16_t> out(untouched_out);
  DeviceArray<float> lse(untouched_lse);

  AttnArgs args;
  args.shape = in.shape;
  args.layer = in.layer;
  args.heads = in.heads;
  args.num_seqs = in.num_seqs();
  args.max_pairs = in.max_pairs;
  args.rows = in.rows();
  args.scale = in.scale;
  args.format = in.format;
  args.q = q.data();
  args.out = out.data();
  args.lse = lse.data();
  args.pool = pool.data();
  args.tables = tables.data();
  args.q_start = q_start.data();
  args.kv_len = kv_len.data();

  DecodeWorkspace w =
      decode_workspace(in.shape, in.heads, in.num_seqs(), in.max_pairs,
                       run.num_ctas ? std::min(run.num_ctas, multiprocessors()) : multiprocessors());
  DeviceArray<uint8_t> memory(w.bytes);
  cuda_check(cudaMemset(memory.data(), 0, memory.size()));
  w.memory = memory.data();
  int base_pairs = 0;
  for (const PairEntry& e : in.tables) base_pairs += e.is_base();
  PrefillWorkspace pw =
      prefill_workspace(in.shape, in.heads, in.rows(), in.num_seqs(), in.max_pairs, base_pairs);
  DeviceArray<uint8_t> prefill_memory(pw.bytes);
  cuda_check(cudaMemset(prefill_memory.data(), kPoison, prefill_memory.size()));
  pw.memory = prefill_memory.data();

  const KvPath path = kv_path(run.path);
  launch_decode_plan(args, path, w, nullptr);
  launch_prefill_plan(args, pw, nullptr);
  for (int i = 0; i < run.repeats; ++i) {
    out.upload(untouched_out);
    lse.upload(untouched_lse);
    launch_decode(args, path, w, nullptr);
    launch_prefill(args, path, pw, nullptr, run.plain_mma ? MatrixUnit::mma : MatrixUnit::wgmma);
    const std::vector<uint16_t> got = out.download();
    if (i > 0 && got != result.out) result.repeats_equal = false;
    result.out = got;
    result.lse = lse.download();
  }
  return result;
}

std::string attention_target() {
  cudaDeviceProp properties;
  cuda_check(cudaGetDeviceProperties(&properties, 0));
  return properties.name;
}

}  // namespace ekv::test
