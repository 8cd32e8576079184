// main.cpp -- the command line in, an exit code out. The only file that may end the process.

#include <fmt/core.h>

#include "bench/quality.h"
#include "server/flags.h"
#include "server/serve.h"

int main(int argc, char** argv) {
  const ekv::CommandLine line = ekv::parse_command_line(argc, argv);
  if (line.serve) return ekv::serve(*line.serve);
  if (line.quality) return ekv::bench_quality(*line.quality);
  fmt::print(line.exit_code == 0 ? stdout : stderr, "{}", line.text);
  return line.exit_code;
}
