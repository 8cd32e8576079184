#include "backend/sim/transfer_servers.h"

#include <algorithm>
#include <cmath>

namespace ekv {

TransferServers::TransferServers(const LinkModel& to_host, const LinkModel& from_host)
    : servers_{Server{.link = to_host}, Server{.link = from_host}} {}

void TransferServers::Queue::push(const Transfer& transfer) {
  if (first_ > 0 && transfers_.size() == transfers_.capacity() && 2 * first_ >= transfers_.size()) {
    transfers_.erase(transfers_.begin(), transfers_.begin() + std::ptrdiff_t(first_));
    first_ = 0;
  }
  transfers_.push_back(transfer);
}

int64_t TransferServers::start(int64_t begin_us, TransferDirection direction, size_t bytes, uint64_t id) {
  Server& server = servers_[size_t(direction)];
  const double start_us = std::max(double(begin_us), server.free_us);
  server.free_us = start_us + server.link.latency_us + double(bytes) / server.link.bytes_per_us;
  const auto done_us = int64_t(std::ceil(server.free_us));
  server.queue.push({.done_us = done_us, .bytes = bytes, .id = id});
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
    server.queue.pop();
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
