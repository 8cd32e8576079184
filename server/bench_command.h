#pragma once
// bench_command.h -- `elastickv bench ...`: from the name of a benchmark to the program in bench/.

namespace ekv {

// `argv[0]` is "bench". The exit code; 2 for a name that does not exist.
int bench_command(int argc, const char* const* argv);

}  // namespace ekv
