#include "server/disconnect_watcher.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>

#include "elastickv/base.h"

namespace ekv {

DisconnectWatcher::DisconnectWatcher()
    : epoll_(epoll_create1(EPOLL_CLOEXEC)), stop_event_(eventfd(0, EFD_CLOEXEC)) {
  EKV_CHECK(epoll_ >= 0 && stop_event_ >= 0, "no file descriptor left at start-up");
  epoll_event event{.events = EPOLLIN, .data = {.u64 = 0}};
  epoll_ctl(epoll_, EPOLL_CTL_ADD, stop_event_, &event);
  thread_ = std::thread([this] { run(); });
}

DisconnectWatcher::~DisconnectWatcher() {
  const uint64_t one = 1;
  EKV_CHECK(::write(stop_event_, &one, sizeof(one)) == sizeof(one), "an eventfd takes its first value");
  thread_.join();
  ::close(stop_event_);
  ::close(epoll_);
}

uint64_t DisconnectWatcher::watch(int socket, std::function<void()> gone) {
  const std::lock_guard lock(mutex_);
  const uint64_t id = next_++;
  watches_.emplace(id, Watch{socket, std::move(gone)});
  epoll_event event{.events = EPOLLRDHUP | EPOLLONESHOT, .data = {.u64 = id}};  // errors come without asking
  epoll_ctl(epoll_, EPOLL_CTL_ADD, socket, &event);
  return id;
}

void DisconnectWatcher::unwatch(uint64_t watch) {
  const std::lock_guard lock(mutex_);
  const auto it = watches_.find(watch);
  if (it == watches_.end()) return;
  epoll_ctl(epoll_, EPOLL_CTL_DEL, it->second.socket, nullptr);
  watches_.erase(it);
}

void DisconnectWatcher::run() {
  std::array<epoll_event, 64> events;
  for (;;) {
    const int ready = epoll_wait(epoll_, events.data(), int(events.size()), -1);
    const std::lock_guard lock(mutex_);
    for (int i = 0; i < ready; ++i) {
      if (events[size_t(i)].data.u64 == 0) return;
      const auto it = watches_.find(events[size_t(i)].data.u64);
      if (it != watches_.end()) it->second.gone();
    }
  }
}

bool peer_has_gone(int socket) {
  pollfd p{.fd = socket, .events = POLLRDHUP, .revents = 0};
  return ::poll(&p, 1, 0) > 0 && p.revents;
}

}  // namespace ekv
