#pragma once
// raw_http.h -- an HTTP client that sends exactly the bytes it is given and shows exactly what comes back.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "util/json.h"

namespace ekv::testing {

struct RawResponse {
  int status = 0;  // 0: the connection ended before a whole response
  std::vector<std::pair<std::string, std::string>> headers;
  std::string body;

  std::string header(const std::string& name) const {
    for (const auto& [key, value] : headers)
      if (strcasecmp(key.c_str(), name.c_str()) == 0) return value;
    return {};
  }
  // Discarded (not null, not an object) when the body is not JSON.
  Json json() const { return Json::parse(body, nullptr, false); }
  const Json error() const { return member(json(), "error"); }
};

class RawHttp {
 public:
  explicit RawHttp(int port, int timeout_ms = 30000) : timeout_ms_(timeout_ms) {
    socket_ = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(uint16_t(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const int on = 1;
    setsockopt(socket_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    connected_ = ::connect(socket_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
  }
  ~RawHttp() { close(); }
  RawHttp(const RawHttp&) = delete;
  RawHttp& operator=(const RawHttp&) = delete;

  bool connected() const { return connected_; }
  void close() {
    if (socket_ >= 0) ::close(socket_);
    socket_ = -1;
  }
  void reset() {  // closes with RST
    const linger now{.l_onoff = 1, .l_linger = 0};
    setsockopt(socket_, SOL_SOCKET, SO_LINGER, &now, sizeof(now));
    close();
  }
  void half_close() { ::shutdown(socket_, SHUT_WR); }

  bool send(const std::string& bytes) {
    size_t sent = 0;
    while (sent < bytes.size()) {
      const ssize_t n = ::send(socket_, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
      if (n <= 0) return false;
      sent += size_t(n);
    }
    return true;
  }

  // Until the separator, inclusive; nullopt when the connection ends or the time is up.
  std::optional<std::string> read_until(const std::string& end) {
    for (;;) {
      const size_t at = buffer_.find(end);
      if (at != std::string::npos) return take(at + end.size());
      if (!fill()) return std::nullopt;
    }
  }
  std::optional<std::string> read_bytes(size_t count) {
    while (buffer_.size() < count)
      if (!fill()) return std::nullopt;
    return take(count);
  }
  std::string read_all() {
    while (fill()) {
    }
    return take(buffer_.size());
  }

  // Status line and headers only; the body of a stream is then read with next_chunk().
  RawResponse read_head() {
    RawResponse response;
    const std::optional<std::string> head = read_until("\r\n\r\n");
    if (!head || head->size() < 12) return response;
    response.status = std::stoi(head->substr(9, 3));
    size_t at = head->find("\r\n") + 2;
    while (at + 2 < head->size()) {
      const size_t end = head->find("\r\n", at), colon = head->find(": ", at);
      if (colon < end)
        response.headers.emplace_back(head->substr(at, colon - at), head->substr(colon + 2, end - colon - 2));
      at = end + 2;
    }
    return response;
  }
  // One chunk of a chunked body; empty at the end, nullopt when the connection breaks.
  std::optional<std::string> next_chunk() {
    const auto size = read_until("\r\n");
    if (!size) return std::nullopt;
    const auto data = read_bytes(size_t(std::stoul(*size, nullptr, 16)) + 2);
    if (!data) return std::nullopt;
    return data->substr(0, data->size() - 2);
  }
  RawResponse read_response() {
    RawResponse response = read_head();
    if (response.status == 0 || response.status == 204) return response;
    if (response.header("Transfer-Encoding") == "chunked") {
      for (;;) {
        const auto chunk = next_chunk();
        if (!chunk) return {};
        if (chunk->empty()) return response;
        response.body += *chunk;
      }
    }
    const std::string length = response.header("Content-Length");
    if (length.empty()) {
      response.body = read_all();
    } else if (const auto body = read_bytes(std::stoul(length))) {
      response.body = *body;
    } else {
      return {};
    }
    return response;
  }

 private:
  bool fill() {
    pollfd p{.fd = socket_, .events = POLLIN, .revents = 0};
    if (socket_ < 0 || ::poll(&p, 1, timeout_ms_) <= 0) return false;
    char bytes[16384];
    const ssize_t n = ::recv(socket_, bytes, sizeof(bytes), 0);
    if (n <= 0) return false;
    buffer_.append(bytes, size_t(n));
    return true;
  }
  std::string take(size_t count) {
    std::string out = buffer_.substr(0, count);
    buffer_.erase(0, count);
    return out;
  }

  int socket_ = -1, timeout_ms_;
  bool connected_ = false;
  std::string buffer_;
};

using RawHeaders = std::vector<std::pair<std::string, std::string>>;

inline std::string http_request(const std::string& method, const std::string& path,
                                const std::string& body = {},
                                const RawHeaders& headers = {{"Content-Type", "application/json"}}) {
  std::string text = method + " " + path + " HTTP/1.1\r\nHost: test\r\n";
  for (const auto& [name, value] : headers) text += name + ": " + value + "\r\n";
  if (method == "POST") text += "Content-Length: " + std::to_string(body.size()) + "\r\n";
  return text + "\r\n" + body;
}

}  // namespace ekv::testing
