#include "server/http.h"

#include <fmt/format.h>
#include <strings.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <set>
#include <thread>

#include "server/connection.h"

namespace ekv {
namespace {

constexpr int kListenBacklog = 1024;  // the library's own backlog of 5 drops bursts of connections

// The library's request has no room for our connection. Its client-side progress callback is unused in a server
// and carries the reference through.
struct ConnectionRef {
  Connection* connection;
  bool operator()(uint64_t, uint64_t) const { return true; }
};

Connection* connection_of(const httplib::Request& request) {
  const auto* ref = request.progress.target<ConnectionRef>();
  return ref ? ref->connection : nullptr;
}

// Runs jobs at once: the server makes a thread per connection itself, because it must know the socket to
// refuse.
class InlineQueue : public httplib::TaskQueue {
 public:
  explicit InlineQueue(std::function<void()> wait_for_all) : wait_for_all_(std::move(wait_for_all)) {}
  void enqueue(std::function<void()> job) override { job(); }
  void shutdown() override { wait_for_all_(); }

 private:
  std::function<void()> wait_for_all_;
};

HttpRequest head_of(const httplib::Request& from) {
  HttpRequest head;
  head.method = from.method == "HEAD" ? "GET" : from.method;
  head.path = from.path;
  for (const auto& [name, value] : from.headers) head.headers.emplace_back(name, value);
  if (const Connection* connection = connection_of(from)) head.socket = connection->socket();
  return head;
}

bool is_true_size(const std::string& text) {
  return !text.empty() && text.size() <= 18 && text.find_first_not_of("0123456789") == std::string::npos;
}

}  // namespace

std::string HttpRequest::header(std::string_view name) const {
  for (const auto& [key, value] : headers)
    if (key.size() == name.size() && strncasecmp(key.data(), name.data(), name.size()) == 0) return value;
  return {};
}

class HttpServer::Impl : public httplib::Server {
 public:
  Impl(const HttpConfig& config, HttpApp& app)
      : config_(config), app_(app), stop_event_(eventfd(0, EFD_CLOEXEC)) {
    new_task_queue = [this] { return new InlineQueue([this] { wait_for_connections(); }); };
    set_pre_routing_handler(
        [this](const auto& request, auto& response) { return route_head(request, response); });
    Post(".*", [this](const httplib::Request& request, httplib::Response& response,
                      const httplib::ContentReader& reader) { read_and_handle(request, response, reader); });
    set_expect_100_continue_handler([this](const auto& request, auto& response) {
      return answer_early(request, response) ? response.status : 100;
    });
    set_error_handler(httplib::Server::HandlerWithResponse([this](const auto& request, auto& response) {
      word_error(request, response);
      return HandlerResponse::Handled;
    }));
    set_exception_handler([this](const auto& request, auto& response, std::exception_ptr failure) {
      report_exception(request, response, failure);
    });
    set_post_routing_handler(
        [](const auto& request, auto& response) { set_connection_header(request, response); });
    set_payload_max_length(config_.max_body_bytes);
    // The library's default, SO_REUSEPORT, would let a second server bind the same port and take half the
    // clients.
    set_socket_options([](socket_t socket) {
      const int on = 1;
      ::setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    });
  }
  ~Impl() override { ::close(stop_event_); }

  Status open() {
    port_ = config_.port == 0 ? bind_to_any_port(config_.host) : config_.port;
    if (port_ <= 0 || (config_.port != 0 && !bind_to_port(config_.host, config_.port)))
      return Error{Error::io,
                   fmt::format("cannot listen on {}:{}: is the port taken, or the address not this machine's?",
                               config_.host, config_.port),
                   "port"};
    ::listen(svr_sock_, kListenBacklog);
    return std::nullopt;
  }

  void end(int grace_ms) {
    const uint64_t one = 1;
    if (::write(stop_event_, &one, sizeof(one)) != sizeof(one))
      log_error("cannot signal the connections to stop");
    {
      std::unique_lock lock(mutex_);
      ended_.wait_for(lock, std::chrono::milliseconds(grace_ms), [&] { return open_ == 0; });
      for (int socket : sockets_) ::shutdown(socket, SHUT_RDWR);
    }
    // The library's stop() does nothing before its loop has begun; this works at any time.
    const int listener = svr_sock_.exchange(INVALID_SOCKET);
    if (listener == INVALID_SOCKET) return;
    ::shutdown(listener, SHUT_RDWR);
    ::close(listener);
  }

  int port() const { return port_; }

 private:
  bool process_and_close_socket(int socket) override;
  void turn_away(int socket);
  void serve(int socket);
  void forget(int socket);
  void connection_ended();
  void prepare(httplib::Request& request, Connection& connection);
  HandlerResponse route_head(const httplib::Request& request, httplib::Response& response);
  bool answer_early(const httplib::Request& request, httplib::Response& response);
  std::optional<HttpResponse> check_framing(const HttpRequest& head);
  void read_and_handle(const httplib::Request& request, httplib::Response& response,
                       const httplib::ContentReader& reader);
  void word_error(const httplib::Request& request, httplib::Response& response);
  void report_exception(const httplib::Request& request, httplib::Response& response,
                        std::exception_ptr failure);
  static void fill(const httplib::Request& request, HttpResponse from, httplib::Response& to);
  static void set_connection_header(const httplib::Request& request, httplib::Response& response);
  void wait_for_connections() {
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [&] { return open_ == 0; });
  }

  HttpConfig config_;
  HttpApp& app_;
  ConnectionLimits limits_;
  int stop_event_;
  int port_ = -1;
  std::mutex mutex_;
  std::condition_variable ended_;
  std::set<int> sockets_;  // that may be shut down; guarded by mutex_
  int open_ = 0;           // connections whose thread is still there; guarded by mutex_
};

// On the accepting thread. Always true: the library has nothing more to do with this socket.
bool HttpServer::Impl::process_and_close_socket(int socket) {
  bool full = false;
  {
    const std::lock_guard lock(mutex_);
    full = open_ >= config_.max_connections;
    if (!full) ++open_, sockets_.insert(socket);
  }
  try {
    if (!full) std::thread([this, socket] { serve(socket); }).detach();
  } catch (const std::system_error&) {  // no thread to be had
    full = true;
    forget(socket);
    connection_ended();
  }
  if (full) turn_away(socket);
  return true;
}

void HttpServer::Impl::turn_away(int socket) {
  const HttpResponse busy = app_.refuse({}, 503, "too many connections; try again in a second");
  const std::string reply = fmt::format(
      "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: {}\r\n"
      "Retry-After: 1\r\nConnection: close\r\n\r\n{}",
      busy.body.size(), busy.body);
  ::send(socket, reply.data(), reply.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  ::close(socket);
}

void HttpServer::Impl::serve(int socket) {
  {
    Connection connection(socket, stop_event_, limits_);
    while (connection.wait_for_request(std::chrono::seconds(config_.keep_alive_s))) {
      connection.begin_head();
      bool close = false;
      const bool alive = process_request(connection, false, close,
                                         [&](httplib::Request& request) { prepare(request, connection); });
      if (!alive || close || connection.closing() || connection.in_head()) break;
    }
    forget(socket);  // before it is closed: the number may come back at once with a new connection
  }
  connection_ended();
}

void HttpServer::Impl::forget(int socket) {
  const std::lock_guard lock(mutex_);
  sockets_.erase(socket);
}

// The last thing a connection's thread does with this object.
void HttpServer::Impl::connection_ended() {
  const std::lock_guard lock(mutex_);
  --open_;
  ended_.notify_all();
}

// Takes out of the request what would make the library change our replies (compression, byte ranges) or wait
// for a body that the head does not announce.
void HttpServer::Impl::prepare(httplib::Request& request, Connection& connection) {
  connection.end_head();
  request.progress = ConnectionRef{&connection};
  request.headers.erase("Accept-Encoding");
  request.ranges.clear();
  const bool chunked = request.has_header("Transfer-Encoding");
  const std::string length = request.get_header_value("Content-Length");
  if (!chunked && length.empty()) request.headers.emplace("Content-Length", "0");
  connection.expect_body(chunked || (!length.empty() && length != "0"));
  if (request.version == "HTTP/1.0") {
    request.headers.erase("Expect");  // RFC 9110 10.1.1: a 1.0 client cannot mean it
    connection.close_after_reply();
  }
  if (strcasecmp(request.get_header_value("Connection").c_str(), "close") == 0) connection.close_after_reply();
  if (strcasecmp(request.get_header_value("Expect").c_str(), "100-continue") == 0 && connection.is_readable())
    request.headers.erase("Expect");  // the body is already coming
}

// Framing that two parties could read differently is refused, whatever the route.
std::optional<HttpResponse> HttpServer::Impl::check_framing(const HttpRequest& head) {
  const auto count = [&](std::string_view name) {
    return std::count_if(head.headers.begin(), head.headers.end(), [&](const auto& header) {
      return header.first.size() == name.size() &&
             strncasecmp(header.first.data(), name.data(), name.size()) == 0;
    });
  };
  const std::string coding = head.header("Transfer-Encoding");
  const std::string length = head.header("Content-Length");
  if (count("Content-Length") + count("Transfer-Encoding") > 1)
    return app_.refuse(head, 400, "the request must give its length once: Content-Length or Transfer-Encoding");
  if (!coding.empty() && strcasecmp(coding.c_str(), "chunked") != 0)
    return app_.refuse(head, 400, "the only supported Transfer-Encoding is chunked");
  if (coding.empty() && !is_true_size(length)) return app_.refuse(head, 400, "Content-Length is not a size");
  if (coding.empty() && std::stoull(length) > config_.max_body_bytes)
    return app_.refuse(head, 413,
                       fmt::format("the body has {} bytes, the limit is {}", length, config_.max_body_bytes));
  return std::nullopt;
}

bool HttpServer::Impl::answer_early(const httplib::Request& request, httplib::Response& response) {
  const HttpRequest head = head_of(request);
  std::optional<HttpResponse> answer = app_.gate(head);
  if (!answer) answer = check_framing(head);
  if (!answer) return false;
  if (Connection* connection = connection_of(request); connection && connection->body_unread())
    connection->close_after_reply();
  fill(request, *std::move(answer), response);
  return true;
}

httplib::Server::HandlerResponse HttpServer::Impl::route_head(const httplib::Request& request,
                                                              httplib::Response& response) {
  if (answer_early(request, response)) return HandlerResponse::Handled;
  if (request.method == "POST") return HandlerResponse::Unhandled;
  if (Connection* connection = connection_of(request); connection && connection->body_unread())
    connection->close_after_reply();
  fill(request, app_.handle(head_of(request)), response);
  return HandlerResponse::Handled;
}

void HttpServer::Impl::read_and_handle(const httplib::Request& request, httplib::Response& response,
                                       const httplib::ContentReader& reader) {
  HttpRequest whole = head_of(request);
  bool too_large = false;
  const bool complete = reader([&](const char* data, size_t size) {
    too_large = whole.body.size() + size > config_.max_body_bytes;
    if (!too_large) whole.body.append(data, size);
    return !too_large;
  });
  Connection& connection = *connection_of(request);
  response.status = -1;
  if (complete) {
    connection.expect_body(false);
    return fill(request, app_.handle(whole), response);
  }
  connection.close_after_reply();
  whole.body.clear();
  fill(request,
       too_large ? app_.refuse(whole, 413,
                               fmt::format("the body is over the limit of {} bytes", config_.max_body_bytes))
                 : app_.refuse(whole, 400, "the body ended early or its chunks are malformed"),
       response);
}

// For replies that the library made itself; ours have a body already.
void HttpServer::Impl::word_error(const httplib::Request& request, httplib::Response& response) {
  if (!response.body.empty() || response.content_provider_) return;
  const int status = response.status;
  HttpResponse reply = app_.refuse(head_of(request), status, "the HTTP request is malformed or too long");
  fill(request, std::move(reply), response);
}

void HttpServer::Impl::report_exception(const httplib::Request& request, httplib::Response& response,
                                        std::exception_ptr failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& e) {
    log_error(fmt::format("{} {}: {}", request.method, request.path, e.what()));
  } catch (...) {
    log_error(fmt::format("{} {}: unknown exception", request.method, request.path));
  }
  if (Connection* connection = connection_of(request)) connection->close_after_reply();
  fill(request, app_.refuse(head_of(request), 500, "internal error; the server's log says more"), response);
}

void HttpServer::Impl::fill(const httplib::Request& request, HttpResponse from, httplib::Response& to) {
  to.status = from.status;
  for (const auto& [name, value] : from.headers) to.set_header(name, value);
  if (!from.next_chunk) {
    if (!from.body.empty()) to.set_content(from.body, from.content_type);
    return;
  }
  const auto provide = [next = std::move(from.next_chunk)](size_t, httplib::DataSink& sink) {
    std::string chunk;
    const bool more = next(chunk);
    if (!chunk.empty() && !sink.write(chunk.data(), chunk.size())) return false;
    if (!more) sink.done();
    return true;
  };
  if (request.version == "HTTP/1.0")
    to.set_content_provider(from.content_type, provide);
  else
    to.set_chunked_content_provider(from.content_type, provide);
}

void HttpServer::Impl::set_connection_header(const httplib::Request& request, httplib::Response& response) {
  response.headers.erase("Keep-Alive");
  response.headers.erase("Connection");
  response.headers.erase("Accept-Ranges");
  const Connection* connection = connection_of(request);
  if (!connection || connection->closing()) response.set_header("Connection", "close");
}

HttpServer::HttpServer(const HttpConfig& config, HttpApp& app) : impl_(std::make_unique<Impl>(config, app)) {}
HttpServer::~HttpServer() = default;
Status HttpServer::bind() { return impl_->open(); }
int HttpServer::port() const { return impl_->port(); }
void HttpServer::run() { impl_->listen_after_bind(); }
void HttpServer::stop(int grace_ms) { impl_->end(grace_ms); }

}  // namespace ekv
