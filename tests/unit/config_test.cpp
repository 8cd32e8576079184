#include "elastickv/config.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

namespace ekv {
namespace {

TEST(Config, DefaultsAreValid) { EXPECT_FALSE(validate(EngineConfig{}).has_value()); }

struct BadSetting {
  const char* param;  // the flag that the message must name
  std::function<void(EngineConfig&)> spoil;
};

TEST(Config, NamesTheSettingThatMakesNoSense) {
  const BadSetting cases[] = {
      {"max-num-seqs", [](auto& c) { c.scheduler.max_step_seqs = 0; }},
      {"max-num-seqs", [](auto& c) { c.scheduler.max_step_seqs = std::numeric_limits<int>::max(); }},
      {"max-num-batched-tokens", [](auto& c) { c.scheduler.max_step_tokens = 255; }},
      {"max-num-batched-tokens", [](auto& c) { c.scheduler.max_step_tokens = -1; }},
      {"max-num-batched-tokens",
       [](auto& c) { c.scheduler.max_step_tokens = std::numeric_limits<int>::max(); }},
      {"long-prefill-token-threshold", [](auto& c) { c.scheduler.max_chunk_tokens = -1; }},
      {"target-step-ms", [](auto& c) { c.scheduler.target_step_us = -1; }},
      {"watermark", [](auto& c) { c.scheduler.watermark = -0.01; }},
      {"watermark", [](auto& c) { c.scheduler.watermark = 1.0; }},
      {"watermark", [](auto& c) { c.scheduler.watermark = std::nan(""); }},
      {"num-gpu-blocks-override", [](auto& c) { c.kv.num_pages = -1; }},
      {"kv-cache-memory-bytes", [](auto& c) { c.kv.pool_bytes = 0; }},
      {"sink-pairs", [](auto& c) { c.fidelity.sink_pairs = -1; }},
      {"recent-pairs", [](auto& c) { c.fidelity.recent_pairs = -1; }},
      {"min-demote-pairs", [](auto& c) { c.fidelity.min_demote_pairs = -1; }},
      {"reserve-decay", [](auto& c) { c.fidelity.reserve_decay = -1; }},
      {"headroom-pages", [](auto& c) { c.fidelity.headroom_pages = -1; }},
      {"max-restores", [](auto& c) { c.fidelity.max_restores = -1; }},
      {"min-remaining-tokens", [](auto& c) { c.fidelity.min_remaining_tokens = -1; }},
      {"max-base-fraction", [](auto& c) { c.fidelity.max_base_fraction = 1.01; }},
      {"max-base-fraction", [](auto& c) { c.fidelity.max_base_fraction = std::nan(""); }},
      {"demotion-watermark", [](auto& c) { c.fidelity.free_watermark = 1.0; }},
      {"admission",
       [](auto& c) {
         c.scheduler.admission = AdmissionMode::guaranteed;
         c.fidelity.policy = KvPolicy::elastic;
         c.fidelity.max_base_fraction = 0.5;
       }},
      {"admission",
       [](auto& c) {
         c.scheduler.admission = AdmissionMode::guaranteed;
         c.fidelity.policy = KvPolicy::elastic;
         c.fidelity.backing = BackingMode::writethrough;
       }},
      {"max-model-len", [](auto& c) { c.max_model_len = 0; }},
      {"max-model-len", [](auto& c) { c.max_model_len = std::numeric_limits<int>::max(); }},
  };
  for (const BadSetting& bad : cases) {
    SCOPED_TRACE(bad.param);
    EngineConfig config;
    bad.spoil(config);
    const Status status = validate(config);
    ASSERT_TRUE(status.has_value());
    EXPECT_EQ(status->code, Error::invalid_argument);
    EXPECT_EQ(status->param, bad.param);
    const std::string flag = "--" + std::string(bad.param);
    EXPECT_NE(status->message.find(flag), std::string::npos) << status->message;
  }
}

TEST(Config, LimitsThemselvesAreValid) {
  EngineConfig config;
  config.scheduler = {.max_step_tokens = 1, .max_step_seqs = 1, .watermark = 0.99};
  config.kv = {.pool_bytes = 0, .num_pages = 1};
  config.max_model_len = 1;
  EXPECT_FALSE(validate(config).has_value());
}

template <class E, class Parse>
void check_names(std::initializer_list<E> values, Parse parse) {
  for (E value : values) EXPECT_EQ(parse(name_of(value)), value);
  EXPECT_EQ(parse("no such name"), std::nullopt);
  EXPECT_EQ(parse(""), std::nullopt);
}

TEST(Config, NamesOfFlagsGoBothWays) {
  check_names({KvPolicy::elastic, KvPolicy::target_only, KvPolicy::exact_offload, KvPolicy::static8},
              parse_kv_policy);
  check_names({DemotionMode::shortage, DemotionMode::watermark, DemotionMode::eager}, parse_demotion_mode);
  check_names({PromotionMode::reserve, PromotionMode::eager, PromotionMode::none}, parse_promotion_mode);
  check_names({BackingMode::lazy, BackingMode::writethrough}, parse_backing_mode);
  check_names({AdmissionMode::native, AdmissionMode::guaranteed}, parse_admission_mode);
  check_names({AttentionPath::automatic, AttentionPath::general}, parse_attention_path);
  EXPECT_EQ(parse_kv_policy("target-only"), KvPolicy::target_only);
}

TEST(Config, PresetsAreValidAndTouchNoPool) {
  for (const auto preset : {apply_preset_paper015, apply_preset_modern}) {
    EngineConfig config;
    config.kv.num_pages = 777;
    config.fidelity.policy = KvPolicy::elastic;
    preset(config);
    EXPECT_FALSE(validate(config).has_value());
    EXPECT_EQ(config.kv.num_pages, 777);
    EXPECT_EQ(config.fidelity.policy, KvPolicy::elastic);
    EXPECT_EQ(config.kv.prefix_cache, config.scheduler.reserve_full_prompt);
  }
}

}  // namespace
}  // namespace ekv
