#pragma once
// cpu_backend.h -- the CPU backend's state: weights in panels, the KV pool, activations of one step.

#include <array>
#include <functional>
#include <vector>

#include "backend/cpu/cpu_attention.h"
#include "backend/cpu/cpu_kv.h"
#include "backend/cpu/cpu_ops.h"
#include "backend/cpu/cpu_sampler.h"
#include "backend/cpu/cpu_transitions.h"
#include "backend/cpu/cpu_weights.h"
#include "elastickv/backend.h"

namespace ekv {

// submit() does the work but for the copies, which collect() makes before it hands everything out. So a second
// step in flight gains nothing here: it is for tests, which run whole models with it. Keeps its own copy of the
// matrices, and of `model`, whose bytes it shares, for the embeddings.
class CpuBackend : public Backend {
 public:
  CpuBackend(const Model& model, const KvShape& shape, BaseFormat format, const CpuOptions& options);

  const BackendInfo& info() const override { return info_; }
  void submit(const StepInput& input) override;
  const StepOutput& collect() override;

  size_t matrix_bytes() const { return weights_.matrix_bytes(); }  // read by a step of any size
  int64_t num_clamped() const { return pool_.num_clamped(); }      // KV values outside the number format so far
  int num_threads() const { return threads_.size(); }
  KvPath attention_path() const { return attention_.path(); }  // of the last step with tokens

  // Called for every sample row before it is sampled, on any thread of the backend, rows at the same time.
  using LogitsReader = std::function<void(int sample_row, std::span<const float> logits)>;
  void read_logits(LogitsReader reader) { logits_reader_ = std::move(reader); }

 private:
  TokenId known(TokenId token) const;
  void resolve(const StepInput& input);
  void forward(const StepInput& input);
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

  const Model model_;
  const ModelConfig& config_;
  const CpuKernels& kernels_;
  CpuThreads threads_;
  CpuContext cpu_;
  CpuWeights weights_;
  CpuKvPool pool_;
  CpuTransitions transitions_;
  CpuAttention attention_;
  RopeTable rope_;
  std::vector<CpuSampler> samplers_;  // [threads]
  BackendInfo info_;
  // Of the steps in flight and of the one before: tokens that are pending in a step stand in the last but one.
  static constexpr int kOutputs = kMostStepsInFlight + 1;
  std::array<StepOutput, kOutputs> outputs_;
  int64_t num_submitted_ = 0, num_collected_ = 0;
  std::vector<TokenId> tokens_;  // [rows] of the step being computed
  StepOutput& output() { return outputs_[size_t(num_submitted_ % kOutputs)]; }  // likewise
  LogitsReader logits_reader_;

  std::vector<float> hidden_, normed_;               // [rows][hidden]: residual stream, its norm
  std::vector<float> wide_;                          // [rows][qkv or gate and up]
  std::vector<float> attended_;                      // [rows][q_rows or intermediate]
  std::vector<float> delta_;                         // [rows][hidden, padded]: what a block adds
  std::vector<float> gathered_, logits_;             // [kLogitRows][hidden], [kLogitRows][vocab, padded]
  std::vector<int32_t> row_chunk_;                   // [rows] chunk of each row
  std::vector<uint8_t> row_failed_, sample_failed_;  // [rows], [sample rows]: not finite
};

}  // namespace ekv
