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
#include "server/http_body.h"
#include "server/http_head.h"
#include "server/listen_socket.h"

namespace ekv {
namespace {

constexpr std::chrono::milliseconds kHurriedGrace{1000};
constexpr int kListenBacklog = 1024;

HttpRequest head_of(const httplib::Request& from) {
  HttpRequest head;
  head.method = from.method == "HEAD" ? "GET" : from.method;
  head.path = from.path;
  for (const auto& [name, value] : from.headers) head.headers.emplace_back(name, value);
  if (const Connection* connection = Connection::of(from)) head.socket = connection->socket();
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
    set_pre_routing_handler(
        [this](const auto& request, auto& response) { return route_head(request, response); });
    Post(".*", [this](const httplib::Request& request, httplib::Response& response,
                      const httplib::ContentReader&) { read_and_handle(request, response); });
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
  }
  ~Impl() override {
    close_listener();
    ::close(stop_event_);
  }

  Status open() {
    // Not the library's own, which keeps the cause of a failure to itself.
    const Result<int> bound = bind_address(config_.host, config_.port);
    if (!bound) return bound.error();
    if (::listen(*bound, kListenBacklog) != 0) {
      const Error error = address_error(config_.host, config_.port, errno);
      ::close(*bound);
      return error;
    }
    listener_ = *bound;
    port_ = port_of(*bound);
    // The library does not accept. It only takes an invalid socket for a sign to cut streams short.
    svr_sock_ = *bound;
    return std::nullopt;
  }

  void accept(const std::function<void()>& on_failure) {
    const Status failed = accept_until(stop_event_, listener_, [this](int socket) { take(socket); });
    close_listener();
    if (failed) log_error(failed->message + "; start the server again"), on_failure();
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [&] { return open_ == 0; });
  }

  bool end(std::chrono::milliseconds grace, const std::function<bool()>& hurry) {
    const uint64_t one = 1;
    if (::write(stop_event_, &one, sizeof(one)) != sizeof(one))
      log_error("cannot signal the connections to stop");
    return end_connections(grace, hurry);
  }

  int port() const { return port_; }

 private:
  void close_listener() {
    if (listener_ >= 0) ::close(std::exchange(listener_, -1));
  }
  void take(int socket);
  void turn_away(int socket);
  void serve(int socket);
  void converse(Connection& connection);
  bool receive_head(Connection& connection);
  void forget(int socket);
  void connection_ended();
  void prepare(httplib::Request& request, Connection& connection);
  HandlerResponse route_head(const httplib::Request& request, httplib::Response& response);
  bool answer_early(const httplib::Request& request, httplib::Response& response);
  std::optional<HttpResponse> check_framing(const HttpRequest& head);
  BodyEnd read_body(const HttpRequest& head, Connection& connection, std::string& body) const;
  void read_and_handle(const httplib::Request& request, httplib::Response& response);
  void word_error(const httplib::Request& request, httplib::Response& response);
  void report_exception(const httplib::Request& request, httplib::Response& response,
                        std::exception_ptr failure);
  static void fill(const httplib::Request& request, HttpResponse from, httplib::Response& to);
  static void set_connection_header(const httplib::Request& request, httplib::Response& response);
  bool end_connections(std::chrono::milliseconds grace, const std::function<bool()>& hurry);
  bool all_end_within(std::chrono::milliseconds at_most, const std::function<bool()>& hurry,
                      std::unique_lock<std::mutex>& lock);

  HttpConfig config_;
  HttpApp& app_;
  ConnectionLimits limits_;
  int stop_event_;
  int listener_ = -1;  // of the accepting thread, once that runs
  int port_ = -1;
  std::mutex mutex_;
  std::condition_variable ended_;
  std::set<int> sockets_;  // that may be shut down; guarded by mutex_
  int open_ = 0;           // connections whose thread is still there; guarded by mutex_
};

bool HttpServer::Impl::end_connections(std::chrono::milliseconds grace, const std::function<bool()>& hurry) {
  std::unique_lock lock(mutex_);
  if (all_end_within(grace, hurry, lock)) return true;
  for (int socket : sockets_) ::shutdown(socket, SHUT_RDWR);
  return all_end_within(kHurriedGrace, hurry, lock);
}

bool HttpServer::Impl::all_end_within(std::chrono::milliseconds at_most, const std::function<bool()>& hurry,
                                      std::unique_lock<std::mutex>& lock) {
  constexpr std::chrono::milliseconds kTurn{50};
  auto deadline = std::chrono::steady_clock::now() + at_most;
  for (bool hurried = false;;) {
    if (ended_.wait_for(lock, kTurn, [&] { return open_ == 0; })) return true;
    const auto now = std::chrono::steady_clock::now();
    if (!hurried && (hurried = hurry())) deadline = std::min(deadline, now + kHurriedGrace);
    if (now >= deadline) return false;
  }
}

// On the accepting thread.
void HttpServer::Impl::take(int socket) {
  bool taken = false;
  try {
    {
      const std::lock_guard lock(mutex_);
      if (open_ < config_.max_connections) sockets_.insert(socket), ++open_, taken = true;
    }
    if (taken) return std::thread([this, socket] { serve(socket); }).detach();
  } catch (const std::exception&) {  // no thread or no memory to be had
    if (taken) forget(socket), connection_ended();
  }
  turn_away(socket);
}

void HttpServer::Impl::turn_away(int socket) {
  try {
    const std::string reply = last_reply(
        503, app_.refuse({}, 503, "too many connections; try again in a second").body, "Retry-After: 1\r\n");
    ::send(socket, reply.data(), reply.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  } catch (const std::exception&) {  // no memory for words
  }
  ::close(socket);
}

void HttpServer::Impl::serve(int socket) {
  {
    Connection connection(socket, stop_event_, limits_);
    try {
      converse(connection);
    } catch (const std::bad_alloc&) {  // what handle() throws is answered; this is of the bytes around it
      log_error("a connection is closed: out of memory; fewer --max-connections leave more");
    } catch (const std::exception& e) {
      log_error(fmt::format("a connection is closed: {}; report this line as a fault", e.what()));
    }
    forget(socket);  // before it is closed: the number may come back at once with a new connection
  }
  connection_ended();
}

void HttpServer::Impl::converse(Connection& connection) {
  while (connection.wait_for_request(std::chrono::seconds(config_.keep_alive_s))) {
    if (!receive_head(connection)) break;
    bool close = false;
    const bool alive = process_request(connection, false, close,
                                       [&](httplib::Request& request) { prepare(request, connection); });
    if (!alive || close || connection.closing() || connection.in_head()) break;
  }
}

// False: there is none, or it is refused and that has been told.
bool HttpServer::Impl::receive_head(Connection& connection) {
  std::string head;
  const HeadEnd end = connection.receive_head(head);
  if (end == HeadEnd::none) return false;
  std::optional<HeadFault> fault = HeadFault{431, "the head of the request is too long"};
  if (end == HeadEnd::whole) fault = check_head(head);
  if (!fault) {
    connection.put_back(head);
    return true;
  }
  const std::string reply = last_reply(fault->status, app_.refuse({}, fault->status, fault->message).body);
  for (size_t sent = 0; sent < reply.size();) {
    const ssize_t n = connection.write(reply.data() + sent, reply.size() - sent);
    if (n <= 0) break;
    sent += size_t(n);
  }
  return false;
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
  connection.attach_to(request);
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
  const auto [first, last] = request.headers.equal_range("Connection");
  if (std::any_of(first, last, [](const auto& header) { return has_list_item(header.second, "close"); }))
    connection.close_after_reply();
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
  if (Connection* connection = Connection::of(request); connection && connection->body_unread())
    connection->close_after_reply();
  fill(request, *std::move(answer), response);
  return true;
}

httplib::Server::HandlerResponse HttpServer::Impl::route_head(const httplib::Request& request,
                                                              httplib::Response& response) {
  if (answer_early(request, response)) return HandlerResponse::Handled;
  if (request.method == "POST") return HandlerResponse::Unhandled;
  if (Connection* connection = Connection::of(request); connection && connection->body_unread())
    connection->close_after_reply();
  fill(request, app_.handle(head_of(request)), response);
  return HandlerResponse::Handled;
}

BodyEnd HttpServer::Impl::read_body(const HttpRequest& head, Connection& connection, std::string& body) const {
  if (!head.header("Transfer-Encoding").empty())
    return read_chunked_body(connection, config_.max_body_bytes, body);
  return read_sized_body(connection, std::stoull(head.header("Content-Length")), body);
}

// After check_framing(): the length is there once, and is a size within the limit.
void HttpServer::Impl::read_and_handle(const httplib::Request& request, httplib::Response& response) {
  HttpRequest whole = head_of(request);
  Connection& connection = *Connection::of(request);
  const BodyEnd end = read_body(whole, connection, whole.body);
  response.status = -1;
  if (end == BodyEnd::whole) {
    connection.expect_body(false);
    return fill(request, app_.handle(whole), response);
  }
  connection.close_after_reply();
  whole.body.clear();
  const std::string too_large = fmt::format("the body is over the limit of {} bytes", config_.max_body_bytes);
  fill(request,
       end == BodyEnd::too_large ? app_.refuse(whole, 413, too_large)
       : end == BodyEnd::malformed
           ? app_.refuse(whole, 400, "the chunks of the body are malformed")
           : app_.refuse(whole, 400, "the body ended early: fewer bytes came than the request announces"),
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
  if (Connection* connection = Connection::of(request)) connection->close_after_reply();
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
  const Connection* connection = Connection::of(request);
  if (!connection || connection->closing()) response.set_header("Connection", "close");
}

HttpServer::HttpServer(const HttpConfig& config, HttpApp& app) : impl_(std::make_unique<Impl>(config, app)) {}
HttpServer::~HttpServer() = default;
Status HttpServer::bind() { return impl_->open(); }
int HttpServer::port() const { return impl_->port(); }
void HttpServer::run(const std::function<void()>& on_failure) { impl_->accept(on_failure); }
bool HttpServer::stop(std::chrono::milliseconds grace, const std::function<bool()>& hurry) {
  return impl_->end(grace, hurry);
}

}  // namespace ekv
