// A trace file from a stranger, in every format: whatever it holds, each line is a request or counted, and each
// request can be turned into a prompt. The first byte chooses the format and the options.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "bench/trace.h"

namespace {

void check(const ekv::Result<ekv::Trace>& trace) {
  if (!trace) {
    if (trace.error().message.empty()) std::abort();
    return;
  }
  if (int64_t(trace->requests.size()) + trace->num_skipped() != trace->num_lines + trace->num_repeats)
    std::abort();
  for (const ekv::TraceRequest& r : trace->requests) {
    if (r.arrival_us < 0 || r.input_tokens < 1 || r.output_tokens < 1) std::abort();
    if (r.input_tokens <= 10'000 && ekv::prompt_tokens(*trace, r, 1, 3000).size() != size_t(r.input_tokens))
      std::abort();
  }
  if (ekv::describe(*trace).empty()) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  if (size == 0) return 0;
  const unsigned choice = bytes[0];
  const std::string_view text(reinterpret_cast<const char*>(bytes + 1), size - 1);
  ekv::TraceOptions options;
  options.max_tokens = choice & 0x20 ? 1000 : 0;
  options.too_long = choice & 0x40 ? ekv::TooLong::truncate : ekv::TooLong::skip;
  options.length_scale = choice & 0x80 ? 32 : 1;
  options.limit = choice & 0x10 ? 3 : 0;
  if (choice & 0x08) options.end_s = 10;
  constexpr ekv::TraceFormat kFormats[] = {ekv::TraceFormat::detect, ekv::TraceFormat::mooncake,
                                           ekv::TraceFormat::azure, ekv::TraceFormat::arrivals,
                                           ekv::TraceFormat::lengths};
  if ((choice & 7) < 5) {
    options.format = kFormats[choice & 7];
    check(ekv::parse_trace(text, "fuzz", options));
    return 0;
  }
  // ServeGen: the windows before the first NUL, the lengths after it. A second of it is enough.
  options.end_s = 1;
  const size_t end = std::min(text.find('\0'), text.size());
  check(ekv::servegen_trace(text.substr(0, end), text.substr(std::min(end + 1, text.size())), "fuzz", options));
  return 0;
}
