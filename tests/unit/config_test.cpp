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
      {"watermark", [](auto& c) { c.scheduler.watermark = -0.01; }},
      {"watermark", [](auto& c) { c.scheduler.watermark = 1.0; }},
      {"watermark", [](auto& c) { c.scheduler.watermark = std::nan(""); }},
      {"num-gpu-blocks-override", [](auto& c) { c.kv.num_pages = -1; }},
      {"kv-cache-memory-bytes", [](auto& c) { c.kv.pool_bytes = 0; }},
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
    EXPECT_FALSE(status->message.empty());
  }
}

TEST(Config, LimitsThemselvesAreValid) {
  EngineConfig config;
  config.scheduler = {.max_step_tokens = 1, .max_step_seqs = 1, .watermark = 0.99};
  config.kv = {.pool_bytes = 0, .num_pages = 1};
  config.max_model_len = 1;
  EXPECT_FALSE(validate(config).has_value());
}

}  // namespace
}  // namespace ekv
