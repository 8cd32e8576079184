#pragma once
// cuda_sizes.h -- how much of everything the CUDA backend takes, from the model and the engine's settings
// alone. The buffers are made to these sizes, and the KV pool gets what they leave.

#include "backend/cuda/row_buckets.h"
#include "elastickv/config.h"
#include "elastickv/kv_jobs.h"
#include "elastickv/model.h"

namespace ekv {

struct CudaSizes {
  int max_rows = 0;       // tokens of a step; activations have room for row_bucket(max_rows)
  int max_seqs = 0;       // sequences of a step
  int max_batch = 0;      // the same with padding
  int widest_row = 0;     // elements of gate and up, or of q, k and v; while products are tuned, of a norm
  int max_pairs = 0;      // pairs of a sequence
  int max_samples = 0;    // sample rows of a step
  int logit_rows = 0;     // rows of logits held at once
  int logit_stride = 0;   // elements between rows of logits
  int max_biases = 0;     // entries of all lists of logit biases of a step
  int max_jobs = 0;       // changes of fidelity and extractions of low planes in a step
  int scratch_pairs = 0;  // BASE pairs that prefill can expand at once; 0: the policy makes none
  int staged_pairs = 0;   // low planes that came back and wait for their promotion
  int ring_pairs = 0;     // low planes on their way to the host
  int max_positions = 0;

  size_t weight_bytes = 0;      // matrices, norms, rotary tables
  size_t activation_bytes = 0;  // residual stream to logits
  size_t step_bytes = 0;        // arrays that go to the device with a step, and block tables
  size_t result_bytes = 0;      // and those that come back
  size_t attention_bytes = 0;   // workspaces of decode and prefill
  size_t transition_bytes = 0;  // low planes on the device
  size_t sampling_bytes = 0;    // workspace, and token counts for penalties

  // Device memory without the KV pool.
  size_t total_bytes() const {
    return weight_bytes + activation_bytes + step_bytes + result_bytes + attention_bytes + transition_bytes +
           sampling_bytes;
  }
};

// `num_ctas`: multiprocessors of the device. `num_pages`: of the pool, 0 while that is not known; the result is
// then an upper bound.
CudaSizes cuda_sizes(const ModelConfig& model, const EngineConfig& config, int num_ctas, int num_pages);

// Parts of step_bytes and result_bytes: block tables, and what the chunks of a step report.
size_t table_bytes(const CudaSizes& sizes);
size_t flag_bytes(const CudaSizes& sizes);

KvShape cuda_kv_shape(const ModelConfig& model, int num_pages);

}  // namespace ekv
