#pragma once
// cuda_forward.h -- one pass of the model over a mixed batch, top to bottom, as launches on one stream.

#include <memory>
#include <vector>

#include "backend/cuda/cuda_gemm.h"
#include "backend/cuda/cuda_sizes.h"
#include "backend/cuda/cuda_weights.h"
#include "backend/cuda/step_memory.h"
#include "elastickv/backend.h"
#include "kernels/attention.h"

namespace ekv {

class CudaForward {
 public:
  // Errors: no kernel of this build runs the model's shape on this device. `weights` and `pool` outlive it.
  static Result<std::unique_ptr<CudaForward>> make(const ModelConfig& model, const EngineConfig& config,
                                                   const CudaWeights& weights, const CudaSizes& sizes,
                                                   uint8_t* pool, int num_pages, int num_ctas);

  // Before the step's upload and download: places in both.
  void pack(const StepInput& input, StepMemory& step, StepMemory& results);
  // Writes K and V of all rows and leaves the hidden state of every row.
  void run(const Stream& stream);
  // Logits of `count` of the step's sample rows, fp32, CudaSizes::logit_stride apart; until the next call.
  const float* logits(int first, int count, const Stream& stream);

  // After the step's download: whether a key, value or query of the chunk was not finite.
  bool failed(size_t chunk) const { return non_finite_.host[chunk] != 0; }
  uint32_t num_clamped() const { return clamped_.host[0]; }  // values of the step outside the number format

 private:
  enum Product { kQkv, kOut, kGateUp, kDown, kHead };
  // Consecutive sequences whose BASE pairs fit in the scratch of prefill together.
  struct PrefillGroup {
    int first = 0, count = 0;
    int base_pairs = 0;
  };

  CudaForward(const ModelConfig& model, const EngineConfig& config, const CudaWeights& weights,
              const CudaSizes& sizes, uint8_t* pool, int num_pages, int num_ctas);
  void make_workspaces(int num_ctas);
  std::vector<GemmShape> gemm_shapes() const;
  void find_paths(const StepInput& input);
  void add_prefill(int chunk, int base_pairs);
  void plan_attention(const Stream& stream);
  void prefill(const AttnArgs& args, const Stream& stream);
  AttnArgs attention_args(int layer) const;
  AttnArgs group_args(AttnArgs args, const PrefillGroup& group) const;
  void attention_block(int layer, const Stream& stream);
  void mlp_block(int layer, const Stream& stream);
  void norm(const DeviceTensor& weight, bool add_delta, const Stream& stream);
  void write_kv(int layer, const Stream& stream);
  void multiply(Product product, const DeviceTensor& w, const DeviceTensor& x, DeviceTensor& y,
                const Stream& stream);

  const ModelConfig model_;
  const CudaWeights& weights_;
  const CudaSizes sizes_;
  KvShape shape_;
  BaseFormat format_;
  uint8_t* pool_;
  std::unique_ptr<CudaGemm> gemm_;

  DeviceTensor residual_, normed_, delta_;  // [rows][hidden]
  DeviceTensor wide_;                       // [rows][q, k, v or gate, up]
  DeviceTensor q_;                          // [rows][q_rows]
  DeviceTensor attended_;                   // [rows][q_rows or intermediate]
  DeviceTensor gathered_;                   // [logit rows][hidden]
  DeviceBuffer<float> logits_;              // [logit rows][logit_stride]
  DeviceBuffer<uint8_t> decode_memory_, prefill_memory_;
  DecodeWorkspace decode_;
  PrefillWorkspace prefill_;

  // Of the step.
  int rows_ = 0, seqs_ = 0, table_pairs_ = 0;
  int num_decodes_ = 0;
  KvPath path_ = KvPath::native;
  std::vector<PrefillGroup> prefills_;
  StepArray<int32_t> tokens_, positions_, slots_, q_start_, kv_len_, sample_rows_;
  StepArray<PairEntry> table_;
  StepArray<uint32_t> non_finite_, clamped_;
};

}  // namespace ekv
