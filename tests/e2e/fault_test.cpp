// What the system refuses or takes away while the server runs: descriptors, memory, the listening socket, the
// device in the middle of a stop.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <cstdlib>
#include <limits>
#include <new>

#include "server/listen_socket.h"
#include "server/serve.h"
#include "tests/support/test_server.h"
#include "tests/support/tiny_serve.h"

namespace ekv::testing {
namespace {

// Allocations of so many bytes or more fail.
std::atomic<size_t> too_many_bytes{std::numeric_limits<size_t>::max()};

}  // namespace
}  // namespace ekv::testing

// Not inlined: the compiler would see malloc's memory freed, or new's, and warn of the mixture.
[[gnu::noinline]] void* operator new(size_t bytes) {
  void* memory = bytes < ekv::testing::too_many_bytes ? std::malloc(bytes) : nullptr;
  if (!memory) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace ekv::testing {
namespace {

using std::chrono::milliseconds;

const std::string kGetVersion = http_request("GET", "/version", {}, {});

// A TCP socket of this process that listens; -1: there is none.
int listening_socket() {
  for (int fd = 0; fd < 1024; ++fd) {
    int listens = 0, family = 0;
    socklen_t size = sizeof listens;
    if (::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) == 0 && listens &&
        ::getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &family, &size) == 0 && family == AF_INET)
      return fd;
  }
  return -1;
}

TEST(Listening, WhenNobodyCanConnectAnyMoreTheOwnerIsToldAndConnectionsGoOn) {
  auto server = std::make_unique<TestServer>();
  RawHttp before(server->port());
  before.send(kGetVersion);
  ASSERT_EQ(before.read_response().status, 200);
  EXPECT_FALSE(server->fatal);
  const int listener = listening_socket();
  ASSERT_GE(listener, 0);
  ::shutdown(listener, SHUT_RDWR);
  ASSERT_TRUE(eventually([&] { return bool(server->fatal); }));
  before.send(kGetVersion);
  EXPECT_EQ(before.read_response().status, 200);

  // The number is free for others: the end of the server must not close it again.
  ASSERT_EQ(::fcntl(listener, F_GETFD), -1);
  const int other = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  const int reused = other == listener ? other : ::dup2(other, listener);
  ASSERT_EQ(reused, listener);
  server.reset();
  EXPECT_NE(::fcntl(listener, F_GETFD), -1) << "closed twice";
  if (other != listener) ::close(other);
  ::close(listener);
}

TEST(Listening, WithoutDescriptorsClientsWaitAndTheLogSaysSoOnce) {
  const TestServer server;
  const int log = ::memfd_create("log", MFD_CLOEXEC), stderr_before = ::dup(STDERR_FILENO);
  ASSERT_GE(log, 0);
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlim_t before = limit.rlim_cur;
  const int next = ::dup(log);  // the lowest number that is free
  ::close(next);
  limit.rlim_cur = rlim_t(next) + 1;
  ::dup2(log, STDERR_FILENO);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  RawHttp client(server.port());  // has the last one
  const bool connected = client.connected();
  client.send(kGetVersion);
  const auto lines = [&] {
    char text[65536];
    const ssize_t size = ::pread(log, text, sizeof text, 0);
    return std::string(text, size_t(std::max<ssize_t>(size, 0)));
  };
  const bool said = eventually([&] { return !lines().empty(); });
  std::this_thread::sleep_for(milliseconds(100));  // more tries, which must not be more lines
  limit.rlim_cur = before;
  ::setrlimit(RLIMIT_NOFILE, &limit);
  ::dup2(stderr_before, STDERR_FILENO);
  ASSERT_TRUE(connected);
  EXPECT_TRUE(said);
  EXPECT_EQ(client.read_response().status, 200);
  const std::string text = lines();
  EXPECT_NE(text.find("new clients wait: accept: Too many open files; raise"), std::string::npos) << text;
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
  EXPECT_FALSE(server.fatal);
  ::close(log), ::close(stderr_before);
}

TEST(Connections, WithoutMemoryForABufferOneIsClosedAndTheServerLivesOn) {
  const TestServer server;
  RawHttp client(server.port());
  ASSERT_TRUE(client.connected());
  too_many_bytes = 16 << 10;  // what is received at once
  client.send(kGetVersion);
  const RawResponse response = client.read_response();
  too_many_bytes = std::numeric_limits<size_t>::max();
  EXPECT_EQ(response.status, 0);
  EXPECT_EQ(server.get("/version").status, 200);
}

// As of an engine with nothing to do: whoever keeps records writes them out.
TEST(Failure, TheLastReportOfAnEngineThatFailsIsNoStep) {
  std::mutex mutex;
  StepRecord last{.plan_us = -1};
  TestServerOptions options;
  options.service.loop.on_step = [&](const StepRecord& record) {
    const std::lock_guard lock(mutex);
    last = record;
  };
  TestServer server(options);
  EXPECT_EQ(server.complete({{"prompt", "go"}, {"max_tokens", 5}}).status, 200);
  server.behaviour.fail = true;
  EXPECT_EQ(server.complete({{"prompt", "go"}, {"max_tokens", 5}}).status, 500);
  ASSERT_TRUE(eventually([&] { return bool(server.fatal); }));
  const std::lock_guard lock(mutex);
  EXPECT_EQ(last.plan_us, 0);
  EXPECT_EQ(last.device_us, 0);
}

// A device that is lost while SIGTERM drains, and whose backend cannot be destroyed.
class LostInTheDrain : public Backend {
 public:
  explicit LostInTheDrain(std::unique_ptr<Backend> backend) : backend_(std::move(backend)) {}
  ~LostInTheDrain() override { ::sleep(300); }
  const BackendInfo& info() const override { return backend_->info(); }
  void submit(const StepInput&) override {
    ::kill(::getpid(), SIGTERM);
    std::this_thread::sleep_for(milliseconds(500));  // for the drain to begin
    throw DeviceError("planted");
  }
  const StepOutput& collect() override { return backend_->collect(); }

 private:
  std::unique_ptr<Backend> backend_;
};

void send_a_request() {
  int listener = -1;
  eventually([&] { return (listener = listening_socket()) >= 0; });
  RawHttp client(port_of(listener));
  client.send(http_request("POST", "/v1/completions", R"({"prompt": "go", "max_tokens": 5})"));
  client.read_response();
}

Result<std::unique_ptr<Backend>> make_lost(const Model& model, const EngineConfig& config,
                                           const BackendOptions& options) {
  Result<std::unique_ptr<Backend>> made = make_backend(model, config, options);
  if (!made) return made.error();
  std::thread(send_a_request).detach();
  return std::unique_ptr<Backend>(std::make_unique<LostInTheDrain>(*std::move(made)));
}

TEST(Failure, InTheMiddleOfAStopItHasItsOwnExitCode) {
  EXPECT_EXIT(std::_Exit(serve(test::tiny_serve_flags(), make_lost)),
              ::testing::ExitedWithCode(kExitEngineStopped),
              "Terminated: finishing.*the device is lost: planted.*did not end in time");
}

}  // namespace
}  // namespace ekv::testing
