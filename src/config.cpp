#include "elastickv/config.h"

#include <fmt/format.h>

#include <span>

namespace ekv {
namespace {

template <class E>
struct Named {
  E value;
  std::string_view name;
};
constexpr Named<KvPolicy> kPolicies[] = {{KvPolicy::elastic, "elastic"},
                                         {KvPolicy::target_only, "target-only"},
                                         {KvPolicy::exact_offload, "exact-offload"},
                                         {KvPolicy::static8, "static8"}};
constexpr Named<DemotionMode> kDemotions[] = {{DemotionMode::shortage, "shortage"},
                                              {DemotionMode::watermark, "watermark"},
                                              {DemotionMode::eager, "eager"}};
constexpr Named<PromotionMode> kPromotions[] = {
    {PromotionMode::reserve, "reserve"}, {PromotionMode::eager, "eager"}, {PromotionMode::none, "none"}};
constexpr Named<BackingMode> kBackings[] = {{BackingMode::lazy, "lazy"},
                                            {BackingMode::writethrough, "writethrough"}};
constexpr Named<AdmissionMode> kAdmissions[] = {{AdmissionMode::native, "native"},
                                                {AdmissionMode::guaranteed, "guaranteed"}};
constexpr Named<AttentionPath> kPaths[] = {{AttentionPath::automatic, "auto"},
                                           {AttentionPath::general, "general"}};

template <class E>
std::optional<E> parse(std::span<const Named<E>> names, std::string_view name) {
  for (const Named<E>& n : names)
    if (n.name == name) return n.value;
  return std::nullopt;
}
template <class E>
std::string_view find_name(std::span<const Named<E>> names, E value) {
  for (const Named<E>& n : names)
    if (n.value == value) return n.name;
  EKV_CHECK(false, "every setting has a name");
}

Error invalid(std::string param, std::string message) {
  return {Error::invalid_argument, std::move(message), std::move(param)};
}

// Positions and row numbers are 32-bit; a limit far below leaves room for sums of a few of them.
constexpr int kMost = 1 << 28;

Status validate_scheduler(const SchedulerConfig& s) {
  if (s.max_step_seqs < 1 || s.max_step_seqs > kMost)
    return invalid("max-num-seqs",
                   fmt::format("--max-num-seqs must be in [1, {}], got {}", kMost, s.max_step_seqs));
  if (s.max_step_tokens > kMost)
    return invalid("max-num-batched-tokens",
                   fmt::format("--max-num-batched-tokens must be <= {}, got {}", kMost, s.max_step_tokens));
  if (s.max_step_tokens < s.max_step_seqs)
    return invalid("max-num-batched-tokens",
                   fmt::format("--max-num-batched-tokens ({}) must be >= --max-num-seqs ({}): every running "
                               "sequence decodes one token per step",
                               s.max_step_tokens, s.max_step_seqs));
  if (s.max_chunk_tokens < 0)
    return invalid("long-prefill-token-threshold",
                   fmt::format("--long-prefill-token-threshold must be >= 0, got {}", s.max_chunk_tokens));
  if (s.target_step_us < 0) return invalid("target-step-ms", "--target-step-ms must be >= 0; 0: no limit");
  if (!(s.watermark >= 0 && s.watermark < 1))
    return invalid("watermark", fmt::format("--watermark must be in [0, 1), got {}", s.watermark));
  return std::nullopt;
}

Status validate_kv(const KvConfig& kv) {
  if (kv.num_pages < 0 || kv.num_pages > kMost)
    return invalid("num-gpu-blocks-override",
                   fmt::format("--num-gpu-blocks-override must be in [0, {}], got {}", kMost, kv.num_pages));
  if (kv.num_pages == 0 && kv.pool_bytes == 0)
    return invalid("kv-cache-memory-bytes",
                   "the KV pool has no memory: set its size, --kv-cache-memory-bytes, or its pages, "
                   "--num-gpu-blocks-override");
  return std::nullopt;
}

Status not_negative(const char* name, int value) {
  if (value >= 0 && value <= kMost) return std::nullopt;
  return invalid(name, fmt::format("--{} must be in [0, {}], got {}", name, kMost, value));
}

Status validate_counts(const FidelityConfig& f) {
  const std::pair<const char*, int> counts[] = {{"sink-pairs", f.sink_pairs},
                                                {"recent-pairs", f.recent_pairs},
                                                {"min-demote-pairs", f.min_demote_pairs},
                                                {"reserve-decay", f.reserve_decay},
                                                {"headroom-pages", f.headroom_pages},
                                                {"max-restores", f.max_restores},
                                                {"min-remaining-tokens", f.min_remaining_tokens}};
  for (const auto& [name, value] : counts)
    if (Status bad = not_negative(name, value)) return bad;
  return std::nullopt;
}

Status validate_fidelity(const FidelityConfig& f) {
  if (Status bad = validate_counts(f)) return bad;
  if (!(f.max_base_fraction >= 0 && f.max_base_fraction <= 1))
    return invalid("max-base-fraction",
                   fmt::format("--max-base-fraction must be in [0, 1], got {}", f.max_base_fraction));
  if (!(f.free_watermark >= 0 && f.free_watermark < 1))
    return invalid("demotion-watermark",
                   fmt::format("--demotion-watermark must be in [0, 1), got {}", f.free_watermark));
  return std::nullopt;
}

// Guaranteed admission counts on every old pair being demotable at once.
Status validate_guarantee(const EngineConfig& config) {
  const FidelityConfig& f = config.fidelity;
  if (config.scheduler.admission != AdmissionMode::guaranteed || !f.makes_base()) return std::nullopt;
  if (f.max_base_fraction < 1)
    return invalid("admission",
                   "--admission guaranteed needs --max-base-fraction 1: it counts on BASE for all old pairs");
  if (f.writes_through())
    return invalid(
        "admission",
        "--admission guaranteed needs --kv-backing lazy: with writethrough a pair cannot be demoted at once");
  return std::nullopt;
}

}  // namespace

std::optional<KvPolicy> parse_kv_policy(std::string_view name) { return parse<KvPolicy>(kPolicies, name); }
std::optional<DemotionMode> parse_demotion_mode(std::string_view name) {
  return parse<DemotionMode>(kDemotions, name);
}
std::optional<PromotionMode> parse_promotion_mode(std::string_view name) {
  return parse<PromotionMode>(kPromotions, name);
}
std::optional<BackingMode> parse_backing_mode(std::string_view name) {
  return parse<BackingMode>(kBackings, name);
}
std::optional<AdmissionMode> parse_admission_mode(std::string_view name) {
  return parse<AdmissionMode>(kAdmissions, name);
}
std::optional<AttentionPath> parse_attention_path(std::string_view name) {
  return parse<AttentionPath>(kPaths, name);
}
std::string_view name_of(KvPolicy policy) { return find_name<KvPolicy>(kPolicies, policy); }
std::string_view name_of(DemotionMode mode) { return find_name<DemotionMode>(kDemotions, mode); }
std::string_view name_of(PromotionMode mode) { return find_name<PromotionMode>(kPromotions, mode); }
std::string_view name_of(BackingMode mode) { return find_name<BackingMode>(kBackings, mode); }
std::string_view name_of(AdmissionMode mode) { return find_name<AdmissionMode>(kAdmissions, mode); }
std::string_view name_of(AttentionPath path) { return find_name<AttentionPath>(kPaths, path); }

void apply_preset_paper015(EngineConfig& config) {
  config.scheduler.max_step_tokens = 2048;
  config.scheduler.max_step_seqs = 256;
  config.scheduler.max_chunk_tokens = 0;
  config.scheduler.reserve_full_prompt = false;
  config.scheduler.preempt_self = true;
  config.scheduler.watermark = 0;
  config.kv.prefix_cache = false;
}

void apply_preset_modern(EngineConfig& config) {
  config.scheduler.max_step_tokens = 8192;
  config.scheduler.max_step_seqs = 256;
  config.scheduler.max_chunk_tokens = 0;
  config.scheduler.reserve_full_prompt = true;
  config.scheduler.preempt_self = false;
  config.scheduler.watermark = 0;
  config.kv.prefix_cache = true;
}

Status validate(const EngineConfig& config) {
  if (Status bad = validate_scheduler(config.scheduler)) return bad;
  if (Status bad = validate_kv(config.kv)) return bad;
  if (Status bad = validate_fidelity(config.fidelity)) return bad;
  if (Status bad = validate_guarantee(config)) return bad;
  if (config.max_model_len < 1 || config.max_model_len > kMost)
    return invalid("max-model-len",
                   fmt::format("--max-model-len must be in [1, {}], got {}", kMost, config.max_model_len));
  return std::nullopt;
}

}  // namespace ekv
