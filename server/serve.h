#pragma once
// serve.h -- `elastickv serve`: loads the model, reports what will be served, runs until SIGTERM or SIGINT.

#include "server/flags.h"

namespace ekv {

// The exit code: 0 after a signal, 1 when the start failed or the engine stopped.
int serve(const ServeFlags& flags);

// Longest sequence: what was asked for must fit a pool of `num_pages`; without a wish it is cut to what fits.
// `pool_flag`: the flag that the size of the pool comes from.
Result<int> fit_context(std::optional<int> wanted, int max_position, int num_pages,
                        const std::string& pool_flag);

}  // namespace ekv
