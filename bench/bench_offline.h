#pragma once
// bench_offline.h -- `elastickv bench latency` and `bench throughput`: the engine in this process, no server.
// Flags, definitions and result fields are those of `vllm bench latency` and `vllm bench throughput`.

#include <memory>
#include <string>
#include <vector>

#include "bench/arrivals.h"
#include "bench/offline_model.h"
#include "elastickv/engine.h"

namespace ekv {

// One engine, driven by the caller's thread.
class OfflineEngine : private EngineListener {
 public:
  // `longest`: tokens of the longest sequence to come. Errors: model, settings, a pool too small for it.
  static Result<std::unique_ptr<OfflineEngine>> make(const OfflineModelFlags& flags, int longest);

  struct Totals {
    double elapsed_s = 0;
    int64_t output_tokens = 0, preemptions = 0;
    // Of each request: from submission to its first token; from there to its last, per token.
    std::vector<double> ttft_s, tpot_s;
  };
  // Submits everything at once and steps until all is done. An Error when a request was refused or failed.
  Result<Totals> run(std::vector<Request> requests);

  const ModelConfig& model() const { return model_->config(); }

 private:
  explicit OfflineEngine(Model model) : model_(std::make_unique<Model>(std::move(model))) {}
  void on_event(SeqEvent event) override;
  void on_step(const StepRecord& record) override;

  std::unique_ptr<Model> model_;  // outlives the backend
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
