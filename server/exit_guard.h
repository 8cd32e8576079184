#pragma once
// exit_guard.h -- the last resort of a stop. A thread that is inside a template, a tokenizer or a device call
// cannot be ended from outside, and no destructor returns before it does: when the time is over the process
// leaves as it is. Nothing is lost with it but the last records of --step-log: an engine that fails has written
// them out.

#include <signal.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

namespace ekv {

class ExitGuard {
 public:
  // From now on the process has `at_most`; late, it ends with what `code` says then, on another thread. One of
  // `signals`, which every thread has blocked, makes hurried() true and cuts the rest to `when_hurried`.
  ExitGuard(const sigset_t& signals, std::chrono::milliseconds at_most, std::chrono::milliseconds when_hurried,
            std::function<int()> code);
  ~ExitGuard();  // all is done: the process may end by itself
  ExitGuard(const ExitGuard&) = delete;
  ExitGuard& operator=(const ExitGuard&) = delete;

  bool hurried() const { return hurried_; }

 private:
  void run(sigset_t signals, std::chrono::milliseconds at_most, std::chrono::milliseconds when_hurried,
           const std::function<int()>& code);

  std::atomic<bool> done_{false}, hurried_{false};
  std::thread thread_;
};

// While the server starts there is nobody to finish for, and no turn in which loading or building could be
// asked to stop: one of `signals`, which every thread has blocked, says so in the log and ends the process with
// 0. The default action would not: the first process of a container never sees a signal that it neither handles
// nor blocks. A handler would need a thread that does not block them, and threads that the start makes (of
// OpenMP, of CUDA) would inherit that. The thread polls so that it can be told to end.
class StartGuard {
 public:
  explicit StartGuard(const sigset_t& signals);
  ~StartGuard();  // the server has started, or failed to: signals wait for the next who asks for them
  StartGuard(const StartGuard&) = delete;
  StartGuard& operator=(const StartGuard&) = delete;

 private:
  std::atomic<bool> done_{false};
  std::thread thread_;
};

// Says why and ends the process with `code`, without destructors.
[[noreturn]] void leave_as_it_is(const char* why, int code);

}  // namespace ekv
