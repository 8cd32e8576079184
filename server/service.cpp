#include "server/service.h"

namespace ekv {
namespace {

// For the last bytes of replies; a client that does not take them by then is cut off.
constexpr int kFlushGraceMs = 5000;
constexpr std::chrono::milliseconds kDrainTurn{20};

}  // namespace

Service::Service(const ServiceConfig& config, ServedModel model, const EngineConfig& engine_config,
                 int num_pages, const EngineLoop::MakeEngine& make_engine, const Clock& clock,
                 std::function<void()> on_fatal)
    : model_(std::move(model)),
      metrics_(model_.limits.model_names.front(), engine_config, num_pages),
      loop_(config.loop, make_engine, clock, metrics_, std::move(on_fatal)),
      routes_(config.routes, model_, loop_, watcher_, metrics_, clock),
      http_(config.http, routes_) {}

Service::~Service() {
  if (accepting_.joinable()) shut_down(std::chrono::milliseconds(0), [] { return true; });
}

Status Service::start() {
  if (Status failed = http_.bind()) return failed;
  accepting_ = std::thread([this] { http_.run(); });
  return std::nullopt;
}

void Service::shut_down(std::chrono::milliseconds at_most, const std::function<bool()>& hurry) {
  loop_.refuse_new_requests();
  const auto deadline = std::chrono::steady_clock::now() + at_most;
  while (loop_.num_in_flight() > 0 && !loop_.failed() && std::chrono::steady_clock::now() < deadline &&
         !hurry())
    std::this_thread::sleep_for(kDrainTurn);
  loop_.cancel_all();
  http_.stop(kFlushGraceMs);
  if (accepting_.joinable()) accepting_.join();
}

}  // namespace ekv
