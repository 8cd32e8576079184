#include "server/connection.h"

#include <arpa/inet.h>
#include <linux/sockios.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace ekv {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
constexpr size_t kReadBytes = 16 << 10;

struct ConnectionRef {
  Connection* connection;
  bool operator()(uint64_t, uint64_t) const { return true; }
};

// Waits for `events`; false after `at_most` or when the socket is dead.
bool wait_for(int socket, short events, milliseconds at_most) {
  pollfd p{.fd = socket, .events = events, .revents = 0};
  const auto deadline = steady_clock::now() + at_most;
  for (;;) {
    const auto left = std::chrono::duration_cast<milliseconds>(deadline - steady_clock::now());
    const int ready = ::poll(&p, 1, int(std::max<int64_t>(0, left.count())));
    if (ready > 0) return true;
    if (ready == 0 || errno != EINTR) return false;
  }
}

int unsent_bytes(int socket) {
  int bytes = 0;
  return ::ioctl(socket, SIOCOUTQ, &bytes) == 0 ? bytes : 0;
}

void name_address(const sockaddr_storage& address, std::string& ip, int& port) {
  char text[INET6_ADDRSTRLEN] = "";
  if (address.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
    inet_ntop(AF_INET, &v4.sin_addr, text, sizeof(text));
    port = ntohs(v4.sin_port);
  } else if (address.ss_family == AF_INET6) {
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
    inet_ntop(AF_INET6, &v6.sin6_addr, text, sizeof(text));
    port = ntohs(v6.sin6_port);
  }
  ip = text;
}

}  // namespace

Connection::Connection(int socket, int stop_event, const ConnectionLimits& limits)
    : socket_(socket), stop_event_(stop_event), limits_(limits) {
  // Tokens leave one by one: waiting for a full segment would add its delay to each of them.
  const int on = 1;
  setsockopt(socket_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

Connection::~Connection() {
  if (body_unread_) drain();
  ::close(socket_);
}

bool Connection::wait_for_request(std::chrono::seconds at_most) {
  if (taken_ < buffer_.size()) return true;
  pollfd p[2] = {{.fd = socket_, .events = POLLIN, .revents = 0},
                 {.fd = stop_event_, .events = POLLIN, .revents = 0}};
  const int ready = ::poll(p, 2, int(milliseconds(at_most).count()));
  return ready > 0 && !p[1].revents && (p[0].revents & POLLIN);
}

void Connection::attach_to(httplib::Request& request) { request.progress = ConnectionRef{this}; }

Connection* Connection::of(const httplib::Request& request) {
  const auto* ref = request.progress.target<ConnectionRef>();
  return ref ? ref->connection : nullptr;
}

HeadEnd Connection::receive_head(std::string& head) {
  in_head_ = body_unread_ = true;  // a head that cannot be read may go on, or have a body
  head_deadline_ = steady_clock::now() + limits_.head_timeout;
  buffer_.erase(0, std::exchange(taken_, 0));
  bool skipped = false;
  for (size_t searched = 0;;) {
    if (!skipped && buffer_.starts_with("\r\n")) buffer_.erase(0, 2), skipped = true;
    // Bare line feeds end a head too: it is refused for them, and not waited for.
    const size_t end = std::min(buffer_.find("\n\r\n", searched), buffer_.find("\n\n", searched));
    if (end != std::string::npos) {
      const size_t size = end + (buffer_[end + 1] == '\r' ? 3 : 2);
      if (size > limits_.max_head_bytes) return HeadEnd::too_long;
      head = buffer_.substr(0, size);
      buffer_.erase(0, size);
      return HeadEnd::whole;
    }
    if (buffer_.size() > limits_.max_head_bytes) return HeadEnd::too_long;
    searched = buffer_.size() < 2 ? 0 : buffer_.size() - 2;
    if (receive(kReadBytes) <= 0) return HeadEnd::none;
  }
}

void Connection::put_back(const std::string& head) { buffer_.insert(0, head); }

bool Connection::is_readable() const { return taken_ < buffer_.size() || wait_until_readable(milliseconds(0)); }

bool Connection::is_writable() const { return wait_for(socket_, POLLOUT, limits_.write_timeout); }

bool Connection::wait_until_readable(milliseconds at_most) const { return wait_for(socket_, POLLIN, at_most); }

milliseconds Connection::time_to_read() const {
  if (!in_head_) return limits_.read_timeout;
  return std::chrono::duration_cast<milliseconds>(head_deadline_ - steady_clock::now());
}

// More bytes behind those in the buffer; what recv() says.
ssize_t Connection::receive(size_t at_most) {
  if (!wait_until_readable(time_to_read())) return -1;
  const size_t before = buffer_.size();
  buffer_.resize(before + at_most);
  const ssize_t got = ::recv(socket_, buffer_.data() + before, at_most, MSG_DONTWAIT);
  buffer_.resize(before + size_t(std::max<ssize_t>(got, 0)));
  return got;
}

ssize_t Connection::read(char* to, size_t size) {
  if (taken_ == buffer_.size()) {
    buffer_.clear();
    taken_ = 0;
    if (const ssize_t got = receive(kReadBytes); got <= 0) return got;
  }
  const size_t n = std::min(size, buffer_.size() - taken_);
  buffer_.copy(to, n, taken_);
  taken_ += n;
  return ssize_t(n);
}

ssize_t Connection::write(const char* from, size_t size) {
  for (;;) {
    const ssize_t sent = ::send(socket_, from, size, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent >= 0) return sent;
    if (errno == EINTR) continue;
    if (errno != EAGAIN) return -1;
    // A full buffer becomes writable again only when a third of it has left: ask whether anything has.
    const int before = unsent_bytes(socket_);
    if (!is_writable() && unsent_bytes(socket_) >= before) return -1;
  }
}

void Connection::get_remote_ip_and_port(std::string& ip, int& port) const {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (getpeername(socket_, reinterpret_cast<sockaddr*>(&address), &size) == 0) name_address(address, ip, port);
}

void Connection::get_local_ip_and_port(std::string& ip, int& port) const {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &size) == 0) name_address(address, ip, port);
}

// Closing a socket with unread bytes resets the connection, and the reset destroys the reply on its way.
void Connection::drain() {
  ::shutdown(socket_, SHUT_WR);
  const auto deadline = steady_clock::now() + limits_.linger;
  char sink[kReadBytes];
  for (;;) {
    const auto left = std::chrono::duration_cast<milliseconds>(deadline - steady_clock::now());
    if (left.count() <= 0 || !wait_until_readable(left)) return;
    if (::recv(socket_, sink, sizeof(sink), MSG_DONTWAIT) <= 0) return;
  }
}

}  // namespace ekv
