#pragma once
// transfer_servers.h -- the link to the host in virtual time: one FIFO server per direction.

#include <array>
#include <cstddef>
#include <optional>
#include <vector>

#include "backend/sim/cost_model.h"

namespace ekv {

enum class TransferDirection : uint8_t { to_host, from_host };

// Transfers of one direction run one after the other in the order of their start; the two directions do not
// disturb each other. A transfer occupies its server for latency + bytes / bandwidth.
class TransferServers {
 public:
  TransferServers(const LinkModel& to_host, const LinkModel& from_host);

  // Queues a transfer for `begin_us` (Clock time, which may be still to come; must not decrease from call to
  // call). Returns when it will be done.
  int64_t start(int64_t begin_us, TransferDirection direction, size_t bytes, uint64_t id);

  // Appends the ids of what is done at `now_us` to `done`, each once: in order of completion, at equal times
  // those to the host first.
  void take_done(int64_t now_us, std::vector<uint64_t>& done);

  std::optional<int64_t> next_done_us() const;                // nullopt: nothing is on its way
  size_t bytes_in_flight(TransferDirection direction) const;  // queued or moving

 private:
  struct Transfer {
    int64_t done_us = 0;
    size_t bytes = 0;
    uint64_t id = 0;
  };
  // First in, first out. What was popped is cut off when it is half of the memory, so that a queue which has
  // been as long as it gets allocates nothing.
  class Queue {
   public:
    bool empty() const { return first_ == transfers_.size(); }
    const Transfer& front() const { return transfers_[first_]; }
    void pop() { ++first_; }
    void push(const Transfer& transfer);

   private:
    std::vector<Transfer> transfers_;
    size_t first_ = 0;
  };
  struct Server {
    LinkModel link;
    double free_us = 0;  // fractions of a microsecond are kept, so that many small transfers do not drift
    size_t bytes_in_flight = 0;
    Queue queue;
  };
  const Server* next() const;  // the server whose first transfer is done first; null: none

  std::array<Server, 2> servers_;
};

}  // namespace ekv
