#pragma once
// model.h -- what a model is (ModelConfig) and its weights (Model): views into mapped safetensors files.
//
//   HF folder      config.json, generation_config.json  -> ModelConfig
//                  model.safetensors, or a sharded index -> Model
//   built-in name  llama-3.1-8b, qwen3-8b, llama-3.1-70b, tiny -> ModelConfig, with Model::dummy weights
//
// A variant that this engine would compute wrongly (a sliding window that matters, an unknown rope type,
// quantised weights, attention or MLP biases) is refused with its name; nothing is ignored that changes the
// result.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "elastickv/base.h"
#include "elastickv/kv_layout.h"

namespace ekv {

enum class DType : uint8_t { bf16, f16, f32 };
constexpr size_t dtype_bytes(DType type) { return type == DType::f32 ? 4 : 2; }
std::string_view dtype_name(DType type);  // "bfloat16", "float16", "float32"

enum class Architecture : uint8_t { llama, mistral, qwen2, qwen3 };
std::string_view architecture_name(Architecture architecture);  // as in config.json: "LlamaForCausalLM"

struct RopeScaling {
  enum Kind : uint8_t { none, linear, llama3 } kind = none;
  double factor = 1;
  double low_freq_factor = 1, high_freq_factor = 4;  // llama3 only, as is the next
  int original_max_position = 8192;                  // tokens

  bool operator==(const RopeScaling&) const = default;
};

// What the publisher recommends in generation_config.json; nullopt where the file says nothing. A request that
// names a value wins.
struct GenerationDefaults {
  std::optional<double> temperature, top_p, min_p, repetition_penalty;
  std::optional<int> top_k, max_new_tokens;

  bool operator==(const GenerationDefaults&) const = default;
};

struct ModelConfig {
  std::string name;  // of the folder, or the built-in name
  Architecture architecture = Architecture::llama;
  int layers = 0, hidden = 0, heads = 0, kv_heads = 0, head_dim = 0, intermediate = 0, vocab = 0;
  int max_position = 0;  // tokens the model was made for
  double rope_theta = 10000;
  RopeScaling rope;
  double rms_eps = 1e-6;
  bool qkv_bias = false;         // Qwen2
  bool qk_norm = false;          // Qwen3: RMSNorm over head_dim of every q and k head, before RoPE
  bool tied_embeddings = false;  // lm_head is the embedding
  DType dtype = DType::bf16;     // what config.json announces; each Tensor has its own
  std::optional<TokenId> bos_id;
  std::vector<TokenId> eos_ids;  // union of generation_config.json and config.json, each once
  GenerationDefaults generation;

  int q_rows() const { return heads * head_dim; }
  int kv_rows() const { return kv_heads * head_dim; }
  int64_t num_parameters() const;
  KvShape kv_shape() const { return {.layers = layers, .kv_heads = kv_heads, .head_dim = head_dim}; }
};

// Reads `folder`/config.json and, where it exists, generation_config.json. `max_model_len` is the longest
// sequence that will be served (0: all positions of the model): a sliding window no shorter than that cannot
// matter and is accepted. Errors name the file and the field; a variant that is not supported has code
// `unsupported`.
Result<ModelConfig> load_model_config(const std::filesystem::path& folder, int max_model_len = 0);

// The same from texts. `generation_json` nullopt: there is no generation_config.json.
Result<ModelConfig> parse_model_config(std::string_view config_json,
                                       std::optional<std::string_view> generation_json, int max_model_len = 0);

// Shapes without a checkpoint, for Model::dummy. not_found lists the names.
Result<ModelConfig> builtin_model_config(std::string_view name);
std::span<const std::string_view> builtin_model_names();

// Radians per position of each of the head_dim / 2 rotations, with the scaling of the model applied. Element i
// turns the elements i and i + head_dim / 2 of a head.
std::vector<float> rope_inverse_frequencies(const ModelConfig& config);

// A row-major view; whoever hands it out owns the bytes. `data` is aligned to the size of an element.
struct Tensor {
  DType dtype = DType::bf16;
  std::vector<int64_t> shape;
  std::span<const std::byte> data;

  bool empty() const { return data.empty(); }
  int64_t num_elements() const { return int64_t(data.size() / dtype_bytes(dtype)); }
};

// The elements [first, first + out.size()) of a tensor as float32; exact, since every dtype is narrower.
void to_float(const Tensor& tensor, int64_t first, std::span<float> out);
std::vector<float> to_float(const Tensor& tensor);

// Matrices are [outputs, inputs], as in Hugging Face files: y = W x.
struct LayerWeights {
  Tensor input_norm;              // [hidden]
  Tensor q, k, v;                 // [q_rows | kv_rows, hidden]
  Tensor q_bias, k_bias, v_bias;  // [q_rows | kv_rows], with qkv_bias only
  Tensor q_norm, k_norm;          // [head_dim], with qk_norm only
  Tensor o;                       // [hidden, q_rows]
  Tensor post_norm;               // [hidden]
  Tensor gate, up;                // [intermediate, hidden]
  Tensor down;                    // [hidden, intermediate]
};

struct ModelWeights {
  Tensor embedding;  // [vocab, hidden]
  std::vector<LayerWeights> layers;
  Tensor final_norm;  // [hidden]
  Tensor lm_head;     // [vocab, hidden]; the same bytes as `embedding` when tied
};

// Config and weights, immutable. Copies share the bytes, which live as long as the last copy.
class Model {
 public:
  // Maps model.safetensors, or the shards that model.safetensors.index.json names, and reads every weight once.
  // Every tensor that `config` needs must be there with its shape, else an Error names the file and the tensor.
  // With tied embeddings a stored lm_head is ignored, with a warning if it differs; untied without one is an
  // error.
  static Result<Model> load(const std::filesystem::path& folder, ModelConfig config);

  // Random bf16 weights, about normal(0, 0.02), norms 1; the same for the same config and seed on every
  // machine.
  static Model dummy(ModelConfig config, uint64_t seed = 0);  // throws bad_alloc

  const ModelConfig& config() const { return config_; }
  const ModelWeights& weights() const { return weights_; }
  size_t weight_bytes() const;  // distinct bytes of all weights

 private:
  Model(ModelConfig config, ModelWeights weights, std::shared_ptr<const void> bytes)
      : config_(std::move(config)), weights_(std::move(weights)), bytes_(std::move(bytes)) {}

  ModelConfig config_;
  ModelWeights weights_;
  std::shared_ptr<const void> bytes_;
};

}  // namespace ekv
