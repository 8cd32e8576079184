#include "elastickv/base.h"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>

namespace ekv {
namespace {

// The log goes to stderr: stdout belongs to results (tables, JSON) that users pipe on.
spdlog::logger& logger() {
  static const auto instance = [] {
    auto made =
        std::make_shared<spdlog::logger>("elastickv", std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
    made->set_pattern("%Y-%m-%d %H:%M:%S.%e %^%l%$ %v");
    return made;
  }();
  return *instance;
}

}  // namespace

void check_failed(const char* expression, std::string_view reason, const char* file, int line) {
  std::fprintf(stderr, "%s:%d: bug: %.*s (%s is false)\n", file, line, int(reason.size()), reason.data(),
               expression);
  std::abort();
}

int64_t SteadyClock::now_us() const {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void log_debug(std::string_view message) { logger().debug("{}", message); }
void log_info(std::string_view message) { logger().info("{}", message); }
void log_warn(std::string_view message) { logger().warn("{}", message); }
void log_error(std::string_view message) { logger().error("{}", message); }

}  // namespace ekv
