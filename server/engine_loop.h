#pragma once
// engine_loop.h -- the engine's thread, and the way back: each HTTP request gets the events of its sequences in
// a queue of its own. The engine thread never waits for a reader; a queue is bounded by the tokens asked for.

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "elastickv/engine.h"
#include "elastickv/metrics.h"

namespace ekv {

class EngineLoop;

struct ChoiceEvent {
  int choice = 0;  // index into the requests that were submitted together
  SeqEvent event;
};

// What one HTTP request has running in the engine. Its destructor cancels what has not finished.
class Generation {
 public:
  ~Generation();
  Generation(const Generation&) = delete;
  Generation& operator=(const Generation&) = delete;

  int num_choices() const { return int(choices_.size()); }
  // Replaces `events` by all that have arrived, in order; blocks until there is one. False: abandon() was
  // called.
  bool wait(std::vector<ChoiceEvent>& events);
  // The reader makes use of this event; it must, of each in order, until it finishes the choice. Counted here
  // and not where tokens are made: past a stop string the engine makes a few that no client ever sees, and
  // totals must equal those of the clients.
  // `is_output`: false for the token that scoring a prompt makes and nobody gets.
  void count(const ChoiceEvent& arrived, bool is_output);
  // The reader has all that it needs of this choice: the engine finished it, or its text is complete at
  // `stats.num_output` tokens and the rest is cancelled.
  void finish_choice(int choice, FinishReason reason, const SeqStats& stats);
  // Any thread: nobody reads any more. Cancels everything; wait() returns false from now on.
  void abandon();

 private:
  friend class EngineLoop;
  struct Choice {
    SeqId id{};
    bool ended = false;     // the engine has finished it
    bool finished = false;  // the reader has
    int max_tokens = 0;
    int num_taken = 0;
    int64_t last_token_us = 0;
    bool counts_prompt = false;  // several choices share one prompt: it is counted once
  };
  Generation(EngineLoop& loop, size_t num_choices) : loop_(loop), choices_(num_choices) {}
  void push(int choice, SeqEvent event);  // engine thread

  EngineLoop& loop_;
  std::vector<Choice> choices_;  // the reader's; ids are fixed before the generation is handed out
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::vector<ChoiceEvent> events_;  // guarded by mutex_
  bool abandoned_ = false;           // guarded by mutex_
};

struct EngineLoopConfig {
  int max_queued = 0;           // sequences that may wait for a place in the batch; 0: no limit
  int64_t hang_us = 300000000;  // a step that takes longer makes healthy() false
  // Engine thread, after every report of the engine; must be quick. Empty: nobody listens.
  std::function<void(const StepRecord&)> on_step;
};

// Fatal-error policy: an exception out of a step (a DeviceError: the device is lost) is logged in one line,
// ends every request with an error, makes healthy() false, refuses new requests as unavailable and calls
// `on_fatal` once; the process should then exit.
class EngineLoop : private EngineListener {
 public:
  using MakeEngine = std::function<std::unique_ptr<Engine>(EngineListener&)>;
  EngineLoop(const EngineLoopConfig& config, const MakeEngine& make_engine, const Clock& clock,
             Metrics& metrics, std::function<void()> on_fatal);
  ~EngineLoop() override;  // cancels everything and ends the thread

  // Any thread. All requests or none. `per_prompt`: so many consecutive requests are choices of one prompt.
  Result<std::shared_ptr<Generation>> submit(std::vector<Request> requests, int per_prompt);
  void reset_prefix_cache() { engine_->reset_prefix_cache(); }
  void refuse_new_requests() { accepting_ = false; }  // from now on submit() says that the server is stopping
  void cancel_all();

  bool accepting() const { return accepting_; }
  bool failed() const { return failed_; }
  bool healthy() const;       // alive, and its current step is not older than hang_us
  int num_in_flight() const;  // sequences that have not finished
  const EngineConfig& engine_config() const { return engine_->config(); }
  int num_pages() const { return engine_->kv().num_pages(); }

 private:
  friend class Generation;
  struct Reader {
    std::weak_ptr<Generation> generation;
    int choice = 0;
  };
  void on_event(SeqEvent event) override;
  void on_step(const StepRecord& record) override;
  void run();
  void fail(const std::string& what, const std::string& advice);
  Status room_for(size_t num_requests) const;

  EngineLoopConfig config_;
  const Clock& clock_;
  Metrics& metrics_;
  std::function<void()> on_fatal_;
  std::unique_ptr<Engine> engine_;
  mutable std::mutex mutex_;
  std::unordered_map<SeqId, Reader> readers_;  // of sequences in flight; guarded by mutex_
  std::atomic<bool> accepting_{true}, failed_{false}, stopping_{false};
  std::atomic<int> num_running_{0}, num_waiting_{0};  // after the last step
  std::atomic<int64_t> last_turn_us_{0};
  std::thread thread_;
};

}  // namespace ekv
