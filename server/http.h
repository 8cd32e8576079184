#pragma once
// http.h -- bytes in and out: connections, limits, keep-alive, streams. One thread per connection. What a
// request means is the HttpApp's business.

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "elastickv/base.h"

namespace ekv {

using HttpHeaders = std::vector<std::pair<std::string, std::string>>;

struct HttpRequest {
  std::string method, path;  // path: decoded, without the query
  std::string body;          // empty while only the head is known
  HttpHeaders headers;
  int socket = -1;  // for watching whether the client is still there; not for reading or writing

  std::string header(std::string_view name) const;  // the first value; empty when absent
};

// A whole body, or a stream. A stream's destructor must end whatever feeds it: the client may leave at any
// time.
struct HttpResponse {
  int status = 200;
  std::string content_type = "application/json";
  std::string body;
  HttpHeaders headers;
  // Called again and again on the connection's thread; appends what to send now. False: the stream is complete.
  std::function<bool(std::string& chunk)> next_chunk;
};

// Called on connection threads, many at once.
class HttpApp {
 public:
  virtual ~HttpApp() = default;
  // Sees the head before the body is read; an answer here refuses the request without reading it. After
  // nullopt the body is read and handle() is called.
  virtual std::optional<HttpResponse> gate(const HttpRequest& head) = 0;
  virtual HttpResponse handle(const HttpRequest& request) = 0;
  // Words for what the HTTP layer itself refuses: a malformed request, a body over the limit, an exception.
  virtual HttpResponse refuse(const HttpRequest& head, int status, const std::string& message) = 0;
};

struct HttpConfig {
  std::string host = "0.0.0.0";
  int port = 8000;                           // 0: any free port
  size_t max_body_bytes = size_t(32) << 20;  // larger bodies are refused with 413
  int max_connections = 4096;                // more are answered with 503 and closed
  int keep_alive_s = 60;                     // an idle connection is closed after so long
};

class HttpServer {
 public:
  HttpServer(const HttpConfig& config, HttpApp& app);  // `app` outlives the server
  ~HttpServer();                                       // after run() has returned

  Status bind();
  int port() const;  // after bind()
  // Accepts connections until stop(); returns when the last one has ended. `on_failure`: nobody can connect any
  // more though nobody called stop(), and the log says why; connections go on. Called once at most.
  void run(const std::function<void()>& on_failure);
  // Any thread. Idle connections are closed; the others have `grace` to finish, a second when `hurry` says
  // true, then their sockets are shut. False: another second later the thread of one is still at work, which
  // nothing can end; run() returns when it is done.
  bool stop(std::chrono::milliseconds grace, const std::function<bool()>& hurry);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ekv
