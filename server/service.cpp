#include "server/service.h"

namespace ekv {
namespace {

constexpr std::chrono::milliseconds kDrainTurn{20};

}  // namespace

Service::Service(const ServiceConfig& config, ServedModel model, const EngineConfig& engine_config,
                 int num_pages, const EngineLoop::MakeEngine& make_engine, const Clock& clock,
                 std::function<void()> on_fatal)
    : flush_grace_(config.flush_grace),
      model_(std::move(model)),
      metrics_(model_.limits.model_names.front(), engine_config, num_pages),
      loop_(config.loop, make_engine, clock, metrics_, on_fatal),
      on_fatal_(std::move(on_fatal)),
      routes_(config.routes, model_, loop_, watcher_, metrics_, clock),
      http_(config.http, routes_) {}

Service::~Service() {
  if (!accepting_.joinable()) return;
  shut_down(std::chrono::milliseconds(0), [] { return true; });
  if (accepting_.joinable()) accepting_.join();
}

Status Service::start() {
  if (Status failed = http_.bind()) return failed;
  accepting_ = std::thread([this] { http_.run(on_fatal_); });
  return std::nullopt;
}

bool Service::shut_down(std::chrono::milliseconds at_most, const std::function<bool()>& hurry) {
  loop_.refuse_new_requests();
  const auto deadline = std::chrono::steady_clock::now() + at_most;
  while (loop_.num_in_flight() > 0 && !loop_.failed() && std::chrono::steady_clock::now() < deadline &&
         !hurry())
    std::this_thread::sleep_for(kDrainTurn);
  loop_.cancel_all();
  const bool all_ended = http_.stop(flush_grace_, hurry);
  if (all_ended && accepting_.joinable()) accepting_.join();
  return all_ended;
}

}  // namespace ekv
