#pragma once
// service.h -- the parts of a running server, put together once: engine loop, routes, HTTP. Owns their threads.

#include <chrono>
#include <functional>
#include <thread>

#include "elastickv/metrics.h"
#include "server/disconnect_watcher.h"
#include "server/engine_loop.h"
#include "server/http.h"
#include "server/routes.h"

namespace ekv {

struct ServiceConfig {
  HttpConfig http;
  RouteOptions routes;
  EngineLoopConfig loop;
  // For the last bytes of replies when the server stops; a client that does not take them by then is cut off.
  std::chrono::milliseconds flush_grace{5000};
};

class Service {
 public:
  // `clock` outlives the service. `on_fatal`: the engine has failed, or no client can connect any more, and the
  // log says why. Called once for each, on a thread of the service.
  Service(const ServiceConfig& config, ServedModel model, const EngineConfig& engine_config, int num_pages,
          const EngineLoop::MakeEngine& make_engine, const Clock& clock, std::function<void()> on_fatal);
  ~Service();  // without shut_down() before: at once; waits for every thread

  Status start();  // listens and returns
  int port() const { return http_.port(); }
  EngineLoop& loop() { return loop_; }

  // New requests get 503. Running ones have `at_most` to finish, or until `hurry` says true; then they are
  // cancelled, told so, and the sockets are closed, at the latest after the flush grace. False: after that
  // grace once more a connection's thread is still at work.
  bool shut_down(std::chrono::milliseconds at_most, const std::function<bool()>& hurry);

 private:
  std::chrono::milliseconds flush_grace_;
  ServedModel model_;
  Metrics metrics_;
  EngineLoop loop_;
  std::function<void()> on_fatal_;
  DisconnectWatcher watcher_;
  Routes routes_;
  HttpServer http_;
  std::thread accepting_;
};

}  // namespace ekv
