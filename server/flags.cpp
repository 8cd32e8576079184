#include "server/flags.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <sstream>

#include "server/engine_flags.h"
#include "server/kv_flags.h"
#include "text/tokenizer_utf8.h"
#include "util/json.h"

namespace ekv {
namespace {

constexpr int kMostSeconds = 1000000;

// Texts that need a parser of their own, before they become flags.
struct RawFlags {
  std::string max_model_len = "auto";
  std::string max_body = "32M";
  std::string generation_config = "auto";
  std::string allowed_origins = "[\"*\"]";
  EngineFlags engine;
  KvFlags kv;
};

void add_model_flags(CLI::App& app, ServeFlags& flags, RawFlags& raw) {
  app.add_option("model,--model", flags.model, model_help())->required();
  app.add_option("--tokenizer", flags.tokenizer, "folder with tokenizer.json (default: the model's)")
      ->check(CLI::ExistingDirectory);
  app.add_option(
         "--served-model-name", flags.served_model_names,
         "name that requests may use; may be given several times; replies carry the first (default: the "
         "model as given)")
      ->allow_extra_args(false);
  app.add_option("--max-model-len", raw.max_model_len,
                 "tokens of prompt and output together; 8k = 8000, 8K = 8192; auto or -1: the most that fits")
      ->capture_default_str();
  app.add_option("--load-format", flags.load_format, "auto, safetensors, or dummy (random weights)")
      ->check(CLI::IsMember({"auto", "safetensors", "dummy"}))
      ->capture_default_str();
  app.add_option("--seed", flags.seed, "seed of the weights of --load-format dummy")
      ->check(seed())
      ->capture_default_str();
  app.add_option("--generation-config", raw.generation_config,
                 "auto: sampling defaults from generation_config.json; vllm: neutral ones")
      ->check(CLI::IsMember({"auto", "vllm"}))
      ->capture_default_str();
  app.add_option("--chat-template", flags.chat_template, "Jinja file instead of the model's own template")
      ->check(CLI::ExistingFile);
  app.add_option("--max-logprobs", flags.max_logprobs,
                 "most alternatives that a request may ask for; on a GPU 20")
      ->check(CLI::Range(0, 1000))
      ->capture_default_str();
  app.add_option("--device", flags.device, "auto, cpu or cuda; auto: cuda where there is a GPU")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
  app.add_option("--threads", flags.threads, "threads of the CPU backend; 0: all cores")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
}

void add_limit_flags(CLI::App& app, ServeFlags& flags) {
  app.add_option("--max-num-queued-reqs", flags.max_queued,
                 "sequences that may wait; more are refused with 503; 0: no limit")
      ->check(CLI::Range(0, 1 << 24))
      ->capture_default_str();
  app.add_option("--watchdog-timeout", flags.watchdog_timeout_s,
                 "seconds of one step after which /health says 503")
      ->check(CLI::Range(1, kMostSeconds))
      ->capture_default_str();
  app.add_option(
      "--step-log", flags.step_log,
      "file for a JSON line per step: times in us, work, pages, changes of fidelity (default: none)");
}

void add_http_flags(CLI::App& app, ServeFlags& flags, RawFlags& raw) {
  app.add_option("--host", flags.http.host, "address to listen on")->capture_default_str();
  app.add_option("--port", flags.http.port, "TCP port; 0: any free one")
      ->check(CLI::Range(0, 65535))
      ->capture_default_str();
  app.add_option("--api-key", flags.api_keys,
                 "key that requests must carry, but for the state of the server; may be given several times")
      ->allow_extra_args(false);
  app.add_option("--allowed-origins", raw.allowed_origins,
                 "JSON list of origins of browser pages that may call; []: no CORS headers")
      ->capture_default_str();
  app.add_flag("--enable-request-id-headers", flags.echo_request_id, "send X-Request-Id back");
  app.add_flag("--enable-log-requests,!--disable-log-requests", flags.log_requests,
               "a log line for each request (default: off)");
  app.add_flag("--enable-prompt-tokens-details", flags.prompt_tokens_details, "cached tokens in `usage`");
  app.add_option("--max-body-bytes", raw.max_body, "largest request body; more is refused with 413")
      ->capture_default_str();
  app.add_option("--max-connections", flags.http.max_connections, "open connections; more are refused with 503")
      ->check(CLI::Range(1, 1 << 16))
      ->capture_default_str();
  app.add_option("--shutdown-timeout", flags.shutdown_timeout_s,
                 "seconds that running requests get to finish after SIGTERM; 0: none")
      ->check(CLI::Range(0, kMostSeconds))
      ->capture_default_str();
}

std::vector<std::string> origins_or_throw(const std::string& text) {
  const Result<Json> list = parse_json(text);
  if (!list || !list->is_array() ||
      !std::all_of(list->begin(), list->end(), [](auto& o) { return o.is_string(); }))
    throw CLI::ValidationError("--allowed-origins",
                               "must be a JSON list of strings, such as '[\"https://a.example\"]'");
  return list->get<std::vector<std::string>>();
}

void finish(const RawFlags& raw, ServeFlags& flags) {
  if (raw.max_model_len != "auto" && raw.max_model_len != "-1")
    flags.max_model_len = int(size_or_throw("--max-model-len", raw.max_model_len, 1, 1 << 24));
  flags.http.max_body_bytes = size_t(size_or_throw("--max-body-bytes", raw.max_body, 1, int64_t(1) << 40));
  flags.use_generation_config = raw.generation_config == "auto";
  flags.allowed_origins = origins_or_throw(raw.allowed_origins);
  for (const std::string& key : flags.api_keys)
    if (key.empty() ||
        !std::all_of(key.begin(), key.end(), [](char c) { return c > 0x20 && c < 0x7f && c != '%'; }))
      throw CLI::ValidationError("--api-key", "must be visible ASCII characters without '%'");
  if (flags.model.empty())
    throw CLI::ValidationError("model", "must be a folder or the name of a built-in config");
  if (flags.served_model_names.empty()) flags.served_model_names = {flags.model};
  for (const std::string& name : flags.served_model_names)
    if (name.empty() || !is_utf8(name) ||
        std::any_of(name.begin(), name.end(), [](char c) { return uint8_t(c) < 0x20; }))
      throw CLI::ValidationError("--served-model-name", "must be UTF-8 text that is not empty, on one line");
}

}  // namespace

Result<int64_t> parse_size(const std::string& text) {
  const Error wrong{
      Error::invalid_argument, fmt::format("'{}' is not a size such as 4096, 8k, 8K, 25.6k or 4G", text), {}};
  const size_t digits = text.find_first_not_of("0123456789.");
  const std::string number = text.substr(0, digits),
                    suffix = digits == std::string::npos ? "" : text.substr(digits);
  if (number.empty() || number.front() == '.' || std::count(number.begin(), number.end(), '.') > 1 ||
      number.size() > 18 || suffix.size() > 1)
    return wrong;
  const size_t power = suffix.empty() ? 0 : std::string("kKmMgGtT").find(suffix) / 2 + 1;
  if (power > 4) return wrong;
  const bool binary = !suffix.empty() && suffix[0] < 'a';
  if (number.find('.') != std::string::npos && (binary || suffix.empty())) return wrong;
  const double size = std::stod(number) * std::pow(binary ? 1024.0 : 1000.0, double(power));
  if (!(size < 9e18)) return wrong;
  return int64_t(std::llround(size));
}

const char* version_text() { return EKV_VERSION; }

namespace {

// The library says "INI was not able to parse NAME" of a name that is not known, NAME.++ of a section.
std::string config_fault(const std::string& file, const std::string& words) {
  constexpr std::string_view kUnknown = "INI was not able to parse ", kSection = ".++";
  if (!words.starts_with(kUnknown)) return fmt::format("--config: {}: {}\n", file, words);
  std::string name = words.substr(kUnknown.size());
  if (name.ends_with(kSection)) name = "[" + name.substr(0, name.size() - kSection.size()) + "]";
  return fmt::format(
      "--config: {}: '{}' is no flag of elastickv serve, whose --help lists them; write one "
      "`name = value` per line\n",
      file, name);
}

// The library reads a config file for the outermost command only, so `serve` is one of its own. `argv[0]` is
// "serve".
CommandLine parse_serve(int argc, const char* const* argv) {
  CLI::App serve{"Serve a model over HTTP until SIGTERM or SIGINT.", "elastickv serve"};
  ServeFlags flags;
  RawFlags raw;
  serve.footer(
      "Exit codes: 0 after SIGTERM or SIGINT; 1 it could not start, a stop took too long, or --step-log could "
      "not be written; 2 a flag is wrong; 3 the device is lost, a step failed, or no client can connect any "
      "more: start it again.");
  serve.set_config("--config", "", "file with flags, one `name = value` per line; the command line wins");
  serve.allow_config_extras(CLI::config_extras_mode::error);
  add_model_flags(serve, flags, raw);
  add_engine_flags(serve, flags.engine, raw.engine);
  add_async_flag(serve, flags.async_scheduling);
  add_cuda_flags(serve, flags.cuda_launch);
  add_limit_flags(serve, flags);
  add_kv_flags(serve, flags.engine, flags.base_fill, raw.kv);
  add_http_flags(serve, flags, raw);
  std::ostringstream out;
  try {
    serve.parse(argc, argv);
    finish(raw, flags);
    finish_engine_flags(raw.engine, flags.engine);
    finish_cuda_flags(flags.device, flags.cuda_launch);
    finish_kv_flags(serve, raw.kv, flags.engine);
  } catch (const CLI::ConfigError& e) {
    return {.serve = {}, .text = config_fault(serve["--config"]->as<std::string>(), e.what()), .exit_code = 2};
  } catch (const CLI::ParseError& e) {
    const int code = serve.exit(e, out, out) == 0 ? 0 : 2;
    return {.serve = {}, .text = out.str(), .exit_code = code};
  }
  return {.serve = std::move(flags), .text = {}};
}

}  // namespace

CommandLine parse_command_line(int argc, const char* const* argv) {
  const std::string_view command = argc > 1 ? argv[1] : "";
  if (command == "serve") return parse_serve(argc - 1, argv + 1);
  CLI::App app{"elastickv serves large language models over HTTP, with an OpenAI-compatible interface."};
  app.set_version_flag("--version", std::string("elastickv ") + version_text());
  app.footer(
      "Each command has flags of its own: elastickv serve --help, elastickv bench --help, elastickv replay "
      "--help");
  app.require_subcommand(1);
  app.add_subcommand("serve", "Serve a model over HTTP until SIGTERM or SIGINT.");
  app.add_subcommand("replay",
                     "Run a trace or a synthetic load on the simulator, an engine, or against a server.");
  app.add_subcommand("bench",
                     "Latency and throughput of a model or a server, and what halved KV costs in quality.");
  const auto is_command = [&](const CLI::App* known) { return known->get_name() == command; };
  if (!command.empty() && command[0] != '-' && app.get_subcommands(is_command).empty())
    return {.serve = {},
            .text = fmt::format("elastickv has no command '{}': it has serve, replay and bench\n"
                                "Run with --help for more information.\n",
                                command),
            .exit_code = 2};
  std::ostringstream out;
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    const int code = app.exit(e, out, out) == 0 ? 0 : 2;
    return {.serve = {}, .text = out.str(), .exit_code = code};
  }
  return {.serve = {}, .text = "the command must come first: elastickv serve MODEL [flags]\n", .exit_code = 2};
}

Status check_device_flags(const ServeFlags& flags, Device device) {
  if (device == Device::cpu || flags.max_logprobs <= kMaxCudaLogprobs) return std::nullopt;
  return Error{Error::invalid_argument,
               fmt::format("--max-logprobs {} is beyond the {} that --device cuda can report; lower it or use "
                           "--device cpu",
                           flags.max_logprobs, kMaxCudaLogprobs),
               "max-logprobs"};
}

}  // namespace ekv
