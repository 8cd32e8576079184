#include "elastickv/model.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>

#include "tests/support/temp_dir.h"
#include "tests/support/test_data.h"
#include "util/files.h"
#include "util/json.h"

namespace ekv {
namespace {

namespace fs = std::filesystem;

const fs::path kGolden = test::test_data() / "golden";

struct TempFolder : test::TempDir {
  void write(const std::string& name, const std::string& bytes) const {
    std::ofstream(path() / name, std::ios::binary) << bytes;
  }
};

struct Entry {
  std::string dtype;
  std::vector<int64_t> shape;
  std::string bytes;
};

std::string safetensors(const std::map<std::string, Entry>& tensors, size_t header_padding = 0) {
  Json header = Json::object();
  std::string data;
  for (const auto& [name, entry] : tensors) {
    header[name] = {{"dtype", entry.dtype},
                    {"shape", entry.shape},
                    {"data_offsets", {data.size(), data.size() + entry.bytes.size()}}};
    data += entry.bytes;
  }
  std::string text = dump_json(header);
  text.append((8 - text.size() % 8) % 8 + header_padding, ' ');
  const uint64_t length = text.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof length) + text + data;
}

// The value of element i of every tensor of the small models below: exact in float16, bfloat16 and float32.
float value_of(size_t i) { return float(int(i % 7) - 3) * 0.25f; }

std::string encoded(const std::string& dtype, size_t count, float plus = 0) {
  std::string bytes;
  for (size_t i = 0; i < count; ++i) {
    const float value = value_of(i) + plus;
    uint32_t wide;
    std::memcpy(&wide, &value, sizeof wide);
    const uint16_t brain = uint16_t(wide >> 16);
    const _Float16 half = _Float16(value);
    if (dtype == "F32") bytes.append(reinterpret_cast<const char*>(&value), 4);
    if (dtype == "BF16") bytes.append(reinterpret_cast<const char*>(&brain), 2);
    if (dtype == "F16") bytes.append(reinterpret_cast<const char*>(&half), 2);
    if (dtype == "I64") bytes.append(8, '\0');
  }
  return bytes;
}

Entry entry(const std::string& dtype, std::vector<int64_t> shape, float plus = 0) {
  size_t count = 1;
  for (const int64_t extent : shape) count *= size_t(extent);
  return {dtype, shape, encoded(dtype, count, plus)};
}

ModelConfig small_config(bool tied) {
  ModelConfig m;
  m.layers = 1, m.hidden = 8, m.heads = 2, m.kv_heads = 1, m.head_dim = 6, m.intermediate = 10, m.vocab = 5;
  m.tied_embeddings = tied;
  return m;
}

std::map<std::string, Entry> small_tensors(const std::string& dtype, bool with_head) {
  const std::string p = "model.layers.0.";
  std::map<std::string, Entry> t = {
      {"model.embed_tokens.weight", entry(dtype, {5, 8})},
      {p + "input_layernorm.weight", entry(dtype, {8})},
      {p + "self_attn.q_proj.weight", entry(dtype, {12, 8})},
      {p + "self_attn.k_proj.weight", entry(dtype, {6, 8})},
      {p + "self_attn.v_proj.weight", entry(dtype, {6, 8})},
      {p + "self_attn.o_proj.weight", entry(dtype, {8, 12})},
      {p + "post_attention_layernorm.weight", entry(dtype, {8})},
      {p + "mlp.gate_proj.weight", entry(dtype, {10, 8})},
      {p + "mlp.up_proj.weight", entry(dtype, {10, 8})},
      {p + "mlp.down_proj.weight", entry(dtype, {8, 10})},
      {"model.norm.weight", entry(dtype, {8})},
  };
  if (with_head) t["lm_head.weight"] = entry(dtype, {5, 8});
  return t;
}

void expect_load_error(const fs::path& folder, const ModelConfig& config,
                       std::initializer_list<std::string> words) {
  const Result<Model> model = Model::load(folder, config);
  ASSERT_FALSE(model) << "loaded";
  for (const std::string& word : words)
    EXPECT_NE(model.error().message.find(word), std::string::npos)
        << model.error().message << "\n  lacks: " << word;
}

TEST(Model, LoadsEveryDtypeWithTheSameValues) {
  for (const char* dtype : {"F32", "BF16", "F16"}) {
    SCOPED_TRACE(dtype);
    TempFolder folder;
    folder.write("model.safetensors", safetensors(small_tensors(dtype, true)));
    const Result<Model> model = Model::load(folder.path(), small_config(false));
    ASSERT_TRUE(model) << model.error().message;
    const LayerWeights& layer = model->weights().layers.at(0);
    for (const Tensor* tensor : {&layer.q, &layer.o, &layer.input_norm, &model->weights().lm_head}) {
      const std::vector<float> values = to_float(*tensor);
      for (size_t i = 0; i < values.size(); ++i) ASSERT_EQ(values[i], value_of(i)) << i;
    }
    EXPECT_EQ(layer.q.shape, (std::vector<int64_t>{12, 8}));
    EXPECT_TRUE(layer.q_bias.empty());
  }
}

TEST(Model, MixedDtypesInOneFileAndUnalignedData) {
  for (const size_t padding : {0, 1, 2, 3}) {
    std::map<std::string, Entry> tensors = small_tensors("BF16", false);
    tensors["model.norm.weight"] = entry("F32", {8});
    TempFolder folder;
    folder.write("model.safetensors", safetensors(tensors, padding));
    const Result<Model> model = Model::load(folder.path(), small_config(true));
    ASSERT_TRUE(model) << model.error().message;
    const ModelWeights& weights = model->weights();
    EXPECT_EQ(weights.final_norm.dtype, DType::f32);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(weights.final_norm.data.data()) % 4, 0u);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(weights.layers[0].q.data.data()) % 2, 0u);
    EXPECT_EQ(to_float(weights.final_norm)[1], value_of(1));
    EXPECT_EQ(to_float(weights.layers[0].q)[13], value_of(13));
  }
}

TEST(Model, NamesMissingAndMisshapenTensors) {
  const ModelConfig config = small_config(true);
  for (const auto& [name, whole] : small_tensors("F16", false)) {
    SCOPED_TRACE(name);
    TempFolder folder;
    std::map<std::string, Entry> tensors = small_tensors("F16", false);
    tensors.erase(name);
    folder.write("model.safetensors", safetensors(tensors));
    expect_load_error(folder.path(), config, {folder.path().string(), name, "missing"});
    tensors = small_tensors("F16", false);
    tensors[name] = entry("F16", {3, 8});
    folder.write("model.safetensors", safetensors(tensors));
    expect_load_error(folder.path(), config, {"model.safetensors", name, "[3, 8]"});
    tensors[name] = {"I64", whole.shape, std::string(whole.bytes.size() * 4, '\0')};
    folder.write("model.safetensors", safetensors(tensors));
    expect_load_error(folder.path(), config, {"model.safetensors", name, "I64"});
  }
}

TEST(Model, AnEmptyCheckpointMissesTensors) {
  TempFolder folder;
  expect_load_error(folder.path(), small_config(true), {folder.path().string(), "model.safetensors"});
  folder.write("model.safetensors", safetensors({}));
  expect_load_error(folder.path(), small_config(true), {"model.embed_tokens.weight", "missing"});
}

TEST(Model, BiasAndNormOfHeadsComeWithTheArchitecture) {
  ModelConfig config = small_config(true);
  config.qkv_bias = config.qk_norm = true;
  TempFolder folder;
  std::map<std::string, Entry> tensors = small_tensors("F16", false);
  folder.write("model.safetensors", safetensors(tensors));
  expect_load_error(folder.path(), config, {"model.layers.0.self_attn.q_proj.bias", "missing"});
  const std::string p = "model.layers.0.self_attn.";
  tensors[p + "q_proj.bias"] = entry("F16", {12});
  tensors[p + "k_proj.bias"] = tensors[p + "v_proj.bias"] = entry("F16", {6});
  tensors[p + "q_norm.weight"] = tensors[p + "k_norm.weight"] = entry("F16", {6});
  folder.write("model.safetensors", safetensors(tensors));
  const Result<Model> model = Model::load(folder.path(), config);
  ASSERT_TRUE(model) << model.error().message;
  EXPECT_EQ(model->weights().layers[0].k_bias.num_elements(), 6);
  EXPECT_EQ(model->weights().layers[0].q_norm.num_elements(), 6);
}

TEST(Model, TiedEmbeddings) {
  const auto load = [](bool tied, std::map<std::string, Entry> tensors, std::string* log = nullptr) {
    TempFolder folder;
    folder.write("model.safetensors", safetensors(tensors));
    testing::internal::CaptureStderr();
    Result<Model> model = Model::load(folder.path(), small_config(tied));
    const std::string captured = testing::internal::GetCapturedStderr();
    if (log) *log = captured;
    return model;
  };
  std::string log;
  // Tied, not stored; stored and equal, in the same and in another dtype: the embedding, no warning.
  for (const char* head : {"", "F16", "F32"}) {
    std::map<std::string, Entry> tensors = small_tensors("F16", false);
    if (*head) tensors["lm_head.weight"] = entry(head, {5, 8});
    const Result<Model> model = load(true, tensors, &log);
    ASSERT_TRUE(model) << model.error().message;
    EXPECT_EQ(model->weights().lm_head.data.data(), model->weights().embedding.data.data());
    EXPECT_EQ(log, "");
  }
  // Tied, a different one stored: ignored, and said so.
  for (const char* dtype : {"F16", "F32"}) {
    std::map<std::string, Entry> tensors = small_tensors("F16", false);
    tensors["lm_head.weight"] = entry(dtype, {5, 8}, 0.5f);
    const Result<Model> model = load(true, tensors, &log);
    ASSERT_TRUE(model) << model.error().message;
    EXPECT_EQ(to_float(model->weights().lm_head), to_float(model->weights().embedding));
    EXPECT_NE(log.find("lm_head.weight that differs"), std::string::npos) << log;
  }
  // Not tied: the stored one counts, and there must be one.
  std::map<std::string, Entry> tensors = small_tensors("F16", false);
  const Result<Model> without = load(false, tensors);
  ASSERT_FALSE(without);
  EXPECT_NE(without.error().message.find("lm_head.weight"), std::string::npos);
  tensors["lm_head.weight"] = entry("F16", {5, 8}, 0.5f);
  const Result<Model> with = load(false, tensors, &log);
  ASSERT_TRUE(with) << with.error().message;
  EXPECT_EQ(to_float(with->weights().lm_head)[0], value_of(0) + 0.5f);
  EXPECT_EQ(log, "");
}

TEST(Model, AFolderWithoutAModelIsToldWhatItMustHold) {
  TempFolder folder;
  folder.write("model.gguf", "GGUF");
  const Result<ModelConfig> config = load_model_config(folder.path());
  ASSERT_FALSE(config);
  for (const char* word : {"config.json", "tokenizer.json", "safetensors", "GGUF"})
    EXPECT_NE(config.error().message.find(word), std::string::npos) << config.error().message;
}

TEST(Model, ALinkToNothingIsNamedWithItsTarget) {
  TempFolder folder;
  fs::create_symlink("/no/such/blob", folder.path() / "model.safetensors");
  expect_load_error(folder.path(), small_config(true), {"model.safetensors: ", "/no/such/blob"});
}

// Whether such a file is there cannot be told: the system says so, and no exception does.
TEST(Model, ALinkToItselfIsAnErrorThatNamesIt) {
  for (const char* name : {"model.safetensors", "model.safetensors.index.json"}) {
    TempFolder folder;
    fs::create_symlink(name, folder.path() / name);
    expect_load_error(folder.path(), small_config(true), {std::string(name) + ": ", "symbolic links"});
  }
}

TEST(Model, WarnsOfTensorsThatNobodyUses) {
  TempFolder folder;
  std::map<std::string, Entry> tensors = small_tensors("F16", false);
  tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = entry("F32", {3});
  folder.write("model.safetensors", safetensors(tensors));
  testing::internal::CaptureStderr();
  ASSERT_TRUE(Model::load(folder.path(), small_config(true)));
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  tensors["model.layers.0.self_attn.o_proj.bias"] = entry("F16", {8});
  folder.write("model.safetensors", safetensors(tensors));
  testing::internal::CaptureStderr();
  ASSERT_TRUE(Model::load(folder.path(), small_config(true)));
  EXPECT_NE(testing::internal::GetCapturedStderr().find("o_proj.bias"), std::string::npos);
}

// The sharded fixture, with one thing broken at a time.
class Shards : public testing::Test {
 protected:
  static constexpr char kFirst[] = "model-00001-of-00002.safetensors";
  static constexpr char kSecond[] = "model-00002-of-00002.safetensors";
  static constexpr char kIndex[] = "model.safetensors.index.json";

  Shards() {
    for (const char* file : {kFirst, kSecond, kIndex, "config.json", "generation_config.json"})
      fs::copy_file(kGolden / "tiny-qwen2" / file, folder_.path() / file);
    config_ = *load_model_config(folder_.path());
    index_ = *parse_json(*read_file(folder_.path() / kIndex));
  }
  void expect_error(std::initializer_list<std::string> words) {
    expect_load_error(folder_.path(), config_, words);
  }
  void write_index() { folder_.write(kIndex, dump_json(index_)); }

  TempFolder folder_;
  ModelConfig config_;
  Json index_;
};

TEST_F(Shards, Load) {
  const Result<Model> model = Model::load(folder_.path(), config_);
  ASSERT_TRUE(model) << model.error().message;
  EXPECT_EQ(model->weights().layers.size(), 2u);
  EXPECT_EQ(model->weights().layers[1].k_bias.num_elements(), 128);
  EXPECT_EQ(model->weights().final_norm.dtype, DType::f32);
  EXPECT_GT(model->weight_bytes(), 200'000u);
}

TEST_F(Shards, AbsentShard) {
  fs::remove(folder_.path() / kSecond);
  expect_error({kSecond, "No such file"});
}

TEST_F(Shards, TruncatedShard) {
  fs::resize_file(folder_.path() / kSecond, fs::file_size(folder_.path() / kSecond) - 1024);
  expect_error({kSecond, "cut off"});
}

TEST_F(Shards, TensorNotInItsShard) {
  index_["weight_map"]["model.norm.weight"] = kFirst;
  write_index();
  expect_error({kFirst, "model.norm.weight", "missing"});
}

TEST_F(Shards, TensorNotInTheIndex) {
  index_["weight_map"].erase("model.norm.weight");
  write_index();
  expect_error({"model.norm.weight", "missing"});
}

TEST_F(Shards, BrokenIndex) {
  folder_.write(kIndex, "{\"weight_map\":");
  expect_error({kIndex, "not valid JSON"});
  folder_.write(kIndex, "{}");
  expect_error({kIndex, "weight_map"});
  folder_.write(kIndex, "[]");
  expect_error({kIndex, "weight_map"});
  index_["weight_map"]["model.norm.weight"] = 7;
  write_index();
  expect_error({kIndex, "model.norm.weight"});
  for (const char* escape : {"../secret.safetensors", "/etc/passwd", "..", ".", "", "a/b"}) {
    index_["weight_map"]["model.norm.weight"] = escape;
    write_index();
    expect_error({kIndex, "same folder"});
  }
}

TEST(Model, LoadsEveryTinyModel) {
  for (const char* name : {"tiny-llama", "tiny-mistral", "tiny-qwen2", "tiny-qwen3"}) {
    SCOPED_TRACE(name);
    const Result<ModelConfig> config = load_model_config(kGolden / name);
    ASSERT_TRUE(config) << config.error().message;
    testing::internal::CaptureStderr();
    const Result<Model> model = Model::load(kGolden / name, *config);
    EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
    ASSERT_TRUE(model) << model.error().message;
    for (const LayerWeights& layer : model->weights().layers) {
      EXPECT_EQ(layer.q_bias.empty(), !config->qkv_bias);
      EXPECT_EQ(layer.q_norm.empty(), !config->qk_norm);
    }
  }
}

TEST(Model, WeightsOutliveTheObjectTheyCameFrom) {
  std::optional<Model> copy;
  {
    const Result<Model> model = Model::load(kGolden / "tiny-llama", *load_model_config(kGolden / "tiny-llama"));
    ASSERT_TRUE(model);
    copy = *model;
  }
  EXPECT_TRUE(std::isfinite(to_float(copy->weights().final_norm).at(0)));
}

TEST(ToFloat, EveryHalfAndBrainFloat) {
  std::vector<uint16_t> bits(65536);
  for (size_t i = 0; i < bits.size(); ++i) bits[i] = uint16_t(i);
  const Tensor half{DType::f16, {65536}, std::as_bytes(std::span(bits))};
  const Tensor brain{DType::bf16, {65536}, std::as_bytes(std::span(bits))};
  const std::vector<float> halves = to_float(half), brains = to_float(brain);
  for (size_t i = 0; i < bits.size(); ++i) {
    // The definition of both formats: sign, exponent, fraction.
    const int exponent_bits[] = {5, 8}, fraction_bits[] = {10, 7}, biases[] = {15, 127};
    for (int f = 0; f < 2; ++f) {
      const float got = f == 0 ? halves[i] : brains[i];
      const int exponent = int(i >> fraction_bits[f]) & ((1 << exponent_bits[f]) - 1);
      const double fraction = double(i & ((1u << fraction_bits[f]) - 1)) / double(1 << fraction_bits[f]);
      const double sign = i & 0x8000 ? -1 : 1;
      if (exponent == (1 << exponent_bits[f]) - 1) {
        ASSERT_TRUE(fraction != 0 ? std::isnan(got) : std::isinf(got)) << i;
        continue;
      }
      const double wanted =
          exponent == 0 ? std::ldexp(fraction, 1 - biases[f]) : std::ldexp(1 + fraction, exponent - biases[f]);
      ASSERT_EQ(double(got), sign * wanted) << i << " format " << f;
    }
  }
  std::vector<float> part(3);
  to_float(half, 0x3c00, part);
  EXPECT_EQ(part[0], 1.0f);
}

TEST(Dummy, LooksNormalAndIsReproducible) {
  const ModelConfig config = *builtin_model_config("tiny");
  const Model model = Model::dummy(config, 3), again = Model::dummy(config, 3), other = Model::dummy(config, 4);
  const std::vector<float> values = to_float(model.weights().embedding);
  EXPECT_EQ(values, to_float(again.weights().embedding));
  EXPECT_NE(values, to_float(other.weights().embedding));
  EXPECT_NE(values, to_float(model.weights().layers[0].gate));
  double sum = 0, squares = 0, fourths = 0;
  for (const float v : values) sum += v, squares += double(v) * v, fourths += std::pow(double(v), 4);
  const double n = double(values.size()), variance = squares / n;
  EXPECT_NEAR(sum / n, 0, 5 * 0.02 / std::sqrt(n));  // five standard errors
  EXPECT_NEAR(std::sqrt(variance), 0.02, 0.0004);
  EXPECT_NEAR(fourths / n / (variance * variance), 3, 0.1);  // kurtosis of a normal distribution
  EXPECT_EQ(to_float(model.weights().final_norm), std::vector<float>(128, 1.0f));
  EXPECT_EQ(to_float(model.weights().layers[1].post_norm), std::vector<float>(128, 1.0f));
  EXPECT_EQ(model.weights().lm_head.data.data(), model.weights().embedding.data.data());
}

// Benchmarks on two machines compare only if the bytes are the same: a checksum holds them.
TEST(Dummy, BytesAreTheSameEverywhere) {
  const Model model = Model::dummy(*builtin_model_config("tiny"), 0);
  uint64_t hash = 14695981039346656037u;
  for (const Tensor* tensor : {&model.weights().embedding, &model.weights().layers[1].down})
    for (const std::byte b : tensor->data) hash = (hash ^ uint64_t(b)) * 1099511628211u;
  EXPECT_EQ(hash, 15133574227900804142u);
}

TEST(Dummy, HasWhatItsConfigAsksFor) {
  ModelConfig config = small_config(false);
  config.qkv_bias = config.qk_norm = true;
  const Model model = Model::dummy(config);
  EXPECT_EQ(model.weights().lm_head.shape, (std::vector<int64_t>{5, 8}));
  EXPECT_NE(model.weights().lm_head.data.data(), model.weights().embedding.data.data());
  EXPECT_EQ(model.weights().layers[0].v_bias.num_elements(), 6);
  EXPECT_EQ(to_float(model.weights().layers[0].k_norm), std::vector<float>(6, 1.0f));
  EXPECT_EQ(model.weight_bytes(), size_t(2 * config.num_parameters()));
}

// The default model, as scripts/fetch_model.py converts it.
TEST(FetchedModel, Loads) {
  const fs::path folder = fs::path(EKV_MODELS) / "smollm2-135m-instruct";
  ASSERT_TRUE(fs::exists(folder)) << folder << " is absent: run scripts/setup.sh";
  const Result<ModelConfig> config = load_model_config(folder);
  ASSERT_TRUE(config) << config.error().message;
  EXPECT_EQ(config->name, "smollm2-135m-instruct");
  EXPECT_EQ(config->num_parameters(), 134'515'008);
  testing::internal::CaptureStderr();
  const Result<Model> model = Model::load(folder, *config);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  ASSERT_TRUE(model) << model.error().message;
  EXPECT_EQ(model->weight_bytes(), size_t(2 * config->num_parameters()));
}

}  // namespace
}  // namespace ekv
