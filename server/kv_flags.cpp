#include "server/kv_flags.h"

#include <fmt/format.h>

#include "server/engine_flags.h"

namespace ekv {
namespace {

// A flag whose values are the names of an enum, as `parse` knows them.
template <class E, class Parse>
CLI::Option* add_named(CLI::App& app, const char* flag, E& value, Parse parse, const char* names,
                       const char* help) {
  const auto take = [&value, parse, flag, names](const std::string& name) {
    const std::optional<E> found = parse(name);
    if (!found) throw CLI::ValidationError(flag, fmt::format("must be one of {}, got '{}'", names, name));
    value = *found;
  };
  return app.add_option_function<std::string>(flag, take, fmt::format("{}: {}", names, help));
}

std::optional<BaseFormat> parse_base_format(std::string_view name) {
  if (name == "fixed8") return BaseFormat::fixed8;
  if (name == "e5m2") return BaseFormat::e5m2;
  return std::nullopt;
}

std::optional<BaseFill> parse_base_fill(std::string_view name) {
  if (name == "zero") return BaseFill::zero;
  if (name == "mid") return BaseFill::mid;
  return std::nullopt;
}

void add_modes(CLI::App& app, EngineConfig& config, BaseFill& fill) {
  FidelityConfig& f = config.fidelity;
  add_named(app, "--kv-policy", f.policy, parse_kv_policy, "elastic, target-only, exact-offload, static8",
            "what happens to KV when pages are short")
      ->default_str("target-only");
  add_named(app, "--demotion", f.demotion, parse_demotion_mode, "shortage, watermark, eager",
            "when pairs become BASE")
      ->default_str("shortage");
  add_named(app, "--promotion", f.promotion, parse_promotion_mode, "reserve, eager, none",
            "from which free pages pairs become TARGET again")
      ->default_str("reserve");
  add_named(app, "--kv-backing", f.backing, parse_backing_mode, "lazy, writethrough",
            "when low bytes go to the host")
      ->default_str("lazy");
  add_named(app, "--admission", config.scheduler.admission, parse_admission_mode, "native, guaranteed",
            "guaranteed admits only what fits to its last token")
      ->default_str("native");
  add_named(app, "--attention-path", f.attention_path, parse_attention_path, "auto, general",
            "the attention loop of batches with BASE pairs")
      ->default_str("auto");
  add_named(app, "--kv-base-format", config.kv.base_format, parse_base_format, "fixed8, e5m2",
            "the grid on which KV values are written")
      ->default_str("fixed8");
  add_named(app, "--kv-base-fill", fill, parse_base_fill, "zero, mid",
            "what e5m2 reads for missing low bytes; on a GPU mid only")
      ->default_str("mid");
}

constexpr int kMost = 1 << 24;

void add_thresholds(CLI::App& app, FidelityConfig& f) {
  const auto add = [&app](const char* flag, int& value, const char* help) {
    app.add_option(flag, value, help)->check(CLI::Range(0, kMost))->capture_default_str();
  };
  add("--sink-pairs", f.sink_pairs, "first pairs of a sequence that stay TARGET");
  add("--recent-pairs", f.recent_pairs, "last complete pairs of a sequence that stay TARGET");
  add("--min-demote-pairs", f.min_demote_pairs, "a shortage demotes at least so many pairs");
  add("--min-remaining-tokens", f.min_remaining_tokens,
      "sequences with fewer tokens to go change fidelity only when they must");
  add("--reserve-decay", f.reserve_decay, "pages by which the reserve that promotion spares shrinks in a step");
  add("--headroom-pages", f.headroom_pages, "pages per running sequence that promotion leaves free");
  add("--max-restores", f.max_restores, "pairs on their way back from the host at any time");
  app.add_option("--demotion-watermark", f.free_watermark,
                 "share of the pool that --demotion watermark keeps free")
      ->check(between(0, 1))
      ->capture_default_str();
}

// Flags that were given and that nobody reads with the others as they are.
void warn_of_idle_flags(const CLI::App& app, const FidelityConfig& f) {
  const auto idle = [&app](const char* flag, const char* beside, std::string_view value, const char* use) {
    if (app.count(flag) > 0)
      log_warn(fmt::format("{} has no effect with {} {}: it is for {}", flag, beside, value, use));
  };
  if (f.policy != KvPolicy::elastic) {
    for (const char* flag : {"--demotion", "--demotion-watermark", "--promotion", "--kv-backing"})
      idle(flag, "--kv-policy", name_of(f.policy), "--kv-policy elastic");
    return;
  }
  if (f.demotion != DemotionMode::watermark)
    idle("--demotion-watermark", "--demotion", name_of(f.demotion), "--demotion watermark");
  if (f.demotion == DemotionMode::eager)
    idle("--promotion", "--demotion", name_of(f.demotion), "--demotion shortage and watermark");
}

}  // namespace

void add_kv_flags(CLI::App& app, EngineConfig& config, BaseFill& fill, KvFlags& raw) {
  add_modes(app, config, fill);
  FidelityConfig& f = config.fidelity;
  app.add_option(
         "--kv-host-bytes", raw.host_bytes,
         "host memory for low bytes, without room nothing is demoted; with exact-offload for whole pairs")
      ->capture_default_str();
  app.add_option("--max-base-fraction", f.max_base_fraction,
                 "a pair is demoted only while at most this share of the resident pairs is BASE")
      ->check(between(0, 1))
      ->capture_default_str();
  add_thresholds(app, f);
  app.add_option(
         "--preset", raw.preset,
         "scheduler settings of a vLLM; flags that are given win. paper015, of 0.15: 2048 tokens a step, no "
         "prefix cache, admission when the first chunk fits, who finds no page preempts itself; modern, of "
         "today: 8192 tokens a step, prefix cache, admission when the whole prompt fits. Both: 256 "
         "sequences, no watermark, no --long-prefill-token-threshold")
      ->check(CLI::IsMember({"paper015", "modern"}));
}

void finish_kv_flags(const CLI::App& app, const KvFlags& raw, EngineConfig& config) {
  config.fidelity.host_bytes = size_t(size_or_throw("--kv-host-bytes", raw.host_bytes, 0, int64_t(1) << 50));
  warn_of_idle_flags(app, config.fidelity);
  if (raw.preset.empty()) return;
  const EngineConfig given = config;
  raw.preset == "modern" ? apply_preset_modern(config) : apply_preset_paper015(config);
  const auto keep = [&app](const char* flag, auto& value, const auto& asked) {
    if (app.count(flag)) value = asked;
  };
  SchedulerConfig& s = config.scheduler;
  keep("--max-num-batched-tokens", s.max_step_tokens, given.scheduler.max_step_tokens);
  keep("--max-num-seqs", s.max_step_seqs, given.scheduler.max_step_seqs);
  keep("--long-prefill-token-threshold", s.max_chunk_tokens, given.scheduler.max_chunk_tokens);
  keep("--scheduler-reserve-full-isl", s.reserve_full_prompt, given.scheduler.reserve_full_prompt);
  keep("--watermark", s.watermark, given.scheduler.watermark);
  keep("--enable-prefix-caching", config.kv.prefix_cache, given.kv.prefix_cache);
}

}  // namespace ekv
