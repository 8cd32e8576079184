// What becomes of a command that fails where nobody expected it: an exit code, one line, and files that are
// complete.

#include "server/exit_code.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <new>
#include <system_error>

#include "bench/sim_replay.h"
#include "tests/support/temp_dir.h"
#include "util/json.h"

namespace ekv {
namespace {

constexpr int kGoodSteps = 100;

// As a process of its own, which ends without the destructors of main: what is not on disk by then is lost.
#define EXPECT_COMMAND(command, code, words) \
  EXPECT_EXIT(std::_Exit(run_command(command)), ::testing::ExitedWithCode(code), words)

TEST(RunCommand, GivesWhatTheCommandGives) {
  EXPECT_EQ(run_command([] { return 0; }), 0);
  EXPECT_EQ(run_command([] { return 2; }), 2);
}

TEST(RunCommand, EveryExceptionIsOneLineThatSaysWhatToDo) {
  EXPECT_COMMAND([]() -> int { throw DeviceError("planted"); }, kExitEngineStopped,
                 "^[^\n]*the device is lost: planted[^\n]*Start it again[^\n]*nvidia-smi -q\n$");
  EXPECT_COMMAND([]() -> int { throw std::bad_alloc(); }, kExitFailed,
                 "^out of memory: use a smaller model[^\n]*\n$");
  EXPECT_COMMAND([]() -> int { throw std::system_error(EAGAIN, std::generic_category()); }, kExitFailed,
                 "^[^\n]*Resource temporarily unavailable[^\n]*pids.max[^\n]*\n$");
  EXPECT_COMMAND([]() -> int { return std::filesystem::exists(std::string(5000, 'a')); }, kExitFailed,
                 "^[^\n]*File name too long[^\n]*\n$");
  EXPECT_COMMAND([]() -> int { throw std::logic_error("planted"); }, kExitFailed,
                 "^[^\n]*planted[^\n]*Report this line[^\n]*\n$");
}

// Before the simulator: takes it away after some steps.
class LosingBackend : public Backend {
 public:
  explicit LosingBackend(std::unique_ptr<Backend> backend) : backend_(std::move(backend)) {}
  const BackendInfo& info() const override { return backend_->info(); }
  void submit(const StepInput& input) override {
    if (num_steps_++ == kGoodSteps) throw DeviceError("planted");
    backend_->submit(input);
  }
  const StepOutput& collect() override { return backend_->collect(); }

 private:
  std::unique_ptr<Backend> backend_;
  int num_steps_ = 0;
};

int replay_and_lose(const std::string& step_log) {
  const Result<CostModel> model = load_cost_model("a100-llama-3.1-8b");
  ReplayOptions options{.concurrency = 4, .step_log = step_log};
  options.engine.kv.num_pages = 600, options.engine.max_model_len = 4096;
  std::vector<ReplayDevice> devices;
  devices.push_back(*make_sim_device(*model, options.engine));
  devices[0].backend = std::make_unique<LosingBackend>(std::move(devices[0].backend));
  return run_replay(synthetic_load(40, 50, 60, 1), std::move(devices), options) ? 0 : kExitFailed;
}

TEST(RunCommand, TheStepsBeforeALostDeviceAreInTheLog) {
  const test::TempDir folder;
  const std::string path = folder.file("steps.jsonl");
  EXPECT_COMMAND([&] { return replay_and_lose(path); }, kExitEngineStopped, "the device is lost: planted");
  std::ifstream log(path);
  int num_steps = 0;
  for (std::string line; std::getline(log, line);) {
    const Json record = Json::parse(line, nullptr, false);
    ASSERT_TRUE(record.is_object()) << "half a line: " << line;
    num_steps += record["kind"] == "step";
  }
  EXPECT_EQ(num_steps, kGoodSteps);
}

}  // namespace
}  // namespace ekv
