#include "bench/stream_reply.h"

#include <fmt/format.h>
#include <strings.h>

#include <algorithm>
#include <charconv>

namespace ekv {
namespace {

constexpr size_t kMaxLine = 64 << 10;        // of the head
constexpr size_t kMaxEventBytes = 16 << 20;  // a longer line of a stream is taken for garbage
constexpr size_t kMaxErrorBody = 64 << 10;   // kept of a body that is no stream
constexpr size_t kMaxErrorText = 300;

std::string_view trim(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t' || text.back() == '\r'))
    text.remove_suffix(1);
  return text;
}

bool same_word(std::string_view a, std::string_view b) {
  return a.size() == b.size() && strncasecmp(a.data(), b.data(), a.size()) == 0;
}

bool begins_with_word(std::string_view text, std::string_view word) {
  return same_word(text.substr(0, word.size()), word);
}

template <class T>
bool parse_whole(std::string_view text, int base, T& value) {
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value, base);
  return error == std::errc() && stop == text.data() + text.size() && value >= 0;
}

bool has_text(const Json& object, const char* key) {
  const Json& value = member(object, key);
  return value.is_string() && !value.get_ref<const std::string&>().empty();
}

// The server's own words where the body is an error object of any of the known shapes.
std::string error_words(const Json& json) {
  const Json& error = member(json, "error");
  const Json& holder = error.is_object() ? error : json;
  for (const char* key : {"message", "detail"}) {
    if (has_text(holder, key)) return member(holder, key).get<std::string>();
  }
  return error.is_string() ? error.get<std::string>() : dump_json(json);
}

}  // namespace

void StreamReply::receive(std::string_view bytes, int64_t time_us) {
  now_us_ = time_us;
  begun_ = begun_ || !bytes.empty();
  while (!bytes.empty() && part_ != Part::end) {
    if (part_ == Part::length_body || part_ == Part::open_body || part_ == Part::chunk_data) {
      take_data(bytes);
      continue;
    }
    if (!take_line(bytes)) return;
    if (part_ == Part::head) {
      head_line();
    } else if (part_ == Part::chunk_size) {
      chunk_size_line();
    } else if (part_ == Part::chunk_end) {
      part_ = Part::chunk_size;
    } else if (trim(line_).empty()) {  // the end of the trailer
      finish();
    }
    line_.clear();
  }
}

// True when line_ holds a whole line, without its end.
bool StreamReply::take_line(std::string_view& bytes) {
  const size_t end = bytes.find('\n');
  line_.append(bytes.substr(0, end));
  bytes.remove_prefix(end == std::string_view::npos ? bytes.size() : end + 1);
  if (line_.size() > kMaxLine) {
    fail("the reply has a header line of more than 64 KiB");
    return false;
  }
  return end != std::string_view::npos;
}

void StreamReply::head_line() {
  const std::string_view line = trim(line_);
  if (status_ == 0) {
    const size_t blank = line.find(' ');
    const bool http = line.starts_with("HTTP/1.") && blank != std::string_view::npos;
    if (!http || !parse_whole(line.substr(blank + 1, 3), 10, status_) || status_ < 100)
      return fail(fmt::format("not an HTTP reply: \"{}\"", line.substr(0, 60)));
    keep_alive_ = !line.starts_with("HTTP/1.0");
    return;
  }
  if (line.empty()) return begin_body();
  const size_t colon = std::min(line.find(':'), line.size());
  const std::string_view name = line.substr(0, colon),
                         value = trim(line.substr(std::min(colon + 1, line.size())));
  if (same_word(name, "content-length")) {
    if (!parse_whole(value, 10, left_)) fail("the reply has a Content-Length that is no size");
  } else if (same_word(name, "transfer-encoding")) {
    chunked_ = same_word(value, "chunked");
  } else if (same_word(name, "connection")) {
    keep_alive_ = same_word(value, "keep-alive") || (keep_alive_ && !same_word(value, "close"));
  } else if (same_word(name, "content-type")) {
    events_ = begins_with_word(value, "text/event-stream");
  }
}

void StreamReply::begin_body() {
  if (status_ < 200) {  // 100 Continue: the real head follows
    status_ = 0;
    return;
  }
  if (chunked_) {
    part_ = Part::chunk_size;
  } else if (left_ >= 0) {
    part_ = Part::length_body;
    if (left_ == 0) finish();
  } else {
    keep_alive_ = false;
    part_ = Part::open_body;
  }
}

void StreamReply::chunk_size_line() {
  const std::string_view line = trim(line_);
  if (!parse_whole(trim(line.substr(0, line.find(';'))), 16, left_))
    return fail("the reply has a chunk without a size");
  part_ = left_ == 0 ? Part::trailer : Part::chunk_data;
}

void StreamReply::take_data(std::string_view& bytes) {
  const size_t size = part_ == Part::open_body ? bytes.size() : std::min(bytes.size(), size_t(left_));
  const std::string_view data = bytes.substr(0, size);
  bytes.remove_prefix(size);
  body_bytes(data);
  if (part_ == Part::end || part_ == Part::open_body) return;
  left_ -= int64_t(size);
  if (left_ > 0) return;
  if (part_ == Part::length_body) return finish();
  part_ = Part::chunk_end;
}

void StreamReply::body_bytes(std::string_view bytes) {
  if (!events_ || status_ != 200) {
    body_.append(bytes.substr(0, kMaxErrorBody - std::min(kMaxErrorBody, body_.size())));
    return;
  }
  while (!bytes.empty() && part_ != Part::end) {
    const size_t end = bytes.find('\n');
    event_line_.append(bytes.substr(0, end));
    bytes.remove_prefix(end == std::string_view::npos ? bytes.size() : end + 1);
    if (event_line_.size() + data_.size() > kMaxEventBytes)
      return fail("the stream has an event of more than 16 MiB");
    if (end == std::string_view::npos) return;
    if (event_line_.ends_with('\r')) event_line_.pop_back();
    event_line(event_line_);
    event_line_.clear();
  }
}

void StreamReply::event_line(std::string_view line) {
  if (line.empty()) {
    if (!data_.empty()) message(data_);
    data_.clear();
    return;
  }
  if (!line.starts_with("data:")) return;  // comments, event names, ids
  line.remove_prefix(line.starts_with("data: ") ? 6 : 5);
  if (!data_.empty()) data_ += '\n';
  data_ += line;
}

void StreamReply::message(std::string_view data) {
  if (trim(data) == "[DONE]") {
    done_ = true;
    return;
  }
  const Result<Json> json = parse_json(data);
  if (!json || !json->is_object())
    return fail(fmt::format("the stream has a message that is no JSON object: {}", data.substr(0, 80)));
  if (!member(*json, "error").is_null()) return fail("in the stream: " + error_words(*json));
  const Json& usage = member(*json, "usage");
  if (usage.is_object()) {
    const Json& prompt = member(usage, "prompt_tokens");
    const Json& completion = member(usage, "completion_tokens");
    if (prompt.is_number_integer()) prompt_tokens_ = prompt.get<int>();
    if (completion.is_number_integer()) usage_tokens_ = completion.get<int>();
  }
  const Json& choices = member(*json, "choices");
  if (choices.is_array() && !choices.empty() && choices[0].is_object()) choice(choices[0]);
}

void StreamReply::choice(const Json& choice) {
  const Json& delta = member(choice, "delta");
  const bool ends = has_text(choice, "finish_reason");
  bool carries_text = false;
  for (const char* key : {"text", "content", "reasoning_content", "reasoning"}) {
    const Json& holder = key[0] == 't' ? choice : delta;
    if (!has_text(holder, key)) continue;
    carries_text = true;
    text_ += member(holder, key).get_ref<const std::string&>();
  }
  const bool calls_tool = member(delta, "tool_calls").is_array() && !member(delta, "tool_calls").empty();
  const bool opens = member(delta, "role").is_string();
  finish_reason_ = finish_reason_ || ends;
  if (carries_text || calls_tool || (!opens && !ends)) times_.add(now_us_);
}

void StreamReply::finish() {
  part_ = Part::end;
  if (!error_.empty()) return;
  if (status_ != 200 || !events_) {
    const Result<Json> json = parse_json(body_);
    const std::string words = json && json->is_object() ? error_words(*json) : body_;
    error_ = fmt::format("HTTP {}: {}", status_, words).substr(0, kMaxErrorText);
    if (status_ == 200) error_ = "the reply is no event stream; does the endpoint support \"stream\": true?";
  } else if (!done_ && !finish_reason_) {
    error_ = "the stream ended without a finish reason or [DONE]";
  }
}

void StreamReply::connection_closed() {
  keep_alive_ = false;
  if (part_ == Part::end) return;
  if (part_ == Part::open_body) return finish();
  fail(begun_ ? "the server closed the connection in the middle of the reply"
              : "the server closed the connection without a reply");
}

void StreamReply::fail(std::string why) {
  keep_alive_ = false;
  part_ = Part::end;
  if (error_.empty()) error_ = why.substr(0, kMaxErrorText);
}

int StreamReply::output_tokens() const { return usage_tokens_ >= 0 ? usage_tokens_ : int(times_.count()); }

}  // namespace ekv
