#pragma once
// stream_reply.h -- one streamed reply of an OpenAI-compatible server, taken apart as its bytes come in: HTTP,
// server-sent events, JSON. No sockets and no clock in here.
//
// Which messages count as tokens, and so set TTFT and ITL: those with a choice that carries text, and those
// that neither open nor end a choice (a token whose text is held back). Left out are
//   the role chunk of a chat: it opens the reply and carries no token. `vllm bench serve` lets it set TTFT, so
//     that a server that sends it early shows a TTFT near zero, and every chat an ITL of 0 ms;
//   a last message with a finish reason and no text;
//   the usage message, which has no choices.

#include <string>
#include <string_view>

#include "bench/report.h"

namespace ekv {

class StreamReply {
 public:
  // Bytes that were received at `time_us`; times must not go back.
  void receive(std::string_view bytes, int64_t time_us);
  // The server closed the connection. Ends a body that has no length; anything else is cut off then.
  void connection_closed();

  bool begun() const { return begun_; }  // at least one byte has come
  bool complete() const { return part_ == Part::end; }
  bool reusable() const { return keep_alive_; }  // of a complete reply: the connection takes another request

  // Of a complete reply.
  const std::string& error() const { return error_; }  // empty: none
  const TokenTimes& times() const { return times_; }
  const std::string& text() const { return text_; }
  int output_tokens() const;  // as the server counts them, or one per message where it does not say
  bool has_usage() const { return usage_tokens_ >= 0; }
  int prompt_tokens() const { return prompt_tokens_; }  // as the server counts them; -1: it did not say

 private:
  enum class Part { head, length_body, open_body, chunk_size, chunk_data, chunk_end, trailer, end };

  bool take_line(std::string_view& bytes);
  void head_line();
  void begin_body();
  void chunk_size_line();
  void take_data(std::string_view& bytes);
  void body_bytes(std::string_view bytes);
  void event_line(std::string_view line);
  void message(std::string_view data);
  void choice(const Json& choice);
  void finish();
  void fail(std::string why);

  Part part_ = Part::head;
  std::string line_;  // unfinished line of the head or of the chunk framing
  int status_ = 0;
  bool begun_ = false, keep_alive_ = true, chunked_ = false, events_ = false;
  int64_t left_ = -1;  // bytes of the body or chunk still to come; -1: not known
  std::string event_line_, data_, body_;
  bool done_ = false, finish_reason_ = false;
  int64_t now_us_ = 0;
  int usage_tokens_ = -1, prompt_tokens_ = -1;
  TokenTimes times_;
  std::string text_, error_;
};

}  // namespace ekv
