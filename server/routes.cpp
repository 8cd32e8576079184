#include "server/routes.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

namespace ekv {
namespace {

constexpr const char* kModelPrefix = "/v1/models/";

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return char(std::tolower(c)); });
  return text;
}

// Takes the same time wherever the first difference is.
bool equal_in_constant_time(std::string_view given, std::string_view key) {
  unsigned difference = unsigned(given.size() ^ key.size());
  for (size_t i = 0; i < given.size(); ++i)
    difference |= unsigned(uint8_t(given[i]) ^ uint8_t(key[key.empty() ? 0 : i % key.size()]));
  return difference == 0;
}

bool is_json_type(const std::string& content_type) {
  const std::string type = lower(content_type.substr(0, content_type.find(';')));
  const size_t end = type.find_last_not_of(" \t");
  return type.empty() || (end != std::string::npos && type.substr(0, end + 1) == "application/json");
}

// Everything that costs more than an answer about the server's state. vLLM leaves /tokenize open: 32 MB of text
// are seconds of a core.
bool needs_key(const std::string& path) {
  return path == "/v1" || path.starts_with("/v1/") || path == "/tokenize" || path == "/detokenize" ||
         path == "/reset_prefix_cache";
}

bool has_body(const HttpRequest& head) {
  const std::string length = head.header("Content-Length");
  return !head.header("Transfer-Encoding").empty() || (!length.empty() && length != "0");
}

}  // namespace

Routes::Routes(const RouteOptions& options, const ServedModel& model, EngineLoop& loop,
               DisconnectWatcher& watcher, const Metrics& metrics, const Clock& clock)
    : options_(options),
      model_(model),
      loop_(loop),
      metrics_(metrics),
      generate_(model, loop, watcher, clock) {}

const std::vector<Routes::Route>& Routes::table() {
  static const std::vector<Route> routes{
      {"POST", "/v1/completions", &Routes::completions, true},
      {"POST", "/v1/chat/completions", &Routes::chat_completions, true},
      {"GET", "/v1/models", &Routes::models, false},
      {"POST", "/tokenize", &Routes::tokenize, true},
      {"POST", "/detokenize", &Routes::detokenize, true},
      {"GET", "/health", &Routes::health, false},
      {"GET", "/ping", &Routes::health, false},
      {"POST", "/ping", &Routes::health, false},
      {"GET", "/version", &Routes::version, false},
      {"GET", "/metrics", &Routes::metrics, false},
      {"GET", "/load", &Routes::load, false},
      {"POST", "/reset_prefix_cache", &Routes::reset_prefix_cache, false},
  };
  return routes;
}

const Routes::Route* Routes::find(const HttpRequest& request) const {
  static const Route one_model{"GET", kModelPrefix, &Routes::one_model, false};
  if (request.method == "GET" && request.path.starts_with(kModelPrefix)) return &one_model;
  for (const Route& route : table())
    if (request.method == route.method && request.path == route.path) return &route;
  return nullptr;
}

// Order: browsers ask without a key; a key is asked before telling what exists; then route and kind of body.
std::optional<HttpResponse> Routes::gate(const HttpRequest& head) {
  if (std::optional<HttpResponse> answer = preflight(head)) return answer;
  if (!authorised(head)) {
    HttpResponse response =
        refuse(head, 401, "the Authorization header must carry a valid API key: Bearer <key>");
    response.headers.emplace_back("WWW-Authenticate", "Bearer");
    return response;
  }
  const Route* route = find(head);
  if (!route) return unknown_route(head);
  const std::string coding = lower(head.header("Content-Encoding"));
  if (has_body(head) && !coding.empty() && coding != "identity")
    return refuse(head, 415,
                  fmt::format("Content-Encoding '{}' is not supported; send the body as it is", coding));
  if (route->json && !is_json_type(head.header("Content-Type")))
    return refuse(head, 415, "the Content-Type header must be application/json");
  if (!route->json && lower(head.header("Content-Type")).starts_with("multipart/"))
    return refuse(head, 415, "the Content-Type header must not be multipart");
  return std::nullopt;
}

HttpResponse Routes::handle(const HttpRequest& request) {
  const Route* route = find(request);
  if (!route) return unknown_route(request);
  HttpResponse response = (this->*route->handler)(request);
  decorate(request, response);
  if (options_.log_requests) log_info(fmt::format("{} {} {}", request.method, request.path, response.status));
  return response;
}

HttpResponse Routes::refuse(const HttpRequest& head, int status, const std::string& message) {
  HttpResponse response = json_reply(error_body(status, message), status);
  decorate(head, response);
  return response;
}

HttpResponse Routes::unknown_route(const HttpRequest& head) const {
  std::string allowed;
  for (const Route& route : table())
    if (head.path == route.path) allowed += (allowed.empty() ? "" : ", ") + std::string(route.method);
  if (head.path.starts_with(kModelPrefix)) allowed = "GET";
  HttpResponse response =
      allowed.empty() ? json_reply(error_body(404, fmt::format("there is no route {}", head.path)), 404)
                      : json_reply(error_body(405, fmt::format("{} takes {}", head.path, allowed)), 405);
  if (!allowed.empty()) response.headers.emplace_back("Allow", allowed);
  decorate(head, response);
  return response;
}

std::optional<HttpResponse> Routes::preflight(const HttpRequest& head) const {
  const std::string method = head.header("Access-Control-Request-Method");
  if (head.method != "OPTIONS" || method.empty() || options_.allowed_origins.empty()) return std::nullopt;
  HttpResponse response;
  response.status = 204;
  decorate(head, response);
  const std::string headers = head.header("Access-Control-Request-Headers");
  response.headers.emplace_back("Access-Control-Allow-Methods", "GET, POST, OPTIONS");
  // The wildcard does not cover Authorization (WHATWG Fetch), so what is asked for is named.
  response.headers.emplace_back("Access-Control-Allow-Headers",
                                headers.empty() ? "authorization, content-type, x-request-id" : headers);
  response.headers.emplace_back("Access-Control-Max-Age", "600");
  return response;
}

bool Routes::authorised(const HttpRequest& head) const {
  if (options_.api_keys.empty() || head.method == "OPTIONS" || !needs_key(head.path)) return true;
  const std::string given = head.header("Authorization");
  if (lower(given.substr(0, 7)) != "bearer ") return false;
  bool known = false;
  for (const std::string& key : options_.api_keys)
    known |= equal_in_constant_time(std::string_view(given).substr(7), key);
  return known;
}

// Never with Access-Control-Allow-Credentials: keys come in a header that the page sets itself.
void Routes::decorate(const HttpRequest& request, HttpResponse& response) const {
  const std::string origin = request.header("Origin");
  const auto& allowed = options_.allowed_origins;
  if (!origin.empty() && std::find(allowed.begin(), allowed.end(), "*") != allowed.end()) {
    response.headers.emplace_back("Access-Control-Allow-Origin", "*");
  } else if (!origin.empty() && std::find(allowed.begin(), allowed.end(), origin) != allowed.end()) {
    response.headers.emplace_back("Access-Control-Allow-Origin", origin);
    response.headers.emplace_back("Vary", "Origin");
  }
  const std::string id = request.header("X-Request-Id");
  if (options_.echo_request_id && !id.empty() && reply_id(request, ""))
    response.headers.emplace_back("X-Request-Id", id);
}

}  // namespace ekv
