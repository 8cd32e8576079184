#include "backend/cuda/cuda_sizes.h"

#include <algorithm>

#include "backend/cuda/cuda_gemm.h"
#include "backend/cuda/penalty_counts.h"
#include "backend/cuda/step_memory.h"
#include "elastickv/request.h"
#include "kernels/attention.h"
#include "kernels/sampling.h"

namespace ekv {
namespace {

constexpr int kMostLogitRows = 512;  // 300 MB of fp32 at a vocabulary of 152K
constexpr int kFewRingPairs = 32;    // 64 MiB for Llama-3.1-8B: a millisecond of copying to the host
constexpr size_t kMostRingBytes = size_t(1) << 30;  // 512 pairs of Llama-3.1-8B, of a step of 8,192 tokens
// Of a row that is sampled; one that only reports a given token has one.
constexpr int kRowBiases = kMaxLogitBias + kMaxStopTokenIds + kMaxEosIds;
constexpr size_t kMostPairBytes = size_t(1) << 29;  // of prefill's scratch, beyond what one sequence needs

// One sequence must fit; more than that saves rounds of prefill when several sequences with BASE pairs are in a
// step.
int scratch_pairs(const KvShape& shape, const CudaSizes& sizes) {
  const size_t pair_bytes = 2 * shape.slot_bytes() * size_t(shape.kv_heads);
  const int more = int(std::min<size_t>(kMostPairBytes / pair_bytes, size_t(8) * size_t(sizes.max_pairs)));
  return std::max(sizes.max_pairs, more);
}

// A step of prefill demotes a pair for each page that its tokens need. Those that find no place in the ring
// wait for copies, and the chunks wait for them: with 32 places 11 to 15 ms for each GB on an H200, where steps
// at the end of a first wave took 223 ms and take 207 with room for all.
int ring_pairs(const KvShape& shape, const CudaSizes& sizes) {
  const int wanted = sizes.max_rows / kBlockTokens;
  const size_t most = kMostRingBytes / shape.low_pair_bytes();
  return std::max(kFewRingPairs, int(std::min(size_t(wanted), most)));
}

size_t weight_bytes(const ModelConfig& m, int max_positions) {
  return size_t(m.num_parameters()) * sizeof(uint16_t) +
         size_t(max_positions) * size_t(m.head_dim) * sizeof(float);
}

size_t activation_bytes(const ModelConfig& m, const CudaSizes& s) {
  const size_t per_row =
      size_t(3 * m.hidden + s.widest_row + m.q_rows() + std::max(m.q_rows(), m.intermediate));
  return size_t(row_bucket(s.max_rows)) * per_row * sizeof(uint16_t) +
         size_t(row_bucket(s.logit_rows)) *
             (size_t(m.hidden) * sizeof(uint16_t) + size_t(s.logit_stride) * sizeof(float)) +
         kGemmWorkspaceBytes;
}

size_t step_bytes(const CudaSizes& s) {
  const auto bytes = [](size_t count, size_t size) { return (count * size + 255) / 256 * 256; };
  return 3 * bytes(size_t(std::max(s.max_rows, s.max_batch)), 4) + 2 * bytes(size_t(s.max_batch) + 1, 4) +
         bytes(size_t(s.max_samples + s.max_batch), 4) + bytes(size_t(s.max_samples), sizeof(RowSampling)) +
         2 * bytes(size_t(s.max_biases), 4) + 3 * bytes(size_t(s.max_jobs), sizeof(PairJob)) +
         3 * bytes(size_t(s.max_jobs), 4);
}

size_t result_bytes(const CudaSizes& s) {
  const auto bytes = [](size_t count) { return (count * 4 + 255) / 256 * 256; };
  return flag_bytes(s) + 3 * bytes(size_t(s.max_samples)) + 2 * bytes(size_t(s.max_samples) * kMaxTopLogprobs);
}

}  // namespace

size_t flag_bytes(const CudaSizes& s) {
  return StepMemory::bytes_for<uint32_t>(1) + StepMemory::bytes_for<uint32_t>(size_t(s.max_batch));
}

size_t table_bytes(const CudaSizes& s) {
  return StepMemory::bytes_for<PairEntry>(size_t(s.max_batch) * size_t(s.max_pairs));
}

KvShape cuda_kv_shape(const ModelConfig& model, int num_pages) {
  KvShape shape = model.kv_shape();
  shape.pages = num_pages;
  return shape;
}

CudaSizes cuda_sizes(const ModelConfig& m, const EngineConfig& config, int num_ctas, int num_pages) {
  const KvShape shape = cuda_kv_shape(m, num_pages);
  const bool base = config.fidelity.makes_base(), elastic = config.fidelity.policy == KvPolicy::elastic;
  CudaSizes s;
  s.max_rows = config.scheduler.max_step_tokens;
  s.max_seqs = std::min(config.scheduler.max_step_seqs, s.max_rows);
  s.max_batch = std::min(decode_bucket(s.max_seqs), row_bucket(s.max_rows));
  s.widest_row = std::max({m.q_rows() + 2 * m.kv_rows(), 2 * m.intermediate, m.hidden});
  s.max_positions = config.max_model_len;
  s.max_pairs = ceil_div(config.max_model_len, kPairTokens) + 1;
  s.max_samples = s.max_rows + s.max_seqs;
  s.logit_rows = std::max(std::min(16, s.max_samples), std::min(s.max_batch, kMostLogitRows));
  s.logit_stride = count_stride(m.vocab);
  s.max_biases = s.max_seqs * kRowBiases + s.max_samples;
  s.max_jobs = num_pages > 0 ? std::min(num_pages, 1 << 16) : 1 << 16;
  s.scratch_pairs = base ? scratch_pairs(shape, s) : 0;
  s.staged_pairs = elastic ? std::max(1, config.fidelity.max_restores) : 0;
  s.ring_pairs = elastic ? ring_pairs(shape, s) : 0;

  s.weight_bytes = weight_bytes(m, s.max_positions);
  s.activation_bytes = activation_bytes(m, s);
  s.step_bytes = step_bytes(s) + table_bytes(s);
  s.result_bytes = result_bytes(s);
  s.attention_bytes =
      decode_workspace(shape, m.heads, s.max_batch, s.max_pairs, num_ctas).bytes +
      prefill_workspace(shape, m.heads, s.max_rows, s.max_seqs, s.max_pairs, s.scratch_pairs).bytes;
  s.transition_bytes = size_t(s.staged_pairs + s.ring_pairs) * shape.low_pair_bytes();
  s.sampling_bytes = sampling_workspace_bytes(s.logit_rows, m.vocab) + PenaltyCounts::device_bytes(s, m.vocab);
  return s;
}

}  // namespace ekv
