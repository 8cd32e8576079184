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
  const auto shape = [&](int outputs, int inputs) {
    return GemmShape{.outputs = outputs, .inputs = inputs, .max_rows = sizes_.max_rows, .out_stride = outputs};
  };
  GemmShape gate_up = shape(2 * m.intermediate, m.hidden);
  gate_up.gated = true;
  return {shape(m.q_rows() + 2 * m.kv_rows(), m.hidden),
          shape(m.hidden, m.q_rows()),
          gate_up,
          shape(m.hidden, m.intermediate),
          {.outputs = m.vocab,
           .inputs = m.hidden,
           .max_rows = sizes_.logit_rows,
           .fp32_out = true,
           .out_stride = sizes_.logit_stride}};
}

// In the order of Product. Between products a norm stands for all small kernels: one that makes x where the
// step has a norm ahead of the product, else one that reads y. None at the LM head, whose neighbours are not
// launched programmatically.
std::vector<GemmOperands> CudaForward::gemm_operands() {
  const auto norm_of = [this](const DeviceTensor& x) {
    return [this, &x](int rows, cudaStream_t stream) {
      launch_rms_norm({.x = x.data(),
                       .weight = weights_.final_norm.data(),
                       .out = normed_.data(),
                       .num_rows = rows,
                       .hidden = model_.hidden,
                       .epsilon = float(model_.rms_eps),
                       .element = Element::fp16},
                      stream);
    };
  };
  std::vector<GemmOperands> all{
      {.weights = {}, .x = normed_.data(), .y = wide_.data(), .between = norm_of(attended_)},
      {.weights = {}, .x = attended_.data(), .y = delta_.data(), .between = norm_of(delta_)},
      {.weights = {},
       .x = normed_.data(),
       .y = wide_.data(),
       .activated = attended_.data(),
       .between = norm_of(attended_)},
      {.weights = {}, .x = attended_.data(), .y = delta_.data(), .between = norm_of(delta_)},
      {.weights = {weights_.lm_head()}, .x = gathered_.data(), .y = logits_.data(), .between = {}}};
  for (const CudaLayer& layer : weights_.layers) {
    all[kQkv].weights.push_back(layer.qkv.data());
    all[kOut].weights.push_back(layer.o.data());
    all[kGateUp].weights.push_back(layer.gate_up.data());
    all[kDown].weights.push_back(layer.down.data());
  }
  return all;
}

void CudaForward::tune(const GemmTuning& tuning, const Stream& stream) {
  constexpr int kSmall = 0x2c;  // bytes of fp16 0.065: with zeros the multipliers would have nothing to do
  DeviceTensor* const inputs[] = {&normed_, &attended_, &gathered_};
  for (const DeviceTensor* x : inputs) cuda_check(cudaMemsetAsync(x->data(), kSmall, x->bytes(), stream.get()));
  cuda_check(cudaStreamSynchronize(stream.get()));
  gemm_->tune(gemm_operands(), tuning, stream.get());
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
    launch(stream);  // loads the kernels
    graphs_.prepare({batch_, path_}, stream, [&] { launch(stream); });
    cuda_check(cudaStreamSynchronize(stream.get()));
  }
  log_info(fmt::format("captured {} CUDA graphs for decodes of up to {} sequences in {:.0f} ms",
                       graphs_.num_captured(), most, graphs_.capture_ms()));
}

}  // namespace ekv
