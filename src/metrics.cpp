#include "elastickv/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <map>
#include <vector>

namespace ekv {
namespace {

using Buckets = prometheus::Histogram::BucketBoundaries;

const Buckets kFirstTokenSeconds{.001, .005, .01, .02, .04, .06, .08, .1, .25, .5,  .75,
                                 1,    2.5,  5,   7.5, 10,  20,  40,  80, 160, 640, 2560};
const Buckets kTokenSeconds{.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80};
const Buckets kRequestSeconds{.3, .5, .8, 1,  1.5, 2,   2.5, 5,   10,   15,  20,
                              30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680};
const Buckets kStepTokens{1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384};
const Buckets kChoices{1, 2, 5, 10, 20};

// 1, 2, 5 times the powers of ten, up to `most`.
Buckets token_buckets(int most) {
  Buckets buckets;
  for (double decade = 1;; decade *= 10)
    for (double step : {1., 2., 5.}) {
      if (step * decade > most) return buckets;
      buckets.push_back(step * decade);
    }
}

double seconds(int64_t from_us, int64_t to_us) {
  return from_us && to_us > from_us ? double(to_us - from_us) * 1e-6 : 0;
}

const char* reason_label(FinishReason reason) {
  switch (reason) {
    case FinishReason::stop:
      return "stop";
    case FinishReason::length:
      return "length";
    case FinishReason::cancelled:
      return "abort";
    default:
      return "error";
  }
}

// What steps tell: one line per metric. Counters add it up, gauges show the last.
struct StepMetric {
  const char* name;
  const char* help;
  double (*value)(const StepRecord& record);
  const char* label = nullptr;  // with its value, where a family has several members
  const char* label_value = nullptr;
};
using R = StepRecord;

const StepMetric kStepCounters[] = {
    {"vllm:prefix_cache_queries_total", "Tokens looked up in the prefix cache.",
     [](const R& r) { return double(r.prefix_query_tokens); }},
    {"vllm:prefix_cache_hits_total", "Tokens found in the prefix cache.",
     [](const R& r) { return double(r.prefix_hit_tokens); }},
    {"vllm:num_preemptions_total", "Sequences that gave up their pages.",
     [](const R& r) { return double(r.num_preempted); }},
    {"elastickv:preemptions_avoided_total", "Sequences that a step without demotion would have preempted.",
     [](const R& r) { return double(r.num_preemptions_avoided); }},
    {"elastickv:recomputed_tokens_total", "Tokens computed again because preemption threw away their KV.",
     [](const R& r) { return double(r.num_recomputed); }},
    {"elastickv:demotions_total", "Pairs that became BASE to free a page.",
     [](const R& r) { return double(r.demoted_pairs); }},
    {"elastickv:promotions_total", "Pairs that became TARGET again from their low bytes.",
     [](const R& r) { return double(r.promoted_pairs); }},
    {"elastickv:restores_total", "Pairs whose low bytes were fetched from the host.",
     [](const R& r) { return double(r.restores_begun); }},
    {"elastickv:backups_total", "TARGET pairs whose low bytes were sent to the host ahead of time.",
     [](const R& r) { return double(r.backups_begun); }},
    {"elastickv:stores_total", "Whole pairs that were copied to the host.",
     [](const R& r) { return double(r.stores_begun); }},
    {"elastickv:stores_skipped_total", "Tries to copy a pair to the host for which all its slots were in use.",
     [](const R& r) { return double(r.stores_skipped); }},
    {"elastickv:loads_total", "Whole pairs that were copied back from the host.",
     [](const R& r) { return double(r.loads_begun); }},
    {"elastickv:host_copy_bytes_total", "Bytes of KV copied between device and host.",
     [](const R& r) { return double(r.to_host_bytes); }, "direction", "to_host"},
    {"elastickv:host_copy_bytes_total", "Bytes of KV copied between device and host.",
     [](const R& r) { return double(r.from_host_bytes); }, "direction", "from_host"},
    {"elastickv:kv_clamped_values_total", "KV values that were cut to what the number format holds.",
     [](const R& r) { return double(r.clamped_values); }},
    {"elastickv:pairs_seen_total", "Pairs that attention read, summed over steps and sequences.",
     [](const R& r) { return double(r.pairs_seen); }},
    {"elastickv:base_pairs_seen_total", "BASE pairs among them; base_pairs_seen / pairs_seen is the exposure.",
     [](const R& r) { return double(r.base_pairs_seen); }},
};

// held: by sequences; cached: by the prefix cache alone; locked: by a copy that has not ended.
const StepMetric kStepGauges[] = {
    {"vllm:num_requests_running", "Sequences in the batch.", [](const R& r) { return double(r.num_running); }},
    {"vllm:num_requests_waiting", "Sequences that wait for admission.",
     [](const R& r) { return double(r.num_waiting); }},
    {"vllm:kv_cache_usage_perc", "Share of the KV pages that live sequences hold, 0 to 1.",
     [](const R& r) {
       return r.total_pages ? double(r.total_pages - r.free_pages - r.cached_pages) / r.total_pages : 0;
     }},
    {"elastickv:num_requests_loading", "Sequences in the batch that wait for copies of their KV from the host.",
     [](const R& r) { return double(r.num_loading); }},
    {"elastickv:kv_pairs", "Resident pairs, of sequences and the prefix cache.",
     [](const R& r) { return double(r.resident_pairs); }},
    {"elastickv:kv_base_pairs", "Resident pairs that are BASE.",
     [](const R& r) { return double(r.resident_base_pairs); }},
    {"elastickv:kv_host_slots_used", "Pairs whose low bytes, or which themselves, have a place on the host.",
     [](const R& r) { return double(r.host_slots_used); }},
    {"elastickv:kv_pages", "KV pages by state.", [](const R& r) { return double(r.free_pages); }, "state",
     "free"},
    {"elastickv:kv_pages", "KV pages by state.", [](const R& r) { return double(r.cached_pages); }, "state",
     "cached"},
    {"elastickv:kv_pages", "KV pages by state.", [](const R& r) { return double(r.locked_pages); }, "state",
     "locked"},
    {"elastickv:kv_pages", "KV pages by state.",
     [](const R& r) { return double(r.total_pages - r.free_pages - r.cached_pages - r.locked_pages); }, "state",
     "held"},
};

}  // namespace

struct Metrics::Families {
  using Labels = prometheus::Labels;

  static Labels label_of(const StepMetric& m) { return m.label ? Labels{{m.label, m.label_value}} : Labels{}; }
  // One member of a family; `buckets` for histograms.
  template <class Builder, class... Buckets>
  auto& add(Builder builder, const char* name, const char* help, const Labels& more,
            const Buckets&... buckets) {
    return builder.Name(name).Help(help).Labels(labels).Register(registry).Add(more, buckets...);
  }

  Families(const std::string& model_name, int max_model_len)
      : labels{{"model_name", model_name}, {"engine", "0"}}, tokens(token_buckets(max_model_len)) {
    for (const StepMetric& m : kStepCounters)
      step_counters.push_back(&add(prometheus::BuildCounter(), m.name, m.help, label_of(m)));
    for (const StepMetric& m : kStepGauges)
      step_gauges.push_back(&add(prometheus::BuildGauge(), m.name, m.help, label_of(m)));
  }

  prometheus::Counter& counter(const char* name, const char* help, const Labels& more = {}) {
    return add(prometheus::BuildCounter(), name, help, more);
  }
  prometheus::Histogram& histogram(const char* name, const char* help, const Buckets& buckets) {
    return add(prometheus::BuildHistogram(), name, help, {}, buckets);
  }

  prometheus::Registry registry{prometheus::Registry::InsertBehavior::Merge};
  Labels labels;
  Buckets tokens;

  std::vector<prometheus::Counter*> step_counters;  // [kStepCounters]
  std::vector<prometheus::Gauge*> step_gauges;      // [kStepGauges]
  prometheus::Counter& prompt_tokens = counter("vllm:prompt_tokens_total", "Prompt tokens, once per prompt.");
  prometheus::Counter& generation_tokens =
      counter("vllm:generation_tokens_total", "Output tokens that requests have taken.");
  prometheus::Histogram& step_tokens =
      histogram("vllm:iteration_tokens_total", "Tokens computed in one step.", kStepTokens);
  prometheus::Histogram& request_prompt =
      histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", tokens);
  prometheus::Histogram& request_output =
      histogram("vllm:request_generation_tokens", "Output tokens of a finished request.", tokens);
  prometheus::Histogram& request_longest =
      histogram("vllm:request_max_num_generation_tokens", "Output tokens of the longest choice.", tokens);
  prometheus::Histogram& params_max_tokens =
      histogram("vllm:request_params_max_tokens", "max_tokens of a finished request.", tokens);
  prometheus::Histogram& params_n = histogram("vllm:request_params_n", "n of a request.", kChoices);
  prometheus::Histogram& first_token = histogram(
      "vllm:time_to_first_token_seconds", "Arrival to first token, queue time inside.", kFirstTokenSeconds);
  prometheus::Histogram& token_gap =
      histogram("vllm:inter_token_latency_seconds", "Gap between two tokens of a sequence.", kTokenSeconds);
  prometheus::Histogram& per_token = histogram("vllm:request_time_per_output_token_seconds",
                                               "First to last token / (output tokens - 1).", kTokenSeconds);
  prometheus::Histogram& e2e =
      histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", kRequestSeconds);
  prometheus::Histogram& queue =
      histogram("vllm:request_queue_time_seconds", "Handed to the engine to first scheduled.", kRequestSeconds);
  prometheus::Histogram& inference =
      histogram("vllm:request_inference_time_seconds", "First scheduled to last token.", kRequestSeconds);
  prometheus::Histogram& prefill =
      histogram("vllm:request_prefill_time_seconds", "First scheduled to first token.", kRequestSeconds);
  prometheus::Histogram& decode =
      histogram("vllm:request_decode_time_seconds", "First to last token.", kRequestSeconds);
  std::map<std::string, prometheus::Counter*> finished;  // [finished_reason]; all exist from the start
};

Metrics::Metrics(const std::string& model_name, const EngineConfig& config, int num_pages)
    : families_(std::make_unique<Families>(model_name, config.max_model_len)) {
  for (const char* reason : {"stop", "length", "abort", "error"})
    families_->finished[reason] = &families_->counter(
        "vllm:request_success_total", "Finished requests by reason.", {{"finished_reason", reason}});
  families_
      ->add(prometheus::BuildGauge(), "vllm:cache_config_info", "Settings of the KV cache.",
            {{"block_size", std::to_string(kBlockTokens)},
             {"num_gpu_blocks", std::to_string(num_pages)},
             {"enable_prefix_caching", config.kv.prefix_cache ? "True" : "False"}})
      .Set(1);
}

Metrics::~Metrics() = default;

void Metrics::on_request(int num_choices) { families_->params_n.Observe(num_choices); }

void Metrics::on_first_token(const SeqStats& stats, bool counts_prompt, bool is_output) {
  Families& f = *families_;
  if (is_output) f.generation_tokens.Increment();
  f.first_token.Observe(seconds(stats.arrival_us, stats.first_token_us));
  if (!counts_prompt) return;
  f.prompt_tokens.Increment(stats.num_prompt);
  f.request_prompt.Observe(stats.num_prompt);
}

void Metrics::on_next_token(int64_t gap_us) {
  families_->generation_tokens.Increment();
  families_->token_gap.Observe(double(gap_us) * 1e-6);
}

void Metrics::on_finished(FinishReason reason, const SeqStats& stats, int max_tokens) {
  Families& f = *families_;
  f.finished.at(reason_label(reason))->Increment();
  f.request_output.Observe(stats.num_output);
  f.request_longest.Observe(stats.num_output);
  f.params_max_tokens.Observe(max_tokens);
  if (!stats.first_token_us) return;  // ended before it had a token
  f.e2e.Observe(seconds(stats.arrival_us, stats.last_token_us));
  f.queue.Observe(seconds(stats.queued_us, stats.first_scheduled_us));
  f.inference.Observe(seconds(stats.first_scheduled_us, stats.last_token_us));
  f.prefill.Observe(seconds(stats.first_scheduled_us, stats.first_token_us));
  f.decode.Observe(seconds(stats.first_token_us, stats.last_token_us));
  if (stats.num_output > 1)
    f.per_token.Observe(seconds(stats.first_token_us, stats.last_token_us) / (stats.num_output - 1));
}

void Metrics::on_step(const StepRecord& record) {
  Families& f = *families_;
  for (size_t i = 0; i < f.step_counters.size(); ++i)
    f.step_counters[i]->Increment(kStepCounters[i].value(record));
  for (size_t i = 0; i < f.step_gauges.size(); ++i) f.step_gauges[i]->Set(kStepGauges[i].value(record));
  if (const int tokens = record.num_prefill_tokens + record.num_decode_tokens) f.step_tokens.Observe(tokens);
}

std::string Metrics::text() const {
  return prometheus::TextSerializer().Serialize(families_->registry.Collect());
}

}  // namespace ekv
