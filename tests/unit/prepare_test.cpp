// What a start says before weights are loaded, and that the flag it names is one of the command.

#include <gtest/gtest.h>

#include <functional>

#include "backend/start.h"
#include "bench/bench_offline.h"
#include "bench/replay_command.h"
#include "server/flags.h"

namespace ekv {
namespace {

ModelFlags tiny() {
  ModelFlags flags;
  flags.model = "tiny", flags.load_format = "dummy", flags.device = "cpu";
  return flags;
}

struct Said {
  int code = 0;
  std::string out, err;
};
Said run(int (*command)(int, const char* const*), std::vector<const char*> argv) {
  testing::internal::CaptureStdout(), testing::internal::CaptureStderr();
  Said said{.code = command(int(argv.size()), argv.data())};
  said.out = testing::internal::GetCapturedStdout(), said.err = testing::internal::GetCapturedStderr();
  return said;
}

std::vector<std::string> helps() {
  const char* serve[] = {"elastickv", "serve", "--help"};
  return {parse_command_line(3, serve).text, run(replay, {"replay", "--help"}).out,
          run(bench_latency, {"latency", "--help"}).out, run(bench_throughput, {"throughput", "--help"}).out};
}

struct Mistake {
  const char* flag;
  std::function<void(ModelFlags&)> make;
  LongestSequence longest;
};

const Mistake kMistakes[] = {
    {"model", [](ModelFlags& f) { f.model = "no-such-model"; }},
    {"load-format", [](ModelFlags& f) { f.load_format = "auto"; }},
    {"dtype", [](ModelFlags& f) { f.cuda_launch.dtype = CudaDtype::float16; }},
    {"num-gpu-blocks-override", [](ModelFlags& f) { f.engine.kv.num_pages = 1; }},
    {"kv-cache-memory-bytes", [](ModelFlags& f) { f.engine.kv.pool_bytes = 1000; }},
    {"kv-cache-memory-bytes",
     [](ModelFlags& f) { f.model = "llama-3.1-8b", f.engine.kv.pool_bytes = size_t(1) << 50; }},
    {"num-gpu-blocks-override",
     [](ModelFlags& f) { f.model = "llama-3.1-8b", f.engine.kv.num_pages = 1 << 24; }},
    {"kv-host-bytes",
     [](ModelFlags& f) {
       f.model = "llama-3.1-8b", f.engine.fidelity.policy = KvPolicy::exact_offload;
       f.engine.fidelity.host_bytes = size_t(1) << 50;
     }},
    {"max-num-batched-tokens", [](ModelFlags& f) { f.engine.scheduler.max_step_seqs = 4096; }},
    {"admission",
     [](ModelFlags& f) {
       f.engine.scheduler.admission = AdmissionMode::guaranteed;
       f.engine.fidelity.policy = KvPolicy::elastic, f.engine.fidelity.max_base_fraction = 0.5;
     }},
};

TEST(PrepareStart, NamesAFlagThatEveryCommandHas) {
  const std::vector<std::string> texts = helps();
  for (const Mistake& mistake : kMistakes) {
    ModelFlags flags = tiny();
    mistake.make(flags);
    const Result<Start> start = prepare_start(flags, {});
    ASSERT_FALSE(start) << mistake.flag;
    EXPECT_EQ(start.error().param, mistake.flag) << start.error().message;
    for (const std::string& help : texts)
      EXPECT_NE(help.find(std::string("--") + mistake.flag), std::string::npos) << mistake.flag << "\n" << help;
  }
}

TEST(PrepareStart, ALengthIsNamedByTheFlagItComesFrom) {
  ModelFlags flags = tiny();
  flags.engine.kv.num_pages = 4;
  for (const int tokens : {66, 1 << 24})  // beyond the pool, beyond the model
    for (const char* flag : {"max-model-len", "input-len"}) {
      const Result<Start> start = prepare_start(flags, {.asked = tokens, .flag = flag});
      ASSERT_FALSE(start);
      EXPECT_EQ(start.error().param, flag);
      EXPECT_NE(start.error().message.find(std::string("--") + flag), std::string::npos);
    }
}

TEST(PrepareStart, TheContextIsWhatIsAskedForOrWhatFits) {
  ModelFlags flags = tiny();
  const auto context = [&](const LongestSequence& longest) {
    const Result<Start> start = prepare_start(flags, longest);
    EXPECT_TRUE(start) << start.error().message;
    return start->engine.max_model_len;
  };
  const int positions = builtin_model_config("tiny")->max_position;
  EXPECT_EQ(context({}), positions);
  EXPECT_EQ(context({.asked = 7}), 7);
  EXPECT_EQ(context({.at_most = 9}), 9);
  flags.engine.kv.num_pages = 4;
  EXPECT_EQ(context({}), 65) << "the last token has no place in the pool";
  EXPECT_EQ(context({.asked = 65}), 65);
  EXPECT_EQ(context({.at_most = 100}), 65);
}

// 16 GB of random weights were made before.
TEST(PrepareStart, ADeviceThatIsNotThereIsSaidBeforeWeightsAreMade) {
  if (!cuda_fault()) GTEST_SKIP() << "there is a GPU";
  const auto check = [](const Said& said) {
    EXPECT_EQ(said.code, 1);
    EXPECT_NE(said.err.find("--device cpu"), std::string::npos) << said.err;
    EXPECT_EQ(said.err.find("loading"), std::string::npos) << said.err;
  };
  check(run(replay, {"replay", "--quiet", "--device", "cuda", "--model", "llama-3.1-8b", "--load-format",
                     "dummy", "--synthetic", "2:20:4", "--concurrency", "2"}));
  check(
      run(bench_latency, {"latency", "--device", "cuda", "--model", "llama-3.1-8b", "--load-format", "dummy"}));
}

TEST(PrepareStart, AResultThatCannotBeWrittenIsSaidFirst) {
  const std::vector<const char*> flags{"bench",    "--model", "tiny",          "--load-format",         "dummy",
                                       "--device", "cpu",     "--output-json", "/no/such/folder/x.json"};
  for (const auto command : {bench_latency, bench_throughput}) {
    const Said said = run(command, flags);
    EXPECT_EQ(said.code, 2);
    EXPECT_NE(said.err.find("--output-json: cannot write"), std::string::npos) << said.err;
    EXPECT_EQ(said.err.find("loading"), std::string::npos) << said.err;
  }
}

// The weights go when the backend has what it needs of them.
TEST(LoadBackend, ABackendOutlivesItsModel) {
  ModelFlags flags = tiny();
  flags.engine.kv.num_pages = 64;
  const auto engine = OfflineEngine::make(flags, {.asked = 40});
  ASSERT_TRUE(engine) << engine.error().message;
  const auto totals = (*engine)->run(random_requests(3, 20, 8, (*engine)->vocab(), 1));
  ASSERT_TRUE(totals) << totals.error().message;
  EXPECT_EQ(totals->output_tokens, 24);
}

}  // namespace
}  // namespace ekv
