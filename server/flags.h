#pragma once
// flags.h -- the command line. Names and defaults are those of `vllm serve` where the feature exists. We differ
// in --shutdown-timeout (30, there 0), and a flag of an absent feature is an error.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "backend/start.h"
#include "server/http.h"

namespace ekv {

struct ServeFlags : ModelFlags {
  std::string tokenizer;                        // folder of tokenizer.json; empty: the model's
  std::vector<std::string> served_model_names;  // empty: the model as given
  std::optional<int> max_model_len;             // tokens; absent: the model's own, or what fits
  HttpConfig http;
  int max_logprobs = 20;
  bool use_generation_config = true;  // sampling defaults from generation_config.json
  std::string chat_template;          // file; empty: the model's
  std::vector<std::string> api_keys;
  std::vector<std::string> allowed_origins{"*"};
  bool echo_request_id = false;
  bool log_requests = false;
  bool prompt_tokens_details = false;
  int max_queued = 0;  // sequences; 0: no limit
  int shutdown_timeout_s = 30;
  int watchdog_timeout_s = 300;
  std::string step_log;  // file; empty: none
};

// What the command line asks for: serve with these flags, or print `text` and exit with `exit_code`.
struct CommandLine {
  std::optional<ServeFlags> serve;
  std::string text;
  int exit_code = 0;
};
CommandLine parse_command_line(int argc, const char* const* argv);

// "4096", "8k" (thousands), "8K" (1024), "25.6k"; also m, M, g, G, t, T.
Result<int64_t> parse_size(const std::string& text);

const char* version_text();

// What vLLM's flags allow and the device does not.
Status check_device_flags(const ServeFlags& flags, Device device);

}  // namespace ekv
