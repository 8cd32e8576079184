#pragma once
// command.h -- what the benchmark commands have in common: flags in, files and progress out.
//
// Exit codes of every command: 0, 1 when the run failed or a request did, 2 for bad flags, 3 when the device is
// lost (server/exit_code.h).

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "elastickv/base.h"
#include "util/json.h"

namespace CLI {
class App;
}

namespace ekv {

// Parses the command line, then calls `finish`, which may throw CLI::ValidationError as the parser does. The
// exit code when the command is to end now; what there is to say has been printed.
std::optional<int> parse_flags(CLI::App& app, int argc, const char* const* argv,
                               const std::function<void()>& finish = {});

// Texts of flags as values. They throw CLI::ValidationError, which names the flag.
[[noreturn]] void wrong_flag(const std::string& flag, const std::string& why);
double positive_or_inf(const char* flag, const std::string& text);  // "inf", or a number above 0
std::vector<std::pair<std::string, std::string>> key_values(const char* flag,
                                                            const std::vector<std::string>& texts);
void must_be_writable(const char* flag, const std::string& path);  // a file that can be made; empty: no file

// Logs the error, with the flag at fault where its message does not name it; 1, the exit code.
int fail(const Error& error);

// Writes indented JSON. An empty path writes nothing.
Status write_json(const std::string& path, const Json& json);

// How far a long run is, on stderr: a bar on a terminal, elsewhere a line every ten seconds.
class Progress {
 public:
  explicit Progress(bool quiet = false);
  // `words` is asked for only when something is printed. done == all ends the bar.
  void show(int64_t done, int64_t all, const std::function<std::string()>& words);

 private:
  bool quiet_, terminal_;
  int64_t next_us_;
};

}  // namespace ekv
