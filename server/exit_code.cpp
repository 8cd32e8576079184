#include "server/exit_code.h"

#include <fmt/format.h>

#include <cstdio>
#include <new>
#include <system_error>

#include "elastickv/base.h"

namespace ekv {

int run_command(const std::function<int()>& command) {
  try {
    return command();
  } catch (const DeviceError& e) {
    log_error(fmt::format("the device is lost: {}. The run ends without a result. Start it again; {}", e.what(),
                          kLostDeviceAdvice));
    return kExitEngineStopped;
  } catch (const std::bad_alloc&) {
    std::fputs(
        "out of memory: use a smaller model, a smaller --kv-cache-memory-bytes or --kv-host-bytes, or fewer "
        "requests at once\n",
        stderr);
  } catch (const std::system_error& e) {
    const bool no_thread = e.code() == std::errc::resource_unavailable_try_again;
    log_error(fmt::format("the system refused: {}; {}", e.what(),
                          no_thread ? "where threads are limited (ulimit -u, pids.max) raise the limit"
                                    : "see to what it names, or report this line as a fault"));
  } catch (const std::exception& e) {
    log_error(fmt::format("the run ends: {}. Report this line as a fault", e.what()));
  }
  return kExitFailed;
}

}  // namespace ekv
