#include "server/http_head.h"

#include <fmt/format.h>
#include <strings.h>

#include <algorithm>
#include <array>

namespace ekv {
namespace {

bool is_alphanumeric(char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

bool is_token_char(char c) {
  return is_alphanumeric(c) || (c && std::string_view("!#$%&'*+-.^_`|~").find(c) != std::string_view::npos);
}

bool is_control(char c) { return (uint8_t(c) < 0x20 && c != '\t') || c == 0x7f; }

bool equal_ignoring_case(std::string_view a, std::string_view b) {
  return a.size() == b.size() && strncasecmp(a.data(), b.data(), a.size()) == 0;
}

std::string_view trimmed(std::string_view text) {
  const size_t begin = text.find_first_not_of(" \t");
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t") - begin + 1);
}

// Name or address, perhaps a port: nothing that could end it or be read as another header.
bool is_host(std::string_view value) {
  return std::all_of(value.begin(), value.end(), [](char c) {
    return is_alphanumeric(c) ||
           (c && std::string_view("-._~%!$&'()*+,;=:[]").find(c) != std::string_view::npos);
  });
}

// Takes the next line off `text`. nullopt: its end is not CR LF.
std::optional<std::string_view> next_line(std::string_view& text) {
  const size_t end = text.find('\n');
  if (end == std::string_view::npos || end == 0 || text[end - 1] != '\r') return std::nullopt;
  const std::string_view line = text.substr(0, end - 1);
  text.remove_prefix(end + 1);
  return line;
}

bool is_known_method(std::string_view method) {
  constexpr std::array<std::string_view, 8> kMethods{"GET",    "HEAD",    "POST",  "PUT",
                                                     "DELETE", "OPTIONS", "PATCH", "TRACE"};
  return std::find(kMethods.begin(), kMethods.end(), method) != kMethods.end();
}

// The path of "http://host/path"; as it is when it is no absolute form.
std::string_view without_origin(std::string_view target) {
  const size_t scheme = target.find("://");
  const std::string_view name = target.substr(0, scheme);
  if (scheme == std::string_view::npos ||
      !(equal_ignoring_case(name, "http") || equal_ignoring_case(name, "https")))
    return target;
  const size_t path = target.find_first_of("/?", scheme + 3);
  return path == std::string_view::npos ? std::string_view("/") : target.substr(path);
}

const char* reason_of(int status) {
  switch (status) {
    case 414:
      return "URI Too Long";
    case 431:
      return "Request Header Fields Too Large";
    case 501:
      return "Not Implemented";
    case 503:
      return "Service Unavailable";
    case 505:
      return "HTTP Version Not Supported";
    default:
      return "Bad Request";
  }
}

struct RequestLine {
  std::string_view method, target, version;
};

std::optional<HeadFault> check_request_line(std::string_view line, RequestLine& out) {
  if (line.size() > kMaxTargetBytes) return HeadFault{414, "the request target is too long"};
  const size_t first = line.find(' '), last = line.rfind(' ');
  if (first == std::string_view::npos || first == last || std::any_of(line.begin(), line.end(), is_control))
    return HeadFault{400, "the request line must be a method, a target and a version, with one space between"};
  out = {line.substr(0, first), line.substr(first + 1, last - first - 1), line.substr(last + 1)};
  if (!std::all_of(out.method.begin(), out.method.end(), is_token_char) || out.target.empty() ||
      out.target.find_first_of(" \t") != std::string_view::npos || !out.version.starts_with("HTTP/"))
    return HeadFault{400, "the request line must be a method, a target and a version, with one space between"};
  if (out.version != "HTTP/1.1" && out.version != "HTTP/1.0")
    return HeadFault{505, "this server speaks HTTP/1.1 and HTTP/1.0"};
  if (!is_known_method(out.method)) return HeadFault{501, "the request method is not known"};
  out.target = without_origin(out.target);
  if (out.target[0] != '/' && out.target[0] != '?' && out.target != "*")
    return HeadFault{400, "the request target must be a path or an http URL"};
  return std::nullopt;
}

// The lines after the request line.
std::optional<HeadFault> check_headers(std::string_view text, bool needs_host) {
  int num_hosts = 0, num_lines = 0;
  for (;;) {
    const std::optional<std::string_view> line = next_line(text);
    if (!line) return HeadFault{400, "every line of the head must end with CR LF"};
    if (line->empty()) break;
    if (line->size() > kMaxHeaderLineBytes) return HeadFault{431, "a header line is too long"};
    if (++num_lines > kMaxHeaderLines) return HeadFault{431, "the request has too many header lines"};
    if (!is_header_line(*line))
      return HeadFault{400, "a header line must be a name, a colon without space before it, and a value"};
    const size_t colon = line->find(':');
    if (!equal_ignoring_case(line->substr(0, colon), "Host")) continue;
    if (++num_hosts > 1 || !is_host(trimmed(line->substr(colon + 1))))
      return HeadFault{400, "the Host header must be there once and name a host"};
  }
  if (needs_host && num_hosts == 0) return HeadFault{400, "an HTTP/1.1 request must have a Host header"};
  return std::nullopt;
}

}  // namespace

bool is_header_line(std::string_view line) {
  const size_t colon = line.find(':');
  return colon != std::string_view::npos && colon > 0 &&
         std::all_of(line.begin(), line.begin() + ptrdiff_t(colon), is_token_char) &&
         std::none_of(line.begin(), line.end(), is_control);
}

bool has_list_item(std::string_view list, std::string_view item) {
  for (;;) {
    const size_t end = std::min(list.find(','), list.size());
    if (equal_ignoring_case(trimmed(list.substr(0, end)), item)) return true;
    if (end == list.size()) return false;
    list.remove_prefix(end + 1);
  }
}

std::optional<HeadFault> check_head(std::string& head) {
  std::string_view rest = head;
  const std::optional<std::string_view> line = next_line(rest);
  if (!line) return HeadFault{400, "every line of the head must end with CR LF"};
  RequestLine request;
  if (std::optional<HeadFault> fault = check_request_line(*line, request)) return fault;
  if (std::optional<HeadFault> fault = check_headers(rest, request.version == "HTTP/1.1")) return fault;
  // The library takes a target that begins with its query for an empty path.
  std::string normal(request.method);
  normal.append(request.target[0] == '?' ? " /" : " ")
      .append(request.target)
      .append(" ")
      .append(request.version);
  head.replace(0, line->size(), normal);
  return std::nullopt;
}

std::string last_reply(int status, const std::string& json, const char* more) {
  return fmt::format(
      "HTTP/1.1 {} {}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n{}Connection: close\r\n\r\n{}",
      status, reason_of(status), json.size(), more, json);
}

}  // namespace ekv
