// Reads config.json and generation_config.json. Key names and defaults are those of the configuration classes
// in Hugging Face transformers; a key whose default there differs from model to model is required here.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "elastickv/model.h"
#include "elastickv/request.h"
#include "util/files.h"
#include "util/json.h"

namespace ekv {
namespace {

constexpr int64_t kMaxExtent = int64_t(1) << 24;  // far above any real model; products of two fit into 64 bits

Error bad_field(const char* key, std::string_view what) {
  return {Error::invalid_argument, fmt::format("config.json: '{}' {}", key, what), key};
}

Error unsupported(const char* key, std::string_view what) {
  return {Error::unsupported, fmt::format("config.json: {}", what), key};
}

// Reads members of one object and remembers the first error, so that a list of fields reads as a list.
class Fields {
 public:
  explicit Fields(const Json& object) : object_(object) {}

  bool has(const char* key) const { return !member(object_, key).is_null(); }

  int extent(const char* key, std::optional<int64_t> fallback = {}) {
    if (!fallback && !has(key)) fail(bad_field(key, "is missing"));
    const int64_t value = keep(int_member(object_, key, fallback.value_or(1)), 1);
    if (value < 1 || value > kMaxExtent)
      fail(bad_field(key, fmt::format("is {}, not in 1..{}", value, kMaxExtent)));
    return int(std::clamp<int64_t>(value, 1, kMaxExtent));
  }
  double positive(const char* key, std::optional<double> fallback = {}) {
    if (!fallback && !has(key)) fail(bad_field(key, "is missing"));
    const double value = keep(number_member(object_, key, fallback.value_or(1)), 1);
    if (!(value > 0)) fail(bad_field(key, fmt::format("is {}, must be above 0", value)));
    return value;
  }
  bool flag(const char* key, bool fallback) { return keep(bool_member(object_, key, fallback), fallback); }
  std::string text(const char* key, std::string fallback) {
    return keep(string_member(object_, key, fallback), fallback);
  }
  void fail(Error error) {
    if (!error_) error_ = std::move(error);
  }
  const Status& error() const { return error_; }

 private:
  template <class T>
  T keep(Result<T> value, std::type_identity_t<T> fallback) {
    if (value) return *std::move(value);
    Error error = value.error();
    error.message = "config.json: " + error.message;
    fail(std::move(error));
    return fallback;
  }

  const Json& object_;
  Status error_;
};

struct ArchitectureEntry {
  Architecture architecture;
  std::string_view name, model_type;
  bool qkv_bias, qk_norm;
  bool window_has_switch;  // use_sliding_window and max_window_layers; without them a window is on where it is
                           // set
  int default_window;      // where the key sliding_window is absent; 0: none
};

constexpr ArchitectureEntry kArchitectures[] = {
    {Architecture::llama, "LlamaForCausalLM", "llama", false, false, false, 0},
    {Architecture::mistral, "MistralForCausalLM", "mistral", false, false, false, 4096},
    {Architecture::qwen2, "Qwen2ForCausalLM", "qwen2", true, false, true, 4096},
    {Architecture::qwen3, "Qwen3ForCausalLM", "qwen3", false, true, true, 4096},
};

std::string supported_architectures() {
  std::string list;
  for (const ArchitectureEntry& entry : kArchitectures)
    list += fmt::format("{}{}", list.empty() ? "" : ", ", entry.name);
  return list;
}

// `architectures` decides; a config without it is known by its model_type.
Result<const ArchitectureEntry*> find_architecture(const Json& config) {
  const Json& names = member(config, "architectures");
  std::string name;
  if (names.is_array() && !names.empty() && names[0].is_string())
    name = names[0].get<std::string>();
  else if (!names.is_null())
    return bad_field("architectures", "must be a list of strings");

  const Json& type = member(config, "model_type");
  if (name.empty() && !type.is_string())
    return bad_field("architectures", "is missing, and so is 'model_type'");
  const std::string model_type = name.empty() ? type.get<std::string>() : "";
  for (const ArchitectureEntry& entry : kArchitectures)
    if (name.empty() ? entry.model_type == model_type : entry.name == name) return &entry;
  return unsupported("architectures", fmt::format("architecture '{}' is not supported (supported: {})",
                                                  name.empty() ? model_type : name, supported_architectures()));
}

// The object that holds the rope parameters: `rope_parameters` in new files, where it also has rope_theta, or
// `rope_scaling` in older ones.
const Json& rope_object(const Json& config) {
  const Json& parameters = member(config, "rope_parameters");
  return parameters.is_null() ? member(config, "rope_scaling") : parameters;
}

Status parse_rope(const Json& config, ModelConfig& model) {
  const Json& object = rope_object(config);
  if (!object.is_null() && !object.is_object()) return bad_field("rope_scaling", "must be an object or null");
  for (const Json& value : object)
    if (value.is_object())
      return unsupported("rope_parameters", "rope parameters per layer type are not supported");

  Fields top(config), rope(object);
  model.rope_theta = rope.has("rope_theta") ? rope.positive("rope_theta") : top.positive("rope_theta", 10000.0);
  const double rotary = rope.positive("partial_rotary_factor", top.positive("partial_rotary_factor", 1.0));
  if (rotary != 1)
    rope.fail(unsupported("partial_rotary_factor", "partial_rotary_factor other than 1 is not supported"));

  const std::string type = rope.text("rope_type", rope.text("type", "default"));
  if (type == "linear") {
    model.rope.kind = RopeScaling::linear;
    model.rope.factor = rope.positive("factor");
  } else if (type == "llama3") {
    model.rope.kind = RopeScaling::llama3;
    model.rope.factor = rope.positive("factor");
    model.rope.low_freq_factor = rope.positive("low_freq_factor");
    model.rope.high_freq_factor = rope.positive("high_freq_factor");
    model.rope.original_max_position = rope.extent("original_max_position_embeddings");
    if (!rope.error() && !(model.rope.high_freq_factor > model.rope.low_freq_factor))
      rope.fail(bad_field("high_freq_factor", "must be above low_freq_factor"));
  } else if (type != "default") {
    rope.fail(
        unsupported("rope_type",
                    fmt::format("rope type '{}' is not supported (supported: default, linear, llama3)", type)));
  }
  return top.error() ? top.error() : rope.error();
}

// True if some layer looks back over a window only. `layer_types` wins over the switch, as in transformers.
Result<bool> has_windowed_layer(const Json& config, const ArchitectureEntry& entry, int layers) {
  const Json& types = member(config, "layer_types");
  if (!types.is_null()) {
    if (!types.is_array()) return bad_field("layer_types", "must be a list of strings");
    bool windowed = false;
    for (const Json& type : types) {
      if (type == "sliding_attention")
        windowed = true;
      else if (type != "full_attention")
        return unsupported("layer_types", fmt::format("layer type {} is not supported", dump_json(type)));
    }
    return windowed;
  }
  if (!entry.window_has_switch) return true;
  Fields fields(config);
  const bool on = fields.flag("use_sliding_window", false);
  const Result<int64_t> full_layers =
      int_member(config, "max_window_layers", 28);  // the default of Qwen2 and Qwen3
  if (fields.error()) return *fields.error();
  if (!full_layers) return bad_field("max_window_layers", "must be an integer");
  return on && layers > *full_layers;
}

// Accepts a window only where it cannot change a result: it is off, or no sequence grows longer than it.
Status check_sliding_window(const Json& config, const ArchitectureEntry& entry, const ModelConfig& model,
                            int max_model_len) {
  const Result<bool> windowed = has_windowed_layer(config, entry, model.layers);
  if (!windowed) return windowed.error();
  if (!*windowed) return {};
  const bool by_layer_type = !member(config, "layer_types").is_null();
  const int64_t default_window = config.contains("sliding_window") ? 0 : entry.default_window;
  const Result<int64_t> window = int_member(config, "sliding_window", default_window);
  if (!window || *window < 0) return bad_field("sliding_window", "must be a non-negative integer or null");
  if (*window == 0 && !by_layer_type) return {};
  const int longest = max_model_len > 0 ? max_model_len : model.max_position;
  if (longest <= *window) return {};
  return unsupported(
      "sliding_window",
      fmt::format(
          "sliding-window attention (sliding_window {}) is not supported for sequences of up to {} tokens{}",
          *window, longest,
          *window > 0 ? fmt::format("; start with --max-model-len {} or less", *window) : std::string()));
}

Status check_variant(const Json& config) {
  const Json& quantization = member(config, "quantization_config");
  if (!quantization.is_null()) {
    const Json& method = member(quantization, "quant_method");
    return unsupported(
        "quantization_config",
        fmt::format("quantised weights (quantization_config, quant_method {}) are not supported; use an "
                    "unquantised checkpoint",
                    dump_json(method)));
  }
  Fields fields(config);
  for (const char* key : {"attention_bias", "mlp_bias"})
    if (fields.flag(key, false)) fields.fail(unsupported(key, fmt::format("{} true is not supported", key)));
  const std::string act = fields.text("hidden_act", "silu");
  if (act != "silu")
    fields.fail(unsupported("hidden_act", fmt::format("hidden_act '{}' is not supported", act)));
  return fields.error();
}

Status parse_shape(const Json& config, ModelConfig& model) {
  Fields fields(config);
  model.layers = fields.extent("num_hidden_layers");
  model.hidden = fields.extent("hidden_size");
  model.heads = fields.extent("num_attention_heads");
  if (model.architecture == Architecture::llama)
    model.kv_heads = fields.extent("num_key_value_heads", model.heads);
  else
    model.kv_heads = fields.extent("num_key_value_heads");
  model.intermediate = fields.extent("intermediate_size");
  model.vocab = fields.extent("vocab_size");
  model.max_position = fields.extent("max_position_embeddings", 2048);
  model.rms_eps = fields.positive("rms_norm_eps", 1e-6);
  model.tied_embeddings = fields.flag("tie_word_embeddings", false);
  if (!fields.has("head_dim") && model.hidden % model.heads != 0)
    fields.fail(bad_field("head_dim", "is missing, and hidden_size is not a multiple of num_attention_heads"));
  model.head_dim = fields.extent("head_dim", std::max(1, model.hidden / model.heads));
  if (fields.error()) return fields.error();
  if (model.heads % model.kv_heads != 0)
    return bad_field("num_key_value_heads", fmt::format("is {}, which does not divide num_attention_heads {}",
                                                        model.kv_heads, model.heads));
  if (model.head_dim % 2 != 0) return bad_field("head_dim", "must be even");
  if (int64_t(model.heads) * model.head_dim > kMaxExtent)
    return bad_field("head_dim", "times the heads is too large");
  return {};
}

Status parse_dtype(const Json& config, ModelConfig& model) {
  Fields fields(config);
  std::string name = fields.text("dtype", fields.text("torch_dtype", "bfloat16"));
  if (name.starts_with("torch.")) name.erase(0, 6);
  for (const DType type : {DType::bf16, DType::f16, DType::f32})
    if (name == dtype_name(type)) {
      model.dtype = type;
      return fields.error();
    }
  return unsupported("torch_dtype",
                     fmt::format("dtype '{}' is not supported (bfloat16, float16, float32 are)", name));
}

// `value` is an id, a list of ids, or null. Ids outside of the vocabulary can never be sampled: left out.
Status add_eos_ids(const Json& value, std::string_view file, ModelConfig& model) {
  const auto add = [&](const Json& id) {
    if (!id.is_number_integer()) return false;
    const int64_t number =
        id.is_number_unsigned() && id.get<uint64_t>() > uint64_t(INT64_MAX) ? -1 : id.get<int64_t>();
    const bool known = std::find(model.eos_ids.begin(), model.eos_ids.end(), number) != model.eos_ids.end();
    if (number >= 0 && number < model.vocab && !known) model.eos_ids.push_back(TokenId(number));
    if (number < 0 || number >= model.vocab)
      log_warn(fmt::format("{}: eos_token_id {} is outside of the vocabulary and ignored", file, number));
    return true;
  };
  bool good = true;
  if (value.is_array())
    for (const Json& id : value) good = good && add(id);
  else if (!value.is_null())
    good = add(value);
  if (!good)
    return Error{Error::invalid_argument,
                 fmt::format("{}: 'eos_token_id' must be an id or a list of ids", file), "eos_token_id"};
  if (model.eos_ids.size() >= kMaxEosIds)  // the tokenizer may bring one more
    return Error{
        Error::invalid_argument,
        fmt::format(
            "{}: 'eos_token_id' makes {} ids with those of the other file; the most is {}. Shorten the list",
            file, model.eos_ids.size(), kMaxEosIds - 1),
        "eos_token_id"};
  return {};
}

template <class T>
std::optional<T> optional_number(const Json& object, const char* key, Status& error) {
  const Json& value = member(object, key);
  if (value.is_null()) return std::nullopt;
  const bool right = std::is_integral_v<T> ? value.is_number_integer() : value.is_number();
  const double number = value.is_number() ? value.get<double>() : 0;
  if (right && std::isfinite(number) && std::abs(number) < 1e9) return T(number);
  if (!error)
    error = Error{Error::invalid_argument,
                  fmt::format("generation_config.json: '{}' must be {}", key,
                              std::is_integral_v<T> ? "an integer" : "a number"),
                  key};
  return std::nullopt;
}

Status parse_generation(std::optional<std::string_view> text, ModelConfig& model) {
  if (!text) return {};
  const Result<Json> parsed = parse_json(*text);
  if (!parsed || !parsed->is_object())
    return Error{Error::invalid_argument,
                 "generation_config.json: " + (parsed ? "must be a JSON object" : parsed.error().message),
                 {}};
  Status error = add_eos_ids(member(*parsed, "eos_token_id"), "generation_config.json", model);
  GenerationDefaults& out = model.generation;
  out.temperature = optional_number<double>(*parsed, "temperature", error);
  out.top_p = optional_number<double>(*parsed, "top_p", error);
  out.min_p = optional_number<double>(*parsed, "min_p", error);
  out.repetition_penalty = optional_number<double>(*parsed, "repetition_penalty", error);
  out.top_k = optional_number<int>(*parsed, "top_k", error);
  out.max_new_tokens = optional_number<int>(*parsed, "max_new_tokens", error);
  return error;
}

Status parse_bos(const Json& config, ModelConfig& model) {
  const Result<int64_t> id = int_member(config, "bos_token_id", -1);
  if (!id) return bad_field("bos_token_id", "must be an integer or null");
  if (*id >= 0 && *id < model.vocab) model.bos_id = TokenId(*id);
  return {};
}

}  // namespace

std::string_view dtype_name(DType type) {
  switch (type) {
    case DType::bf16:
      return "bfloat16";
    case DType::f16:
      return "float16";
    case DType::f32:
      return "float32";
  }
  return "?";
}

std::string_view architecture_name(Architecture architecture) {
  for (const ArchitectureEntry& entry : kArchitectures)
    if (entry.architecture == architecture) return entry.name;
  return "?";
}

Result<ModelConfig> parse_model_config(std::string_view config_json,
                                       std::optional<std::string_view> generation_json, int max_model_len) {
  const Result<Json> config = parse_json(config_json);
  if (!config) return Error{config.error().code, "config.json: " + config.error().message, {}};
  if (!config->is_object()) return Error{Error::invalid_argument, "config.json: must be a JSON object", {}};
  const Result<const ArchitectureEntry*> entry = find_architecture(*config);
  if (!entry) return entry.error();

  ModelConfig model;
  model.architecture = (*entry)->architecture;
  model.qkv_bias = (*entry)->qkv_bias;
  model.qk_norm = (*entry)->qk_norm;
  if (Status bad = check_variant(*config)) return *bad;
  if (Status bad = parse_shape(*config, model)) return *bad;
  if (Status bad = parse_rope(*config, model)) return *bad;
  if (Status bad = check_sliding_window(*config, **entry, model, max_model_len)) return *bad;
  if (Status bad = parse_dtype(*config, model)) return *bad;
  if (Status bad = parse_generation(generation_json, model)) return *bad;
  if (Status bad = add_eos_ids(member(*config, "eos_token_id"), "config.json", model)) return *bad;
  if (Status bad = parse_bos(*config, model)) return *bad;
  return model;
}

Result<ModelConfig> load_model_config(const std::filesystem::path& folder, int max_model_len) {
  constexpr size_t kMaxBytes = size_t(16) << 20;
  const Result<std::string> config = read_file(folder / "config.json", kMaxBytes);
  if (!config && config.error().code == Error::not_found)
    return Error{Error::not_found,
                 fmt::format("{}: No such file; the folder of a model holds config.json, tokenizer.json "
                             "and weights in safetensors, as Hugging Face has them; GGUF is not read",
                             (folder / "config.json").string()),
                 "model"};
  if (!config) return config.error();
  Result<std::string> generation = read_file(folder / "generation_config.json", kMaxBytes);
  if (!generation && generation.error().code != Error::not_found) return generation.error();
  Result<ModelConfig> model =
      parse_model_config(*config, generation ? std::optional(*generation) : std::nullopt, max_model_len);
  if (!model)
    return Error{model.error().code, folder.string() + "/" + model.error().message, model.error().param};
  const std::filesystem::path clean = std::filesystem::absolute(folder).lexically_normal();
  model->name = (clean.has_filename() ? clean : clean.parent_path()).filename().string();
  return model;
}

}  // namespace ekv
