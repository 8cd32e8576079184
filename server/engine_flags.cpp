#include "server/engine_flags.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <charconv>
#include <cmath>
#include <cstdlib>
#include <optional>

#include "elastickv/model.h"
#include "server/flags.h"

namespace ekv {
namespace {

// vLLM's names, and float16, as config.json has it.
std::optional<CudaDtype> dtype_of(std::string_view name) {
  if (name == "auto") return CudaDtype::automatic;
  if (name == "float16" || name == "half") return CudaDtype::float16;
  if (name == "bfloat16") return CudaDtype::bfloat16;
  return std::nullopt;
}

// The largest binary unit of which it is a multiple: 16M, 1024T.
std::string size_text(int64_t size) {
  std::string unit;
  for (const char larger : {'K', 'M', 'G', 'T'}) {
    if (size < 1024 || size % 1024 != 0) break;
    size /= 1024;
    unit = larger;
  }
  return std::to_string(size) + unit;
}

template <class Number>
std::optional<Number> whole_number(const std::string& text) {
  Number number{};
  const auto [end, fault] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (fault != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

// Whole microseconds; what would round to none must not mean "no limit".
CLI::Validator step_ms() {
  const auto check = [](const std::string& text) {
    const std::optional<double> value = whole_number<double>(text);
    return value && (*value == 0 || (*value >= 0.001 && *value <= 60'000))
               ? std::string()
               : "must be 0 (no limit) or between 0.001 and 60000, got " + text;
  };
  return CLI::Validator(check, "0, or 0.001 to 60000");
}

CLI::Validator dtype() {
  const auto check = [](const std::string& name) -> std::string {
    if (name == "float32")
      return "float32 is how --device cpu computes, without this flag; a GPU has float16 and bfloat16";
    return dtype_of(name) ? "" : fmt::format("must be auto, float16 (or half) or bfloat16, got '{}'", name);
  };
  return CLI::Validator(check, "auto, float16, half or bfloat16");
}

// No folder, no cache.
std::string default_gemm_cache() {
  const char *cache = std::getenv("XDG_CACHE_HOME"), *home = std::getenv("HOME");
  if (cache && *cache) return std::string(cache) + "/elastickv/gemm-cache.txt";
  return home && *home ? std::string(home) + "/.cache/elastickv/gemm-cache.txt" : "";
}

}  // namespace

CLI::Validator between(double least, double most) {
  const auto check = [=](const std::string& text) {
    const std::optional<double> value = whole_number<double>(text);
    return value && *value >= least && *value <= most
               ? std::string()
               : fmt::format("must be between {} and {}, got {}", least, most, text);
  };
  return CLI::Validator(check, fmt::format("{} to {}", least, most));
}

CLI::Validator seed() {
  const auto check = [](const std::string& text) {
    return whole_number<uint64_t>(text)
               ? std::string()
               : fmt::format("must be an integer between 0 and {}, got {}", UINT64_MAX, text);
  };
  return CLI::Validator(check, "UINT");
}

void add_engine_flags(CLI::App& app, EngineConfig& config, EngineFlags& raw) {
  SchedulerConfig& scheduler = config.scheduler;
  app.add_option("--kv-cache-memory-bytes", raw.kv_cache_memory,
                 "bytes of the KV pool; 512M, 4G; auto: 1G, on a GPU what --gpu-memory-utilization leaves")
      ->capture_default_str();
  app.add_option("--gpu-memory-utilization", raw.gpu_memory_utilization,
                 "share of the GPU's memory that weights, buffers and KV pool take together")
      ->check(between(0.01, 1))
      ->capture_default_str();
  app.add_option("--num-gpu-blocks-override", config.kv.num_pages,
                 "exact number of KV pages of 16 tokens; 0: what fits in the pool")
      ->check(CLI::Range(0, 1 << 24))
      ->capture_default_str();
  app.add_flag("--enable-prefix-caching,!--no-enable-prefix-caching", config.kv.prefix_cache,
               "reuse the KV of equal prompt prefixes (default: on)");
  app.add_option("--max-num-batched-tokens", raw.max_step_tokens, "tokens computed in one step")
      ->capture_default_str();
  app.add_option("--max-num-seqs", scheduler.max_step_seqs, "sequences in one step; on a GPU at most 2048")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app.add_option("--long-prefill-token-threshold", scheduler.max_chunk_tokens,
                 "longest prefill chunk of one sequence, in tokens; 0: no limit")
      ->check(CLI::Range(0, 1 << 24))
      ->capture_default_str();
  app.add_option("--target-step-ms", raw.target_step_ms,
                 "prefill chunks are cut so that a step should take no longer, as those before predict it. "
                 "Decodes are never cut, one prompt gets at least 32 tokens a step, and what prompts cost is "
                 "known after the first long one. Set it above the time of a step of decodes alone: below, "
                 "prompts get only those 32 tokens a step and wait long for their first token; 0: no limit")
      ->check(step_ms())
      ->capture_default_str();
  app.add_option("--scheduling-policy", raw.scheduling_policy, "fcfs, or priority (lower values first)")
      ->check(CLI::IsMember({"fcfs", "priority"}))
      ->capture_default_str();
  app.add_flag("--scheduler-reserve-full-isl,!--no-scheduler-reserve-full-isl", scheduler.reserve_full_prompt,
               "admit a request only when its whole prompt fits (default: on)");
  app.add_option("--watermark", scheduler.watermark, "share of the KV pool kept free when admitting")
      ->check(between(0, 1))
      ->capture_default_str();
}

void finish_engine_flags(const EngineFlags& raw, EngineConfig& config) {
  if (raw.kv_cache_memory == "auto")
    config.kv.gpu_memory_utilization = raw.gpu_memory_utilization;
  else
    config.kv.pool_bytes =
        size_t(size_or_throw("--kv-cache-memory-bytes", raw.kv_cache_memory, 1, int64_t(1) << 50));
  config.scheduler.max_step_tokens =
      int(size_or_throw("--max-num-batched-tokens", raw.max_step_tokens, 1, 1 << 24));
  config.scheduler.target_step_us = int(std::llround(raw.target_step_ms * 1e3));
  config.scheduler.policy =
      raw.scheduling_policy == "priority" ? SchedulingPolicy::priority : SchedulingPolicy::fcfs;
}

void add_async_flag(CLI::App& app, std::optional<bool>& async_scheduling, const std::string& on_by_default) {
  app.add_flag_function(
         "--async-scheduling,!--no-async-scheduling", [&](int64_t on) { async_scheduling = on > 0; },
         "plan and submit a step while the device works on the one before (default: " + on_by_default + ")")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);  // not their sum
}

std::string model_help() {
  return fmt::format("Hugging Face folder, or with --load-format dummy one of {}",
                     fmt::join(builtin_model_names(), ", "));
}

void add_cuda_flags(CLI::App& app, CudaLaunch& launch) {
  launch.tune_gemms = true;
  launch.gemm_cache = default_gemm_cache();
  app.add_option_function<std::string>(
         "--dtype", [&launch](const std::string& name) { launch.dtype = *dtype_of(name); },
         "on a GPU: type of weights and activations, float16 (or half) or bfloat16. auto: float16, which keeps "
         "three more bits, unless a weight is beyond its range. KV is float16 with all of them")
      ->check(dtype())
      ->default_str("auto");
  app.add_flag("--enforce-eager", launch.enforce_eager,
               "on a GPU: launch every step kernel by kernel, without CUDA graphs");
  app.add_option_function<std::string>(
         "--gemm-tuning", [&](const std::string& mode) { launch.tune_gemms = mode == "auto"; },
         "on a GPU: auto times the implementations of matrix products at the start, for 20 s at most, and "
         "keeps the fastest; off takes the library's first choice")
      ->check(CLI::IsMember({"auto", "off"}))
      ->default_str("auto");
  app.add_option("--gemm-cache", launch.gemm_cache,
                 "file with what --gemm-tuning found before; \"\": none. Default: gemm-cache.txt in "
                 "$XDG_CACHE_HOME/elastickv or ~/.cache/elastickv");
}

void finish_cuda_flags(std::string_view device, const CudaLaunch& launch) {
  if (launch.dtype == CudaDtype::automatic || device == "cuda" || device == "auto") return;
  throw CLI::ValidationError("--dtype",
                             fmt::format("is for --device cuda; with --device {} leave it at auto{}", device,
                                         device == "cpu" ? ": the CPU reads weights as they are stored" : ""));
}

int64_t size_or_throw(const char* flag, const std::string& text, int64_t least, int64_t most) {
  const Result<int64_t> size = parse_size(text);
  if (!size) throw CLI::ValidationError(flag, size.error().message);
  if (*size < least || *size > most)
    throw CLI::ValidationError(
        flag, fmt::format("must be between {} and {}, got {}", size_text(least), size_text(most), text));
  return *size;
}

}  // namespace ekv
