// A trace against a running server: prompts as token ids, so that lengths and shared prefixes are exact
// whatever the tokenizer, answers of exactly the recorded length.

#include "bench/arrivals.h"
#include "bench/replay_command.h"
#include "bench/server_info.h"

namespace ekv {
namespace {

constexpr int kDrawRange = 1 << 24;  // of the numbers that choose from the pool

Result<std::string> model_name(const ReplayFlags& flags, const Json& card) {
  if (!flags.model.model.empty()) return flags.model.model;
  return string_member(card, "id", "");
}

Result<std::vector<LoadRequest>> load_requests(const ReplayFlags& flags, const Trace& trace,
                                               const TokenSource& source, const std::string& model) {
  if (source.pool.empty())
    return Error{Error::invalid_argument, "there are no tokens to make prompts of", "tokenizer"};
  const BodyOptions options{.model = model, .ignore_eos = true, .extra = {{"temperature", 0}}};
  std::vector<LoadRequest> requests;
  for (const TraceRequest& r : trace.requests) {
    BenchPrompt prompt{.arrival_us = r.arrival_us,
                       .tokens = prompt_tokens(trace, r, flags.load.seed, kDrawRange),
                       .output_tokens = r.output_tokens};
    for (TokenId& token : prompt.tokens) token = source.pool[size_t(token) % source.pool.size()];
    Result<LoadRequest> request = make_request(prompt, options);
    if (!request) return request.error();
    requests.push_back(*std::move(request));
  }
  return requests;
}

EngineTotals totals_of(const std::map<std::string, double>& before,
                       const std::map<std::string, double>& after) {
  EngineTotals totals{.preemptions = growth(before, after, "vllm:num_preemptions_total"),
                      .recomputed_tokens = growth(before, after, "elastickv:recomputed_tokens_total"),
                      .prefix_hit_tokens = growth(before, after, "vllm:prefix_cache_hits_total"),
                      .demoted_pairs = growth(before, after, "elastickv:demotions_total"),
                      .promoted_pairs = growth(before, after, "elastickv:promotions_total")};
  const auto pairs = growth(before, after, "elastickv:pairs_seen_total");
  const auto base = growth(before, after, "elastickv:base_pairs_seen_total");
  if (base && pairs.value_or(0) > 0) totals.base_exposure = double(*base) / double(*pairs);
  return totals;
}

}  // namespace

Result<ReplayOutcome> replay_over_http(const ReplayFlags& flags, const Trace& trace) {
  const Result<Json> card = first_model(flags.target, 0);
  if (!card) return Error{card.error().code, card.error().message, "url"};
  const Result<std::string> model = model_name(flags, *card);
  if (!model) return model.error();
  const Result<TokenSource> source = token_source(flags.tokenizer, *card, flags.target, *model);
  if (!source) return source.error();
  const Result<std::vector<LoadRequest>> requests = load_requests(flags, trace, *source, *model);
  if (!requests) return requests.error();
  const auto before = read_counters(flags.target);
  Result<LoadResult> loaded = run_load(flags.target, *requests,
                                       {.max_concurrency = flags.concurrency,
                                        .from_arrival = flags.concurrency == 0,
                                        .on_progress = progress_bar(flags.quiet)});
  if (!loaded) return loaded.error();
  EngineTotals totals = totals_of(before, read_counters(flags.target));
  std::vector<RequestRecord> records;
  for (LoadReply& reply : loaded->replies) records.push_back(std::move(reply.record));
  ReplayOutcome outcome{.report = make_report(records, {.slo = flags.slo}, std::move(totals)),
                        .health = std::move(loaded->health)};
  outcome.report.engine.wall_s = outcome.report.duration_s;
  return outcome;
}

}  // namespace ekv
