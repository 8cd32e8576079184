#include "server/exit_guard.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>

#include "elastickv/base.h"

namespace ekv {

using std::chrono::steady_clock;

namespace {

constexpr timespec kTurn{.tv_sec = 0, .tv_nsec = 20'000'000};

}  // namespace

ExitGuard::ExitGuard(const sigset_t& signals, std::chrono::milliseconds at_most,
                     std::chrono::milliseconds when_hurried, std::function<int()> code)
    : thread_([=, this] { run(signals, at_most, when_hurried, code); }) {}

ExitGuard::~ExitGuard() {
  done_ = true;
  thread_.join();
}

void ExitGuard::run(sigset_t signals, std::chrono::milliseconds at_most, std::chrono::milliseconds when_hurried,
                    const std::function<int()>& code) {
  auto deadline = steady_clock::now() + at_most;
  while (!done_) {
    if (sigtimedwait(&signals, nullptr, &kTurn) > 0 && !hurried_.exchange(true))
      deadline = std::min(deadline, steady_clock::now() + when_hurried);
    if (steady_clock::now() >= deadline && !done_) leave_as_it_is("a thread did not end in time", code());
  }
}

StartGuard::StartGuard(const sigset_t& signals)
    : thread_([this, signals] {
        while (!done_) {
          if (sigtimedwait(&signals, nullptr, &kTurn) <= 0) continue;
          log_info("stopped while starting");
          std::_Exit(0);
        }
      }) {}

StartGuard::~StartGuard() {
  done_ = true;
  thread_.join();
}

void leave_as_it_is(const char* why, int code) {
  log_error(fmt::format("{}: the process ends without it", why));
  std::_Exit(code);
}

}  // namespace ekv
