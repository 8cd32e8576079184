#include "bench/bench_serve.h"

#include <fmt/format.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <set>
#include <thread>

#include "bench/trace_builder.h"
#include "elastickv/tokenizer.h"

namespace ekv {
namespace {

constexpr int kHttpOk = 200;

Result<Json> ask(const HttpTarget& target, const std::string& path, const std::string& body = {}) {
  const Result<HttpAnswer> answer = http_call(target, path, body);
  if (!answer) return answer.error();
  if (answer->status != kHttpOk)
    return Error{Error::unavailable,
                 fmt::format("{} gave HTTP {}: {}", path, answer->status, answer->body.substr(0, 200)),
                 {}};
  return parse_json(answer->body);
}

// The first model that the server names, after as long a wait as was allowed.
Result<Json> model_card(const ServeBenchFlags& flags) {
  const int64_t deadline_us = SteadyClock().now_us() + int64_t(flags.ready_timeout_s * 1e6);
  for (;;) {
    Result<Json> models = ask(flags.target, "/v1/models");
    if (models) {
      const Json& data = member(*models, "data");
      if (data.is_array() && !data.empty()) return data[0];
      return Error{Error::unavailable, "/v1/models names no model; give --model", "model"};
    }
    if (SteadyClock().now_us() >= deadline_us) return models.error();
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
  }
}

struct TokenSource {
  std::string id;  // tokenizer_id of the result
  std::vector<TokenId> pool;
  std::function<Result<std::string>(const std::vector<TokenId>&)> decode;
};

Result<TokenSource> local_tokens(const std::string& folder) {
  const Result<Tokenizer> loaded = Tokenizer::load(folder);
  if (!loaded) return loaded.error();
  const auto tokenizer = std::make_shared<const Tokenizer>(*loaded);
  TokenSource source{.id = folder, .pool = {}, .decode = [tokenizer](const std::vector<TokenId>& tokens) {
                       return Result<std::string>(tokenizer->decode(tokens, true));
                     }};
  for (TokenId id = 0; id < tokenizer->vocab_size(); ++id)
    if (tokenizer->is_token(id) && !tokenizer->is_special(id)) source.pool.push_back(id);
  return source;
}

// Without the tokenizer's files: ordinary tokens are those that the server makes of ordinary words.
Result<TokenSource> server_tokens(const HttpTarget& target, const std::string& model) {
  std::string text;
  const char* const kSyllables[] = {"ba", "con", "der", "er", "fin",  "ing",
                                    "la", "man", "ner", "or", "port", "ter"};
  for (const char* first : kSyllables)
    for (const char* second : kSyllables) text += fmt::format(" {}{}", first, second);
  const Json body{{"model", model}, {"prompt", text}, {"add_special_tokens", false}};
  const Result<Json> answer = ask(target, "/tokenize", dump_json(body));
  if (!answer)
    return Error{answer.error().code, answer.error().message + "; give --tokenizer FOLDER", "tokenizer"};
  std::set<TokenId> tokens;
  const Json& list = member(*answer, "tokens");
  if (list.is_array())
    for (const Json& token : list)
      if (token.is_number_integer()) tokens.insert(token.get<TokenId>());
  TokenSource source{.id = "server", .pool = {tokens.begin(), tokens.end()}, .decode = {}};
  source.decode = [&target, model](const std::vector<TokenId>& ids) -> Result<std::string> {
    const Result<Json> reply = ask(target, "/detokenize", dump_json({{"model", model}, {"tokens", ids}}));
    if (!reply) return reply.error();
    return string_member(*reply, "prompt", "");
  };
  return source;
}

Result<TokenSource> token_source(const ServeBenchFlags& flags, const Json& card) {
  if (!flags.tokenizer.empty()) return local_tokens(flags.tokenizer);
  const Result<std::string> root = string_member(card, "root", "");
  if (root && std::filesystem::exists(std::filesystem::path(*root) / "tokenizer.json"))
    return local_tokens(*root);
  return server_tokens(flags.target, flags.model);
}

Result<std::vector<LoadRequest>> make_requests(const ServeBenchFlags& flags, const TokenSource& source) {
  const Result<std::vector<BenchPrompt>> prompts = make_prompts(flags.dataset, source.pool);
  if (!prompts) return prompts.error();
  BodyOptions options{.chat = flags.chat(),
                      .model = flags.model,
                      .ignore_eos = flags.ignore_eos,
                      .extra = flags.extra_body,
                      .decode = source.decode};
  if (flags.temperature && !options.extra.contains("temperature"))
    options.extra["temperature"] = *flags.temperature;
  std::vector<LoadRequest> requests;
  for (const BenchPrompt& prompt : *prompts) {
    Result<LoadRequest> request = make_request(prompt, options);
    if (!request) return request.error();
    requests.push_back(*std::move(request));
  }
  return requests;
}

Status warm_up(const ServeBenchFlags& flags, LoadRequest request) {
  request.arrival_us = 0;
  const std::vector<LoadRequest> requests(size_t(flags.num_warmups), request);
  const Result<LoadResult> done =
      run_load(flags.target, requests,
               {.path = flags.path(), .max_concurrency = flags.max_concurrency, .on_progress = {}});
  if (!done) return done.error();
  for (const LoadReply& reply : done->replies)
    if (reply.record.failed())
      return Error{Error::unavailable, "a warm-up request failed: " + reply.record.error, "num-warmups"};
  return std::nullopt;
}

// The counter of preemptions over all label sets; nullopt when the server has none.
std::optional<double> preemptions_so_far(const HttpTarget& target) {
  const Result<HttpAnswer> answer = http_call(target, "/metrics");
  if (!answer || answer->status != kHttpOk) return std::nullopt;
  std::optional<double> sum;
  for_each_line(answer->body, [&](int64_t, std::string_view line) {
    if (!line.starts_with("vllm:num_preemptions_total")) return;
    if (const auto value = to_number(line.substr(line.rfind(' ') + 1))) sum = sum.value_or(0) + *value;
  });
  return sum;
}

void show_progress(const LoadProgress& p) {
  constexpr int kWidth = 30;
  const int filled = p.num_requests ? int(kWidth * p.num_done / p.num_requests) : kWidth;
  fmt::print(stderr, "\r[{}{}] {}/{} requests, {} in flight, {} failed, {:.0f} s ",
             std::string(size_t(filled), '#'), std::string(size_t(kWidth - filled), '.'), p.num_done,
             p.num_requests, p.in_flight, p.num_failed, p.elapsed_s);
  if (p.num_done == p.num_requests) fmt::print(stderr, "\n");
}

// A bar on a terminal, elsewhere a line every ten seconds.
std::function<void(const LoadProgress&)> progress_printer(bool quiet) {
  if (quiet) return {};
  if (isatty(STDERR_FILENO)) return show_progress;
  return [next_s = 10.0](const LoadProgress& p) mutable {
    if (p.elapsed_s < next_s && p.num_done < p.num_requests) return;
    next_s = p.elapsed_s + 10;
    fmt::print(stderr, "{}/{} requests, {} failed, {:.0f} s\n", p.num_done, p.num_requests, p.num_failed,
               p.elapsed_s);
  };
}

std::string local_time(const char* format) {
  const time_t now = ::time(nullptr);
  tm parts{};
  localtime_r(&now, &parts);
  char text[32];
  return {text, strftime(text, sizeof(text), format, &parts)};
}

template <class T>
Json number_or(bool known, T value, Json otherwise) {
  return known ? Json(value) : otherwise;
}

Json settings_json(const ServeBenchFlags& flags, const TokenSource& source, size_t num_prompts) {
  Json json{{"date", local_time("%Y%m%d-%H%M%S")},
            {"endpoint_type", flags.backend},
            {"backend", flags.backend},
            {"label", flags.label.empty() ? Json() : Json(flags.label)},
            {"model_id", flags.model},
            {"tokenizer_id", source.id},
            {"num_prompts", num_prompts}};
  for (const auto& [key, value] : flags.metadata) json[key] = value;
  json["request_rate"] = number_or(std::isfinite(flags.dataset.rate), flags.dataset.rate, "inf");
  json["burstiness"] = number_or(std::isfinite(flags.dataset.burstiness), flags.dataset.burstiness, "inf");
  json["max_concurrency"] = number_or(flags.max_concurrency > 0, flags.max_concurrency, nullptr);
  return json;
}

Json health_json(const ClientHealth& health) {
  return {{"cpu_share", health.cpu_share},
          {"peak_cpu_share", health.peak_cpu_share},
          {"worst_lateness_ms", double(health.worst_lateness_us) / 1e3},
          {"worst_round_ms", double(health.worst_round_us) / 1e3},
          {"connections_opened", health.connections_opened},
          {"peak_in_flight", health.peak_in_flight},
          {"bottleneck", health.bottleneck}};
}

ServeBenchOutcome summarise(const ServeBenchFlags& flags, const TokenSource& source, LoadResult loaded) {
  std::vector<RequestRecord> records;
  Json texts = Json::array();
  int64_t num_without_usage = 0;
  for (LoadReply& reply : loaded.replies) {
    num_without_usage += reply.record.completed() && !reply.has_usage;
    records.push_back(std::move(reply.record));
    if (flags.save_detailed) texts.push_back(std::move(reply.text));
  }
  ServeBenchOutcome outcome{.report = make_report(records, {.slo = flags.slo}),
                            .health = std::move(loaded.health),
                            .num_without_usage = num_without_usage,
                            .preemptions = {},
                            .result = {}};
  outcome.result = settings_json(flags, source, records.size());
  outcome.result.update(vllm_result_json(outcome.report, flags.percentiles));
  outcome.result["client"] = health_json(outcome.health);
  if (!outcome.report.first_error.empty()) outcome.result["first_error"] = outcome.report.first_error;
  if (flags.save_detailed) {
    outcome.result.update(vllm_detail_json(records));
    outcome.result["generated_texts"] = std::move(texts);
  }
  return outcome;
}

}  // namespace

bool ServeBenchFlags::chat() const {
  return backend == "openai-chat" || endpoint.ends_with("/chat/completions");
}

std::string ServeBenchFlags::path() const {
  if (!endpoint.empty()) return endpoint;
  return chat() ? "/v1/chat/completions" : "/v1/completions";
}

Result<ServeBenchOutcome> run_serve_bench(ServeBenchFlags flags) {
  if (!flags.base_url.empty()) {
    Result<HttpTarget> target = parse_base_url(flags.base_url);
    if (!target) return target.error();
    target->headers = flags.target.headers;
    flags.target = *std::move(target);
  }
  const Result<Json> card = model_card(flags);
  if (!card) return card.error();
  if (flags.model.empty()) {
    Result<std::string> name = string_member(*card, "id", "");
    if (!name) return name.error();
    flags.model = *std::move(name);
  }
  Result<TokenSource> source = TokenSource{.id = flags.tokenizer, .pool = {}, .decode = {}};
  if (flags.dataset.name != "custom") source = token_source(flags, *card);
  if (!source) return source.error();
  const Result<std::vector<LoadRequest>> requests = make_requests(flags, *source);
  if (!requests) return requests.error();
  if (flags.num_warmups > 0)
    if (Status failed = warm_up(flags, requests->front())) return *std::move(failed);
  const std::optional<double> before = preemptions_so_far(flags.target);
  Result<LoadResult> loaded =
      run_load(flags.target, *requests,
               {.path = flags.path(),
                .max_concurrency = flags.max_concurrency,
                .from_arrival = std::isfinite(flags.dataset.rate) && flags.max_concurrency == 0,
                .on_progress = progress_printer(flags.quiet)});
  if (!loaded) return loaded.error();
  ServeBenchOutcome outcome = summarise(flags, *source, *std::move(loaded));
  if (const auto after = preemptions_so_far(flags.target); before && after)
    outcome.preemptions = int64_t(*after - *before);
  outcome.result["preemptions"] = outcome.preemptions ? Json(*outcome.preemptions) : Json();
  return outcome;
}

}  // namespace ekv
