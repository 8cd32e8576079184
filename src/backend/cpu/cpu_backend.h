#pragma once
// cpu_backend.h -- the CPU backend's state: weights in panels, the KV pool, activations of one step.

#include <vector>

#include "backend/cpu/cpu_attention.h"
#include "backend/cpu/cpu_kv.h"
#include "backend/cpu/cpu_ops.h"
#include "backend/cpu/cpu_sampler.h"
#include "backend/cpu/cpu_weights.h"
#include "elastickv/backend.h"

namespace ekv {

// submit() does the work, collect() hands it out. `model` outlives the backend, which keeps its own copy of the
// matrices and reads embeddings from the model.
class CpuBackend : public Backend {
 public:
  // threads 0: all cores the process may use.
  CpuBackend(const Model& model, const KvShape& shape, BaseFormat format, int threads);

  const BackendInfo& info() const override { return info_; }
  void submit(const StepInput& input) override;
  const StepOutput& collect() override;

  size_t matrix_bytes() const { return weights_.matrix_bytes(); }  // read by a step of any size
  int64_t num_clamped() const { return pool_.num_clamped(); }      // KV values outside the number format so far
  int num_threads() const { return threads_.size(); }

 private:
  void attention_block(int layer, const StepInput& input);
  void prepare_qkv(int layer, const StepInput& input, int64_t ld);
  void turn_head(const std::vector<float>& norm, int row, float* x);
  void begin_rows(const StepInput& input);
  void list_invalid_chunks(const StepInput& input);
  void mlp_block(int layer, int rows);
  void sample(const StepInput& input);
  void reserve(int rows, int sample_rows);
  float eps() const { return float(config_.rms_eps); }
  int64_t delta_ld() const { return weights_.layers.front().o.padded_outputs(); }

  const Model& model_;
  const ModelConfig& config_;
  const CpuKernels& kernels_;
  CpuThreads threads_;
  CpuContext cpu_;
  CpuWeights weights_;
  CpuKvPool pool_;
  CpuAttention attention_;
  RopeTable rope_;
  std::vector<CpuSampler> samplers_;  // [threads]
  BackendInfo info_;
  StepOutput output_;

  std::vector<float> hidden_, normed_;               // [rows][hidden]: residual stream, its norm
  std::vector<float> wide_;                          // [rows][qkv or gate and up]
  std::vector<float> attended_;                      // [rows][q_rows or intermediate]
  std::vector<float> delta_;                         // [rows][hidden, padded]: what a block adds
  std::vector<float> gathered_, logits_;             // [kLogitRows][hidden], [kLogitRows][vocab, padded]
  std::vector<int32_t> row_chunk_;                   // [rows] chunk of each row
  std::vector<uint8_t> row_failed_, sample_failed_;  // [rows], [sample rows]: not finite
};

}  // namespace ekv
