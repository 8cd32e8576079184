#include "server/flags.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>

#include "tests/support/temp_dir.h"

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
  EXPECT_FALSE(f.async_scheduling.has_value()) << "the device decides";
  EXPECT_EQ(f.engine.kv.pool_bytes, size_t(1) << 30);
  EXPECT_EQ(f.engine.kv.gpu_memory_utilization, 0.9);
  EXPECT_EQ(f.max_logprobs, 20);
  EXPECT_TRUE(f.use_generation_config);
  EXPECT_EQ(f.allowed_origins, std::vector<std::string>{"*"});
}

TEST(Flags, AllAreTaken) {
  const CommandLine line = parse({"serve",
                                  "m",
                                  "--served-model-name",
                                  "a",
                                  "--served-model-name",
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
                                  "--target-step-ms",
                                  "12.5",
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
  EXPECT_EQ(f.engine.kv.gpu_memory_utilization, 0) << "the size of the pool is given";
  EXPECT_EQ(f.engine.kv.num_pages, 77);
  EXPECT_FALSE(f.engine.kv.prefix_cache);
  EXPECT_EQ(f.engine.scheduler.policy, SchedulingPolicy::priority);
  EXPECT_EQ(f.engine.scheduler.max_step_tokens, 4000);
  EXPECT_EQ(f.engine.scheduler.max_step_seqs, 12);
  EXPECT_EQ(f.engine.scheduler.max_chunk_tokens, 64);
  EXPECT_FALSE(f.engine.scheduler.reserve_full_prompt);
  EXPECT_EQ(f.engine.scheduler.target_step_us, 12500);
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

TEST(Flags, AsyncSchedulingIsOnOffOrTheDevices) {
  EXPECT_EQ(parse({"serve", "m", "--async-scheduling"}).serve->async_scheduling, true);
  EXPECT_EQ(parse({"serve", "m", "--no-async-scheduling"}).serve->async_scheduling, false);
  EXPECT_EQ(parse({"serve", "m", "--no-async-scheduling", "--async-scheduling"}).serve->async_scheduling, true)
      << "the last one counts";
}

TEST(Flags, MaxLogprobsIsCheckedAtTheStart) {
  const CommandLine many = parse({"serve", "m", "--max-logprobs", "1001"});
  EXPECT_FALSE(many.serve);
  EXPECT_NE(many.text.find("--max-logprobs"), std::string::npos) << many.text;
  const auto served = [](const char* most) { return *parse({"serve", "m", "--max-logprobs", most}).serve; };
  EXPECT_FALSE(check_device_flags(served("20"), Device::cuda));
  EXPECT_FALSE(check_device_flags(served("1000"), Device::cpu));
  const Status beyond = check_device_flags(served("21"), Device::cuda);
  ASSERT_TRUE(beyond);
  EXPECT_EQ(beyond->param, "max-logprobs");
  for (const char* part : {"--max-logprobs 21", "20", "--device cuda"})
    EXPECT_NE(beyond->message.find(part), std::string::npos) << beyond->message;
}

TEST(Flags, TypesOfWeightsAreAutoOrTwo) {
  const auto served = [](const char* dtype) { return parse({"serve", "m", "--dtype", dtype}); };
  EXPECT_EQ(parse({"serve", "m"}).serve->cuda_launch.dtype, CudaDtype::automatic);
  EXPECT_EQ(served("auto").serve->cuda_launch.dtype, CudaDtype::automatic);
  EXPECT_EQ(served("float16").serve->cuda_launch.dtype, CudaDtype::float16);
  EXPECT_EQ(served("half").serve->cuda_launch.dtype, CudaDtype::float16);
  EXPECT_EQ(served("bfloat16").serve->cuda_launch.dtype, CudaDtype::bfloat16);
  for (const char* other : {"float32", "fp16", "Auto", ""}) {
    const CommandLine line = served(other);
    EXPECT_FALSE(line.serve) << other;
    EXPECT_EQ(line.exit_code, 2);
    EXPECT_NE(line.text.find("--dtype"), std::string::npos) << line.text;
  }
  EXPECT_NE(served("float32").text.find("--device cpu"), std::string::npos) << served("float32").text;
}

TEST(Flags, TheCpuHasNoTypesToChoose) {
  const auto served = [](const char* device, const char* dtype) {
    return parse({"serve", "m", "--dtype", dtype, "--device", device});
  };
  EXPECT_TRUE(served("cpu", "auto").serve);
  for (const char* dtype : {"float16", "half", "bfloat16"}) {
    EXPECT_TRUE(served("cuda", dtype).serve);
    EXPECT_TRUE(served("auto", dtype).serve) << "there may be a GPU";
    const CommandLine line = served("cpu", dtype);
    EXPECT_FALSE(line.serve);
    EXPECT_EQ(line.exit_code, 2);
    EXPECT_NE(line.text.find("--dtype: is for --device cuda"), std::string::npos) << line.text;
  }
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
                                                          {"serve", "m", "--device", "tpu"},
                                                          {"serve", "m", "--gpu-memory-utilization", "1.5"},
                                                          {"serve", "m", "--allowed-origins", "http://a"},
                                                          {"serve", "m", "--api-key", "with space"},
                                                          {"serve", "m", "--chat-template", "/does/not/exist"}};
  for (const auto& arguments : mistakes) {
    const CommandLine line = parse(arguments);
    EXPECT_FALSE(line.serve);
    EXPECT_EQ(line.exit_code, 2);
    EXPECT_FALSE(line.text.empty());
  }
  EXPECT_NE(parse({"serve", "m", "--no-such-flag"}).text.find("--no-such-flag"), std::string::npos);
}

class ConfigFile {
 public:
  explicit ConfigFile(const std::string& text) { std::ofstream(path_) << text; }
  const char* path() const { return path_.c_str(); }

 private:
  test::TempDir folder_;
  std::string path_ = folder_.file("flags");
};

TEST(Flags, AConfigFileIsAppliedAndYieldsToTheCommandLine) {
  const ConfigFile file(
      "port = 1234\nmax-model-len = 8K\nserved-model-name = [\"a\", \"b\"]\nkv-policy = elastic\n"
      "enable-prefix-caching = false\nmax-num-seqs = 7\n# a comment\nkv-cache-memory-bytes = 2G\n");
  for (const bool before : {false, true}) {
    const CommandLine line = before ? parse({"serve", "--config", file.path(), "--port", "99", "m"})
                                    : parse({"serve", "m", "--port", "99", "--config", file.path()});
    ASSERT_TRUE(line.serve) << line.text;
    const ServeFlags& f = *line.serve;
    EXPECT_EQ(f.model, "m");
    EXPECT_EQ(f.http.port, 99);
    EXPECT_EQ(f.max_model_len, 8192);
    EXPECT_EQ(f.served_model_names, (std::vector<std::string>{"a", "b"}));
    EXPECT_EQ(f.engine.fidelity.policy, KvPolicy::elastic);
    EXPECT_FALSE(f.engine.kv.prefix_cache);
    EXPECT_EQ(f.engine.scheduler.max_step_seqs, 7);
    EXPECT_EQ(f.engine.kv.pool_bytes, size_t(2) << 30);
  }
  const ConfigFile with_model("model = some/folder\n");
  const CommandLine line = parse({"serve", "--config", with_model.path()});
  ASSERT_TRUE(line.serve) << line.text;
  EXPECT_EQ(line.serve->model, "some/folder");
}

TEST(Flags, WhatIsWrongInAConfigFileIsNamed) {
  const std::pair<const char*, const char*> mistakes[] = {{"prot = 1234\n", "prot"},
                                                          {"port = many\n", "port"},
                                                          {"port = 99999\n", "port"},
                                                          {"kv-policy = rubber\n", "kv-policy"},
                                                          {"max-model-len = much\n", "max-model-len"}};
  for (const auto& [text, name] : mistakes) {
    const ConfigFile file(text);
    const CommandLine line = parse({"serve", "m", "--config", file.path()});
    EXPECT_FALSE(line.serve) << text;
    EXPECT_EQ(line.exit_code, 2) << text;
    EXPECT_NE(line.text.find(name), std::string::npos) << line.text;
  }
  for (const auto& [text, name] : {std::pair("foo = 3\n", "'foo'"), std::pair("[part]\nport = 3\n", "'[part]'"),
                                   std::pair("garbage\n", "'garbage'")}) {
    const ConfigFile file(text);
    const CommandLine line = parse({"serve", "m", "--config", file.path()});
    EXPECT_EQ(line.exit_code, 2);
    EXPECT_NE(line.text.find(std::string(file.path()) + ": " + name + " is no flag"), std::string::npos)
        << line.text;
  }
  const CommandLine missing = parse({"serve", "m", "--config", "/does/not/exist.ini"});
  EXPECT_FALSE(missing.serve);
  EXPECT_NE(missing.text.find("/does/not/exist.ini"), std::string::npos) << missing.text;
}

TEST(Flags, AWordThatIsNoCommandIsNamed) {
  const CommandLine line = parse({"frob", "model"});
  EXPECT_FALSE(line.serve);
  EXPECT_EQ(line.exit_code, 2);
  for (const char* word : {"'frob'", "serve", "replay", "bench"})
    EXPECT_NE(line.text.find(word), std::string::npos) << line.text;
}

TEST(Flags, OfSeveralValuesEachIsGivenByItself) {
  for (const char* flag : {"--served-model-name", "--api-key"}) {
    const CommandLine line = parse({"serve", flag, "one", "model", "--port", "1"});
    ASSERT_TRUE(line.serve) << line.text;
    EXPECT_EQ(line.serve->model, "model");
    EXPECT_FALSE(parse({"serve", "model", flag, "one", "two"}).serve);
  }
}

TEST(Flags, NamesOfTheModelAreText) {
  for (const char* name : {"", "\xff", "a\xc3", "line\nbreak"}) {
    const CommandLine line = parse({"serve", "m", "--served-model-name", name});
    EXPECT_FALSE(line.serve) << name;
    EXPECT_NE(line.text.find("--served-model-name"), std::string::npos) << line.text;
  }
  EXPECT_TRUE(parse({"serve", "m", "--served-model-name", "mod\xc3\xa8le/7B"}).serve);
}

TEST(Flags, NumbersOutOfRangeAreRefusedWithReadableBounds) {
  const std::vector<std::pair<const char*, std::vector<const char*>>> flags = {
      {"--seed", {"-1", "18446744073709551616", "1e3", "x"}},
      {"--port", {"-1", "65536"}},
      {"--max-num-queued-reqs", {"-1", "99999999999"}},
      {"--watchdog-timeout", {"0", "-1", "99999999999"}},
      {"--shutdown-timeout", {"-1", "99999999999"}},
      {"--max-num-seqs", {"0", "-1", "99999999999"}},
      {"--long-prefill-token-threshold", {"-1"}},
      {"--target-step-ms", {"-1", "0.0004", "0.0009", "1e-9", "99999", "nan", "x"}},
      {"--max-num-batched-tokens", {"0", "99G"}},
      {"--num-gpu-blocks-override", {"-1", "99999999"}},
      {"--kv-cache-memory-bytes", {"0", "5000T"}},
      {"--max-model-len", {"0", "99G"}},
      {"--max-body-bytes", {"0"}},
      {"--threads", {"-1", "5000"}},
      {"--gpu-memory-utilization", {"0", "1.01", "nan", "-inf"}},
      {"--watermark", {"-0.1", "1.5", "nan"}},
      {"--max-base-fraction", {"-0.1", "1.5", "nan"}},
      {"--max-connections", {"0", "100000"}}};
  for (const auto& [flag, values] : flags)
    for (const char* value : values) {
      const CommandLine line = parse({"serve", "m", flag, value});
      EXPECT_FALSE(line.serve) << flag << " " << value;
      EXPECT_NE(line.text.find(flag), std::string::npos) << line.text;
      EXPECT_EQ(line.text.find("e+"), std::string::npos) << line.text;
      EXPECT_EQ(line.text.find("e-3"), std::string::npos) << line.text;
      EXPECT_LT(line.text.size(), 200u) << line.text;
    }
  EXPECT_EQ(parse({"serve", "m", "--seed", "18446744073709551615"}).serve->seed, UINT64_MAX);
}

TEST(Flags, ElasticKvIsOffUntilAskedFor) {
  const CommandLine line = parse({"serve", "m"});
  ASSERT_TRUE(line.serve) << line.text;
  const FidelityConfig& f = line.serve->engine.fidelity;
  EXPECT_EQ(f.policy, KvPolicy::target_only);
  EXPECT_EQ(f.host_bytes, size_t(4) << 30);
  EXPECT_EQ(line.serve->engine.kv.base_format, BaseFormat::fixed8);
  EXPECT_EQ(line.serve->base_fill, BaseFill::mid);
}

TEST(Flags, ElasticKvFlagsAreTaken) {
  const CommandLine line = parse({"serve",
                                  "m",
                                  "--kv-policy",
                                  "elastic",
                                  "--demotion",
                                  "eager",
                                  "--promotion",
                                  "none",
                                  "--kv-backing",
                                  "writethrough",
                                  "--kv-host-bytes",
                                  "3M",
                                  "--sink-pairs",
                                  "2",
                                  "--recent-pairs",
                                  "7",
                                  "--min-demote-pairs",
                                  "1",
                                  "--admission",
                                  "guaranteed",
                                  "--attention-path",
                                  "general",
                                  "--kv-base-format",
                                  "e5m2",
                                  "--kv-base-fill",
                                  "zero",
                                  "--max-base-fraction",
                                  "0.5"});
  ASSERT_TRUE(line.serve) << line.text;
  const FidelityConfig& f = line.serve->engine.fidelity;
  EXPECT_EQ(f.policy, KvPolicy::elastic);
  EXPECT_EQ(f.demotion, DemotionMode::eager);
  EXPECT_EQ(f.promotion, PromotionMode::none);
  EXPECT_EQ(f.backing, BackingMode::writethrough);
  EXPECT_EQ(f.host_bytes, size_t(3) << 20);
  EXPECT_EQ(f.sink_pairs, 2);
  EXPECT_EQ(f.recent_pairs, 7);
  EXPECT_EQ(f.min_demote_pairs, 1);
  EXPECT_EQ(f.attention_path, AttentionPath::general);
  EXPECT_EQ(f.max_base_fraction, 0.5);
  EXPECT_EQ(line.serve->engine.scheduler.admission, AdmissionMode::guaranteed);
  EXPECT_EQ(line.serve->engine.kv.base_format, BaseFormat::e5m2);
  EXPECT_EQ(line.serve->base_fill, BaseFill::zero);
}

TEST(Flags, BadValuesOfElasticKvNameTheFlag) {
  const std::pair<const char*, const char*> mistakes[] = {
      {"--kv-policy", "rubber"}, {"--demotion", "never"},        {"--promotion", "lazy"},
      {"--kv-backing", "eager"}, {"--kv-host-bytes", "much"},    {"--max-base-fraction", "1.5"},
      {"--sink-pairs", "-1"},    {"--recent-pairs", "x"},        {"--min-demote-pairs", "-2"},
      {"--admission", "open"},   {"--attention-path", "native"}, {"--kv-base-format", "int8"},
      {"--kv-base-fill", "one"}, {"--preset", "paper"}};
  for (const auto& [flag, value] : mistakes) {
    const CommandLine line = parse({"serve", "m", flag, value});
    EXPECT_FALSE(line.serve) << flag;
    EXPECT_EQ(line.exit_code, 2) << flag;
    EXPECT_NE(line.text.find(flag), std::string::npos) << line.text;
  }
}

TEST(Flags, APresetYieldsToFlagsThatAreGiven) {
  const CommandLine paper = parse({"serve", "m", "--preset", "paper015"});
  ASSERT_TRUE(paper.serve) << paper.text;
  EXPECT_FALSE(paper.serve->engine.scheduler.reserve_full_prompt);
  EXPECT_FALSE(paper.serve->engine.kv.prefix_cache);
  const CommandLine modern = parse(
      {"serve", "m", "--max-num-batched-tokens", "512", "--no-enable-prefix-caching", "--preset", "modern"});
  ASSERT_TRUE(modern.serve) << modern.text;
  EXPECT_EQ(modern.serve->engine.scheduler.max_step_tokens, 512);
  EXPECT_FALSE(modern.serve->engine.kv.prefix_cache);
  EXPECT_EQ(parse({"serve", "m", "--preset", "modern"}).serve->engine.scheduler.max_step_tokens, 8192);
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

TEST(Flags, ThoseWithoutEffectAreNamed) {
  const struct {
    std::vector<const char*> flags;
    std::vector<std::string> words;  // of the only line; none: no line
  } cases[] = {
      {{"--demotion", "eager"}, {"--demotion has no effect with --kv-policy target-only"}},
      {{"--kv-policy", "static8", "--promotion", "eager"}, {"--promotion has no", "--kv-policy static8"}},
      {{"--kv-policy", "exact-offload", "--kv-backing", "lazy"},
       {"--kv-backing has", "--kv-policy exact-offload"}},
      {{"--demotion-watermark", "0.2"}, {"--demotion-watermark has", "--kv-policy target-only"}},
      {{"--kv-policy", "elastic", "--demotion-watermark", "0.2"},
       {"--demotion-watermark has", "with --demotion shortage", "--demotion watermark"}},
      {{"--kv-policy", "elastic", "--demotion", "eager", "--promotion", "reserve"},
       {"--promotion has", "with --demotion eager"}},
      {{"--kv-policy", "elastic", "--demotion", "watermark", "--demotion-watermark", "0.2"}, {}},
      {{"--kv-policy", "elastic", "--demotion", "shortage", "--promotion", "none", "--kv-backing",
        "writethrough"},
       {}},
      {{"--kv-policy", "target-only"}, {}}};
  for (const auto& c : cases) {
    std::vector<const char*> arguments{"serve", "m"};
    arguments.insert(arguments.end(), c.flags.begin(), c.flags.end());
    ::testing::internal::CaptureStderr();
    EXPECT_TRUE(parse(arguments).serve);
    const std::string said = ::testing::internal::GetCapturedStderr();
    EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), c.words.empty() ? 0 : 1) << said;
    for (const std::string& word : c.words)
      EXPECT_NE(said.find(word), std::string::npos) << word << "\n" << said;
  }
}

TEST(Flags, HelpSaysTheExitCodeOfAWrongFlag) {
  const CommandLine help = parse({"serve", "--help"});
  EXPECT_NE(help.text.find("2 a flag is wrong"), std::string::npos) << help.text;
  EXPECT_EQ(parse({"serve", "m", "--bogus"}).exit_code, 2);
}

}  // namespace
}  // namespace ekv
