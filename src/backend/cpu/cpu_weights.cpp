#include "backend/cpu/cpu_weights.h"

#include <array>

namespace ekv {
namespace {

std::vector<float> qkv_bias(const LayerWeights& w) {
  std::vector<float> bias;
  for (const Tensor* part : {&w.q_bias, &w.k_bias, &w.v_bias}) {
    const std::vector<float> values = to_float(*part);
    bias.insert(bias.end(), values.begin(), values.end());
  }
  return bias;
}

CpuLayer pack_layer(const ModelConfig& config, const LayerWeights& w, CpuThreads& threads) {
  using Stack = std::vector<const Tensor*>;
  CpuLayer layer;
  layer.input_norm = to_float(w.input_norm);
  layer.post_norm = to_float(w.post_norm);
  if (config.qkv_bias) layer.qkv_bias = qkv_bias(w);
  if (config.qk_norm) {
    layer.q_norm = to_float(w.q_norm);
    layer.k_norm = to_float(w.k_norm);
  }
  layer.qkv = PackedMatrix(Stack{&w.q, &w.k, &w.v}, config.hidden, threads);
  layer.o = PackedMatrix(Stack{&w.o}, config.q_rows(), threads);
  layer.gate_up = PackedMatrix(Stack{&w.gate, &w.up}, config.hidden, threads);
  layer.down = PackedMatrix(Stack{&w.down}, config.intermediate, threads);
  return layer;
}

}  // namespace

CpuWeights::CpuWeights(const Model& model, CpuThreads& threads)
    : final_norm(to_float(model.weights().final_norm)),
      lm_head(std::array{&model.weights().lm_head}, model.config().hidden, threads) {
  for (const LayerWeights& layer : model.weights().layers) {
    layers.push_back(pack_layer(model.config(), layer, threads));
  }
}

size_t CpuWeights::matrix_bytes() const {
  size_t bytes = lm_head.bytes();
  for (const CpuLayer& layer : layers) {
    bytes += layer.qkv.bytes() + layer.o.bytes() + layer.gate_up.bytes() + layer.down.bytes();
  }
  return bytes;
}

}  // namespace ekv
