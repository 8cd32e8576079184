#include "bench/bench_serve.h"

#include <fmt/format.h>
#include <time.h>

#include <algorithm>
#include <cmath>

#include "bench/server_info.h"

namespace ekv {
namespace {

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
  const Result<Json> card = first_model(flags.target, flags.ready_timeout_s);
  if (!card) return card.error();
  if (flags.model.empty()) {
    Result<std::string> name = string_member(*card, "id", "");
    if (!name) return name.error();
    flags.model = *std::move(name);
  }
  Result<TokenSource> source = TokenSource{.id = flags.tokenizer, .pool = {}, .decode = {}};
  if (flags.dataset.name != "custom") source = token_source(flags.tokenizer, *card, flags.target, flags.model);
  if (!source) return source.error();
  const Result<std::vector<LoadRequest>> requests = make_requests(flags, *source);
  if (!requests) return requests.error();
  if (flags.num_warmups > 0)
    if (Status failed = warm_up(flags, requests->front())) return *std::move(failed);
  const auto before = read_counters(flags.target);
  Result<LoadResult> loaded =
      run_load(flags.target, *requests,
               {.path = flags.path(),
                .max_concurrency = flags.max_concurrency,
                .from_arrival = std::isfinite(flags.dataset.rate) && flags.max_concurrency == 0,
                .on_progress = progress_bar(flags.quiet)});
  if (!loaded) return loaded.error();
  ServeBenchOutcome outcome = summarise(flags, *source, *std::move(loaded));
  outcome.preemptions = growth(before, read_counters(flags.target), "vllm:num_preemptions_total");
  outcome.result["preemptions"] = outcome.preemptions ? Json(*outcome.preemptions) : Json();
  return outcome;
}

}  // namespace ekv
