#include "bench/command.h"

#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <fstream>
#include <limits>

#include "bench/trace_builder.h"

namespace ekv {
namespace {

constexpr int64_t kBarUs = 100'000, kLineUs = 10'000'000;

}  // namespace

std::optional<int> parse_flags(CLI::App& app, int argc, const char* const* argv,
                               const std::function<void()>& finish) {
  if (app.get_footer().empty())
    app.footer("Exit codes: 0; 1 the run failed, or a request did; 2 a flag is wrong; 3 the device is lost.");
  try {
    app.parse(argc, argv);
    if (finish) finish();
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : 2;
  }
  return std::nullopt;
}

void wrong_flag(const std::string& flag, const std::string& why) { throw CLI::ValidationError(flag, why); }

double positive_or_inf(const char* flag, const std::string& text) {
  if (text == "inf") return std::numeric_limits<double>::infinity();
  const std::optional<double> value = to_number(text);
  if (!value || !(*value > 0)) wrong_flag(flag, fmt::format("'{}' is neither a number above 0 nor inf", text));
  return *value;
}

std::vector<std::pair<std::string, std::string>> key_values(const char* flag,
                                                            const std::vector<std::string>& texts) {
  std::vector<std::pair<std::string, std::string>> out;
  for (const std::string& text : texts) {
    const size_t equals = text.find('=');
    if (equals == 0 || equals == std::string::npos)
      wrong_flag(flag, fmt::format("'{}' is not KEY=VALUE", text));
    out.emplace_back(text.substr(0, equals), text.substr(equals + 1));
  }
  return out;
}

void must_be_writable(const char* flag, const std::string& path) {
  if (path.empty()) return;
  const std::ofstream file(path, std::ios::app);
  if (!file) wrong_flag(flag, fmt::format("cannot write {}", path));
}

int fail(const Error& error) {
  std::string flag = error.param;
  std::ranges::replace(flag, '_', '-');
  const bool named = flag.empty() || error.message.find("--" + flag) != std::string::npos;
  log_error(named ? error.message : fmt::format("--{}: {}", flag, error.message));
  return 1;
}

Status write_json(const std::string& path, const Json& json) {
  if (path.empty()) return std::nullopt;
  std::ofstream file(path);
  file << dump_json(json, 2) << "\n";
  file.close();
  if (file) return std::nullopt;
  return Error{Error::io, fmt::format("cannot write {}", path), "json"};
}

Progress::Progress(bool quiet)
    : quiet_(quiet),
      terminal_(isatty(STDERR_FILENO) != 0),
      next_us_(SteadyClock().now_us() + (terminal_ ? kBarUs : kLineUs)) {}

void Progress::show(int64_t done, int64_t all, const std::function<std::string()>& words) {
  if (quiet_) return;
  const int64_t now_us = SteadyClock().now_us();
  const bool ends = terminal_ && done == all;
  if (now_us < next_us_ && !ends) return;
  next_us_ = now_us + (terminal_ ? kBarUs : kLineUs);
  if (!terminal_) {
    fmt::print(stderr, "{}/{} {}\n", done, all, words());
    return;
  }
  constexpr int kWidth = 30;
  const int filled = all > 0 ? int(kWidth * done / all) : kWidth;
  fmt::print(stderr, "\r[{:#<{}}{:.<{}}] {}/{} {}\033[K{}", "", filled, "", kWidth - filled, done, all, words(),
             ends ? "\n" : "");
  std::fflush(stderr);
}

}  // namespace ekv
