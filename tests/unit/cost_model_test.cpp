// The price of a step against its formula written out, the shipped models against the measurements they were
// fitted to, and the file format: what is missing, misspelt or impossible is refused by name.

#include "backend/sim/cost_model.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <random>

#include "elastickv/kv_layout.h"
#include "tests/support/temp_dir.h"
#include "util/json.h"

namespace ekv {
namespace {

CostModel shipped(const std::string& name) {
  Result<CostModel> model = load_cost_model(name);
  EXPECT_TRUE(bool(model)) << (model ? "" : model.error().message);
  return model ? *model : CostModel{};
}

// Round figures, every term of its own magnitude.
CostModel plain_model() {
  return {.name = "plain",
          .target_bytes_per_token = 1000,
          .base_bytes_per_token = 600,
          .step_fixed_us = 100,
          .step_per_seq_us = 3,
          .graph_sizes = {1, 2, 4, 8},
          .forward = {{1, 50}, {8, 120}, {100, 1040}},
          .prefill_per_chunk_us = 7,
          .prefill_per_key_us = 0.5,
          .decode_fixed_us = 11,
          .decode_target_factor = 1.1,
          .decode_base_factor = 1.3,
          .decode_bytes_per_us = 200,
          .demotion_fixed_us = 13,
          .demotion_per_pair_us = 0.25,
          .promotion_fixed_us = 17,
          .promotion_per_pair_us = 0.75,
          .all_reduce = {{1, 5}, {100, 104}}};
}

TEST(CostModel, ForwardPadsToTheGraphSizeAndInterpolates) {
  const CostModel model = plain_model();
  EXPECT_DOUBLE_EQ(forward_us(model, 1), 50);
  EXPECT_DOUBLE_EQ(forward_us(model, 3), 50 + 70 * 3.0 / 7);  // as 4 tokens
  EXPECT_DOUBLE_EQ(forward_us(model, 5), 120);                // as 8
  EXPECT_DOUBLE_EQ(forward_us(model, 9), 130);                // above the largest graph: not padded
  EXPECT_DOUBLE_EQ(forward_us(model, 100), 1040);
  EXPECT_DOUBLE_EQ(forward_us(model, 200), 2040);  // last slope
  EXPECT_DOUBLE_EQ(all_reduce_us(model, 3), 8);
}

TEST(CostModel, OnePointIsAConstant) {
  CostModel model = plain_model();
  model.forward = {{4, 70}};
  for (int tokens : {1, 4, 1000}) EXPECT_DOUBLE_EQ(forward_us(model, tokens), 70);
}

TEST(CostModel, PrefillCountsEveryVisibleKeyOnce) {
  const CostModel model = plain_model();
  for (const auto& [context, rows] :
       {std::pair(0, 2), std::pair(0, 7), std::pair(33, 5), std::pair(4096, 100)}) {
    int64_t keys = 0;
    for (int row = 0; row < rows; ++row) keys += context + row + 1;
    EXPECT_DOUBLE_EQ(prefill_attention_us(model, {.num_tokens = rows, .kv_len = context + rows}),
                     7 + 0.5 * double(keys));
  }
}

TEST(CostModel, AStepIsTheSumOfItsTerms) {
  const CostModel model = plain_model();
  for (unsigned seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 rng(seed);
    StepWork work{.num_demoted_pairs = int(rng() % 3) * 16, .num_promoted_pairs = int(rng() % 3) * 5};
    int tokens = 0, decodes = 0;
    double expected = 0, bytes = 0;
    for (int chunk = int(rng() % 6); chunk > 0; --chunk) {
      ChunkWork c{.num_tokens = rng() % 2 ? 1 : 2 + int(rng() % 30)};
      c.kv_len = c.num_tokens + int(rng() % 300);
      c.num_base_pairs = int(rng() % unsigned(c.kv_len / kPairTokens + 1));
      work.chunks.push_back(c);
      tokens += c.num_tokens;
      expected += 3;
      if (c.num_tokens == 1) {
        ++decodes;
        bytes += 1.1 * 1000 * (c.kv_len - 32 * c.num_base_pairs) + 1.3 * 600 * 32 * c.num_base_pairs;
      } else {
        expected += prefill_attention_us(model, c);
      }
    }
    if (!work.chunks.empty()) expected += 100 + forward_us(model, tokens) + all_reduce_us(model, tokens);
    if (decodes > 0) expected += 11 + bytes / 200;
    if (work.num_demoted_pairs) expected += 13 + 0.25 * work.num_demoted_pairs;
    if (work.num_promoted_pairs) expected += 17 + 0.75 * work.num_promoted_pairs;
    EXPECT_NEAR(step_us(model, work), expected, 1e-9 * expected);
  }
}

TEST(CostModel, NothingCostsNothing) { EXPECT_EQ(step_us(plain_model(), {}), 0); }

double decode_ms(const CostModel& model, int sequences, int context) {
  const StepWork work{.chunks =
                          std::vector<ChunkWork>(size_t(sequences), {.num_tokens = 1, .kv_len = context})};
  return step_us(model, work) * 1e-3;
}

// TPOT of vLLM 0.26.0 on an H200, Llama-3.1-8B shapes; the outputs made the context about 128 tokens longer.
TEST(CostModel, H200MeetsTheMeasuredDecodeSteps) {
  const CostModel model = shipped("vllm-h200-llama-3.1-8b");
  const struct {
    int sequences, prompt;
    double ms;
  } measured[] = {{1, 1024, 4.90}, {1, 4096, 5.00}, {64, 1024, 7.44}, {32, 4096, 8.97}, {64, 4096, 13.08}};
  for (const auto& m : measured)
    EXPECT_NEAR(decode_ms(model, m.sequences, m.prompt + 128), m.ms, 0.01 * m.ms)
        << m.sequences << "x" << m.prompt;
}

// The same engine, batches of 8,192 prompt tokens: thousands of tokens per second by prompt length.
TEST(CostModel, H200MeetsTheMeasuredPrefillRates) {
  const CostModel model = shipped("vllm-h200-llama-3.1-8b");
  for (const auto& [prompt, rate] : {std::pair(1024, 44.1), std::pair(4096, 41.8), std::pair(8192, 38.9)}) {
    const StepWork work{.chunks = std::vector<ChunkWork>(size_t(8192 / prompt), {prompt, prompt})};
    EXPECT_NEAR(8192 / (step_us(model, work) * 1e-3), rate, 0.01 * rate) << prompt;
  }
}

TEST(CostModel, A100MeetsItsConstants) {
  const CostModel model = shipped("a100-llama-3.1-8b");
  EXPECT_NEAR(decode_ms(model, 1, 1), 11, 0.01);
  EXPECT_NEAR(decode_ms(model, 100, 1250) - decode_ms(model, 100, 1), 124'900 * 131072e-3 / 1.5e6, 0.01);
  EXPECT_EQ(model.pages_in(size_t(20) << 30), 10'240);
  EXPECT_EQ(shipped("a100-qwen3-8b").pages_in(size_t(20) << 30), 9'102);
}

TEST(CostModel, EveryShippedModelPricesMoreWorkHigher) {
  ASSERT_GE(shipped_cost_models().size(), 6u);
  for (const std::string_view name : shipped_cost_models()) {
    SCOPED_TRACE(name);
    const CostModel model = shipped(std::string(name));
    EXPECT_EQ(model.name, name);
    for (int tokens = 1; tokens < 10'000; tokens += 7)
      EXPECT_LE(forward_us(model, tokens), forward_us(model, tokens + 7));
    EXPECT_LT(decode_ms(model, 8, 1000), decode_ms(model, 9, 1000));
    const StepWork target{.chunks = {{1, 3200, 0}}}, base{.chunks = {{1, 3200, 100}}},
        one{.chunks = {{1, 1, 0}}};
    EXPECT_LT(step_us(model, base), step_us(model, target));
    const auto reading_us = [&](const StepWork& work) {
      return decode_attention_us(model, work.chunks) - decode_attention_us(model, one.chunks);
    };
    EXPECT_NEAR(reading_us(base) / reading_us(target), 0.53, 0.02);  // 0.504 of the bytes, 3 to 5 % slower
  }
}

Json valid_file() {
  const auto section = [](Json figures) { return figures["source"] = "test", figures; };
  return {{"name", "m"},
          {"kv", section({{"target_bytes_per_token", 1024}, {"base_bytes_per_token", 516}})},
          {"step", section({{"fixed_us", 1}, {"per_seq_us", 0}, {"steps_in_flight", 2}})},
          {"forward", section({{"graph_sizes", {1, 2}}, {"tokens_us", {{1, 10}, {5, 20.5}}}})},
          {"prefill_attention", section({{"per_chunk_us", 0}, {"per_key_us", 0.1}})},
          {"decode_attention",
           section({{"fixed_us", 0}, {"target_factor", 1}, {"base_factor", 1}, {"bytes_per_us", 10}})},
          {"demotion", section({{"fixed_us", 0}, {"per_pair_us", 0}})},
          {"promotion", section({{"fixed_us", 0}, {"per_pair_us", 0}})},
          {"all_reduce", section({{"tokens_us", Json::array()}})},
          {"to_host", section({{"bytes_per_us", 5}, {"latency_us", 1}})},
          {"from_host", section({{"bytes_per_us", 6}, {"latency_us", 2}})}};
}

TEST(CostModelFile, ReadsEveryFigure) {
  const Result<CostModel> model = parse_cost_model(valid_file().dump());
  ASSERT_TRUE(bool(model)) << model.error().message;
  EXPECT_EQ(model->graph_sizes, (std::vector{1, 2}));
  ASSERT_EQ(model->forward.size(), 2u);
  EXPECT_EQ(model->forward[1].us, 20.5);
  EXPECT_EQ(model->prefill_per_key_us, 0.1);
  EXPECT_EQ(model->steps_in_flight, 2);
  EXPECT_EQ(model->from_host.bytes_per_us, 6);
  EXPECT_EQ(model->from_host.latency_us, 2);
  EXPECT_EQ(model->to_host.bytes_per_us, 5);
}

void expect_refused(const Json& file, const std::string& words) {
  const Result<CostModel> model = parse_cost_model(file.dump());
  ASSERT_FALSE(bool(model)) << words;
  EXPECT_NE(model.error().message.find(words), std::string::npos) << model.error().message;
}

TEST(CostModelFile, RefusesWhatIsMissing) {
  const Json valid = valid_file();
  for (const auto& [section, figures] : valid.items()) {
    Json file = valid_file();
    file.erase(section);
    expect_refused(file, "'" + section + "'");
    if (!figures.is_object()) continue;
    for (const auto& [key, value] : figures.items()) {
      file = valid_file();
      file[section].erase(key);
      const std::string missing = key == "source" ? "'source' must say" : "has no '" + key + "'";
      expect_refused(file, "section '" + section + "' " + missing);
    }
  }
}

TEST(CostModelFile, RefusesWhatMakesNoSense) {
  const auto changed = [](const char* section, const char* key, Json value) {
    Json file = valid_file();
    file[section][key] = std::move(value);
    return file;
  };
  expect_refused(changed("step", "fixed_us", -1), "'fixed_us' must be 0 to 60000000 us, got -1");
  expect_refused(changed("step", "fixed_us", "1"), "must be a number");
  for (const Json& count : {Json(0), Json(3), Json(1.5), Json("2")})
    expect_refused(changed("step", "steps_in_flight", count), "'steps_in_flight' must be 1 to 2: 1, or 2 if");
  expect_refused(changed("step", "per_sequence_us", 1), "section 'step' has a member that is none of");
  expect_refused(changed("decode_attention", "bytes_per_us", 0),
                 "'bytes_per_us' must be 1 to 1000000000000 bytes/us, got 0");
  expect_refused(changed("forward", "graph_sizes", {2, 2}), "must ascend");
  expect_refused(changed("forward", "graph_sizes", {0}), "token counts from 1 to 16777216, has 0");
  expect_refused(changed("forward", "tokens_us", Json::array()), "needs a point");
  expect_refused(changed("forward", "tokens_us", Json::array({{5, 1}, {1, 2}})), "must ascend");
  expect_refused(changed("forward", "tokens_us", Json::array({{1, 2}, {5, 1}})), "not descend");
  expect_refused(changed("forward", "tokens_us", Json::array({{1, 2, 3}})), "must hold");
  expect_refused(
      changed("kv", "base_bytes_per_token", 1024),
      "section 'kv' 'base_bytes_per_token' must be less than 'target_bytes_per_token', which is 1024");
  expect_refused(changed("kv", "source", ""), "where its figures come from");
  Json unknown = valid_file();
  unknown["decode"] = Json::object();
  expect_refused(unknown, "'decode' is no part of a cost model");
  EXPECT_FALSE(bool(parse_cost_model("{")));
  EXPECT_FALSE(bool(parse_cost_model("[]")));
}

// Whatever number stands in a file: it is refused by name and value, or every price is small enough to add up.
TEST(CostModelFile, NoFigureMakesTimesThatDoNotFit) {
  StepWork work{.num_demoted_pairs = 1 << 16, .num_promoted_pairs = 1 << 16};
  work.chunks.assign(1024, {.num_tokens = 1, .kv_len = 1 << 20, .num_base_pairs = 1 << 10});
  work.chunks.push_back({.num_tokens = 1 << 20, .kv_len = 1 << 24});
  const Json valid = valid_file();
  int accepted = 0, refused = 0;
  for (const double value : {-1.0, -0.0, 0.0, 5e-324, 1e-308, 1e-12, 1e-6, 0.5, 1.5, 900.0, 1e9, 1e15, 1e18,
                             0x1p63, 0x1p64, 1e30, 1e308})
    for (const auto& [section, figures] : valid.items()) {
      if (!figures.is_object()) continue;
      for (const auto& [key, old] : figures.items()) {
        if (!old.is_number_float() && !old.is_number_integer()) continue;
        SCOPED_TRACE(section + "." + key + " " + std::to_string(value));
        Json file = valid_file();
        file[section][key] = value;
        const Result<CostModel> model = parse_cost_model(file.dump());
        if (!model) {
          ++refused;
          EXPECT_NE(model.error().message.find("section '" + section + "' '" + key + "' must be "),
                    std::string::npos)
              << model.error().message;
          EXPECT_NE(model.error().message.find(", got "), std::string::npos) << model.error().message;
          continue;
        }
        ++accepted;
        const double us = step_us(*model, work);
        EXPECT_TRUE(us >= 0 && us < 0x1p61) << us;
        EXPECT_GE(model->pages_in(size_t(1) << 50), 1);
        EXPECT_GE(model->slot_bytes(HostContent::low_planes), 1u);
      }
    }
  EXPECT_GT(accepted, 20);
  EXPECT_GT(refused, 100);
}

TEST(CostModelFile, APointOfATableIsRefusedAsAFigureIs) {
  for (const Json& point :
       {Json({1e18, 5}), Json({3, 1e18}), Json({3, -1}), Json({3, 1e308}), Json({"3", 1})}) {
    for (const char* section : {"forward", "all_reduce"}) {
      Json file = valid_file();
      file[section]["tokens_us"] = Json::array({point});
      expect_refused(
          file, "must hold [tokens from 1 to 16777216, microseconds from 0 to 60000000], has " + point.dump());
    }
  }
}

TEST(CostModelFile, ComesByNameOrByPath) {
  const test::TempDir temp;
  const std::string path = temp.file("cost_model.json");
  std::ofstream(path) << valid_file().dump();
  const Result<CostModel> model = load_cost_model(path);
  ASSERT_TRUE(bool(model));
  EXPECT_EQ(model->name, "m");
  std::ofstream(path) << "{}";
  const Result<CostModel> broken = load_cost_model(path);
  ASSERT_FALSE(bool(broken));
  EXPECT_NE(broken.error().message.find(path), std::string::npos);
  const Result<CostModel> folder = load_cost_model(temp.path().string() + "/");
  ASSERT_FALSE(bool(folder));
  EXPECT_EQ(folder.error().param, "cost-model");
  const Result<CostModel> unknown = load_cost_model("h100");
  ASSERT_FALSE(bool(unknown));
  EXPECT_EQ(unknown.error().code, Error::not_found);
  EXPECT_NE(unknown.error().message.find("vllm-h200-qwen3-8b"), std::string::npos);
}

// A file that is there is read, whatever its name ends in, so that the message is about what it holds.
TEST(CostModelFile, ANameThatIsTooLongForAPathIsAnError) {
  const Result<CostModel> none = load_cost_model(std::string(5000, 'a'));
  ASSERT_FALSE(none);
  EXPECT_NE(none.error().message.find("there is no cost model"), std::string::npos) << none.error().message;
}

TEST(CostModelFile, MayHaveAnyName) {
  const std::filesystem::path before = std::filesystem::current_path();
  const test::TempDir folder;
  std::filesystem::current_path(folder.path());
  std::ofstream("ekv_cost_model.txt") << "# no JSON";
  const Result<CostModel> broken = load_cost_model("ekv_cost_model.txt");
  std::ofstream("ekv_cost_model.txt") << valid_file().dump();
  const Result<CostModel> good = load_cost_model("ekv_cost_model.txt");
  std::filesystem::current_path(before);
  ASSERT_FALSE(bool(broken));
  EXPECT_EQ(broken.error().message.find("ekv_cost_model.txt: "), 0u) << broken.error().message;
  EXPECT_TRUE(bool(good));
}

TEST(CostModelFile, ShippedOnesSayWhoseTimesTheyHave) {
  for (const std::string_view name : shipped_cost_models()) {
    const std::string description = load_cost_model(std::string(name))->description;
    const std::string whose = name.starts_with("h200-")          ? "this program"
                              : name == "vllm-h200-llama-3.1-8b" ? "vLLM 0.26"
                                                                 : "";
    EXPECT_NE(description.find(whose), std::string::npos) << name;
  }
}

}  // namespace
}  // namespace ekv
