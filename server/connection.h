#pragma once
// connection.h -- one accepted socket as the HTTP library's Stream. Bytes that arrive behind a request stay
// here for the next one: the library's own stream belongs to a single request and loses pipelined ones.

#include <httplib.h>

#include <chrono>
#include <string>

namespace ekv {

struct ConnectionLimits {
  size_t max_head_bytes = 64 << 10;        // request line and headers together
  std::chrono::seconds head_timeout{30};   // for the whole head, so that a trickle cannot hold a thread
  std::chrono::seconds read_timeout{30};   // between two pieces of a body
  std::chrono::seconds write_timeout{60};  // without a single byte taken by the client
  std::chrono::milliseconds linger{2000};  // for the rest of a refused body, so that the client can read why
};

enum class HeadEnd { whole, too_long, none };  // none: the client has left, or the time is up

// Used by the thread of its connection only. Owns the socket.
class Connection final : public httplib::Stream {
 public:
  // `stop_event` becomes readable when the server stops; idle connections end then.
  Connection(int socket, int stop_event, const ConnectionLimits& limits);
  ~Connection() override;
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // False: nothing came within `at_most`, the client closed, or the server stops.
  bool wait_for_request(std::chrono::seconds at_most);
  // The library's request has no room for us. Its client-side progress callback, which a server does not use,
  // carries the connection through; nullptr: not attached.
  void attach_to(httplib::Request& request);
  static Connection* of(const httplib::Request& request);

  // Takes all of a head off the connection, an empty line before it dropped; then put_back() lets read() have
  // it.
  HeadEnd receive_head(std::string& head);
  void put_back(const std::string& head);
  void end_head() { in_head_ = false; }
  bool in_head() const { return in_head_; }  // still so after a request: its head could not be read

  void close_after_reply() { closing_ = true; }
  bool closing() const { return closing_; }
  void expect_body(bool has_one) { body_unread_ = has_one; }
  bool body_unread() const { return body_unread_; }

  bool is_readable() const override;
  bool is_writable() const override;
  ssize_t read(char* to, size_t size) override;
  ssize_t write(const char* from, size_t size) override;
  void get_remote_ip_and_port(std::string& ip, int& port) const override;
  void get_local_ip_and_port(std::string& ip, int& port) const override;
  int socket() const override { return socket_; }

 private:
  bool wait_until_readable(std::chrono::milliseconds at_most) const;
  std::chrono::milliseconds time_to_read() const;
  ssize_t receive(size_t at_most);
  void drain();

  int socket_, stop_event_;
  ConnectionLimits limits_;
  std::string buffer_;
  size_t taken_ = 0;  // of buffer_
  std::chrono::steady_clock::time_point head_deadline_;
  bool in_head_ = false, closing_ = false, body_unread_ = false;
};

}  // namespace ekv
