#pragma once
// bench_offline.h -- `elastickv bench latency` and `bench throughput`: the engine in this process, no server.
// Flags, definitions and result fields are those of `vllm bench latency` and `vllm bench throughput`.

#include <memory>
#include <string>
#include <vector>

#include "backend/start.h"
#include "bench/arrivals.h"
#include "elastickv/engine.h"

namespace ekv {

// One engine, driven by the caller's thread.
class OfflineEngine : private EngineListener {
 public:
  // Errors: see prepare_start() and load_backend().
  static Result<std::unique_ptr<OfflineEngine>> make(const ModelFlags& flags, const LongestSequence& longest);

  struct Totals {
    double elapsed_s = 0;
    int64_t output_tokens = 0, preemptions = 0;
    // Of each request: from submission to its first token; from there to its last, per token.
    std::vector<double> ttft_s, tpot_s;
  };
  // Submits everything at once and steps until all is done. An Error when a request was refused or failed.
  Result<Totals> run(std::vector<Request> requests);

  int vocab() const { return vocab_; }  // of the model

 private:
  explicit OfflineEngine(int vocab) : vocab_(vocab) {}
  void on_event(SeqEvent event) override;
  void on_step(const StepRecord& record) override;

  int vocab_;
  SteadyClock clock_;
  std::unique_ptr<Engine> engine_;
  Totals totals_;
  std::string failure_;
};

// `batch` requests of random tokens that run to exactly `output_len` tokens; the same for the same seed.
std::vector<Request> random_requests(int batch, int input_len, int output_len, int vocab, uint64_t seed);

// Exit codes: bench/command.h.
int bench_latency(int argc, const char* const* argv);
int bench_throughput(int argc, const char* const* argv);

}  // namespace ekv
