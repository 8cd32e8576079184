// Plain requests through the HTTP library; apart from the load client because its header is slow to compile.

#include <fmt/format.h>
#include <httplib.h>

#include "bench/load_client.h"

namespace ekv {

Result<HttpAnswer> http_call(const HttpTarget& target, const std::string& path, const std::string& body) {
  constexpr int kTimeoutS = 60;
  httplib::Client client(target.host, target.port);
  client.set_read_timeout(kTimeoutS, 0);
  httplib::Headers headers(target.headers.begin(), target.headers.end());
  const std::string whole = target.prefix + path;
  const httplib::Result reply =
      body.empty() ? client.Get(whole, headers) : client.Post(whole, headers, body, "application/json");
  if (!reply)
    return Error{Error::unavailable,
                 fmt::format("http://{}:{}{} does not answer ({})", target.host, target.port, whole,
                             httplib::to_string(reply.error())),
                 "base-url"};
  return HttpAnswer{reply->status, reply->body};
}

}  // namespace ekv
