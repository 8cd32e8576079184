// The process must end in time, whatever its threads do.

#include "server/exit_guard.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

namespace ekv {
namespace {

using std::chrono::milliseconds;

sigset_t blocked_signals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  return signals;
}

TEST(ExitGuard, EndsAProcessThatIsLate) {
  EXPECT_EXIT(
      {
        const ExitGuard guard(blocked_signals(), milliseconds(100), milliseconds(50), [] { return 3; });
        ::sleep(60);
      },
      ::testing::ExitedWithCode(3), "did not end in time");
}

TEST(ExitGuard, ASignalShortensTheTime) {
  EXPECT_EXIT(
      {
        const ExitGuard guard(blocked_signals(), milliseconds(60000), milliseconds(100), [] { return 1; });
        ::kill(::getpid(), SIGTERM);
        ::sleep(60);
      },
      ::testing::ExitedWithCode(1), "did not end in time");
}

int num_threads() { return int(std::distance(std::filesystem::directory_iterator("/proc/self/task"), {})); }

// Whatever is late here ends by the guard, with 1. That it never comes back is seen by its thread, which is
// gone, and not by waiting for it.
TEST(ExitGuard, LetsAProcessInTimeAlone) {
  EXPECT_EXIT(
      {
        const int before = num_threads();
        {
          const ExitGuard guard(blocked_signals(), milliseconds(60000), milliseconds(60000), [] { return 1; });
          if (guard.hurried()) std::_Exit(3);
          ::kill(::getpid(), SIGTERM);
          while (!guard.hurried()) ::usleep(1000);
        }
        for (int i = 0; i < 5000 && num_threads() > before; ++i) ::usleep(1000);
        std::_Exit(num_threads() > before ? 4 : 7);
      },
      ::testing::ExitedWithCode(7), "");
}

TEST(StartGuard, ASignalEndsTheProcessWithoutFailure) {
  EXPECT_EXIT(
      {
        const StartGuard guard(blocked_signals());
        ::kill(::getpid(), SIGTERM);
        ::sleep(60);
      },
      ::testing::ExitedWithCode(0), "stopped while starting");
}

TEST(StartGuard, LeavesSignalsToOthersAfterwards) {
  EXPECT_EXIT(
      {
        const sigset_t signals = blocked_signals();
        { const StartGuard guard(signals); }
        ::kill(::getpid(), SIGTERM);
        ::usleep(100000);
        int number = 0;
        sigwait(&signals, &number);
        std::_Exit(number == SIGTERM ? 7 : 8);
      },
      ::testing::ExitedWithCode(7), "");
}

}  // namespace
}  // namespace ekv
