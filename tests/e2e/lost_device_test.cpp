// A device that is lost while it works: what the engine throws, what clients get, what the log says, how the
// process ends. Each test is a process of its own, which runs this program with arguments: a lost context stays
// lost.

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <random>
#include <regex>

#include "elastickv/engine.h"
#include "server/serve.h"
#include "tests/support/lose_device.h"
#include "tests/support/raw_http.h"
#include "tests/support/test_data.h"

namespace ekv::test {
namespace {

using std::chrono::steady_clock, std::chrono::seconds;

constexpr int kGoodSteps = 20, kPages = 128, kContext = 512, kOutput = 450;
// Much more than it takes. A thread that hangs at the end is not seen by the time but by the line of the guard
// of a stop in the log.
constexpr seconds kStartTime{120}, kEndTime{60};

std::string model_folder() { return test_data() / "golden/tiny-llama"; }

// Before the real backend: takes the device away after some steps of two sequences.
class LosingBackend : public Backend {
 public:
  // `gated`: no step begins before there is a byte in standard input.
  LosingBackend(std::unique_ptr<Backend> backend, bool gated) : backend_(std::move(backend)), gated_(gated) {}
  const BackendInfo& info() const override { return backend_->info(); }
  void submit(const StepInput& input) override {
    char go;
    if (std::exchange(gated_, false) && ::read(STDIN_FILENO, &go, 1) != 1) std::_Exit(1);
    if (input.kv_len.size() == 2 && ++num_steps_ == kGoodSteps) lose_device();
    backend_->submit(input);
  }
  const StepOutput& collect() override { return backend_->collect(); }

 private:
  std::unique_ptr<Backend> backend_;
  bool gated_;
  int num_steps_ = 0;
};

template <bool gated>
Result<std::unique_ptr<Backend>> make_losing(const Model& model, const EngineConfig& config,
                                             const BackendOptions& options) {
  Result<std::unique_ptr<Backend>> made = make_backend(model, config, options);
  if (!made) return made.error();
  return std::unique_ptr<Backend>(std::make_unique<LosingBackend>(*std::move(made), gated));
}

// The child processes.

struct Endings : EngineListener {
  void on_event(SeqEvent event) override {
    num_tokens += event.token.has_value();
    num_errors += event.finish == FinishReason::error && event.error == "lost";
  }
  void on_step(const StepRecord&) override {}
  int num_tokens = 0, num_errors = 0;
};

// What the engine does wrong when its device is lost; empty: nothing.
std::string run_engine(bool two_in_flight) {
  EngineConfig config;
  config.kv.num_pages = kPages, config.max_model_len = kContext, config.async_scheduling = two_in_flight;
  Result<ModelConfig> shape = load_model_config(model_folder());
  if (!shape) return shape.error().message;
  const Result<Model> model = Model::load(model_folder(), *std::move(shape));
  if (!model) return model.error().message;
  const Result<Device> device = choose_device(kLostDevice);
  if (!device) return device.error().message;
  Result<std::unique_ptr<Backend>> backend = make_losing<false>(*model, config, {.device = *device});
  if (!backend) return backend.error().message;
  Endings endings;
  const SteadyClock clock;
  Engine engine(config, *std::move(backend), clock, endings);
  for (int i = 0; i < 3; ++i) {
    Request request;
    request.prompt.assign(20, TokenId(7 + i));
    request.sampling = {.temperature = 0, .max_tokens = i < 2 ? kOutput : 2};
    if (!engine.submit(std::move(request))) return "a request was refused";
  }
  std::string fault = "the engine went on to the end without its device";
  try {
    while (!engine.idle()) engine.step();
  } catch (const DeviceError& e) {
    fault = fault_of(e);
  }
  if (!fault.empty()) return fault;
  engine.fail_all("lost");
  if (endings.num_tokens < kGoodSteps) return fmt::format("only {} tokens came before", endings.num_tokens);
  if (endings.num_errors != 2)
    return fmt::format("{} requests ended with the error, not 2", endings.num_errors);
  const KvManager& kv = engine.kv();
  return kv.num_free_pages() + kv.num_cached_pages() == kPages ? "" : "pages are held by nobody";
}

int run_child(int argc, char** argv) {
  const std::string mode = argv[1];
  if (mode == "engine") {
    const std::string fault = run_engine(argv[2] == std::string("2"));
    fmt::print("{}\n", fault);
    return fault.empty() ? 0 : 1;
  }
  const CommandLine line = parse_command_line(argc, argv);
  if (line.serve) return serve(*line.serve, make_losing<true>);
  fmt::print("{}", line.text);
  return 1;
}

// This program with arguments, and what it prints.
class Child {
 public:
  explicit Child(std::vector<std::string> arguments) {
    int ends[2], input[2];
    if (::pipe2(ends, O_CLOEXEC) != 0 || ::pipe2(input, O_CLOEXEC) != 0) ADD_FAILURE() << "pipe2";
    std::vector<char*> argv{const_cast<char*>("lost_device")};
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::dup2(input[0], STDIN_FILENO), ::dup2(ends[1], STDOUT_FILENO), ::dup2(ends[1], STDERR_FILENO);
      ::execv("/proc/self/exe", argv.data());
      ::_exit(127);
    }
    ::close(ends[1]), ::close(input[0]);
    output_ = ends[0], input_ = input[1];
  }
  ~Child() {
    if (pid_ > 0) ::kill(pid_, SIGKILL), ::waitpid(pid_, nullptr, 0);
    ::close(output_), ::close(input_);
  }

  void open_gate() { EXPECT_EQ(::write(input_, "!", 1), 1); }
  const std::string& log() const { return log_; }
  // The port that it says it serves on; 0: it does not in time.
  int port() {
    const auto deadline = steady_clock::now() + kStartTime;
    std::smatch found;
    do {
      if (std::regex_search(log_, found, std::regex("serving \\S+ on http://\\S+:(\\d+)\\n")))
        return std::stoi(found[1]);
    } while (read_until(deadline));
    return 0;
  }
  // The exit code; -1: it does not end in time, or by a signal.
  int wait(seconds at_most) {
    const auto deadline = steady_clock::now() + at_most;
    while (read_until(deadline)) {
    }
    if (steady_clock::now() >= deadline) return -1;
    int status = 0;
    ::waitpid(std::exchange(pid_, 0), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

 private:
  bool read_until(steady_clock::time_point deadline) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - steady_clock::now());
    pollfd ready{.fd = output_, .events = POLLIN, .revents = 0};
    char bytes[4096];
    if (left.count() <= 0 || ::poll(&ready, 1, int(left.count())) <= 0) return false;
    const ssize_t count = ::read(output_, bytes, sizeof(bytes));
    if (count > 0) log_.append(bytes, size_t(count));
    return count > 0;
  }

  pid_t pid_ = 0;
  int output_ = -1, input_ = -1;
  std::string log_;
};

std::string completion(int first, bool stream) {
  const Json body{{"model", "tiny"},    {"prompt", std::vector<int>(24, first)},
                  {"temperature", 0},   {"max_tokens", kOutput},
                  {"ignore_eos", true}, {"stream", stream}};
  return testing::http_request("POST", "/v1/completions", dump_json(body));
}

// Once it has `wanted` requests at a time.
bool wait_for_load(int port, int wanted) {
  const auto deadline = steady_clock::now() + kStartTime;
  while (steady_clock::now() < deadline) {
    testing::RawHttp asking(port);
    asking.send(testing::http_request("GET", "/load"));
    if (member(asking.read_response().json(), "server_load") == wanted) return true;
    ::usleep(5000);
  }
  return false;
}

std::vector<std::string> error_lines(const std::string& log) {
  std::vector<std::string> lines;
  const std::regex is_error("^\\S+ \\S+ (error|warning) .*");
  std::istringstream text(log);
  for (std::string line; std::getline(text, line);)
    if (std::regex_match(line, is_error)) lines.push_back(line);
  return lines;
}

class LostDevice : public ::testing::TestWithParam<int> {};  // steps in flight

TEST_P(LostDevice, TheEngineThrowsAndItsRequestsCanBeFailed) {
  Child engine({"engine", std::to_string(GetParam())});
  EXPECT_EQ(engine.wait(kStartTime), 0) << engine.log();
}

TEST_P(LostDevice, ClientsAreToldTheLogHasOneLineAndTheProcessEnds) {
  Child server({"serve",
                model_folder(),
                "--served-model-name",
                "tiny",
                "--device",
                kLostDevice,
                "--host",
                "127.0.0.1",
                "--port",
                "0",
                "--num-gpu-blocks-override",
                std::to_string(kPages),
                "--max-model-len",
                std::to_string(kContext),
                "--kv-policy",
                "elastic",
                "--kv-host-bytes",
                "1M",
                "--gemm-tuning",
                "off",
                GetParam() == 2 ? "--async-scheduling" : "--no-async-scheduling"});
  const int port = server.port();
  ASSERT_NE(port, 0) << server.log();
  testing::RawHttp streamed(port), plain(port);
  streamed.send(completion(40, true)), plain.send(completion(50, false));
  ASSERT_TRUE(wait_for_load(port, 2)) << server.log();
  server.open_gate();

  // A stream begins with its first event. Where the HTTP thread sees the loss first, the answer is the error
  // itself.
  const int status = streamed.read_head().status;
  ASSERT_TRUE(status == 200 || status == 500) << status;
  const testing::RawResponse answer = plain.read_response();
  EXPECT_EQ(answer.status, 500);
  EXPECT_NE(answer.body.find("the engine has stopped"), std::string::npos) << answer.body;
  if (status == 200) {
    std::string events;
    for (auto chunk = streamed.next_chunk(); chunk && !chunk->empty(); chunk = streamed.next_chunk())
      events += *chunk;
    EXPECT_NE(events.find("\"code\":500"), std::string::npos) << events;
    EXPECT_TRUE(events.ends_with("data: [DONE]\n\n")) << events;
  }

  EXPECT_EQ(server.wait(kEndTime), kExitEngineStopped) << server.log();
  const std::vector<std::string> lines = error_lines(server.log());
  ASSERT_EQ(lines.size(), 1u) << server.log();
  for (const char* part : {"the device is lost: ", "2 sequences end with an error", "new requests get 503",
                           "Start the server again", "nvidia-smi"})
    EXPECT_NE(lines[0].find(part), std::string::npos) << lines[0];
  std::printf("%s\n", lines[0].c_str());
}

INSTANTIATE_TEST_SUITE_P(StepsInFlight, LostDevice, ::testing::Values(1, 2));

}  // namespace
}  // namespace ekv::test

int main(int argc, char** argv) {
  if (argc > 2 && argv[1][0] != '-') return ekv::test::run_child(argc, argv);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
