#include "bench/load_client.h"

#include <fmt/format.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>

#include "bench/stream_reply.h"

namespace ekv {
namespace {

constexpr int kMaxEvents = 1024;
constexpr size_t kReadBytes = 64 << 10;
constexpr int64_t kHeartbeatUs = 100'000;  // progress, deadlines and the CPU share are looked at so often
constexpr double kBusyShare = 0.9;         // of a core in the busiest second: events wait for the client
constexpr int64_t kLateUs = 10'000;        // a send so late, or a round so long, shows in the latencies
constexpr int kSendBurst = 32;             // requests sent before the sockets are looked at again
constexpr int64_t kSpareDescriptors = 64;  // beside the connections

int64_t now_us() { return SteadyClock().now_us(); }

int64_t thread_cpu_us() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return int64_t(t.tv_sec) * 1'000'000 + t.tv_nsec / 1000;
}

std::string system_words(int number) { return std::strerror(number); }

struct Address {
  sockaddr_storage storage{};
  socklen_t size = 0;
};

Result<Address> resolve(const HttpTarget& target) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  const int failed = getaddrinfo(target.host.c_str(), std::to_string(target.port).c_str(), &hints, &found);
  if (failed != 0)
    return Error{Error::io, fmt::format("no address for host {}: {}", target.host, gai_strerror(failed)),
                 "host"};
  Address address;
  address.size = found->ai_addrlen;
  std::memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
  freeaddrinfo(found);
  return address;
}

std::string head_text(const HttpTarget& target, const std::string& method, const std::string& path,
                      size_t size) {
  std::string head = fmt::format("{} {}{} HTTP/1.1\r\nHost: {}:{}\r\nAccept: */*\r\n", method, target.prefix,
                                 path, target.host, target.port);
  if (method == "POST") head += fmt::format("Content-Type: application/json\r\nContent-Length: {}\r\n", size);
  for (const auto& [name, value] : target.headers) head += fmt::format("{}: {}\r\n", name, value);
  return head + "\r\n";
}

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() { reset(); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }
  void reset(int fd = -1) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = fd;
  }

 private:
  int fd_;
};

// One connection, reused by request after request.
struct Link {
  Descriptor socket{-1};
  int64_t request = -1;  // in flight; -1: idle
  std::string head;
  size_t sent = 0;    // of head and body
  bool used = false;  // has carried a whole reply before: the server may be closing it right now
  bool writing = false;
  std::string inbox;  // read, not yet taken apart
  int64_t inbox_us = 0;
  bool closed = false;
  int error = 0;
  StreamReply reply;
};

// Keeps what must be known about the client itself.
class HealthMeter {
 public:
  explicit HealthMeter(ClientHealth& health)
      : health_(health),
        start_us_(now_us()),
        start_cpu_us_(thread_cpu_us()),
        mark_us_(start_us_),
        mark_cpu_us_(start_cpu_us_) {}

  void tick(int64_t at_us) {
    if (at_us - mark_us_ < 1'000'000) return;
    const int64_t cpu_us = thread_cpu_us();
    const double share = double(cpu_us - mark_cpu_us_) / double(at_us - mark_us_);
    health_.peak_cpu_share = std::max(health_.peak_cpu_share, share);
    mark_us_ = at_us;
    mark_cpu_us_ = cpu_us;
  }

  void finish() {
    const int64_t wall_us = std::max<int64_t>(1, now_us() - start_us_);
    health_.cpu_share = double(thread_cpu_us() - start_cpu_us_) / double(wall_us);
    health_.peak_cpu_share = std::max(health_.peak_cpu_share, health_.cpu_share);
    std::string& words = health_.bottleneck;
    if (health_.peak_cpu_share > kBusyShare)
      words += fmt::format("its thread was busy {:.0f} % of a second; ", 100 * health_.peak_cpu_share);
    if (health_.worst_lateness_us > kLateUs)
      words += fmt::format("a request was sent {:.1f} ms late; ", double(health_.worst_lateness_us) / 1e3);
    if (health_.worst_round_us > kLateUs)
      words += fmt::format("sockets waited {:.1f} ms for it; ", double(health_.worst_round_us) / 1e3);
    if (!words.empty()) words.resize(words.size() - 2);
  }

 private:
  ClientHealth& health_;
  int64_t start_us_, start_cpu_us_, mark_us_, mark_cpu_us_;
};

class LoadRun {
 public:
  LoadRun(const HttpTarget& target, const Address& address, std::span<const LoadRequest> requests,
          const LoadOptions& options)
      : target_(target), address_(address), requests_(requests), options_(options) {
    result_.replies.resize(requests.size());
  }

  Result<LoadResult> run();

 private:
  Status open();
  void dispatch();
  bool may_send() const;
  void start(int64_t request);
  void assign(Link& link, int64_t request);
  void connect(Link& link);
  void set_interest(Link& link, bool writing);
  void pump_out(Link& link);
  void read_in(Link& link);
  void take_apart(Link& link);
  void end_request(Link& link);
  void drop(Link& link, int error);
  void round(int count);
  void arm_timer();
  void heartbeat(int64_t at_us);
  std::string_view unsent(const Link& link) const;
  int64_t elapsed_us() const { return now_us() - start_us_; }

  const HttpTarget& target_;
  const Address& address_;
  std::span<const LoadRequest> requests_;
  const LoadOptions& options_;
  LoadResult result_;
  Descriptor epoll_{epoll_create1(EPOLL_CLOEXEC)},
      timer_{timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)};
  std::vector<std::unique_ptr<Link>> links_;
  std::vector<Link*> idle_;  // the one used last is used next
  std::vector<Link*> woken_;
  std::vector<epoll_event> events_{kMaxEvents};
  std::vector<char> buffer_ = std::vector<char>(kReadBytes);
  int64_t start_us_ = 0, next_ = 0, num_done_ = 0, num_failed_ = 0, in_flight_ = 0, next_beat_us_ = 0;
};

Status LoadRun::open() {
  epoll_event event{.events = EPOLLIN, .data = {.ptr = nullptr}};
  if (epoll_.get() < 0 || timer_.get() < 0 || epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, timer_.get(), &event) != 0)
    return Error{Error::io, "cannot make an epoll set: " + system_words(errno), {}};
  const auto most = int64_t(requests_.size());
  const int64_t links = options_.max_concurrency > 0 ? std::min<int64_t>(most, options_.max_concurrency) : most;
  const int64_t descriptors = raise_descriptor_limit();
  if (options_.max_concurrency > 0 && links + kSpareDescriptors > descriptors)
    return Error{
        Error::io,
        fmt::format("{} connections need more than the {} descriptors of `ulimit -n`", links, descriptors),
        "max-concurrency"};
  return std::nullopt;
}

bool LoadRun::may_send() const {
  return next_ < int64_t(requests_.size()) &&
         (options_.max_concurrency <= 0 || in_flight_ < options_.max_concurrency);
}

void LoadRun::dispatch() {
  const int64_t due_us = elapsed_us();
  for (int i = 0; i < kSendBurst && may_send() && requests_[size_t(next_)].arrival_us <= due_us; ++i)
    start(next_++);
}

void LoadRun::start(int64_t request) {
  const int64_t at_us = elapsed_us();
  const int64_t arrival_us = requests_[size_t(request)].arrival_us;
  if (options_.max_concurrency <= 0)
    result_.health.worst_lateness_us =
        std::max(result_.health.worst_lateness_us, options_.from_arrival ? at_us - arrival_us : 0);
  result_.replies[size_t(request)].record.start_us = options_.from_arrival ? arrival_us : at_us;
  ++in_flight_;
  result_.health.peak_in_flight = std::max(result_.health.peak_in_flight, in_flight_);
  if (idle_.empty()) {
    links_.push_back(std::make_unique<Link>());
    idle_.push_back(links_.back().get());
  }
  Link& link = *idle_.back();
  idle_.pop_back();
  assign(link, request);
}

void LoadRun::assign(Link& link, int64_t request) {
  link.request = request;
  link.sent = 0;
  link.head = head_text(target_, "POST", options_.path, requests_[size_t(request)].body.size());
  link.reply = StreamReply();
  if (link.socket.get() < 0) return connect(link);
  pump_out(link);
}

void LoadRun::connect(Link& link) {
  link.used = link.closed = false;
  link.error = 0;
  const int fd = ::socket(address_.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return drop(link, errno);
  link.socket.reset(fd);
  ++result_.health.connections_opened;
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  link.writing = true;
  epoll_event event{.events = EPOLLIN | EPOLLOUT, .data = {.ptr = &link}};
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) return drop(link, errno);
  const auto* to = reinterpret_cast<const sockaddr*>(&address_.storage);
  if (::connect(fd, to, address_.size) != 0 && errno != EINPROGRESS) drop(link, errno);
}

void LoadRun::set_interest(Link& link, bool writing) {
  if (link.writing == writing) return;
  link.writing = writing;
  epoll_event event{.events = EPOLLIN | (writing ? uint32_t(EPOLLOUT) : 0u), .data = {.ptr = &link}};
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, link.socket.get(), &event);
}

std::string_view LoadRun::unsent(const Link& link) const {
  if (link.sent < link.head.size()) return std::string_view(link.head).substr(link.sent);
  return std::string_view(requests_[size_t(link.request)].body).substr(link.sent - link.head.size());
}

void LoadRun::pump_out(Link& link) {
  for (std::string_view rest = unsent(link); !rest.empty(); rest = unsent(link)) {
    const ssize_t n = ::send(link.socket.get(), rest.data(), rest.size(), MSG_NOSIGNAL);
    if (n > 0) {
      link.sent += size_t(n);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) {
      return set_interest(link, true);
    } else {
      return drop(link, errno);
    }
  }
  set_interest(link, false);
}

void LoadRun::read_in(Link& link) {
  const ssize_t n = ::recv(link.socket.get(), buffer_.data(), buffer_.size(), 0);
  link.inbox_us = elapsed_us();
  if (n > 0) link.inbox.append(buffer_.data(), size_t(n));
  if (n == 0) link.closed = true;
  if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) link.error = errno;
}

void LoadRun::take_apart(Link& link) {
  if (link.request < 0) {  // the server closes an idle connection, or sends what nobody asked for
    idle_.erase(std::remove(idle_.begin(), idle_.end(), &link), idle_.end());
    link.socket.reset();
    idle_.insert(idle_.begin(), &link);
    link.inbox.clear();
    return;
  }
  link.reply.receive(link.inbox, link.inbox_us);
  link.inbox.clear();
  if (!link.reply.complete() && (link.closed || link.error != 0)) {
    if (link.error != 0 || !link.reply.begun()) return drop(link, link.error);
    link.reply.connection_closed();
  }
  if (link.reply.complete()) end_request(link);
}

// The connection failed. A reused one may have been closed by the server in the moment of sending: the request
// goes out again, once, on a new connection, since not a byte of an answer came.
void LoadRun::drop(Link& link, int error) {
  link.socket.reset();
  if (link.used && !link.reply.begun()) return assign(link, link.request);
  link.reply.connection_closed();
  if (error != 0)
    result_.replies[size_t(link.request)].record.error =
        fmt::format("connection to {}:{}: {}", target_.host, target_.port, system_words(error));
  end_request(link);
}

void LoadRun::end_request(Link& link) {
  const size_t i = size_t(link.request);
  LoadReply& reply = result_.replies[i];
  RequestRecord& record = reply.record;
  record.end_us = elapsed_us();
  if (record.error.empty()) record.error = link.reply.error();
  record.times = link.reply.times();
  record.output_tokens = link.reply.output_tokens();
  record.input_tokens =
      requests_[i].input_tokens >= 0 ? requests_[i].input_tokens : std::max(0, link.reply.prompt_tokens());
  reply.text = link.reply.text();
  reply.has_usage = link.reply.has_usage();
  ++num_done_, --in_flight_;
  num_failed_ += record.failed();
  link.request = -1;
  link.used = true;
  if (!link.reply.reusable() || link.closed || link.error != 0) link.socket.reset();
  idle_.push_back(&link);
}

// Reads all ready sockets, then takes apart what came.
void LoadRun::round(int count) {
  woken_.clear();
  for (int i = 0; i < count; ++i) {
    auto* link = static_cast<Link*>(events_[size_t(i)].data.ptr);
    if (!link) {
      uint64_t expirations = 0;
      if (::read(timer_.get(), &expirations, sizeof(expirations)) < 0 && errno != EAGAIN)
        log_error("the timer cannot be read: " + system_words(errno));
      continue;
    }
    const uint32_t events = events_[size_t(i)].events;
    if (events & (EPOLLIN | EPOLLHUP | EPOLLERR))
      read_in(*link), woken_.push_back(link);
    else if (link->request >= 0)
      pump_out(*link);
  }
  for (Link* link : woken_) take_apart(*link);
}

void LoadRun::arm_timer() {
  int64_t wake_us = next_beat_us_;
  if (may_send()) wake_us = std::min(wake_us, requests_[size_t(next_)].arrival_us);
  const int64_t absolute_us = std::max<int64_t>(1, start_us_ + wake_us);
  const itimerspec at{
      .it_interval = {},
      .it_value = {.tv_sec = absolute_us / 1'000'000, .tv_nsec = absolute_us % 1'000'000 * 1000}};
  timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME, &at, nullptr);
}

void LoadRun::heartbeat(int64_t at_us) {
  if (at_us < next_beat_us_) return;
  next_beat_us_ = at_us + kHeartbeatUs;
  for (const auto& link : links_) {
    if (link->request < 0) continue;
    RequestRecord& record = result_.replies[size_t(link->request)].record;
    if (at_us - record.start_us < options_.timeout_us) continue;
    record.error = fmt::format("no complete reply within {:.0f} s", double(options_.timeout_us) / 1e6);
    link->closed = true;
    end_request(*link);
  }
  if (options_.on_progress)
    options_.on_progress({num_done_, num_failed_, in_flight_, int64_t(requests_.size()), double(at_us) / 1e6});
}

Result<LoadResult> LoadRun::run() {
  if (Status failed = open()) return *std::move(failed);
  result_.start_us = start_us_ = now_us();
  HealthMeter meter(result_.health);
  while (num_done_ < int64_t(requests_.size())) {
    const int64_t round_start_us = elapsed_us();
    dispatch();
    heartbeat(elapsed_us());
    arm_timer();
    result_.health.worst_round_us = std::max(result_.health.worst_round_us, elapsed_us() - round_start_us);
    const int count = epoll_wait(epoll_.get(), events_.data(), kMaxEvents, -1);
    const int64_t woken_us = elapsed_us();
    if (count > 0) round(count);
    meter.tick(now_us());
    result_.health.worst_round_us = std::max(result_.health.worst_round_us, elapsed_us() - woken_us);
  }
  meter.finish();
  if (options_.on_progress)
    options_.on_progress({num_done_, num_failed_, 0, int64_t(requests_.size()), double(elapsed_us()) / 1e6});
  return std::move(result_);
}

}  // namespace

Result<HttpTarget> parse_base_url(const std::string& url) {
  const Error wrong{Error::invalid_argument, fmt::format("'{}' is no URL such as http://127.0.0.1:8000", url),
                    "base-url"};
  if (url.starts_with("https://"))
    return Error{Error::unsupported, "https is not supported; measure behind the proxy, over http", "base-url"};
  if (!url.starts_with("http://")) return wrong;
  const size_t host = 7, slash = std::min(url.find('/', host), url.size());
  HttpTarget target{
      .host = url.substr(host, slash - host), .port = 80, .prefix = url.substr(slash), .headers = {}};
  while (target.prefix.ends_with('/')) target.prefix.pop_back();
  const size_t colon = target.host.rfind(':');
  if (colon != std::string::npos && target.host.find(']', colon) == std::string::npos) {
    const char* end = target.host.data() + target.host.size();
    const auto [stop, error] = std::from_chars(target.host.data() + colon + 1, end, target.port);
    if (error != std::errc() || stop != end || target.port < 1 || target.port > 65535) return wrong;
    target.host.resize(colon);
  }
  if (target.host.starts_with('[') && target.host.ends_with(']'))
    target.host = target.host.substr(1, target.host.size() - 2);
  if (target.host.empty()) return wrong;
  return target;
}

Result<LoadResult> run_load(const HttpTarget& target, std::span<const LoadRequest> requests,
                            const LoadOptions& options) {
  const Result<Address> address = resolve(target);
  if (!address) return address.error();
  return LoadRun(target, *address, requests, options).run();
}

int64_t raise_descriptor_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return 1024;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  getrlimit(RLIMIT_NOFILE, &limit);
  return limit.rlim_cur == RLIM_INFINITY ? INT64_MAX : int64_t(limit.rlim_cur);
}

}  // namespace ekv
