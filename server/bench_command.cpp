#include "server/bench_command.h"

#include <fmt/core.h>

#include <string_view>

#include "bench/bench_offline.h"
#include "bench/bench_serve.h"
#include "bench/quality.h"

namespace ekv {
namespace {

struct Benchmark {
  std::string_view name, what;
  int (*run)(int argc, const char* const* argv);
};

constexpr Benchmark kBenchmarks[] = {
    {"serve", "load on a running server over HTTP: TTFT, TPOT, ITL, goodput", bench_serve},
    {"latency", "one batch of requests in this process, again and again", bench_latency},
    {"throughput", "many requests at once in this process", bench_throughput},
    {"quality", "what BASE pairs do to the predictions of a text", bench_quality},
};

}  // namespace

int bench_command(int argc, const char* const* argv) {
  const std::string_view name = argc > 1 ? argv[1] : "";
  for (const Benchmark& benchmark : kBenchmarks)
    if (benchmark.name == name) return benchmark.run(argc - 1, argv + 1);
  const bool asked = name == "--help" || name == "-h";
  fmt::print(asked ? stdout : stderr,
             "usage: elastickv bench NAME [flags]; `elastickv bench NAME --help` lists them\n");
  for (const Benchmark& benchmark : kBenchmarks)
    fmt::print(asked ? stdout : stderr, "  {:<12}{}\n", benchmark.name, benchmark.what);
  return asked ? 0 : 2;
}

}  // namespace ekv
