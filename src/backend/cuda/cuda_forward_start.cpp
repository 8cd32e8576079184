// cuda_forward_start.cpp -- what CudaForward does before the first step: matrix products and graphs.

#include <fmt/format.h>

#include <algorithm>

#include "backend/cuda/cuda_forward.h"
#include "kernels/layer_ops.h"

namespace ekv {
namespace {

// The next smaller decode_bucket(); 0 below 1.
int batch_below(int batch) {
  int below = batch - 1;
  while (below > 0 && decode_bucket(below) == batch) --below;
  return below;
}

}  // namespace

// In the order of Product.
std::vector<GemmShape> CudaForward::gemm_shapes() const {
  const ModelConfig& m = model_;
  const auto shape = [&](int outputs, int inputs, After after) {
    return GemmShape{.outputs = outputs,
                     .inputs = inputs,
                     .max_rows = sizes_.max_rows,
                     .out_stride = outputs,
                     .after = after,
                     .element = weights_.element};
  };
  return {shape(m.q_rows() + 2 * m.kv_rows(), m.hidden, After::nothing),
          shape(m.hidden, m.q_rows(), After::norm),
          shape(2 * m.intermediate, m.hidden, After::activation),
          shape(m.hidden, m.intermediate, After::norm),
          {.outputs = m.vocab,
           .inputs = m.hidden,
           .max_rows = sizes_.logit_rows,
           .fp32_out = true,
           .out_stride = sizes_.logit_stride,
           .element = weights_.element}};
}

// In the order of Product. Each has a norm on both sides as in a step, or on one; none the LM head, whose
// neighbours in a step of decodes are not launched programmatically.
std::vector<GemmOperands> CudaForward::gemm_operands() {
  // The norm must not change normed_, which is an x.
  RmsNormArgs norm = norm_args(weights_.final_norm);
  norm.out = wide_.data();
  const auto ahead = [this](size_t matrix_bytes) {
    return [this, matrix_bytes](const void* w, int rows, cudaStream_t stream) {
      RmsNormArgs args = norm_args(weights_.final_norm);
      args.x = delta_.data(), args.residual = nullptr, args.num_rows = rows;
      args.next = read_ahead(w, matrix_bytes, rows);
      launch_rms_norm(args, stream);
    };
  };
  const CudaLayer& any = weights_.layers.front();
  std::vector<GemmOperands> all{{.x = normed_.data(), .y = wide_.data(), .ahead = ahead(any.qkv.bytes())},
                                {.x = attended_.data(), .y = delta_.data(), .norm = norm},
                                {.x = normed_.data(),
                                 .y = wide_.data(),
                                 .activated = attended_.data(),
                                 .ahead = ahead(any.gate_up.bytes())},
                                {.x = attended_.data(), .y = delta_.data(), .norm = norm},
                                {.weights = {weights_.lm_head()}, .x = gathered_.data(), .y = logits_.data()}};
  for (const CudaLayer& layer : weights_.layers) {
    all[kQkv].weights.push_back(layer.qkv.data());
    all[kOut].weights.push_back(layer.o.data());
    all[kGateUp].weights.push_back(layer.gate_up.data());
    all[kDown].weights.push_back(layer.down.data());
  }
  return all;
}

// Norms of embeddings: numbers that differ as those of a step do. How fast products of many rows are is a
// matter of power, and multipliers that see the same bits again and again take little of it.
void CudaForward::fill_with_activations(DeviceTensor& x, const Stream& stream) {
  const int rows = int(x.size() / size_t(model_.hidden));
  for (int first = 0; first < rows; first += model_.vocab) {
    RmsNormArgs norm = norm_args(weights_.final_norm);
    norm.x = weights_.embedding.data(), norm.residual = nullptr;
    norm.out = x.data() + size_t(first) * size_t(model_.hidden);
    norm.num_rows = std::min(rows - first, model_.vocab);
    launch_rms_norm(norm, stream.get());
  }
}

void CudaForward::tune(const GemmTuning& tuning, const Stream& stream) {
  for (DeviceTensor* x : {&normed_, &attended_, &gathered_, &delta_}) fill_with_activations(*x, stream);
  cuda_check(cudaStreamSynchronize(stream.get()));
  gemm_->tune(gemm_operands(), tuning, stream.get());
}

void CudaForward::load_products(const Stream& stream) {
  gemm_->load(gemm_operands(), stream.get());
  // tune() and load() have added up products in it, to infinity perhaps.
  cuda_check(cudaMemsetAsync(residual_.data(), 0, residual_.bytes(), stream.get()));
}

void CudaForward::warm_up(int max_seqs, StepMemory& step, StepMemory& results, const Stream& stream) {
  if (!graphs_.enabled()) return;
  const int most = std::min({decode_bucket(max_seqs), sizes_.max_batch, sizes_.logit_rows});
  for (int batch = most; batch > 0; batch = batch_below(batch)) {
    step.begin_step(), results.begin_step();
    num_decodes_ = rows_ = seqs_ = batch_ = batch;
    path_ = KvPath::native;
    prefills_.clear();
    pack_rows({}, step);
    q_start_.host[0] = 0;
    pack_table({});
    pack_flags(results);
    step.upload(stream);
    launch(stream);  // outside of a capture first, in which CUDA may refuse what a first launch sets up
    graphs_.prepare({batch_, path_}, stream, [&] { launch(stream); });
    cuda_check(cudaStreamSynchronize(stream.get()));
  }
  log_info(fmt::format("captured {} CUDA graphs for decodes of up to {} sequences in {:.0f} ms",
                       graphs_.num_captured(), most, graphs_.capture_ms()));
}

}  // namespace ekv
