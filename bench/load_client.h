#pragma once
// load_client.h -- sends requests to a server at their times, or as fast as a concurrency limit lets them go,
// and notes when each token comes back. One thread and an epoll set hold all connections: the HTTP library's
// client needs a thread for each, and its select() cannot wait for a socket beyond descriptor 1023.
//
// Bytes are stamped when they are read, for all ready sockets first, before anything is parsed, so that a
// message does not look late because another was being taken apart.

#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bench/report.h"

namespace ekv {

struct HttpTarget {
  std::string host = "127.0.0.1";
  int port = 8000;
  std::string prefix;  // of every path; from the base URL
  std::vector<std::pair<std::string, std::string>> headers;
};

// "http://host:port/prefix"; port 80 when there is none. https is refused: this client has no TLS.
Result<HttpTarget> parse_base_url(const std::string& url);

struct LoadRequest {
  int64_t arrival_us = 0;  // since the start of the run; ascending
  std::string body;        // JSON
  int input_tokens = -1;   // -1: as the server counts them
};

struct LoadProgress {
  int64_t num_done = 0, num_failed = 0, in_flight = 0, num_requests = 0;
  double elapsed_s = 0;
};

struct LoadOptions {
  std::string path = "/v1/completions";
  int max_concurrency = 0;              // requests in flight at most; 0: no limit
  bool from_arrival = false;            // latencies count from the arrival instead of the moment of sending
  int64_t timeout_us = 21'600'000'000;  // of one request, as in vLLM's tool
  std::function<void(const LoadProgress&)> on_progress;  // about ten times a second
};

struct LoadReply {
  RequestRecord record;  // times since the start of the run
  std::string text;
  bool has_usage = false;
};

// Whether the figures are the server's or the client's own.
struct ClientHealth {
  double cpu_share = 0, peak_cpu_share = 0;  // of one core: over the run, and in its busiest second
  int64_t worst_lateness_us = 0;  // of sending after the arrival, when no limit held the request back
  int64_t worst_round_us = 0;     // longest time without looking at the sockets
  int64_t connections_opened = 0;
  int64_t peak_in_flight = 0;
  std::string bottleneck;  // in words; empty: the client was not the limit
};

struct LoadResult {
  std::vector<LoadReply> replies;  // in the order of the requests
  ClientHealth health;
  int64_t start_us = 0;  // SteadyClock time of the start of the run
};

// Errors: the host has no address, or a limit of the system is too low for the connections. What goes wrong
// with a request is in its record.
Result<LoadResult> run_load(const HttpTarget& target, std::span<const LoadRequest> requests,
                            const LoadOptions& options);

struct HttpAnswer {
  int status = 0;
  std::string body;
};
// One plain request, outside of the measurement. An empty body: GET.
Result<HttpAnswer> http_call(const HttpTarget& target, const std::string& path, const std::string& body = {});

// Lets the process have as many sockets as the system allows; returns how many descriptors that is.
int64_t raise_descriptor_limit();

}  // namespace ekv
