#include "backend/sim/transfer_servers.h"

#include <algorithm>
#include <cmath>

namespace ekv {

TransferServers::TransferServers(const LinkModel& to_host, const LinkModel& from_host)
    : servers_{Server{.link = to_host}, Server{.link = from_host}} {}

int64_t TransferServers::start(int64_t now_us, TransferDirection direction, size_t bytes, uint64_t id) {
  Server& server = servers_[size_t(direction)];
  const double begin_us = std::max(double(now_us), server.free_us);
  server.free_us = begin_us + server.link.latency_us + double(bytes) / server.link.bytes_per_us;
  const auto done_us = int64_t(std::ceil(server.free_us));
  server.queue.push_back({.done_us = done_us, .bytes = bytes, .id = id});
  server.bytes_in_flight += bytes;
  return done_us;
}

const TransferServers::Server* TransferServers::next() const {
  const Server* first = nullptr;
  for (const Server& server : servers_)
    if (!server.queue.empty() && (!first || server.queue.front().done_us < first->queue.front().done_us))
      first = &server;
  return first;
}

void TransferServers::take_done(int64_t now_us, std::vector<uint64_t>& done) {
  while (const Server* first = next()) {
    if (first->queue.front().done_us > now_us) return;
    Server& server = servers_[size_t(first - servers_.data())];
    server.bytes_in_flight -= server.queue.front().bytes;
    done.push_back(server.queue.front().id);
    server.queue.pop_front();
  }
}

std::optional<int64_t> TransferServers::next_done_us() const {
  const Server* first = next();
  return first ? std::optional(first->queue.front().done_us) : std::nullopt;
}

size_t TransferServers::bytes_in_flight(TransferDirection direction) const {
  return servers_[size_t(direction)].bytes_in_flight;
}

}  // namespace ekv
