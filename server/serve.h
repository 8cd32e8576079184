#pragma once
// serve.h -- `elastickv serve`: loads the model, reports what will be served, runs until SIGTERM or SIGINT.

#include <functional>
#include <memory>

#include "backend/device.h"
#include "server/exit_code.h"
#include "server/flags.h"

namespace ekv {

using MakeBackend =
    std::function<Result<std::unique_ptr<Backend>>(const Model&, const EngineConfig&, const BackendOptions&)>;

// The exit code. `make`: for tests, which put something between engine and device.
int serve(const ServeFlags& flags, const MakeBackend& make = make_backend);

// Longest sequence: what was asked for must fit a pool of `num_pages`; without a wish it is cut to what fits.
// `pool_flag`: the flag that the size of the pool comes from.
Result<int> fit_context(std::optional<int> wanted, int max_position, int num_pages,
                        const std::string& pool_flag);

}  // namespace ekv
