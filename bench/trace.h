#pragma once
// trace.h -- what a replay or a benchmark sends, and when: request traces in the formats in which they are
// published, lengths with made-up arrivals, and synthetic loads.
//
//   mooncake   JSON lines {timestamp (ms), input_length, output_length, hash_ids}; one id stands for 512 prompt
//              tokens and everything before them. github.com/kvcache-ai/Mooncake, FAST25-release/traces.
//   azure      CSV TIMESTAMP,ContextTokens,GeneratedTokens; wall clock, taken relative to the first request.
//              github.com/Azure/AzurePublicDataset.
//   arrivals   CSV of arrival in ms, input tokens, output tokens; with or without a header line.
//   lengths    CSV of input tokens, output tokens: a shuffled sample of the rows gets random arrivals.
//   servegen   chunk-N-trace.csv with its chunk-N-dataset.json beside it, or a folder of such pairs: arrivals
//              and lengths are drawn from the recorded distributions. github.com/alibaba/ServeGen.
//
// Nothing is dropped silently: every line becomes a request or is counted in `skips` with its reason.

#include <filesystem>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "elastickv/base.h"

namespace ekv {

constexpr int kTraceHashBlock = 512;               // prompt tokens that one recorded hash id stands for
constexpr int kMaxTraceTokens = 1 << 24;           // a longer prompt or answer is taken for a broken line
constexpr int64_t kMaxTraceRequests = 10'000'000;  // more drawn requests than that need a window or a limit

struct TraceRequest {
  int64_t arrival_us = 0;         // since the start of the window, dilated
  int input_tokens = 0;           // at least 1
  int output_tokens = 0;          // at least 1: the replay makes exactly so many, whatever the model says
  int64_t id = 0;                 // place in the trace; unique
  int64_t line = 0;               // where it came from, 1-based; 0: drawn
  std::vector<int64_t> hash_ids;  // ceil(input_tokens / Trace::hash_block) ids; empty: shares nothing
};

// Lines that became no request. A fault is a broken line; the rest was left out because of an option.
struct TraceSkip {
  std::string reason;
  bool fault = false;
  int64_t count = 0;
  std::string first;  // "file:line: what is wrong" of the first one
};

enum class TraceFormat { detect, mooncake, azure, servegen, arrivals, lengths };

// requests.size() + lines skipped == num_lines + num_repeats. `requests` are in order of arrival, ties in file
// order. Drawn traces (servegen, synthetic) count one line per drawn request.
struct Trace {
  std::string name;
  TraceFormat format = TraceFormat::detect;  // of the file; detect: there was none
  std::vector<TraceRequest> requests;
  std::vector<TraceSkip> skips;
  int hash_block = kTraceHashBlock;  // after the length scale
  int64_t num_lines = 0;
  int64_t num_repeats = 0;    // lengths: rows used again because more requests than rows were asked for
  int64_t num_truncated = 0;  // requests cut to the longest allowed
  bool closed_loop = false;   // arrivals mean nothing: the next request starts when another ends

  int64_t num_skipped() const;
  int64_t num_faults() const;
  int64_t input_tokens() const;
  int64_t output_tokens() const;
};

enum class TooLong { skip, truncate };

// Bounds of vLLM's ShareGPT sample: {4, 1024, 2048}. 0: no bound.
struct LengthFilter {
  int min_tokens = 0;  // of the prompt, and of the answer
  int max_input = 0;
  int max_total = 0;
};

struct TraceOptions {
  TraceFormat format = TraceFormat::detect;
  double start_s = 0;  // window [start_s, end_s) in trace time; arrivals count from start_s
  double end_s = std::numeric_limits<double>::infinity();
  double dilate = 1;     // arrival times are multiplied by it
  int length_scale = 1;  // divides lengths (rounded up) and the hash block, of which it is a divisor
  int max_tokens = 0;    // prompt + answer of one request, after the scale; 0: no bound
  TooLong too_long = TooLong::skip;  // truncate: the end of the prompt goes first, then that of the answer
  LengthFilter filter;               // after the scale
  int64_t limit = 0;  // requests at most: the first ones, or for lengths the size of the sample; 0: all
  bool ignore_hash_ids = false;  // lengths-only replay
  double rate =
      std::numeric_limits<double>::infinity();  // lengths, synthetic: requests per second; inf: all at 0
  double burstiness = 1;                        // lengths, synthetic: see random_arrivals_us
  uint64_t seed = 0;                            // of everything that is drawn
};

Status validate(const TraceOptions& options);

// A file, or for servegen a folder. Errors: unreadable, unknown format, not one request left.
Result<Trace> load_trace(const std::filesystem::path& path, const TraceOptions& options);

// The same for text in memory; `name` stands in messages. Not for servegen, which needs two files.
Result<Trace> parse_trace(std::string_view text, const std::string& name, const TraceOptions& options);

// One ServeGen client in memory. Each recorded window of `trace_csv` is drawn from a stream of its own, so a
// request does not depend on which other windows are drawn.
Result<Trace> servegen_trace(std::string_view trace_csv, std::string_view dataset_json, const std::string& name,
                             const TraceOptions& options);

// "N:INPUT:OUTPUT" requests, all equal. Closed loop unless a rate is given.
Result<Trace> synthetic_trace(std::string_view spec, const TraceOptions& options);

// N requests with lengths drawn evenly from [x (1 - spread), x (1 + spread)], as vLLM's random data set does.
struct RandomLengths {
  int64_t num_requests = 0;
  int input_tokens = 0, output_tokens = 0;
  double spread = 0;  // 0 <= spread < 1
};
Result<Trace> random_trace(const RandomLengths& lengths, const TraceOptions& options);

Result<TraceFormat> parse_trace_format(std::string_view name);
std::string_view name_of(TraceFormat format);
// "START:END" in seconds, START: or :END alone allowed.
Status parse_window(std::string_view text, TraceOptions& options);

// Send times of `count` requests: gaps are Gamma with shape `burstiness` and mean 1 / rate (1: Poisson
// arrivals, below: burstier, infinite: equal gaps), then rescaled so that the last arrival is at count / rate
// exactly, as `vllm bench serve` does. An infinite rate: all at 0.
std::vector<int64_t> random_arrivals_us(int64_t count, double rate, double burstiness, uint64_t seed);

// The prompt of a request, always the same for the same trace, seed and vocabulary: token j of block h is
// 1000 + splitmix64(seed, h, j) mod (vocab - 2000), the last block cut to the exact length. Ordinary tokens
// are thus used and the ends of the vocabulary, where special tokens live, are not; a vocabulary of at most
// 2,000 keeps a quarter free at each end instead. Requests with common leading hash ids share exactly those
// blocks; requests without hash ids share nothing.
std::vector<TokenId> prompt_tokens(const Trace& trace, const TraceRequest& request, uint64_t seed, int vocab);

// What was read and what was left out, with the first line of each kind of fault; several lines of text.
std::string describe(const Trace& trace);

}  // namespace ekv
