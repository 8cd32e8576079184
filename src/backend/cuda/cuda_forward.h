#pragma once
// cuda_forward.h -- one pass of the model over a mixed batch, top to bottom, as launches on one stream.

#include <memory>
#include <vector>

#include "backend/cuda/cuda_gemm.h"
#include "backend/cuda/cuda_graphs.h"
#include "backend/cuda/cuda_sizes.h"
#include "backend/cuda/cuda_weights.h"
#include "backend/cuda/step_memory.h"
#include "elastickv/backend.h"
#include "kernels/attention.h"

namespace ekv {

// What the chunks of a step report, once it is downloaded.
struct ChunkFlags {
  StepArray<uint32_t> clamped;     // [1] values of the step outside the number format
  StepArray<uint32_t> non_finite;  // [CudaSizes::max_batch] not 0: a key, value or query of the chunk
};

// What stays the same from start to end, owned by the backend and there before and after.
struct ForwardPlaces {
  const CudaWeights& weights;
  uint8_t* pool = nullptr;
  const int32_t* previous = nullptr;  // on the device: the tokens that the step before sampled, by sample row
  int num_pages = 0, num_ctas = 0;
};

// What a norm of `rows` rows asks the L2 for while it waits: the beginning of the matrix of `bytes` that is
// multiplied next.
ReadNext read_ahead(const void* w, size_t bytes, int rows);

// A step of decodes only is padded to decode_bucket() sequences of length 0 and, unless told otherwise,
// replayed as a graph, up to the logits of all its rows. Other steps are launched kernel by kernel.
class CudaForward {
 public:
  // Errors: no kernel of this build runs the model's shape on this device.
  static Result<std::unique_ptr<CudaForward>> make(const ModelConfig& model, const EngineConfig& config,
                                                   const CudaOptions& options, const CudaSizes& sizes,
                                                   const ForwardPlaces& places);

  // Takes the fastest matrix products. Before everything below.
  void tune(const GemmTuning& tuning, const Stream& stream);

  // Multiplies with every number of rows that has code of its own.
  void load_products(const Stream& stream);

  // Before the step's upload and download: the first places of both.
  void pack(const StepInput& input, StepMemory& step, StepMemory& results, ChunkFlags& flags);
  // Block tables, which are not in `step`.
  void upload(const Stream& stream);
  // Writes K and V of all rows and leaves the hidden state of the sample rows.
  void run(const Stream& stream);
  // Logits of `count` of the step's sample rows, fp32, CudaSizes::logit_stride apart; until the next call.
  const float* logits(int first, int count, const Stream& stream);

  // Captures the graphs of the native path, for batches of up to `max_seqs`. No step is under way; `step` and
  // `results` are those of pack().
  void warm_up(int max_seqs, StepMemory& step, StepMemory& results, const Stream& stream);

 private:
  enum Product { kQkv, kOut, kGateUp, kDown, kHead };
  // Consecutive sequences whose BASE pairs fit in the scratch of prefill together.
  struct PrefillGroup {
    int first = 0, count = 0;
    int base_pairs = 0;
  };
  // What the rest of a layer goes on with after its attention.
  struct Attended {
    const DeviceTensor& out;  // [rows][q_rows] of the attention
    DeviceTensor& residual;   // [rows][hidden] the residual stream
    int rows = 0;
  };

  CudaForward(const ModelConfig& model, const EngineConfig& config, const CudaOptions& options,
              const CudaSizes& sizes, const ForwardPlaces& places);
  void make_workspaces(int num_ctas);
  std::vector<GemmShape> gemm_shapes() const;
  std::vector<GemmOperands> gemm_operands();
  void fill_with_activations(DeviceTensor& x, const Stream& stream);
  int batch_of_decodes(const StepInput& input) const;
  void pack_rows(const StepInput& input, StepMemory& step);
  void pack_table(const BlockTableView& table);
  void pack_flags(StepMemory& results);
  void find_paths(const StepInput& input);
  void launch(const Stream& stream);
  void launch_logits(int first, int count, const Stream& stream);
  void add_prefill(int chunk, int base_pairs);
  void plan_attention(const Stream& stream);
  void prefill(const AttnArgs& args, const Stream& stream);
  AttnArgs attention_args(int layer) const;
  AttnArgs group_args(AttnArgs args, const PrefillGroup& group) const;
  void write_kv(int layer, const Stream& stream);
  void attend(int layer, const Stream& stream);
  bool only_samples_go_on() const;
  Attended all_rows();
  Attended gather_samples(const Stream& stream);
  void finish_layer(int layer, const Attended& attended, const Stream& stream);
  RmsNormArgs norm_args(const DeviceTensor& weight) const;

  const ModelConfig model_;
  const CudaWeights& weights_;
  const CudaSizes sizes_;
  KvShape shape_;
  BaseFormat format_;
  uint8_t* pool_;
  const int32_t* previous_;
  std::unique_ptr<CudaGemm> gemm_;
  CudaGraphs graphs_;

  DeviceTensor residual_, normed_, delta_;  // [rows][hidden]
  DeviceTensor wide_;                       // [rows][q, k, v or gate, up]
  DeviceTensor q_;                          // [rows][q_rows], fp16 always; gather_samples() uses it again
  DeviceTensor attended_;                   // [rows][q_rows or intermediate]
  DeviceTensor gathered_;                   // [logit rows][hidden] of sample rows
  DeviceBuffer<float> logits_;              // [logit rows][logit_stride]
  DeviceBuffer<uint8_t> decode_memory_, prefill_memory_;
  DecodeWorkspace decode_;
  PrefillWorkspace prefill_;

  StepMemory tables_;  // of block tables, whose width changes from step to step

  // Of the step. With padding, where `batch_` is not 0.
  int rows_ = 0, seqs_ = 0;
  int batch_ = 0;        // sequences of a step of decodes only; 0: another step
  int table_pairs_ = 0;  // between rows of the table on the device
  int num_decodes_ = 0;
  KvPath path_ = KvPath::native;
  std::vector<PrefillGroup> prefills_;
  StepArray<int32_t> tokens_, positions_, slots_, q_start_, kv_len_, sample_rows_;
  StepArray<PairEntry> table_;
  int table_rows_ = 0, table_width_ = 0;  // that are sent
  ChunkFlags flags_;
};

}  // namespace ekv
