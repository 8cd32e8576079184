#pragma once
// exit_code.h -- what a process tells whoever started it, and what becomes of a failure that nobody below main
// has handled.

#include <functional>

namespace ekv {

// Beside 0; a wrong command line has the codes of flags.h.

// It could not start or go on, a stop took too long, or the step log has a gap: a line of the log says which.
constexpr int kExitFailed = 1;
// The device is lost, a step failed, or no client can connect any more: start the server again.
constexpr int kExitEngineStopped = 3;

// Of every line about a lost device.
constexpr const char* kLostDeviceAdvice =
    "if this comes back, look for Xid in the kernel's log and at nvidia-smi -q";

// What `command` returns. An exception out of it becomes one line of the log and an exit code: 3 of a lost
// device, 1 of everything else. Its destructors have run by then: its files are complete.
int run_command(const std::function<int()>& command);

}  // namespace ekv
