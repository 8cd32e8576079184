#pragma once
// flags.h -- the command line. Names and defaults are those of `vllm serve` where the feature exists. We differ
// in --shutdown-timeout (30, there 0), and a flag of an absent feature is an error.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "backend/device.h"
#include "elastickv/config.h"
#include "server/http.h"

namespace ekv {

struct ServeFlags {
  std::string model;                            // folder or built-in name
  std::string tokenizer;                        // folder of tokenizer.json; empty: the model's
  std::vector<std::string> served_model_names;  // empty: the model as given
  std::optional<int> max_model_len;             // tokens; absent: the model's own, or what fits
  std::optional<bool> async_scheduling;         // absent: as the device has it
  CudaLaunch cuda_launch;
  EngineConfig engine;  // max_model_len is decided at start
  HttpConfig http;
  std::string load_format = "auto";  // auto, safetensors, dummy
  std::string device = "auto";       // auto, cpu, cuda
  int threads = 0;                   // of the CPU backend; 0: all cores
  BaseFill base_fill = BaseFill::mid;
  uint64_t seed = 0;  // of dummy weights
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
