#pragma once
// disconnect_watcher.h -- tells at once when a client has gone, for all waiting requests with one thread. A
// handler that only waits for tokens would not notice before it writes, and without streaming it writes at the
// very end.

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

namespace ekv {

class DisconnectWatcher {
 public:
  DisconnectWatcher();
  ~DisconnectWatcher();
  DisconnectWatcher(const DisconnectWatcher&) = delete;
  DisconnectWatcher& operator=(const DisconnectWatcher&) = delete;

  // Any thread. `gone` is called at most once, on the watcher's thread, when the peer closes its sending side
  // (a client that half-closes and waits for its answer counts as gone) or resets the connection. It must not
  // block and must not call the watcher.
  uint64_t watch(int socket, std::function<void()> gone);
  void unwatch(uint64_t watch);  // afterwards `gone` is not running and will not run

 private:
  struct Watch {
    int socket;
    std::function<void()> gone;
  };
  void run();

  int epoll_, stop_event_;
  std::mutex mutex_;
  std::map<uint64_t, Watch> watches_;  // guarded by mutex_, which is held while `gone` runs
  uint64_t next_ = 1;                  // 0 is the stop event
  std::thread thread_;
};

// Whether the peer has closed the connection or its sending side, looked at once; for work that does not wait.
bool peer_has_gone(int socket);

}  // namespace ekv
