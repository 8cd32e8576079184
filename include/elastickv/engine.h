#pragma once
// engine.h -- the step loop and nothing else. Requests come in through a mailbox, tokens leave through a
// listener.

#include <atomic>
#include <chrono>
#include <memory>
#include <variant>
#include <vector>

#include "elastickv/backend.h"
#include "elastickv/config.h"
#include "elastickv/kv_manager.h"
#include "elastickv/scheduler.h"
#include "elastickv/sequence.h"
#include "sched/pack_step.h"
#include "sched/step_planner.h"
#include "util/mailbox.h"

namespace ekv {

// What one step did and how things stand after it; for metrics and the step log. A step that found nothing to
// run reports too, with zero tokens.
//
// Times of a step: planned from start_us on, submitted, collected, delivered until end_us. With two steps in
// flight the next one is planned and submitted before this one is collected; counts of what runs, waits and
// is held are those at end_us.
struct StepRecord {
  int64_t start_us = 0, end_us = 0;  // Clock time
  int64_t plan_us = 0;               // planning, bookkeeping and packing
  int64_t device_us = 0;    // from submit(), or the end of the step before if later, to the end of collect()
  int64_t wait_us = 0;      // of that in collect(): the host had nothing else to do. Near 0: the host is slower
  int64_t host_gap_us = 0;  // from the end of the step before to submit(): the device had nothing to do. 0 when
                            // that step was collected later, and after a pause in which nobody was served
  int num_prefill_tokens = 0, num_decode_tokens = 0;
  int num_running = 0, num_waiting = 0;
  int num_admitted = 0, num_preempted = 0;
  int num_recomputed = 0;           // tokens computed in this step that had been computed before
  int num_preemptions_avoided = 0;  // sequences that this step would have preempted if it could not demote
  int prefix_query_tokens = 0, prefix_hit_tokens = 0;  // of the sequences admitted in this step
  // Pages by state; what is in none of these is held by running sequences.
  int free_pages = 0, cached_pages = 0, locked_pages = 0, total_pages = 0;
  int resident_pairs = 0, resident_base_pairs = 0;  // of running sequences and of the prefix cache
  int host_slots_used = 0;
  // Changes of fidelity in this step, in pairs, and what its chunks saw; shortage: pages that only demotion
  // could give, reserve: pages that promotion leaves alone.
  int demoted_pairs = 0, promoted_pairs = 0, restores_begun = 0, backups_begun = 0, transfers_done = 0;
  int shortage = 0, reserve = 0;
  // Copies of whole pairs begun in this step, and those for which the host had no slot; sequences that wait for
  // theirs after it. Bytes of all copies begun in this step, each way.
  int stores_begun = 0, loads_begun = 0, stores_skipped = 0, num_loading = 0;
  int64_t to_host_bytes = 0, from_host_bytes = 0;
  int64_t pairs_seen = 0, base_pairs_seen = 0;              // each chunk once,
  int64_t query_pairs_seen = 0, query_base_pairs_seen = 0;  // or once for each of its tokens
  // What attention costs depends on: keys visible to each token of the chunks of several tokens, summed, and
  // the keys of the other chunks with how many of their pairs are BASE.
  int num_prefill_chunks = 0, decode_base_pairs = 0;
  int64_t prefill_keys = 0, decode_keys = 0;
  KvPath path = KvPath::native;
  int64_t clamped_values = 0;  // KV values that were cut to what the number format holds
};

// Called on the engine thread; must not block and must not call back into the engine, except Engine::cancel.
class EngineListener {
 public:
  virtual ~EngineListener() = default;
  virtual void on_event(SeqEvent event) = 0;
  virtual void on_step(const StepRecord& record) = 0;
};

class Engine {
 public:
  // `clock` and `listener` outlive the engine.
  Engine(const EngineConfig& config, std::unique_ptr<Backend> backend, const Clock& clock,
         EngineListener& listener);
  ~Engine();

  // Any thread. A request that can never fit is refused at once; otherwise events with this id follow until one
  // carries a finish reason.
  Result<SeqId> submit(Request request);
  void cancel(SeqId id);      // any thread; unknown and finished ids are ignored
  void reset_prefix_cache();  // any thread; takes effect before the next step

  // Engine thread.
  // False: there was nothing to run, nor anything in flight. With config().async_scheduling and a backend that
  // can, one step stays in flight from call to call, and what a call delivers was submitted by the one before.
  bool step();
  void wait_for_work(std::chrono::milliseconds at_most);  // returns when a command arrived, or after the time
  bool idle() const {
    return sequences_.empty() && mailbox_.empty() && num_in_flight_ == 0 && kv_.pairs().num_transfers() == 0;
  }
  void fail_all(const std::string& reason);  // ends every sequence with FinishReason::error
  void check_integrity() const;              // aborts when a page or a reference is lost

  const EngineConfig& config() const { return config_; }
  const KvManager& kv() const { return kv_; }

 private:
  struct NewSequence {
    SeqId id;
    Request request;
    int64_t queued_us;
  };
  struct Cancel {
    SeqId id;
  };
  struct ResetPrefixCache {};
  using Command = std::variant<NewSequence, Cancel, ResetPrefixCache>;

  // A step from its plan to its delivery.
  struct Flight {
    StepPlan plan;
    PackedStep packed;
    StepRecord record;
    bool submitted = false;  // false: it only preempts, and the device has nothing to do
    int64_t submit_us = 0;   // Clock time
  };

  bool waits_for_copies() const { return num_in_flight_ == 0 && kv_.pairs().num_transfers() > 0; }
  Status refuse(const Request& request) const;
  void accept_commands();
  void commit(Flight& flight);
  void launch(Flight& flight);
  void advance(const Flight& flight);
  void count_plan(Flight& flight);
  void count_admitted(SeqId id, int first_pos, StepRecord& record);
  void count_fidelity(Flight& flight);
  void count_copies(StepRecord& record);
  void land(Flight& flight);
  const StepOutput& collect(Flight& flight);
  void deliver(Flight& flight, const StepOutput& output);
  void deliver_tokens(const Flight& flight, const StepOutput& output);
  void deliver_row(Sequence& sequence, const SampleRow& asked, const SampledRow& row, int64_t now_us);
  bool is_full(const Sequence& sequence, int num_output) const;
  FinishReason finish_reason(const Sequence& sequence, int num_output, TokenId last) const;
  void finish(Sequence& sequence, FinishReason reason, SeqEvent event);
  void report(StepRecord& record);

  EngineConfig config_;
  std::unique_ptr<Backend> backend_;
  const Clock& clock_;
  EngineListener& listener_;
  KvManager kv_;
  SequenceTable sequences_;
  Mailbox<Command> mailbox_;
  std::vector<Command> commands_;  // of the step being run
  std::atomic<uint64_t> next_id_{1};
  StepPlanner planner_;
  std::vector<Flight> flights_;  // a ring, as large as steps may be in flight
  size_t oldest_ = 0;            // in flight, if any is
  size_t num_in_flight_ = 0;
  std::optional<int64_t> collected_us_;  // when the last step was, Clock time; none: nobody was served since
  int num_skipped_before_ = 0;           // stores, up to the step before
};

}  // namespace ekv
