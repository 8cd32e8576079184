#include "server/serve.h"

#include <fmt/format.h>
#include <malloc.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>

#include "backend/device.h"
#include "backend/host_slots.h"
#include "elastickv/backend.h"
#include "elastickv/model.h"
#include "elastickv/step_log.h"
#include "elastickv/tokenizer.h"
#include "server/chat_prompt.h"
#include "server/exit_guard.h"
#include "server/listen_socket.h"
#include "server/service.h"
#include "util/files.h"

namespace ekv {
namespace {

// Flush grace, the second after it, and a turn for engine and backend to end: what a stop may take beyond
// --shutdown-timeout, and after a second signal.
constexpr std::chrono::seconds kStopGrace{8}, kHurriedStopGrace{4};

struct Loaded {
  Model model;
  ServedModel served;
  EngineConfig engine;
  Device device;
};

bool is_folder(const std::string& path) {
  std::error_code unreadable;
  return std::filesystem::is_directory(path, unreadable);
}

Result<ModelConfig> read_config(const ServeFlags& flags) {
  if (is_folder(flags.model)) return load_model_config(flags.model, flags.max_model_len.value_or(0));
  return builtin_model_config(flags.model);
}

// What a built-in model lacks, which is a shape alone.
Status check_parts(const ServeFlags& flags) {
  if (is_folder(flags.model)) return std::nullopt;
  if (flags.load_format != "dummy")
    return Error{Error::invalid_argument,
                 fmt::format("the built-in model '{}' has no weights; add --load-format dummy", flags.model),
                 "load-format"};
  if (!flags.tokenizer.empty()) return std::nullopt;
  return Error{
      Error::invalid_argument,
      fmt::format("the built-in model '{}' has no tokenizer; add --tokenizer FOLDER, which may be that of "
                  "another model with no more tokens in its vocabulary",
                  flags.model),
      "tokenizer"};
}

// After check_parts().
Result<Model> load_weights(const ServeFlags& flags, ModelConfig config) {
  if (flags.load_format != "dummy") return Model::load(flags.model, std::move(config));
  if (Status large = check_dummy_memory(config)) return *std::move(large);
  return Model::dummy(std::move(config), flags.seed);
}

std::filesystem::path tokenizer_folder(const ServeFlags& flags) {
  return flags.tokenizer.empty() ? flags.model : flags.tokenizer;
}

// An empty template would render every chat as nothing.
Result<std::string> read_chat_template(const ServeFlags& flags, const Tokenizer& tokenizer) {
  const bool given = !flags.chat_template.empty();
  Result<std::string> source = given ? read_file(flags.chat_template) : tokenizer.chat_template();
  if (!source || !source->empty()) return source;
  const std::filesystem::path own = tokenizer_folder(flags) / "chat_template.jinja";
  std::error_code unreadable;
  if (!given && !std::filesystem::exists(own, unreadable)) return source;  // a model without one
  return Error{Error::invalid_argument,
               given ? fmt::format("{}: is empty; give a Jinja template", flags.chat_template)
                     : fmt::format("{}: is empty; fetch it again, remove it, or give another with "
                                   "--chat-template",
                                   own.string()),
               "chat-template"};
}

Result<RenderChat> load_chat_template(const ServeFlags& flags, const Tokenizer& tokenizer) {
  const Result<std::string> source = read_chat_template(flags, tokenizer);
  if (!source) return source.error();
  return make_chat_renderer(*source, flags.chat_template.empty() ? "chat template" : flags.chat_template,
                            tokenizer);
}

size_t host_slot_bytes(const Loaded& loaded) {
  const KvShape shape = loaded.model.config().kv_shape();
  const bool whole = host_content(loaded.engine.fidelity.policy) == HostContent::whole_pairs;
  return whole ? 2 * shape.page_bytes() : shape.low_pair_bytes();
}

Result<ServedModel> describe(const ServeFlags& flags, const ModelConfig& config, int max_model_len) {
  Result<Tokenizer> tokenizer = Tokenizer::load(tokenizer_folder(flags));
  if (!tokenizer) return tokenizer.error();
  if (tokenizer->vocab_size() > config.vocab)
    return Error{Error::invalid_argument,
                 fmt::format("the tokenizer has {} tokens, but the model has logits for {} only",
                             tokenizer->vocab_size(), config.vocab),
                 "tokenizer"};
  Result<RenderChat> render = load_chat_template(flags, *tokenizer);
  if (!render) return render.error();
  ApiLimits limits{.model_names = flags.served_model_names,
                   .max_model_len = max_model_len,
                   .vocab_size = config.vocab,
                   .max_logprobs = flags.max_logprobs,
                   .defaults = flags.use_generation_config ? config.generation : GenerationDefaults(),
                   .eos_ids = config.eos_ids,
                   .cached_tokens_in_usage = flags.prompt_tokens_details};
  if (const auto eos = tokenizer->eos_id();
      eos && std::count(limits.eos_ids.begin(), limits.eos_ids.end(), *eos) == 0)
    limits.eos_ids.push_back(*eos);
  return ServedModel{.limits = std::move(limits),
                     .tokenizer = *std::move(tokenizer),
                     .render_chat = *std::move(render),
                     .created_s = int64_t(::time(nullptr)),
                     .root = flags.model};
}

Result<Loaded> load(const ServeFlags& flags) {
  Result<ModelConfig> config = read_config(flags);
  if (!config) return config.error();
  if (Status lacking = check_parts(flags)) return *std::move(lacking);
  if (Status taken = try_address(flags.http.host, flags.http.port)) return *std::move(taken);
  const Result<Device> device = choose_device(flags.device);
  if (!device) return device.error();
  if (Status wrong = check_device_flags(flags, *device)) return *std::move(wrong);
  EngineConfig engine = flags.engine;
  engine.async_scheduling = flags.async_scheduling.value_or(default_async_scheduling(*device));
  const char* pool_flag = engine.kv.num_pages > 0 ? "num-gpu-blocks-override" : "kv-cache-memory-bytes";
  engine.max_model_len = flags.max_model_len.value_or(config->max_position);  // at most
  if (Status small = size_pool(*device, *config, engine)) return *std::move(small);
  const Result<int> context =
      fit_context(flags.max_model_len, config->max_position, engine.kv.num_pages, pool_flag);
  if (!context) return context.error();
  engine.max_model_len = *context;
  if (Status wrong = validate(engine)) return *std::move(wrong);
  Result<ServedModel> served = describe(flags, *config, engine.max_model_len);
  if (!served) return served.error();
  log_info(fmt::format("loading {} ({}, {:.0f} million parameters)", flags.model,
                       architecture_name(config->architecture), double(config->num_parameters()) / 1e6));
  Result<Model> model = load_weights(flags, *std::move(config));
  if (!model) return model.error();
  return Loaded{*std::move(model), *std::move(served), engine, *device};
}

void report(const Loaded& loaded, const Backend& backend) {
  const ModelConfig& model = loaded.model.config();
  const KvShape shape = model.kv_shape();
  const int pages = loaded.engine.kv.num_pages;
  log_info(fmt::format("weights: {:.1f} MiB; backend: {}", double(loaded.model.weight_bytes()) / (1 << 20),
                       backend.info().name));
  log_info(fmt::format("KV pool: {} pages of {} tokens = {} tokens, {:.1f} MiB; prefix cache {}", pages,
                       kBlockTokens, int64_t(pages) * kBlockTokens,
                       double(shape.page_bytes()) * pages / (1 << 20),
                       loaded.engine.kv.prefix_cache ? "on" : "off"));
  const int slots = backend.info().num_host_slots;
  log_info(fmt::format("KV policy: {}; host memory: {} pairs, {:.1f} MiB",
                       name_of(loaded.engine.fidelity.policy), slots,
                       double(host_slot_bytes(loaded)) * slots / (1 << 20)));
  warn_of_no_host_memory(loaded.engine.fidelity.policy, slots);
  log_info(fmt::format("context: {} tokens; per step at most {} tokens of {} sequences; async scheduling {}",
                       loaded.engine.max_model_len, loaded.engine.scheduler.max_step_tokens,
                       loaded.engine.scheduler.max_step_seqs, loaded.engine.async_scheduling ? "on" : "off"));
}

// Formats that are fine on one model can destroy another. Large key biases put a few channels in the hundreds,
// where the byte that e5m2 drops is worth more than most keys; measured on Qwen2.5-1.5B, perplexity times 75.
void warn_of_format(const Loaded& loaded) {
  if (loaded.engine.kv.base_format != BaseFormat::e5m2 || !loaded.model.config().qkv_bias) return;
  log_warn(
      "--kv-base-format e5m2 with a model that has biases on its keys: BASE pairs will ruin its answers. The "
      "default, "
      "fixed8, does not");
}

// One descriptor per connection: the usual soft limit of 1024 is less than what we are ready to serve.
void raise_file_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

// Every connection has a thread, and glibc gives threads arenas, up to eight for each core; each keeps the
// largest messages that its threads have seen. With 256 of them RSS still grew by 1 MiB/s after four minutes of
// long prompts.
void share_arenas() {
  constexpr int kArenas = 16;
  mallopt(M_ARENA_MAX, kArenas);
}

sigset_t block_signals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);  // threads made from here on inherit it
  signal(SIGPIPE, SIG_IGN);
  return signals;
}

// Reports of an engine that has nothing to do are not steps, and the moment to let others read.
std::function<void(const StepRecord&)> writer_of(StepLog& log) {
  return [&log, step = int64_t(0)](const StepRecord& record) mutable {
    if (record.plan_us > 0 || record.device_us > 0)
      log.write(step++, 0, record);
    else
      log.flush();
  };
}

ServiceConfig service_config(const ServeFlags& flags, StepLog& log) {
  return {.http = flags.http,
          .routes = {.version = version_text(),
                     .api_keys = flags.api_keys,
                     .allowed_origins = flags.allowed_origins,
                     .log_requests = flags.log_requests,
                     .echo_request_id = flags.echo_request_id},
          .loop = {.max_queued = flags.max_queued,
                   .hang_us = int64_t(flags.watchdog_timeout_s) * 1000000,
                   .on_step = flags.step_log.empty() ? nullptr : writer_of(log)}};
}

int run(const ServeFlags& flags, const Loaded& loaded, std::unique_ptr<Backend> backend, StepLog& log,
        const sigset_t& signals) {
  const SteadyClock clock;
  std::atomic<bool> failed = false;
  std::optional<ExitGuard> guard;  // outlives the service, whose destructor waits for its threads
  Service service(
      service_config(flags, log), loaded.served, loaded.engine, backend->info().num_pages,
      [&](EngineListener& listener) {
        return std::make_unique<Engine>(loaded.engine, std::move(backend), clock, listener);
      },
      clock,
      [&] {
        failed = true;
        ::kill(::getpid(), SIGTERM);  // wakes the wait below
      });
  if (Status not_started = service.start()) {
    log_error(not_started->message);
    return kExitFailed;
  }
  log_info(fmt::format("serving {} on http://{}:{}", flags.served_model_names.front(), flags.http.host,
                       service.port()));
  int number = 0;
  sigwait(&signals, &number);
  if (!failed) log_info(fmt::format("{}: finishing running requests", strsignal(number)));
  const std::chrono::seconds at_most(service.loop().failed() ? 0 : flags.shutdown_timeout_s);
  const auto late_code = [&] { return failed ? kExitEngineStopped : kExitFailed; };
  guard.emplace(signals, at_most + kStopGrace, kHurriedStopGrace, late_code);
  if (!service.shut_down(at_most, [&] { return guard->hurried(); }))
    leave_as_it_is("the thread of a request did not end in time", late_code());
  log_info("stopped");
  return failed ? kExitEngineStopped : 0;
}

}  // namespace

Result<int> fit_context(std::optional<int> wanted, int max_position, int num_pages,
                        const std::string& pool_flag) {
  // The last token of a sequence is never written to the pool.
  const int64_t fits = int64_t(num_pages) * kBlockTokens + 1;
  if (num_pages < 2)
    return Error{
        Error::invalid_argument,
        fmt::format("the KV pool has room for {} pages of {} tokens, and two are the least; raise --{}",
                    num_pages, kBlockTokens, pool_flag),
        pool_flag};
  if (wanted && *wanted > max_position)
    return Error{
        Error::invalid_argument,
        fmt::format("--max-model-len {} is beyond the {} positions of the model", *wanted, max_position),
        "max-model-len"};
  if (wanted && *wanted > fits)
    return Error{
        Error::invalid_argument,
        fmt::format("--max-model-len {} does not fit: the KV pool has {} pages, which hold {} tokens. Raise "
                    "--{} or lower --max-model-len",
                    *wanted, num_pages, fits, pool_flag),
        "max-model-len"};
  if (wanted) return *wanted;
  if (max_position > fits)
    log_warn(fmt::format(
        "the context is cut from {} to {} tokens, which is what the KV pool holds; raise --{} for more",
        max_position, fits, pool_flag));
  return int(std::min<int64_t>(max_position, fits));
}

int serve(const ServeFlags& flags, const MakeBackend& make) {
  raise_file_limit();
  share_arenas();
  const sigset_t signals = block_signals();
  std::optional<StartGuard> starting(std::in_place, signals);
  const auto not_started = [&](const Error& error) {
    starting.reset();  // from here on a signal is not what ended it
    log_error(error.message);
    return kExitFailed;
  };
  const Result<Loaded> loaded = load(flags);
  if (!loaded) return not_started(loaded.error());
  const Result<std::unique_ptr<StepLog>> log = StepLog::open(flags.step_log);
  if (!log) return not_started(log.error());
  Result<std::unique_ptr<Backend>> backend = make(loaded->model, loaded->engine,
                                                  {.device = loaded->device,
                                                   .threads = flags.threads,
                                                   .base_fill = flags.base_fill,
                                                   .cuda_launch = flags.cuda_launch});
  if (!backend) return not_started(backend.error());
  report(*loaded, **backend);
  warn_of_format(*loaded);
  starting.reset();
  const int code = run(flags, *loaded, *std::move(backend), **log, signals);
  const Status incomplete = (*log)->close();
  if (incomplete) log_error(incomplete->message);
  return incomplete && code == 0 ? kExitFailed : code;
}

}  // namespace ekv
