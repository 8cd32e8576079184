#pragma once
// http_head.h -- the head of a request before the HTTP library reads it: refuses what RFC 9112 forbids and the
// library lets through or skips, because two parties that read a head differently can be played against each
// other.

#include <optional>
#include <string>
#include <string_view>

namespace ekv {

constexpr size_t kMaxTargetBytes = 8000;
constexpr size_t kMaxHeaderLineBytes = 8000;  // the library's own limit is 8192
constexpr int kMaxHeaderLines = 256;

struct HeadFault {
  int status = 400;
  std::string message;
};

// `head`: the request line and the header lines up to the empty one, which is the last. An absolute target
// becomes its path. nullopt: it may be read.
std::optional<HeadFault> check_head(std::string& head);

// "name: value", as in heads and trailers; without the line end.
bool is_header_line(std::string_view line);

// Whether a list such as the value of Connection has this option, whatever its case.
bool has_list_item(std::string_view list, std::string_view item);

// A whole reply without the library, after which the connection ends. `more`: header lines.
std::string last_reply(int status, const std::string& json, const char* more = "");

}  // namespace ekv
