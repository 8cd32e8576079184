#pragma once
// weight_table.h -- the name, the place and the shape of every weight of a layer, for all architectures: they
// differ only in which of the optional weights they have.

#include <span>

#include "elastickv/model.h"

namespace ekv {

enum class Extent : uint8_t { none, hidden, q_rows, kv_rows, intermediate, head_dim, vocab };

struct WeightEntry {
  const char* name;  // after "model.layers.<n>."
  Tensor LayerWeights::*field;
  Extent rows;
  Extent columns = Extent::none;           // none: a vector
  bool ModelConfig::*only_with = nullptr;  // the switch that makes the model have it; null: always
};

inline constexpr WeightEntry kLayerWeights[] = {
    {"input_layernorm.weight", &LayerWeights::input_norm, Extent::hidden},
    {"self_attn.q_proj.weight", &LayerWeights::q, Extent::q_rows, Extent::hidden},
    {"self_attn.k_proj.weight", &LayerWeights::k, Extent::kv_rows, Extent::hidden},
    {"self_attn.v_proj.weight", &LayerWeights::v, Extent::kv_rows, Extent::hidden},
    {"self_attn.q_proj.bias", &LayerWeights::q_bias, Extent::q_rows, Extent::none, &ModelConfig::qkv_bias},
    {"self_attn.k_proj.bias", &LayerWeights::k_bias, Extent::kv_rows, Extent::none, &ModelConfig::qkv_bias},
    {"self_attn.v_proj.bias", &LayerWeights::v_bias, Extent::kv_rows, Extent::none, &ModelConfig::qkv_bias},
    {"self_attn.q_norm.weight", &LayerWeights::q_norm, Extent::head_dim, Extent::none, &ModelConfig::qk_norm},
    {"self_attn.k_norm.weight", &LayerWeights::k_norm, Extent::head_dim, Extent::none, &ModelConfig::qk_norm},
    {"self_attn.o_proj.weight", &LayerWeights::o, Extent::hidden, Extent::q_rows},
    {"post_attention_layernorm.weight", &LayerWeights::post_norm, Extent::hidden},
    {"mlp.gate_proj.weight", &LayerWeights::gate, Extent::intermediate, Extent::hidden},
    {"mlp.up_proj.weight", &LayerWeights::up, Extent::intermediate, Extent::hidden},
    {"mlp.down_proj.weight", &LayerWeights::down, Extent::hidden, Extent::intermediate},
};

std::vector<int64_t> weight_shape(const ModelConfig& config, Extent rows, Extent columns);

// Calls visit(name, tensor, shape) for every weight that `config` needs, in the order of a forward pass. With
// tied embeddings lm_head is not among them.
template <class Visit>
void for_each_weight(const ModelConfig& config, ModelWeights& weights, Visit visit) {
  weights.layers.resize(size_t(config.layers));
  const auto matrix = weight_shape(config, Extent::vocab, Extent::hidden);
  visit("model.embed_tokens.weight", weights.embedding, matrix);
  for (int layer = 0; layer < config.layers; ++layer)
    for (const WeightEntry& entry : kLayerWeights)
      if (!entry.only_with || config.*entry.only_with)
        visit("model.layers." + std::to_string(layer) + "." + entry.name,
              weights.layers[size_t(layer)].*entry.field, weight_shape(config, entry.rows, entry.columns));
  visit("model.norm.weight", weights.final_norm, weight_shape(config, Extent::hidden, Extent::none));
  if (!config.tied_embeddings) visit("lm_head.weight", weights.lm_head, matrix);
}

}  // namespace ekv
