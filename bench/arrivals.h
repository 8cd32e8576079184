#pragma once
// arrivals.h -- what a serving benchmark sends, and when: prompts and lengths of a data set, arrival times of
// a rate.
//
//   random    lengths drawn evenly around --random-input-len and --random-output-len, prompts of random tokens
//   lengths   input and output lengths from a CSV file, a shuffled sample of its rows, prompts of random tokens
//   custom    JSON lines {"prompt": text, "output_tokens": N}; the file's order
//
// Prompts of random tokens go to /v1/completions as token ids, so that the lengths are exact whatever the
// tokenizer; a chat gets their text, whose length is right up to the joints and the chat template.

#include <functional>
#include <string>
#include <vector>

#include "bench/load_client.h"
#include "bench/trace.h"

namespace ekv {

struct DatasetOptions {
  std::string name = "random", path;
  int64_t num_prompts = 1000;
  int input_len = 1024, output_len = 128;                 // random
  double range_ratio = 0;                                 // random: lengths from x (1 - ratio) to x (1 + ratio)
  int custom_output_len = 256;                            // custom: of lines that name none
  double rate = std::numeric_limits<double>::infinity();  // requests per second
  double burstiness = 1;
  uint64_t seed = 0;
};

// A prompt as token ids, or as text when there are none.
struct BenchPrompt {
  int64_t arrival_us = 0;
  std::vector<TokenId> tokens;
  std::string text;
  int output_tokens = 1;
};

// Errors name the flag or the line. `pool`: the tokens that random prompts are made of; ordinary ones.
Result<std::vector<BenchPrompt>> make_prompts(const DatasetOptions& options, const std::vector<TokenId>& pool);

// How requests look; the rest of the body is the same for all.
struct BodyOptions {
  bool chat = false;
  std::string model;
  bool ignore_eos = false;
  Json extra = Json::object();                                             // members that are added or replaced
  std::function<Result<std::string>(const std::vector<TokenId>&)> decode;  // of chats
};
Result<LoadRequest> make_request(const BenchPrompt& prompt, const BodyOptions& options);

}  // namespace ekv
