#pragma once
// serve.h -- `elastickv serve`: loads the model, reports what will be served, runs until SIGTERM or SIGINT.

#include "backend/start.h"
#include "server/exit_code.h"
#include "server/flags.h"

namespace ekv {

// The exit code. `make`: for tests, which put something between engine and device.
int serve(const ServeFlags& flags, const MakeBackend& make = make_backend);

}  // namespace ekv
