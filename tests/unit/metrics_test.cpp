#include "elastickv/metrics.h"

#include <gtest/gtest.h>

namespace ekv {
namespace {

EngineConfig config() {
  EngineConfig config;
  config.max_model_len = 3000;
  return config;
}

// The names that published dashboards query; each must be there before the first request.
TEST(Metrics, EveryNameThatDashboardsAskForExistsFromTheStart) {
  const Metrics metrics("m", config(), 10);
  const std::string text = "\n" + metrics.text();
  for (const char* name : {"e2e_request_latency_seconds_bucket",
                           "time_to_first_token_seconds_bucket",
                           "inter_token_latency_seconds_bucket",
                           "request_time_per_output_token_seconds_bucket",
                           "prompt_tokens_total",
                           "generation_tokens_total",
                           "num_requests_running",
                           "num_requests_waiting",
                           "kv_cache_usage_perc",
                           "request_prompt_tokens_bucket",
                           "request_generation_tokens_bucket",
                           "request_success_total",
                           "request_queue_time_seconds_sum",
                           "request_prefill_time_seconds_sum",
                           "request_decode_time_seconds_sum",
                           "request_inference_time_seconds_sum",
                           "request_max_num_generation_tokens_sum",
                           "request_params_n_bucket",
                           "iteration_tokens_total_count",
                           "prefix_cache_hits_total",
                           "prefix_cache_queries_total",
                           "num_preemptions_total",
                           "cache_config_info"}) {
    const size_t at = text.find(std::string("\nvllm:") + name + "{");
    ASSERT_NE(at, std::string::npos) << name;
    const std::string line = text.substr(at + 1, text.find('\n', at + 1) - at - 1);
    EXPECT_NE(line.find("model_name=\"m\""), std::string::npos) << line;
    EXPECT_NE(line.find("engine=\"0\""), std::string::npos) << line;
  }
  for (const char* reason : {"stop", "length", "abort", "error"})
    EXPECT_NE(text.find("finished_reason=\"" + std::string(reason) + "\""), std::string::npos);
}

double value(const Metrics& metrics, const std::string& name, const std::string& label = {}) {
  const std::string text = "\n" + metrics.text();
  for (size_t at = text.find("\n" + name + "{"); at != std::string::npos;
       at = text.find("\n" + name + "{", at + 1)) {
    const std::string line = text.substr(at + 1, text.find('\n', at + 1) - at - 1);
    if (line.find(label) != std::string::npos) return std::stod(line.substr(line.rfind(' ')));
  }
  return -1;
}

TEST(Metrics, ARequestIsCountedByItsTimes) {
  Metrics metrics("m", config(), 10);
  SeqStats stats{.num_prompt = 30,
                 .num_output = 1,
                 .arrival_us = 1000000,
                 .queued_us = 1250000,
                 .first_scheduled_us = 1500000,
                 .first_token_us = 2000000,
                 .last_token_us = 2000000};
  metrics.on_first_token(stats, true);
  stats.num_output = 3;
  stats.last_token_us = 4000000;
  metrics.on_next_token(500000);
  metrics.on_next_token(1500000);
  metrics.on_finished(FinishReason::length, stats, 3);
  EXPECT_EQ(value(metrics, "vllm:prompt_tokens_total"), 30);
  EXPECT_EQ(value(metrics, "vllm:generation_tokens_total"), 3);
  EXPECT_EQ(value(metrics, "vllm:time_to_first_token_seconds_sum"), 1.0);
  EXPECT_EQ(value(metrics, "vllm:inter_token_latency_seconds_sum"), 2.0);
  EXPECT_EQ(value(metrics, "vllm:request_time_per_output_token_seconds_sum"), 1.0);
  EXPECT_EQ(value(metrics, "vllm:e2e_request_latency_seconds_sum"), 3.0);
  EXPECT_EQ(value(metrics, "vllm:request_queue_time_seconds_sum"), 0.25);
  EXPECT_EQ(value(metrics, "vllm:request_prefill_time_seconds_sum"), 0.5);
  EXPECT_EQ(value(metrics, "vllm:request_decode_time_seconds_sum"), 2.0);
  EXPECT_EQ(value(metrics, "vllm:request_inference_time_seconds_sum"), 2.5);
  EXPECT_EQ(value(metrics, "vllm:request_success_total", "finished_reason=\"length\""), 1);
  EXPECT_EQ(value(metrics, "vllm:request_prompt_tokens_bucket", "le=\"20\""), 0);
  EXPECT_EQ(value(metrics, "vllm:request_prompt_tokens_bucket", "le=\"50\""), 1);
  EXPECT_EQ(value(metrics, "vllm:request_prompt_tokens_bucket", "le=\"2000\""), 1);
}

TEST(Metrics, SharedPromptsCountOnce) {
  Metrics metrics("m", config(), 10);
  const SeqStats stats{.num_prompt = 30, .num_output = 1};
  metrics.on_first_token(stats, true);
  metrics.on_first_token(stats, false);
  EXPECT_EQ(value(metrics, "vllm:prompt_tokens_total"), 30);
  EXPECT_EQ(value(metrics, "vllm:generation_tokens_total"), 2);
}

TEST(Metrics, ClampedValuesAddUp) {
  Metrics metrics("m", config(), 10);
  EXPECT_EQ(value(metrics, "elastickv:kv_clamped_values_total"), 0);
  for (int64_t clamped : {3, 0, 4}) metrics.on_step({.num_decode_tokens = 1, .clamped_values = clamped});
  EXPECT_EQ(value(metrics, "elastickv:kv_clamped_values_total"), 7);
}

TEST(Metrics, GaugesFollowTheLastStep) {
  Metrics metrics("m", config(), 10);
  metrics.on_step({.num_prefill_tokens = 20,
                   .num_decode_tokens = 4,
                   .num_running = 5,
                   .num_waiting = 2,
                   .num_preempted = 1,
                   .num_recomputed = 9,
                   .prefix_query_tokens = 20,
                   .prefix_hit_tokens = 8,
                   .free_pages = 3,
                   .cached_pages = 2,
                   .total_pages = 10});
  EXPECT_EQ(value(metrics, "vllm:num_requests_running"), 5);
  EXPECT_EQ(value(metrics, "vllm:num_requests_waiting"), 2);
  EXPECT_EQ(value(metrics, "vllm:kv_cache_usage_perc"), 0.5);
  EXPECT_EQ(value(metrics, "vllm:num_preemptions_total"), 1);
  EXPECT_EQ(value(metrics, "vllm:prefix_cache_hits_total"), 8);
  EXPECT_EQ(value(metrics, "vllm:iteration_tokens_total_sum"), 24);
  metrics.on_step({.free_pages = 10, .total_pages = 10});
  EXPECT_EQ(value(metrics, "vllm:kv_cache_usage_perc"), 0);
  EXPECT_EQ(value(metrics, "vllm:iteration_tokens_total_count"), 1);  // an idle turn is no step
}

TEST(Metrics, FidelityIsToldByStateAndBySum) {
  Metrics metrics("m", config(), 10);
  const StepRecord step{.num_decode_tokens = 1,
                        .num_recomputed = 9,
                        .num_preemptions_avoided = 2,
                        .free_pages = 3,
                        .cached_pages = 2,
                        .locked_pages = 1,
                        .total_pages = 10,
                        .resident_pairs = 5,
                        .resident_base_pairs = 4,
                        .host_slots_used = 6,
                        .demoted_pairs = 3,
                        .promoted_pairs = 2,
                        .restores_begun = 7,
                        .backups_begun = 8,
                        .stores_begun = 11,
                        .loads_begun = 12,
                        .stores_skipped = 13,
                        .num_loading = 14,
                        .to_host_bytes = 1 << 20,
                        .from_host_bytes = 1 << 10,
                        .pairs_seen = 40,
                        .base_pairs_seen = 10};
  metrics.on_step(step);
  metrics.on_step(step);
  const std::pair<const char*, double> pages[] = {{"free", 3}, {"cached", 2}, {"locked", 1}, {"held", 4}};
  for (const auto& [state, count] : pages)
    EXPECT_EQ(value(metrics, "elastickv:kv_pages", "state=\"" + std::string(state) + "\""), count) << state;
  const std::pair<const char*, double> wanted[] = {{"kv_pairs", 5},
                                                   {"kv_base_pairs", 4},
                                                   {"kv_host_slots_used", 6},
                                                   {"demotions_total", 6},
                                                   {"promotions_total", 4},
                                                   {"restores_total", 14},
                                                   {"backups_total", 16},
                                                   {"pairs_seen_total", 80},
                                                   {"base_pairs_seen_total", 20},
                                                   {"recomputed_tokens_total", 18},
                                                   {"preemptions_avoided_total", 4},
                                                   {"stores_total", 22},
                                                   {"loads_total", 24},
                                                   {"stores_skipped_total", 26},
                                                   {"num_requests_loading", 14}};
  for (const auto& [name, count] : wanted)
    EXPECT_EQ(value(metrics, std::string("elastickv:") + name), count) << name;
  EXPECT_EQ(value(metrics, "elastickv:host_copy_bytes_total", "direction=\"to_host\""), 2 << 20);
  EXPECT_EQ(value(metrics, "elastickv:host_copy_bytes_total", "direction=\"from_host\""), 2 << 10);
}

}  // namespace
}  // namespace ekv
