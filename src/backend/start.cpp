#include "backend/start.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>

#include "backend/host_slots.h"
#include "util/machine_memory.h"

namespace ekv {
namespace {

bool is_dummy(const ModelFlags& flags) { return flags.load_format == "dummy"; }

Result<ModelConfig> read_config(const ModelFlags& flags, const LongestSequence& longest) {
  std::error_code unreadable;
  if (std::filesystem::is_directory(flags.model, unreadable)) {
    const int bound = longest.at_most < INT_MAX ? longest.at_most : 0;
    return load_model_config(flags.model, longest.asked.value_or(bound));
  }
  Result<ModelConfig> shape = builtin_model_config(flags.model);
  if (!shape || is_dummy(flags)) return shape;
  return Error{Error::invalid_argument,
               fmt::format("the built-in model '{}' has no weights; add --load-format dummy", flags.model),
               "load-format"};
}

const char* pool_flag(const KvConfig& kv, Device device) {
  if (kv.num_pages > 0) return "num-gpu-blocks-override";
  return device == Device::cuda && kv.gpu_memory_utilization > 0 ? "gpu-memory-utilization"
                                                                 : "kv-cache-memory-bytes";
}

// Decides kv.num_pages where it is 0: what fits in kv.pool_bytes, or on a GPU what kv.gpu_memory_utilization
// leaves beside buffers for sequences of config.max_model_len.
Status size_pool(Start& start) {
  KvConfig& kv = start.engine.kv;
  if (kv.num_pages == 0) {
    if (start.options.device == Device::cuda && kv.gpu_memory_utilization > 0) {
      const Result<size_t> bytes = cuda_pool_bytes(start.model, start.engine, kv.gpu_memory_utilization);
      if (!bytes) return bytes.error();
      kv.pool_bytes = *bytes;
    }
    kv.num_pages = int(std::min<size_t>(kv.pool_bytes / start.model.kv_shape().page_bytes(), 1 << 24));
  }
  if (kv.num_pages >= 2) return std::nullopt;
  return Error{Error::invalid_argument,
               fmt::format("the KV pool has room for {} pages of {} tokens, and two are the least; raise --{}",
                           kv.num_pages, kBlockTokens, start.pool_flag),
               start.pool_flag};
}

Status check_positions(const ModelConfig& model, const LongestSequence& longest) {
  if (longest.asked.value_or(0) <= model.max_position) return std::nullopt;
  return Error{Error::invalid_argument,
               fmt::format("--{} asks for sequences of {} tokens, beyond the {} positions of the model",
                           longest.flag, *longest.asked, model.max_position),
               longest.flag};
}

Status fit_into_pool(Start& start, const LongestSequence& longest) {
  // The last token of a sequence is never written to the pool.
  const int64_t fits = int64_t(start.engine.kv.num_pages) * kBlockTokens + 1;
  int& context = start.engine.max_model_len;
  if (longest.asked && context > fits)
    return Error{
        Error::invalid_argument,
        fmt::format("--{0} asks for sequences of {1} tokens, and the KV pool has {2} pages, which hold "
                    "{3}: raise --{4} or ask for fewer",
                    longest.flag, context, start.engine.kv.num_pages, fits, start.pool_flag),
        longest.flag};
  context = int(std::min<int64_t>(context, fits));
  return std::nullopt;
}

// Pages that are only mapped cost nothing at first: what is larger than the machine is killed while it is
// filled, or while it is locked for a GPU. Weights of a folder are mapped and may be larger.
Status check_host_memory(const ModelFlags& flags, const Start& start) {
  const KvShape shape = start.model.kv_shape();
  const bool whole = host_content(start.engine.fidelity.policy) == HostContent::whole_pairs;
  const uint64_t slot_bytes = whole ? 2 * shape.page_bytes() : shape.low_pair_bytes();
  const bool on_cpu = start.options.device == Device::cpu;
  struct Part {
    const char *what, *flag;
    uint64_t bytes;
  };
  const Part parts[] = {
      {"random weights", "model", is_dummy(flags) ? uint64_t(start.model.num_parameters()) * 2 : 0},
      {"KV pool", start.pool_flag, on_cpu ? uint64_t(start.engine.kv.num_pages) * shape.page_bytes() : 0},
      {"KV outside the pool", "kv-host-bytes", uint64_t(host_slots(start.model, start.engine)) * slot_bytes}};
  const std::optional<uint64_t> usable = usable_memory();
  uint64_t total = 0;
  for (const Part& part : parts) total += part.bytes;
  if (!usable || total <= *usable) return std::nullopt;
  const auto gib = [](uint64_t bytes) { return double(bytes) / double(1 << 30); };
  std::vector<std::string> help;
  for (const Part& part : parts)
    if (part.bytes > total / 100)
      help.push_back(fmt::format("--{} ({}: {:.1f} GiB)", part.flag, part.what, gib(part.bytes)));
  return Error{
      Error::invalid_argument,
      fmt::format("this start takes {:.1f} GiB of host memory, and this machine, or its control group, "
                  "has {:.1f} GiB: use a smaller {}",
                  gib(total), gib(*usable), fmt::join(help, " or ")),
      std::ranges::max(parts, {}, &Part::bytes).flag};
}

Result<Model> load_weights(const ModelFlags& flags, const ModelConfig& config) {
  log_info(fmt::format("loading {} ({}, {:.0f} million parameters)", flags.model,
                       architecture_name(config.architecture), double(config.num_parameters()) / 1e6));
  if (!is_dummy(flags)) return Model::load(flags.model, config);
  return Model::dummy(config, flags.seed);
}

}  // namespace

Result<Start> prepare_start(const ModelFlags& flags, const LongestSequence& longest) {
  Result<ModelConfig> model = read_config(flags, longest);
  if (!model) return model.error();
  if (Status beyond = check_positions(*model, longest)) return *std::move(beyond);
  const Result<Device> device = choose_device(flags.device);
  if (!device) return device.error();
  Start start{.model = *std::move(model),
              .engine = flags.engine,
              .options = {.device = *device,
                          .threads = flags.threads,
                          .base_fill = flags.base_fill,
                          .cuda_launch = flags.cuda_launch},
              .pool_flag = pool_flag(flags.engine.kv, *device)};
  start.engine.max_model_len = longest.asked.value_or(std::min(longest.at_most, start.model.max_position));
  start.engine.async_scheduling = flags.async_scheduling.value_or(default_async_scheduling(*device));
  if (Status wrong = validate(start.engine)) return *std::move(wrong);
  if (Status wrong = check_device(start.model, start.engine, start.options)) return *std::move(wrong);
  if (Status small = size_pool(start)) return *std::move(small);
  if (Status small = fit_into_pool(start, longest)) return *std::move(small);
  if (Status large = check_host_memory(flags, start)) return *std::move(large);
  return start;
}

Result<std::unique_ptr<Backend>> load_backend(const ModelFlags& flags, const Start& start,
                                              const MakeBackend& make) {
  const Result<Model> model = load_weights(flags, start.model);
  if (!model) return model.error();
  Result<std::unique_ptr<Backend>> backend = make(*model, start.engine, start.options);
  if (!backend) return backend;
  log_info(fmt::format("weights: {:.1f} MiB; backend: {}", double(model->weight_bytes()) / (1 << 20),
                       (*backend)->info().name));
  warn_of_no_host_memory(start.engine.fidelity.policy, (*backend)->info().num_host_slots);
  return backend;
}

}  // namespace ekv
