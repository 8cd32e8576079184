#pragma once
// metrics.h -- counters and histograms under the names that dashboards for vLLM query, as Prometheus text.
//
// Every metric carries the labels model_name and engine ("0"). Each choice of a request counts as one request,
// but the prompt that several choices share is counted once, as in `usage`: totals equal those of clients.

#include <memory>
#include <string>

#include "elastickv/config.h"
#include "elastickv/engine.h"
#include "elastickv/request.h"

namespace ekv {

// Any thread; a call costs well under a microsecond, and text() holds nobody up for longer than that.
class Metrics {
 public:
  Metrics(const std::string& model_name, const EngineConfig& config, int num_pages);
  ~Metrics();

  void on_request(int num_choices);
  // `is_output`: false when the client gets no token, because it asked for the scores of its prompt alone.
  void on_first_token(const SeqStats& stats, bool counts_prompt, bool is_output = true);
  void on_next_token(int64_t gap_us);
  // `max_tokens`: what the request asked for.
  void on_finished(FinishReason reason, const SeqStats& stats, int max_tokens);
  void on_step(const StepRecord& record);

  std::string text() const;  // Prometheus text format 0.0.4

 private:
  struct Families;
  std::unique_ptr<Families> families_;
};

}  // namespace ekv
