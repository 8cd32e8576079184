#include "server/listen_socket.h"

#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>

namespace ekv {
namespace {

// -1 and errno: it cannot be.
int bind_one(const addrinfo& address) {
  const int type = address.ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK;
  const int fd = ::socket(address.ai_family, type, address.ai_protocol);
  if (fd < 0) return -1;
  const int on = 1, off = 0;
  // Not SO_REUSEPORT: a second server could bind the same port and take half the clients.
  ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (address.ai_family == AF_INET6) ::setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  if (::bind(fd, address.ai_addr, address.ai_addrlen) == 0) return fd;
  const int number = errno;
  ::close(fd);
  errno = number;
  return -1;
}

const char* advice(int number) {
  switch (number) {
    case EADDRINUSE:
      return "; stop what listens there, or choose another --port";
    case EADDRNOTAVAIL:
      return "; --host must be an address of this machine";
    case EACCES:
      return "; choose another --port: those below 1024 need privileges";
    default:
      return "; see --host and --port";
  }
}

// What accept() says when the listening socket is of no use any more. Everything else is of one client, or
// passes.
bool is_final(int number) {
  return number == EBADF || number == EINVAL || number == ENOTSOCK || number == EOPNOTSUPP;
}

bool is_of_one_client(int number) {
  return number == EAGAIN || number == EINTR || number == ECONNABORTED || number == EPROTO || number == EPERM;
}

}  // namespace

Error address_error(const std::string& host, int port, int number) {
  return {Error::io, fmt::format("cannot listen on {}:{}: {}{}", host, port, strerror(number), advice(number)),
          number == EADDRNOTAVAIL ? "host" : "port"};
}

Result<int> bind_address(const std::string& host, int port) {
  const addrinfo wanted{.ai_flags = AI_PASSIVE, .ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
  addrinfo* list = nullptr;
  const char* const name = host.empty() ? nullptr : host.c_str();  // nullptr: every address
  if (const int fault = ::getaddrinfo(name, std::to_string(port).c_str(), &wanted, &list); fault != 0)
    return Error{
        Error::io,
        fmt::format("cannot listen on {}:{}: {}{}", host, port,
                    fault == EAI_SYSTEM ? strerror(errno) : ::gai_strerror(fault),
                    fault == EAI_NONAME ? "; --host must be an address of this machine" : "; see --host"),
        "host"};
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(list, ::freeaddrinfo);
  int number = EADDRNOTAVAIL;
  for (const addrinfo* address = list; address != nullptr; address = address->ai_next) {
    if (const int fd = bind_one(*address); fd >= 0) return fd;
    if (number != EADDRINUSE && number != EACCES) number = errno;  // of a name's other address, perhaps
  }
  return address_error(host, port, number);
}

int port_of(int socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  EKV_CHECK(::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size) == 0, "the socket is bound");
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<sockaddr_in&>(address).sin_port);
}

Status accept_until(int stop_event, int listener, const std::function<void(int)>& take) {
  constexpr std::chrono::milliseconds kPause{20};
  constexpr std::chrono::seconds kBetweenLines{10};
  auto next_line = std::chrono::steady_clock::now();
  pollfd p[2] = {{.fd = stop_event, .events = POLLIN, .revents = 0},
                 {.fd = listener, .events = POLLIN, .revents = 0}};
  for (bool scarce = false;;) {
    // Scarce: a connection that waits makes the listener readable, so only the other is asked, and for a while.
    const int ready = ::poll(p, scarce ? 1 : 2, scarce ? int(kPause.count()) : -1);
    if (ready > 0 && p[0].revents) return std::nullopt;
    const int socket = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    const int number = socket < 0 ? errno : 0;
    if (is_final(number))
      return Error{Error::io, fmt::format("no client can connect any more: accept: {}", strerror(number)), {}};
    if (socket >= 0) take(socket);
    scarce = number != 0 && !is_of_one_client(number);
    if (!scarce || std::chrono::steady_clock::now() < next_line) continue;
    log_warn(
        fmt::format("new clients wait: accept: {}; raise the limit of open files (ulimit -n), or lower "
                    "--max-connections",
                    strerror(number)));
    next_line = std::chrono::steady_clock::now() + kBetweenLines;
  }
}

Status try_address(const std::string& host, int port) {
  const Result<int> fd = bind_address(host, port);
  if (!fd) return fd.error();
  ::close(*fd);
  return std::nullopt;
}

}  // namespace ekv
