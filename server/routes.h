#pragma once
// routes.h -- method and path -> handler, and what all replies have in common: API keys, CORS, request ids, the
// shape of errors.

#include <string>
#include <vector>

#include "elastickv/metrics.h"
#include "server/generate.h"
#include "server/http.h"

namespace ekv {

struct RouteOptions {
  std::string version;
  std::vector<std::string> api_keys;              // any of them opens /v1/...; none: everything is open
  std::vector<std::string> allowed_origins{"*"};  // of browser pages; empty: no CORS headers at all
  bool log_requests = false;                      // one line per request
  bool echo_request_id = false;                   // X-Request-Id comes back in the reply
};

class Routes : public HttpApp {
 public:
  // All outlive this object.
  Routes(const RouteOptions& options, const ServedModel& model, EngineLoop& loop, DisconnectWatcher& watcher,
         const Metrics& metrics, const Clock& clock);

  std::optional<HttpResponse> gate(const HttpRequest& head) override;
  HttpResponse handle(const HttpRequest& request) override;
  HttpResponse refuse(const HttpRequest& head, int status, const std::string& message) override;

 private:
  using Handler = HttpResponse (Routes::*)(const HttpRequest&);
  struct Route {
    const char* method;
    const char* path;
    Handler handler;
    bool json;  // the body must be JSON
  };
  static const std::vector<Route>& table();
  const Route* find(const HttpRequest& request) const;
  std::optional<HttpResponse> preflight(const HttpRequest& head) const;
  bool authorised(const HttpRequest& head) const;
  HttpResponse unknown_route(const HttpRequest& head) const;
  void decorate(const HttpRequest& request, HttpResponse& response) const;

  HttpResponse completions(const HttpRequest& request) { return generate_.completion(request); }
  HttpResponse chat_completions(const HttpRequest& request) { return generate_.chat(request); }
  HttpResponse models(const HttpRequest& request);
  HttpResponse one_model(const HttpRequest& request);
  HttpResponse tokenize(const HttpRequest& request);
  HttpResponse detokenize(const HttpRequest& request);
  HttpResponse health(const HttpRequest& request);
  HttpResponse version(const HttpRequest& request);
  HttpResponse metrics(const HttpRequest& request);
  HttpResponse load(const HttpRequest& request);
  HttpResponse reset_prefix_cache(const HttpRequest& request);

  RouteOptions options_;
  const ServedModel& model_;
  EngineLoop& loop_;
  const Metrics& metrics_;
  Generate generate_;
};

}  // namespace ekv
