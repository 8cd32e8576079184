#include "server/flags.h"

#include <gtest/gtest.h>

namespace ekv {
namespace {

CommandLine parse(std::vector<const char*> arguments) {
  arguments.insert(arguments.begin(), "elastickv");
  return parse_command_line(int(arguments.size()), arguments.data());
}

TEST(Flags, DefaultsAreThoseOfVllm) {
  const CommandLine line = parse({"serve", "some/model"});
  ASSERT_TRUE(line.serve) << line.text;
  const ServeFlags& f = *line.serve;
  EXPECT_EQ(f.model, "some/model");
  EXPECT_EQ(f.served_model_names, std::vector<std::string>{"some/model"});
  EXPECT_EQ(f.http.port, 8000);
  EXPECT_FALSE(f.max_model_len);
  EXPECT_EQ(f.engine.scheduler.max_step_tokens, 2048);
  EXPECT_EQ(f.engine.scheduler.max_step_seqs, 256);
  EXPECT_TRUE(f.engine.scheduler.reserve_full_prompt);
  EXPECT_TRUE(f.engine.kv.prefix_cache);
  EXPECT_EQ(f.engine.kv.pool_bytes, size_t(1) << 30);
  EXPECT_EQ(f.max_logprobs, 20);
  EXPECT_TRUE(f.use_generation_config);
  EXPECT_EQ(f.allowed_origins, std::vector<std::string>{"*"});
}

TEST(Flags, AllAreTaken) {
  const CommandLine line = parse({"serve",
                                  "m",
                                  "--served-model-name",
                                  "a",
                                  "b",
                                  "--max-model-len",
                                  "8K",
                                  "--kv-cache-memory-bytes",
                                  "2G",
                                  "--num-gpu-blocks-override",
                                  "77",
                                  "--no-enable-prefix-caching",
                                  "--scheduling-policy",
                                  "priority",
                                  "--max-num-batched-tokens",
                                  "4k",
                                  "--max-num-seqs",
                                  "12",
                                  "--long-prefill-token-threshold",
                                  "64",
                                  "--watermark",
                                  "0.05",
                                  "--api-key",
                                  "k1",
                                  "--api-key",
                                  "k2",
                                  "--allowed-origins",
                                  "[\"http://a\"]",
                                  "--port",
                                  "0",
                                  "--generation-config",
                                  "vllm",
                                  "--shutdown-timeout",
                                  "3",
                                  "--max-num-queued-reqs",
                                  "9",
                                  "--load-format",
                                  "dummy",
                                  "--max-body-bytes",
                                  "1M",
                                  "--enable-prompt-tokens-details",
                                  "--no-scheduler-reserve-full-isl"});
  ASSERT_TRUE(line.serve) << line.text;
  const ServeFlags& f = *line.serve;
  EXPECT_EQ(f.served_model_names, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(f.max_model_len, 8192);
  EXPECT_EQ(f.engine.kv.pool_bytes, size_t(2) << 30);
  EXPECT_EQ(f.engine.kv.num_pages, 77);
  EXPECT_FALSE(f.engine.kv.prefix_cache);
  EXPECT_EQ(f.engine.scheduler.policy, SchedulingPolicy::priority);
  EXPECT_EQ(f.engine.scheduler.max_step_tokens, 4000);
  EXPECT_EQ(f.engine.scheduler.max_step_seqs, 12);
  EXPECT_EQ(f.engine.scheduler.max_chunk_tokens, 64);
  EXPECT_FALSE(f.engine.scheduler.reserve_full_prompt);
  EXPECT_EQ(f.engine.scheduler.watermark, 0.05);
  EXPECT_EQ(f.api_keys, (std::vector<std::string>{"k1", "k2"}));
  EXPECT_EQ(f.allowed_origins, std::vector<std::string>{"http://a"});
  EXPECT_FALSE(f.use_generation_config);
  EXPECT_EQ(f.shutdown_timeout_s, 3);
  EXPECT_EQ(f.max_queued, 9);
  EXPECT_EQ(f.load_format, "dummy");
  EXPECT_EQ(f.http.max_body_bytes, size_t(1) << 20);
  EXPECT_TRUE(f.prompt_tokens_details);
}

TEST(Flags, MistakesEndWithAMessage) {
  const std::vector<std::vector<const char*>> mistakes = {{},
                                                          {"serve"},
                                                          {"bench"},
                                                          {"serve", "m", "--no-such-flag"},
                                                          {"serve", "m", "--port", "99999"},
                                                          {"serve", "m", "--max-model-len", "many"},
                                                          {"serve", "m", "--kv-cache-memory-bytes", "-5"},
                                                          {"serve", "m", "--scheduling-policy", "lifo"},
                                                          {"serve", "m", "--device", "cuda"},
                                                          {"serve", "m", "--allowed-origins", "http://a"},
                                                          {"serve", "m", "--api-key", "with space"},
                                                          {"serve", "m", "--chat-template", "/does/not/exist"}};
  for (const auto& arguments : mistakes) {
    const CommandLine line = parse(arguments);
    EXPECT_FALSE(line.serve);
    EXPECT_NE(line.exit_code, 0);
    EXPECT_FALSE(line.text.empty());
  }
  EXPECT_NE(parse({"serve", "m", "--no-such-flag"}).text.find("--no-such-flag"), std::string::npos);
}

TEST(Flags, HelpAndVersion) {
  const CommandLine help = parse({"serve", "--help"});
  EXPECT_EQ(help.exit_code, 0);
  EXPECT_NE(help.text.find("--max-model-len"), std::string::npos);
  EXPECT_NE(parse({"--version"}).text.find(version_text()), std::string::npos);
}

TEST(ParseSize, LowercaseIsDecimalAndUppercaseBinary) {
  EXPECT_EQ(*parse_size("4096"), 4096);
  EXPECT_EQ(*parse_size("8k"), 8000);
  EXPECT_EQ(*parse_size("8K"), 8192);
  EXPECT_EQ(*parse_size("25.6k"), 25600);
  EXPECT_EQ(*parse_size("3m"), 3000000);
  EXPECT_EQ(*parse_size("2G"), int64_t(2) << 30);
  for (const char* text : {"", "k", "8kb", "1.5", "1.5K", "-1", "8 k", "1e3", "9999999T", "1..2k", ".5k", "8x"})
    EXPECT_FALSE(parse_size(text)) << text;
}

}  // namespace
}  // namespace ekv
