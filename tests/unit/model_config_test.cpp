#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <numeric>

#include "elastickv/model.h"
#include "elastickv/request.h"
#include "tests/support/temp_dir.h"
#include "tests/support/test_data.h"
#include "util/files.h"
#include "util/json.h"

namespace ekv {
namespace {

// A complete config of the architecture, changed by `patch` (members set to null are removed).
std::string config_of(const std::string& architecture, const char* patch = "{}") {
  Json config =
      *parse_json(R"({"hidden_size":64,"intermediate_size":96,"num_hidden_layers":2,"num_attention_heads":4,
      "num_key_value_heads":2,"vocab_size":300,"max_position_embeddings":128,"rms_norm_eps":1e-5,"rope_theta":10000.0,
      "hidden_act":"silu","sliding_window":null,"bos_token_id":1,"eos_token_id":2,"torch_dtype":"float16"})");
  config["architectures"] = {architecture};
  const Json changes = *parse_json(patch);
  for (const auto& [key, value] : changes.items()) {
    if (value.is_null())
      config.erase(key);
    else
      config[key] = value;
  }
  return dump_json(config);
}

ModelConfig good(const std::string& config, std::optional<std::string_view> generation = {},
                 int max_model_len = 0) {
  const Result<ModelConfig> model = parse_model_config(config, generation, max_model_len);
  if (!model) {
    ADD_FAILURE() << model.error().message;
    return {};
  }
  return *model;
}

void expect_error(const std::string& config, Error::Code code, std::string_view words, int max_model_len = 0) {
  const Result<ModelConfig> model = parse_model_config(config, {}, max_model_len);
  ASSERT_FALSE(model) << "accepted, expected: " << words;
  EXPECT_EQ(model.error().code, code) << model.error().message;
  EXPECT_EQ(model.error().message.find("config.json: "), 0u) << model.error().message;
  EXPECT_NE(model.error().message.find(words), std::string::npos)
      << model.error().message << "\n  lacks: " << words;
}

TEST(ModelConfig, ReadsEveryField) {
  const ModelConfig m = good(config_of("LlamaForCausalLM"));
  EXPECT_EQ(m.architecture, Architecture::llama);
  EXPECT_EQ(m.layers, 2);
  EXPECT_EQ(m.hidden, 64);
  EXPECT_EQ(m.heads, 4);
  EXPECT_EQ(m.kv_heads, 2);
  EXPECT_EQ(m.head_dim, 16);
  EXPECT_EQ(m.intermediate, 96);
  EXPECT_EQ(m.vocab, 300);
  EXPECT_EQ(m.max_position, 128);
  EXPECT_EQ(m.rope_theta, 10000);
  EXPECT_EQ(m.rope, RopeScaling{});
  EXPECT_EQ(m.rms_eps, 1e-5);
  EXPECT_EQ(m.dtype, DType::f16);
  EXPECT_EQ(m.bos_id, 1);
  EXPECT_EQ(m.eos_ids, std::vector<TokenId>{2});
  EXPECT_FALSE(m.qkv_bias || m.qk_norm || m.tied_embeddings);
}

TEST(ModelConfig, ArchitecturesDifferInBiasAndNorm) {
  EXPECT_TRUE(good(config_of("Qwen2ForCausalLM")).qkv_bias);
  EXPECT_FALSE(good(config_of("Qwen2ForCausalLM")).qk_norm);
  EXPECT_TRUE(good(config_of("Qwen3ForCausalLM")).qk_norm);
  EXPECT_FALSE(good(config_of("Qwen3ForCausalLM")).qkv_bias);
  EXPECT_EQ(good(config_of("MistralForCausalLM")).architecture, Architecture::mistral);
  EXPECT_EQ(good(config_of("", R"({"architectures":null,"model_type":"qwen3"})")).architecture,
            Architecture::qwen3);
  expect_error(config_of("GemmaForCausalLM"), Error::unsupported, "'GemmaForCausalLM' is not supported");
  expect_error(config_of("", R"({"architectures":null,"model_type":"mamba"})"), Error::unsupported, "'mamba'");
  expect_error(config_of("", R"({"architectures":null})"), Error::invalid_argument,
               "'architectures' is missing");
}

TEST(ModelConfig, HeadDimIsExplicitOrDerived) {
  const ModelConfig m = good(config_of("Qwen3ForCausalLM", R"({"head_dim":32})"));
  EXPECT_EQ(m.head_dim, 32);
  EXPECT_EQ(m.q_rows(), 128);
  EXPECT_EQ(m.kv_rows(), 64);
  EXPECT_EQ(good(config_of("Qwen3ForCausalLM")).head_dim, 16);
  std::string with_null = config_of("LlamaForCausalLM");
  with_null.insert(1, R"("head_dim":null,)");
  EXPECT_EQ(good(with_null).head_dim, 16);
  expect_error(config_of("LlamaForCausalLM", R"({"num_attention_heads":6})"), Error::invalid_argument,
               "head_dim");
  expect_error(config_of("LlamaForCausalLM", R"({"head_dim":7})"), Error::invalid_argument, "head_dim");
  expect_error(config_of("LlamaForCausalLM", R"({"num_key_value_heads":3})"), Error::invalid_argument,
               "num_key_value_heads");
}

TEST(ModelConfig, RefusesMissingAndImpossibleNumbers) {
  for (const char* key :
       {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"}) {
    SCOPED_TRACE(key);
    const std::string name = std::string("'") + key + "'";
    expect_error(config_of("LlamaForCausalLM", ("{\"" + std::string(key) + "\":null}").c_str()),
                 Error::invalid_argument, name);
    for (const char* value :
         {"0", "-4", "1.5", "\"64\"", "1e30", "9223372036854775807", "18446744073709551615", "[64]"}) {
      SCOPED_TRACE(value);
      expect_error(config_of("LlamaForCausalLM", ("{\"" + std::string(key) + "\":" + value + "}").c_str()),
                   Error::invalid_argument, name);
    }
  }
  expect_error(config_of("LlamaForCausalLM", R"({"rms_norm_eps":0})"), Error::invalid_argument, "rms_norm_eps");
  expect_error(config_of("LlamaForCausalLM", R"({"rope_theta":-1})"), Error::invalid_argument, "rope_theta");
  expect_error(config_of("LlamaForCausalLM", R"({"head_dim":16777216})"), Error::invalid_argument, "head_dim");
  expect_error(config_of("LlamaForCausalLM", R"({"tie_word_embeddings":"yes"})"), Error::invalid_argument,
               "tie_word_embeddings");
  expect_error("[1]", Error::invalid_argument, "JSON object");
  expect_error("{", Error::invalid_argument, "not valid JSON");
}

TEST(ModelConfig, RefusesVariantsByName) {
  const struct {
    const char *patch, *words;
  } cases[] = {
      {R"({"quantization_config":{"quant_method":"gptq","bits":4}})", "gptq"},
      {R"({"attention_bias":true})", "attention_bias"},
      {R"({"mlp_bias":true})", "mlp_bias"},
      {R"({"hidden_act":"gelu"})", "'gelu'"},
      {R"({"rope_scaling":{"type":"yarn","factor":4.0}})", "'yarn'"},
      {R"({"rope_scaling":{"rope_type":"dynamic","factor":2.0}})", "'dynamic'"},
      {R"({"rope_parameters":{"full_attention":{"rope_type":"default"}}})", "per layer type"},
      {R"({"partial_rotary_factor":0.5})", "partial_rotary_factor"},
      {R"({"torch_dtype":"float8_e4m3fn"})", "float8_e4m3fn"},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.patch);
    expect_error(config_of("LlamaForCausalLM", c.patch), Error::unsupported, c.words);
  }
  EXPECT_EQ(good(config_of("LlamaForCausalLM", R"({"attention_bias":false,"mlp_bias":false})")).layers, 2);
}

TEST(ModelConfig, RopeScalingInBothSpellings) {
  const ModelConfig linear =
      good(config_of("LlamaForCausalLM", R"({"rope_scaling":{"type":"linear","factor":2}})"));
  EXPECT_EQ(linear.rope.kind, RopeScaling::linear);
  EXPECT_EQ(linear.rope.factor, 2);
  const RopeScaling llama3{RopeScaling::llama3, 8, 1, 4, 8192};
  const char* old_style = R"({"rope_scaling":{"factor":8.0,"low_freq_factor":1.0,"high_freq_factor":4.0,
      "original_max_position_embeddings":8192,"rope_type":"llama3"}})";
  EXPECT_EQ(good(config_of("LlamaForCausalLM", old_style)).rope, llama3);
  const ModelConfig fresh =
      good(config_of("LlamaForCausalLM", R"({"rope_theta":null,"rope_parameters":{"factor":8.0,
      "low_freq_factor":1.0,"high_freq_factor":4.0,"original_max_position_embeddings":8192,"rope_type":"llama3",
      "rope_theta":500000.0}})"));
  EXPECT_EQ(fresh.rope, llama3);
  EXPECT_EQ(fresh.rope_theta, 500000);
  expect_error(config_of("LlamaForCausalLM", R"({"rope_scaling":{"rope_type":"linear"}})"),
               Error::invalid_argument, "'factor' is missing");
  expect_error(
      config_of("LlamaForCausalLM", R"({"rope_scaling":{"rope_type":"llama3","factor":8,"low_freq_factor":4,
      "high_freq_factor":4,"original_max_position_embeddings":8192}})"),
      Error::invalid_argument, "high_freq_factor");
  expect_error(config_of("LlamaForCausalLM", R"({"rope_scaling":"linear"})"), Error::invalid_argument,
               "rope_scaling");
}

// What transformers makes of the same configs: tests/data/golden/README.md.
TEST(ModelConfig, InverseFrequenciesMatchTheReference) {
  const Result<std::string> text = read_file(test::test_data() / "golden/rope.json");
  ASSERT_TRUE(text) << text.error().message;
  const Json golden = *parse_json(*text);
  ASSERT_GE(golden["cases"].size(), 5u);
  for (const Json& c : golden["cases"]) {
    SCOPED_TRACE(dump_json(c["config"]));
    const std::vector<float> got = rope_inverse_frequencies(good(dump_json(c["config"])));
    const auto wanted = c["inverse_frequencies"].get<std::vector<float>>();
    ASSERT_EQ(got.size(), wanted.size());
    // The reference computes pow in float32: a few units in the last place off.
    for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], wanted[i], 1e-6f * wanted[i]) << i;
  }
}

TEST(ModelConfig, EosIsTheUnionOfBothFiles) {
  const std::string config = config_of("LlamaForCausalLM", R"({"eos_token_id":7})");
  EXPECT_EQ(good(config).eos_ids, (std::vector<TokenId>{7}));
  EXPECT_EQ(good(config, R"({"eos_token_id":[128,129]})").eos_ids, (std::vector<TokenId>{128, 129, 7}));
  EXPECT_EQ(good(config, R"({"eos_token_id":[7,7,9]})").eos_ids, (std::vector<TokenId>{7, 9}));
  EXPECT_EQ(good(config, R"({"eos_token_id":8})").eos_ids, (std::vector<TokenId>{8, 7}));
  EXPECT_EQ(good(config, R"({"eos_token_id":[]})").eos_ids, (std::vector<TokenId>{7}));
  EXPECT_EQ(good(config, R"({"eos_token_id":null})").eos_ids, (std::vector<TokenId>{7}));
  EXPECT_EQ(good(config, R"({"eos_token_id":[300,-1]})").eos_ids, (std::vector<TokenId>{7}));
  EXPECT_TRUE(good(config_of("LlamaForCausalLM", R"({"eos_token_id":null})")).eos_ids.empty());
  EXPECT_EQ(good(config_of("LlamaForCausalLM", R"({"eos_token_id":[3,4]})")).eos_ids,
            (std::vector<TokenId>{3, 4}));
  std::vector<int> many(kMaxEosIds - 2);  // config.json has one more, the tokenizer may have another
  std::iota(many.begin(), many.end(), 10);
  EXPECT_EQ(good(config, dump_json(Json{{"eos_token_id", many}})).eos_ids.size(), kMaxEosIds - 1);
  many.push_back(200);
  const Result<ModelConfig> refused = parse_model_config(config, dump_json(Json{{"eos_token_id", many}}));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().param, "eos_token_id");
  EXPECT_FALSE(parse_model_config(config, R"({"eos_token_id":"</s>"})"));
  EXPECT_FALSE(parse_model_config(config, R"({"eos_token_id":[1.5]})"));
  expect_error(config_of("LlamaForCausalLM", R"({"eos_token_id":[[2]]})"), Error::invalid_argument,
               "eos_token_id");
}

TEST(ModelConfig, GenerationDefaults) {
  const std::string config = config_of("LlamaForCausalLM");
  EXPECT_EQ(good(config).generation, GenerationDefaults{});
  const ModelConfig m = good(config, R"({"temperature":0.6,"top_p":0.9,"top_k":20,"repetition_penalty":1.05,
      "min_p":0.1,"max_new_tokens":512,"do_sample":true})");
  EXPECT_EQ(m.generation, (GenerationDefaults{0.6, 0.9, 0.1, 1.05, 20, 512}));
  for (const char* bad : {R"({"temperature":"hot"})", R"({"top_k":1.5})", "[]", "{", ""}) {
    const Result<ModelConfig> refused = parse_model_config(config, bad);
    ASSERT_FALSE(refused) << bad;
    EXPECT_EQ(refused.error().message.find("generation_config.json: "), 0u) << refused.error().message;
  }
}

TEST(ModelConfig, SlidingWindowIsRefusedWhereItMatters) {
  const char* refused_as = "sliding_window 8";
  // Qwen: a window is declared but switched off, or no layer is beyond max_window_layers.
  EXPECT_EQ(good(config_of("Qwen2ForCausalLM", R"({"sliding_window":8,"use_sliding_window":false})")).layers,
            2);
  EXPECT_EQ(good(config_of("Qwen2ForCausalLM",
                           R"({"sliding_window":8,"use_sliding_window":true,"max_window_layers":2})"))
                .layers,
            2);
  expect_error(
      config_of("Qwen3ForCausalLM", R"({"sliding_window":8,"use_sliding_window":true,"max_window_layers":1})"),
      Error::unsupported, refused_as);
  // layer_types wins over the switch, in both directions.
  expect_error(config_of("Qwen2ForCausalLM", R"({"sliding_window":8,"use_sliding_window":false,
      "layer_types":["full_attention","sliding_attention"]})"),
               Error::unsupported, refused_as);
  EXPECT_EQ(
      good(config_of("Qwen2ForCausalLM", R"({"sliding_window":8,"use_sliding_window":true,"max_window_layers":0,
      "layer_types":["full_attention","full_attention"]})"))
          .layers,
      2);
  expect_error(config_of("Qwen2ForCausalLM", R"({"layer_types":["full_attention","sliding_attention"]})"),
               Error::unsupported, "sliding-window");
  expect_error(config_of("Qwen2ForCausalLM", R"({"layer_types":["chunked_attention"]})"), Error::unsupported,
               "chunked_attention");
  // Mistral: no switch; the published default where the key is absent is 4096.
  const std::string mistral = config_of("MistralForCausalLM", R"({"sliding_window":8})");
  expect_error(mistral, Error::unsupported, "--max-model-len 8");
  expect_error(mistral, Error::unsupported, refused_as, 9);
  EXPECT_EQ(good(mistral, {}, 8).layers, 2);
  EXPECT_EQ(good(config_of("MistralForCausalLM", R"({"sliding_window":128})")).layers, 2);
  std::string with_null =
      config_of("MistralForCausalLM", R"({"sliding_window":null,"max_position_embeddings":32768})");
  expect_error(with_null, Error::unsupported, "sliding_window 4096");
  with_null.insert(1, R"("sliding_window":null,)");
  EXPECT_EQ(good(with_null).layers, 2);
}

TEST(ModelConfig, ReadsAFolder) {
  const Result<ModelConfig> m = load_model_config(test::test_data() / "golden/tiny-qwen3/");
  ASSERT_TRUE(m) << m.error().message;
  EXPECT_EQ(m->name, "tiny-qwen3");
  EXPECT_EQ(m->head_dim, 128);
  EXPECT_EQ(m->rope_theta, 1e6);
  EXPECT_EQ(m->eos_ids, (std::vector<TokenId>{282, 280}));
  const Result<ModelConfig> absent = load_model_config("/nonexistent/model");
  ASSERT_FALSE(absent);
  EXPECT_EQ(absent.error().code, Error::not_found);
  EXPECT_NE(absent.error().message.find("/nonexistent/model/config.json"), std::string::npos);
}

TEST(ModelConfig, AnEmptyFileIsNotAnAbsentOne) {
  const test::TempDir temp;
  const std::filesystem::path& folder = temp.path();
  std::ofstream(folder / "config.json") << config_of("LlamaForCausalLM");
  EXPECT_TRUE(load_model_config(folder));
  std::ofstream(folder / "generation_config.json") << "";
  const Result<ModelConfig> empty = load_model_config(folder);
  ASSERT_FALSE(empty);
  EXPECT_NE(empty.error().message.find((folder / "generation_config.json").string()), std::string::npos)
      << empty.error().message;
}

// Whether it is there cannot be told: the system says so, and no exception does.
TEST(ModelConfig, AFileThatCannotBeReachedIsNotAnAbsentOne) {
  const test::TempDir made;
  const std::string folder = made.path();
  std::ofstream(folder + "/config.json") << config_of("LlamaForCausalLM");
  std::filesystem::create_symlink("generation_config.json", folder + "/generation_config.json");
  const Result<ModelConfig> looped = load_model_config(folder);
  ASSERT_FALSE(looped);
  EXPECT_NE(looped.error().message.find("generation_config.json: Too many levels"), std::string::npos)
      << looped.error().message;
}

TEST(ModelConfig, BuiltInShapesHaveTheirPublishedSizes) {
  EXPECT_EQ(builtin_model_config("llama-3.1-8b")->num_parameters(), 8'030'261'248);
  EXPECT_EQ(builtin_model_config("llama-3.1-70b")->num_parameters(), 70'553'706'496);
  EXPECT_EQ(builtin_model_config("qwen3-8b")->num_parameters(), 8'190'735'360);
  for (const std::string_view name : builtin_model_names()) {
    const Result<ModelConfig> m = builtin_model_config(name);
    ASSERT_TRUE(m);
    EXPECT_EQ(m->name, name);
    EXPECT_EQ(m->heads % m->kv_heads, 0);
    EXPECT_FALSE(m->eos_ids.empty());
  }
  const Result<ModelConfig> unknown = builtin_model_config("gpt-5");
  ASSERT_FALSE(unknown);
  EXPECT_NE(unknown.error().message.find("llama-3.1-8b"), std::string::npos);
}

}  // namespace
}  // namespace ekv
