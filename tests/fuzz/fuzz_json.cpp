// A request body from any bytes: JSON, then both generating routes. Whatever is accepted must make engine
// requests inside the limits; whatever is refused must be told in valid JSON.

#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "server/choice_text.h"
#include "server/openai.h"
#include "util/json.h"

namespace {

using namespace ekv;

void stop_unless(bool holds) {
  if (!holds) std::abort();
}

void check_error(const Error& error) {
  const Result<Json> told = parse_json(error_body(error));
  stop_unless(told && member(*told, "error").is_object() && http_status(error) < 500);
}

void check_requests(const ApiRequest& request, const ApiLimits& limits) {
  const Result<std::vector<Request>> made = engine_requests(request, {1, 2, 3}, limits, 1, 1);
  if (!made) return check_error(made.error());
  stop_unless(int(made->size()) == request.n);
  const SamplingParams& s = made->front().sampling;
  stop_unless(s.max_tokens >= 1 && s.max_tokens + int(made->front().prompt.size()) <= limits.max_model_len);
  stop_unless(s.temperature >= 0 && s.temperature <= 2 && s.top_p > 0 && s.top_p <= 1 && s.top_k >= 0);
  stop_unless(s.min_tokens <= s.max_tokens && s.logprobs <= limits.max_logprobs);
  for (const auto& [id, bias] : s.logit_bias)
    stop_unless(id >= 0 && id < limits.vocab_size && std::abs(bias) <= 100);
}

// Stop strings of a client against a text of a client, cut in the middle or not: the same.
void check_stops(const ApiRequest& request, const std::string& text) {
  StopScanner whole(std::make_shared<const StopPatterns>(request.reply.stop), request.reply.include_stop),
      cut = whole;
  const size_t half = text.size() / 2;
  const std::string once = whole.push(text, true) + whole.flush();
  std::string twice = cut.push(std::string_view(text).substr(0, half), true);
  twice += cut.push(std::string_view(text).substr(half), true);
  stop_unless(once == twice + cut.flush());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const ApiLimits limits{.model_names = {"m"},
                                .max_model_len = 64,
                                .vocab_size = 300,
                                .max_logprobs = 20,
                                .defaults = {},
                                .eos_ids = {2}};
  const std::string text(reinterpret_cast<const char*>(data), size);
  const Result<Json> body = parse_json(text);
  if (!body) {
    check_error(body.error());
    return 0;
  }
  stop_unless(bool(parse_json(dump_json(*body))));
  for (const bool chat : {false, true}) {
    const Result<ApiRequest> request = chat ? parse_chat(*body, limits) : parse_completion(*body, limits);
    if (!request) {
      check_error(request.error());
      continue;
    }
    if (request->n <= 64) check_requests(*request, limits);
    check_stops(*request, text);
  }
  return 0;
}
