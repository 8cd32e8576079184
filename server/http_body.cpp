#include "server/http_body.h"

#include <algorithm>
#include <optional>

#include "server/http_head.h"

namespace ekv {
namespace {

constexpr size_t kPieceBytes = 16 << 10;     // memory follows what has come, not what is announced
constexpr size_t kMaxChunkLineBytes = 1024;  // a size and its extensions
constexpr size_t kMaxTrailerBytes = 16 << 10;

// Without its line end.
BodyEnd read_line(httplib::Stream& from, size_t most, std::string& line) {
  line.clear();
  for (;;) {
    char c = 0;
    if (from.read(&c, 1) != 1) return BodyEnd::ended_early;
    if (c == '\n') break;
    if (line.size() >= most && c != '\r') return BodyEnd::malformed;
    if (!line.empty() && line.back() == '\r') return BodyEnd::malformed;
    line.push_back(c);
  }
  if (line.empty() || line.back() != '\r') return BodyEnd::malformed;
  line.pop_back();
  return BodyEnd::whole;
}

// Hexadecimal digits, then nothing or an extension.
std::optional<uint64_t> chunk_size(const std::string& line) {
  const size_t digits = std::min(line.find_first_not_of("0123456789abcdefABCDEF"), line.size());
  const size_t zeros = std::min(line.find_first_not_of('0'), digits);
  const size_t next = std::min(line.find_first_not_of(" \t", digits), line.size());
  const bool extended = next < line.size() && line[next] == ';';
  if (digits == 0 || digits - zeros > 16 || (digits < line.size() && !extended)) return std::nullopt;
  return zeros == digits ? 0 : std::stoull(line.substr(zeros, digits - zeros), nullptr, 16);
}

BodyEnd skip_trailers(httplib::Stream& from) {
  std::string line;
  for (size_t left = kMaxTrailerBytes;; left -= line.size()) {
    if (const BodyEnd end = read_line(from, left, line); end != BodyEnd::whole) return end;
    if (line.empty()) return BodyEnd::whole;
    if (line.size() > left || !is_header_line(line)) return BodyEnd::malformed;
  }
}

}  // namespace

BodyEnd read_sized_body(httplib::Stream& from, size_t size, std::string& body) {
  while (size > 0) {
    const size_t before = body.size(), piece = std::min(size, kPieceBytes);
    body.resize(before + piece);
    const ssize_t got = from.read(body.data() + before, piece);
    body.resize(before + size_t(std::max<ssize_t>(got, 0)));
    if (got <= 0) return BodyEnd::ended_early;
    size -= size_t(got);
  }
  return BodyEnd::whole;
}

BodyEnd read_chunked_body(httplib::Stream& from, size_t most, std::string& body) {
  std::string line;
  for (;;) {
    if (const BodyEnd end = read_line(from, kMaxChunkLineBytes, line); end != BodyEnd::whole) return end;
    const std::optional<uint64_t> size = chunk_size(line);
    if (!size) return BodyEnd::malformed;
    if (*size == 0) return skip_trailers(from);
    if (*size > most - body.size()) return BodyEnd::too_large;
    if (const BodyEnd end = read_sized_body(from, size_t(*size), body); end != BodyEnd::whole) return end;
    if (const BodyEnd end = read_line(from, 0, line); end != BodyEnd::whole) return end;
    if (!line.empty()) return BodyEnd::malformed;
  }
}

}  // namespace ekv
