#pragma once
// load_server.h -- an HTTP server that does exactly what a test of the load client tells it, and counts what it
// sees: requests at the same time, connections. One thread per connection.

#include <arpa/inet.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "util/json.h"

namespace ekv::testing {

// The stream of one reply. What is said after `begin` is chunked server-sent events.
class StreamWriter {
 public:
  StreamWriter(int socket, std::atomic<int>* in_flight) : socket_(socket), in_flight_(in_flight) {}
  void begin() {
    raw("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n");
  }
  void event(const std::string& data) { raw(fmt::format("{:x}\r\ndata: {}\n\n\r\n", data.size() + 8, data)); }
  void token(const std::string& text) {
    event(dump_json({{"choices", Json::array({{{"index", 0}, {"text", text}, {"finish_reason", nullptr}}})}}));
  }
  void stop() { event(R"({"choices":[{"index":0,"text":"","finish_reason":"length"}]})"); }
  void usage(int prompt, int completion) {
    event(dump_json({{"choices", Json::array()},
                     {"usage", {{"prompt_tokens", prompt}, {"completion_tokens", completion}}}}));
  }
  void end() {
    event("[DONE]");
    leave();
    raw("0\r\n\r\n");
  }
  void reply(int status, const std::string& body) {
    leave();
    raw("HTTP/1.1 " + std::to_string(status) + " X\r\nContent-Type: application/json\r\nContent-Length: " +
        std::to_string(body.size()) + "\r\n\r\n" + body);
  }
  void raw(const std::string& bytes) { ::send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL); }
  void hang_up() {
    leave();
    ::shutdown(socket_, SHUT_RDWR);
  }

 private:
  // Before the last bytes: the client may send its next request the moment it has them.
  void leave() {
    if (in_flight_) --*in_flight_;
    in_flight_ = nullptr;
  }

  int socket_;
  std::atomic<int>* in_flight_;
};

class LoadServer {
 public:
  // Called for each POST of a completion; `index` counts them from 0.
  using Handler = std::function<void(StreamWriter& out, int index, const std::string& body)>;

  explicit LoadServer(Handler handler) : handler_(std::move(handler)) {
    listener_ = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    EXPECT_EQ(::bind(listener_, reinterpret_cast<sockaddr*>(&address), size), 0);
    EXPECT_EQ(::listen(listener_, 4096), 0);
    ::getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size);
    port_ = ntohs(address.sin_port);
    accepting_ = std::thread([this] { accept_all(); });
  }
  ~LoadServer() {
    ::shutdown(listener_, SHUT_RDWR);
    accepting_.join();
    {
      const std::lock_guard lock(mutex_);
      for (const int socket : sockets_) ::shutdown(socket, SHUT_RDWR);
    }
    for (std::thread& thread : threads_) thread.join();
    for (const int socket : sockets_) ::close(socket);
    ::close(listener_);
  }

  int port() const { return port_; }
  int peak_in_flight() const { return peak_; }
  int connections() const { return connections_; }
  int requests() const { return requests_; }

 private:
  void accept_all() {
    for (;;) {
      const int socket = ::accept(listener_, nullptr, nullptr);
      if (socket < 0) return;
      const int on = 1;
      setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
      ++connections_;
      const std::lock_guard lock(mutex_);
      sockets_.push_back(socket);
      threads_.emplace_back([this, socket] { serve(socket); });
    }
  }

  void serve(int socket) {
    std::string buffer;
    const auto fill = [&] {
      char bytes[65536];
      const ssize_t n = ::recv(socket, bytes, sizeof(bytes), 0);
      if (n > 0) buffer.append(bytes, size_t(n));
      return n > 0;
    };
    for (;;) {
      while (buffer.find("\r\n\r\n") == std::string::npos)
        if (!fill()) return;
      const size_t end = buffer.find("\r\n\r\n") + 4, length = buffer.find("Content-Length: ");
      const size_t size = length < end ? std::stoul(buffer.substr(length + 16)) : 0;
      while (buffer.size() < end + size)
        if (!fill()) return;
      answer(socket, buffer.substr(0, end), buffer.substr(end, size));
      buffer.erase(0, end + size);
    }
  }

  void answer(int socket, const std::string& head, const std::string& body) {
    StreamWriter plain(socket, nullptr);
    if (head.starts_with("GET /v1/models"))
      return plain.reply(200, R"({"data":[{"id":"fake","root":"nowhere"}]})");
    if (head.starts_with("GET /metrics"))
      return plain.reply(200, fmt::format("# TYPE x\nvllm:num_preemptions_total{{model_name=\"fake\"}} {}.0\n",
                                          requests_ == 0 ? 1 : 5));
    if (head.starts_with("POST /tokenize")) return plain.reply(200, R"({"tokens":[10,11,12,13,14]})");
    if (head.starts_with("POST /detokenize")) return plain.reply(200, R"({"prompt":"ten words"})");
    const int now = ++in_flight_;
    for (int peak = peak_; peak < now && !peak_.compare_exchange_weak(peak, now);) {
    }
    StreamWriter out(socket, &in_flight_);
    handler_(out, requests_++, body);
  }

  Handler handler_;
  int listener_ = -1, port_ = 0;
  std::thread accepting_;
  std::mutex mutex_;
  std::vector<int> sockets_;          // guarded by mutex_
  std::vector<std::thread> threads_;  // guarded by mutex_
  std::atomic<int> in_flight_{0}, peak_{0}, connections_{0}, requests_{0};
};

}  // namespace ekv::testing
