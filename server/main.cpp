// main.cpp -- the command line in, an exit code out. The only file that may end the process,
// beside exit_guard.cpp.

#include <fmt/core.h>

#include <cstdio>
#include <string_view>

#include "bench/replay_command.h"
#include "server/bench_command.h"
#include "server/exit_code.h"
#include "server/flags.h"
#include "server/serve.h"

namespace {

int run(int argc, char** argv) {
  if (argc > 1 && std::string_view(argv[1]) == "bench") return ekv::bench_command(argc - 1, argv + 1);
  if (argc > 1 && std::string_view(argv[1]) == "replay") return ekv::replay(argc - 1, argv + 1);
  const ekv::CommandLine line = ekv::parse_command_line(argc, argv);
  if (line.serve) return ekv::serve(*line.serve);
  fmt::print(line.exit_code == 0 ? stdout : stderr, "{}", line.text);
  return line.exit_code;
}

}  // namespace

int main(int argc, char** argv) {
  return ekv::run_command([&] { return run(argc, argv); });
}
