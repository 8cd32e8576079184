#pragma once
// http_body.h -- the body of a request out of the bytes of its connection, of a known size or in chunks
// (RFC 9112, 7.1). Instead of the library's reader, which takes "-5" for a chunk size and refuses trailers.

#include <httplib.h>

#include <string>

namespace ekv {

enum class BodyEnd { whole, too_large, malformed, ended_early };

// Both append to `body`, and leave what follows the body on the connection.
BodyEnd read_sized_body(httplib::Stream& from, size_t size, std::string& body);
// Never more than `most` bytes. Extensions and trailers are read and dropped.
BodyEnd read_chunked_body(httplib::Stream& from, size_t most, std::string& body);

}  // namespace ekv
