#include "bench/arrivals.h"

#include <fmt/format.h>

#include "bench/trace_builder.h"
#include "util/files.h"

namespace ekv {
namespace {

constexpr int kDrawRange = 1 << 24;  // random numbers of prompt_tokens, before they pick from the pool

Result<Trace> lengths_of(const DatasetOptions& options) {
  TraceOptions wanted{.limit = options.num_prompts,
                      .rate = options.rate,
                      .burstiness = options.burstiness,
                      .seed = options.seed};
  if (options.name == "lengths") {
    wanted.format = TraceFormat::lengths;
    return load_trace(options.path, wanted);
  }
  return random_trace({options.num_prompts, options.input_len, options.output_len, options.range_ratio},
                      wanted);
}

Result<std::vector<BenchPrompt>> random_prompts(const DatasetOptions& options,
                                                const std::vector<TokenId>& pool) {
  if (pool.empty())
    return Error{Error::invalid_argument, "there are no tokens to make prompts of", "tokenizer"};
  const Result<Trace> trace = lengths_of(options);
  if (!trace) return trace.error();
  std::vector<BenchPrompt> prompts;
  for (const TraceRequest& request : trace->requests) {
    BenchPrompt prompt{.arrival_us = request.arrival_us,
                       .tokens = prompt_tokens(*trace, request, options.seed, kDrawRange),
                       .text = {},
                       .output_tokens = request.output_tokens};
    for (TokenId& token : prompt.tokens) token = pool[size_t(token) % pool.size()];
    prompts.push_back(std::move(prompt));
  }
  return prompts;
}

Result<BenchPrompt> custom_prompt(std::string_view line, const DatasetOptions& options) {
  const Result<Json> json = parse_json(line);
  if (!json) return json.error();
  if (!json->is_object()) return Error{Error::invalid_argument, "is no JSON object", {}};
  const Result<std::string> text = string_member(*json, "prompt", "");
  if (!text) return text.error();
  if (text->empty()) return Error{Error::invalid_argument, "has no \"prompt\"", {}};
  const Result<int64_t> output = int_member(*json, "output_tokens", options.custom_output_len);
  if (!output) return output.error();
  if (*output < 1 || *output > kMaxTraceTokens)
    return Error{Error::invalid_argument, "\"output_tokens\" is out of range", {}};
  return BenchPrompt{.text = *text, .output_tokens = int(*output)};
}

Result<std::vector<BenchPrompt>> custom_prompts(const DatasetOptions& options) {
  const Result<std::string> file = read_file(options.path);
  if (!file) return file.error();
  std::vector<BenchPrompt> prompts;
  Status wrong;
  for_each_line(*file, [&](int64_t number, std::string_view line) {
    if (wrong || is_blank(line) || int64_t(prompts.size()) == options.num_prompts) return;
    Result<BenchPrompt> prompt = custom_prompt(line, options);
    if (prompt) return prompts.push_back(*std::move(prompt));
    wrong = Error{Error::invalid_argument,
                  fmt::format("{}:{}: {}", options.path, number, prompt.error().message), "dataset-path"};
  });
  if (wrong) return *wrong;
  if (prompts.empty())
    return Error{Error::invalid_argument, options.path + " has not one line with a prompt", "dataset-path"};
  const std::vector<int64_t> arrivals =
      random_arrivals_us(int64_t(prompts.size()), options.rate, options.burstiness, options.seed);
  for (size_t i = 0; i < prompts.size(); ++i) prompts[i].arrival_us = arrivals[i];
  return prompts;
}

}  // namespace

Result<std::vector<BenchPrompt>> make_prompts(const DatasetOptions& options, const std::vector<TokenId>& pool) {
  if (options.name != "random" && options.path.empty())
    return Error{Error::invalid_argument,
                 fmt::format("--dataset-name {} needs a file: --dataset-path FILE", options.name),
                 "dataset-path"};
  if (!(options.rate > 0) || !(options.burstiness > 0))
    return Error{Error::invalid_argument, "--request-rate and --burstiness must be above 0", "request-rate"};
  if (options.name == "custom") return custom_prompts(options);
  if (options.name == "random" || options.name == "lengths") return random_prompts(options, pool);
  return Error{Error::invalid_argument,
               fmt::format("data set '{}' is unknown; there are random, lengths and custom", options.name),
               "dataset-name"};
}

Result<LoadRequest> make_request(const BenchPrompt& prompt, const BodyOptions& options) {
  Json body{{"model", options.model}};
  if (!options.chat && !prompt.tokens.empty()) {
    body["prompt"] = prompt.tokens;
  } else {
    std::string text = prompt.text;
    if (!prompt.tokens.empty()) {
      EKV_CHECK(options.decode, "a chat of random tokens needs a tokenizer");
      Result<std::string> decoded = options.decode(prompt.tokens);
      if (!decoded) return decoded.error();
      text = *std::move(decoded);
    }
    if (options.chat)
      body["messages"] = Json::array({{{"role", "user"}, {"content", text}}});
    else
      body["prompt"] = text;
  }
  body[options.chat ? "max_completion_tokens" : "max_tokens"] = prompt.output_tokens;
  body["stream"] = true;
  body["stream_options"] = {{"include_usage", true}};
  if (options.ignore_eos) body["ignore_eos"] = true;
  for (const auto& [key, value] : options.extra.items()) body[key] = value;
  return LoadRequest{.arrival_us = prompt.arrival_us,
                     .body = dump_json(body),
                     .input_tokens = prompt.tokens.empty() ? -1 : int(prompt.tokens.size())};
}

}  // namespace ekv
