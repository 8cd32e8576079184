// Shapes of published models, for benchmarks with random weights, and a tiny one for tests. Numbers from the
// config.json and generation_config.json of each model.

#include <fmt/format.h>

#include "elastickv/model.h"

namespace ekv {
namespace {

constexpr std::string_view kNames[] = {"llama-3.1-8b", "qwen3-8b", "llama-3.1-70b", "tiny"};

ModelConfig llama_3_1_8b() {
  ModelConfig m;
  m.layers = 32, m.hidden = 4096, m.heads = 32, m.kv_heads = 8, m.head_dim = 128, m.intermediate = 14336;
  m.vocab = 128256, m.max_position = 131072, m.rope_theta = 500000, m.rms_eps = 1e-5;
  m.rope = {RopeScaling::llama3, 8, 1, 4, 8192};
  m.bos_id = 128000, m.eos_ids = {128001, 128008, 128009};
  m.generation.temperature = 0.6, m.generation.top_p = 0.9;
  return m;
}

ModelConfig llama_3_1_70b() {
  ModelConfig m = llama_3_1_8b();
  m.layers = 80, m.hidden = 8192, m.heads = 64, m.intermediate = 28672;
  return m;
}

ModelConfig qwen3_8b() {
  ModelConfig m;
  m.architecture = Architecture::qwen3, m.qk_norm = true;
  m.layers = 36, m.hidden = 4096, m.heads = 32, m.kv_heads = 8, m.head_dim = 128, m.intermediate = 12288;
  m.vocab = 151936, m.max_position = 40960, m.rope_theta = 1e6, m.rms_eps = 1e-6;
  m.bos_id = 151643, m.eos_ids = {151645, 151643};
  m.generation.temperature = 0.6, m.generation.top_p = 0.95, m.generation.top_k = 20;
  return m;
}

ModelConfig tiny() {
  ModelConfig m;
  m.layers = 2, m.hidden = 128, m.heads = 4, m.kv_heads = 2, m.head_dim = 64, m.intermediate = 256;
  m.vocab = 512, m.max_position = 4096, m.tied_embeddings = true;
  m.bos_id = 1, m.eos_ids = {2};
  return m;
}

}  // namespace

std::span<const std::string_view> builtin_model_names() { return kNames; }

Result<ModelConfig> builtin_model_config(std::string_view name) {
  ModelConfig (*const make[])() = {llama_3_1_8b, qwen3_8b, llama_3_1_70b, tiny};
  std::string known;
  for (size_t i = 0; i < std::size(kNames); ++i) {
    if (kNames[i] == name) {
      ModelConfig model = make[i]();
      model.name = name;
      return model;
    }
    known += fmt::format("{}{}", i ? ", " : "", kNames[i]);
  }
  return Error{Error::not_found,
               fmt::format("'{}' is neither the folder of a model nor a built-in model ({})", name, known),
               "model"};
}

}  // namespace ekv
