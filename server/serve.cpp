#include "server/serve.h"

#include <fmt/format.h>
#include <malloc.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>

#include "elastickv/backend.h"
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

// All that can be said before the weights are loaded has been said.
struct Prepared {
  Start start;
  ServedModel served;
};

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

// A built-in model is a shape alone.
Status check_tokenizer(const ServeFlags& flags) {
  std::error_code unreadable;
  if (!flags.tokenizer.empty() || std::filesystem::is_directory(flags.model, unreadable)) return std::nullopt;
  return Error{
      Error::invalid_argument,
      fmt::format("the built-in model '{}' has no tokenizer; add --tokenizer FOLDER, which may be that of "
                  "another model with no more tokens in its vocabulary",
                  flags.model),
      "tokenizer"};
}

Result<Prepared> prepare(const ServeFlags& flags) {
  if (Status taken = try_address(flags.http.host, flags.http.port)) return *std::move(taken);
  Result<Start> start = prepare_start(flags, {.asked = flags.max_model_len});
  if (!start) return start.error();
  if (Status wrong = check_device_flags(flags, start->options.device)) return *std::move(wrong);
  if (Status lacking = check_tokenizer(flags)) return *std::move(lacking);
  Result<ServedModel> served = describe(flags, start->model, start->engine.max_model_len);
  if (!served) return served.error();
  return Prepared{*std::move(start), *std::move(served)};
}

void report(const Start& start, const BackendInfo& backend) {
  const EngineConfig& engine = start.engine;
  const size_t page_bytes = start.model.kv_shape().page_bytes();
  const int pages = engine.kv.num_pages;
  log_info(fmt::format("KV pool: {} pages of {} tokens = {} tokens, {:.1f} MiB; prefix cache {}", pages,
                       kBlockTokens, int64_t(pages) * kBlockTokens, double(page_bytes) * pages / (1 << 20),
                       engine.kv.prefix_cache ? "on" : "off"));
  const bool whole = host_content(engine.fidelity.policy) == HostContent::whole_pairs;
  const size_t slot_bytes = whole ? backend.pair_bytes : backend.low_plane_bytes;
  log_info(fmt::format("KV policy: {}; host memory: {} pairs, {:.1f} MiB", name_of(engine.fidelity.policy),
                       backend.num_host_slots, double(slot_bytes) * backend.num_host_slots / (1 << 20)));
  log_info(fmt::format("context: {} tokens; per step at most {} tokens of {} sequences; async scheduling {}",
                       engine.max_model_len, engine.scheduler.max_step_tokens, engine.scheduler.max_step_seqs,
                       engine.async_scheduling ? "on" : "off"));
}

void warn_of_cut_context(const ServeFlags& flags, const Start& start) {
  if (flags.max_model_len || start.engine.max_model_len == start.model.max_position) return;
  log_warn(fmt::format(
      "the context is cut from {} to {} tokens, which is what the KV pool holds; raise --{} for more",
      start.model.max_position, start.engine.max_model_len, start.pool_flag));
}

// Formats that are fine on one model can destroy another. Large key biases put a few channels in the hundreds,
// where the byte that e5m2 drops is worth more than most keys; measured on Qwen2.5-1.5B, perplexity times 75.
void warn_of_format(const Start& start) {
  if (start.engine.kv.base_format != BaseFormat::e5m2 || !start.model.qkv_bias) return;
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

int run(const ServeFlags& flags, const Prepared& prepared, std::unique_ptr<Backend> backend, StepLog& log,
        const sigset_t& signals) {
  const SteadyClock clock;
  std::atomic<bool> failed = false;
  std::optional<ExitGuard> guard;  // outlives the service, whose destructor waits for its threads
  Service service(
      service_config(flags, log), prepared.served, prepared.start.engine, backend->info().num_pages,
      [&](EngineListener& listener) {
        return std::make_unique<Engine>(prepared.start.engine, std::move(backend), clock, listener);
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
  const Result<Prepared> prepared = prepare(flags);
  if (!prepared) return not_started(prepared.error());
  const Start& start = prepared->start;
  const Result<std::unique_ptr<StepLog>> log = StepLog::open(flags.step_log);
  if (!log) return not_started(log.error());
  warn_of_cut_context(flags, start);
  warn_of_format(start);
  Result<std::unique_ptr<Backend>> backend = load_backend(flags, start, make);
  if (!backend) return not_started(backend.error());
  report(start, (*backend)->info());
  starting.reset();
  const int code = run(flags, *prepared, *std::move(backend), **log, signals);
  const Status incomplete = (*log)->close();
  if (incomplete) log_error(incomplete->message);
  return incomplete && code == 0 ? kExitFailed : code;
}

}  // namespace ekv
