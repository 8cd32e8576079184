#pragma once
// serve.h -- `elastickv serve`: loads the model, reports what will be served, runs until SIGTERM or SIGINT.

#include "backend/start.h"
#include "server/flags.h"

namespace ekv {

// Of the process, beside 0 after a signal; a wrong command line has the codes of flags.h.
constexpr int kExitNotStarted = 1;     // or a stop that took too long, or a step log with a gap
constexpr int kExitEngineStopped = 3;  // the device is lost, or a step failed: start the server again

// The exit code. `make`: for tests, which put something between engine and device.
int serve(const ServeFlags& flags, const MakeBackend& make = make_backend);

}  // namespace ekv
