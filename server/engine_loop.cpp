#include "server/engine_loop.h"

#include <fmt/format.h>

#include <exception>

#include "server/exit_code.h"

namespace ekv {
namespace {

constexpr std::chrono::milliseconds kIdleTurn{100};  // how long an idle engine thread sleeps at most

}  // namespace

Generation::~Generation() {
  for (Choice& choice : choices_) {
    if (choice.finished || choice.id == SeqId{}) continue;
    if (!choice.ended) loop_.engine_->cancel(choice.id);
    loop_.metrics_.on_finished(FinishReason::cancelled, {.num_output = choice.num_taken}, choice.max_tokens);
  }
}

bool Generation::wait(std::vector<ChoiceEvent>& events) {
  events.clear();
  std::unique_lock lock(mutex_);
  arrived_.wait(lock, [&] { return abandoned_ || !events_.empty(); });
  if (abandoned_) return false;
  std::swap(events, events_);
  return true;
}

void Generation::count(const ChoiceEvent& arrived, bool is_output) {
  Choice& choice = choices_[size_t(arrived.choice)];
  const SeqStats& stats = arrived.event.stats;
  if (arrived.event.finish != FinishReason::none) choice.ended = true;
  if (!arrived.event.token) return;
  if (choice.num_taken++ == 0)
    loop_.metrics_.on_first_token(stats, choice.counts_prompt, is_output);
  else
    loop_.metrics_.on_next_token(stats.last_token_us - choice.last_token_us);
  choice.last_token_us = stats.last_token_us;
}

void Generation::finish_choice(int index, FinishReason reason, const SeqStats& stats) {
  Choice& choice = choices_[size_t(index)];
  if (choice.finished) return;
  choice.finished = true;
  if (!choice.ended) loop_.engine_->cancel(choice.id);
  loop_.metrics_.on_finished(reason, stats, choice.max_tokens);
}

void Generation::abandon() {
  {
    const std::lock_guard lock(mutex_);
    if (abandoned_) return;
    abandoned_ = true;
    events_.clear();
  }
  arrived_.notify_all();
  for (const Choice& choice : choices_) loop_.engine_->cancel(choice.id);
}

void Generation::push(int choice, SeqEvent event) {
  {
    const std::lock_guard lock(mutex_);
    if (abandoned_) return;
    events_.push_back({choice, std::move(event)});
  }
  arrived_.notify_one();
}

EngineLoop::EngineLoop(const EngineLoopConfig& config, const MakeEngine& make_engine, const Clock& clock,
                       Metrics& metrics, std::function<void()> on_fatal)
    : config_(config),
      clock_(clock),
      metrics_(metrics),
      on_fatal_(std::move(on_fatal)),
      engine_(make_engine(*this)),
      last_turn_us_(clock.now_us()) {
  thread_ = std::thread([this] { run(); });
}

EngineLoop::~EngineLoop() {
  stopping_ = true;
  cancel_all();
  engine_->cancel(SeqId{});  // nobody has this id: it only wakes the thread
  thread_.join();
}

void EngineLoop::run() {
  try {
    while (!stopping_) {
      last_turn_us_ = clock_.now_us();
      if (!engine_->step()) engine_->wait_for_work(kIdleTurn);
    }
  } catch (const DeviceError& e) {
    fail(fmt::format("the device is lost: {}", e.what()),
         fmt::format("Start the server again; {}", kLostDeviceAdvice));
  } catch (const std::exception& e) {
    fail(fmt::format("a step failed: {}", e.what()), "Start the server again, and report this line as a fault");
  }
  {
    // A submit() that was let in before has put its requests into the engine when this lock is taken.
    const std::lock_guard lock(mutex_);
    accepting_ = false;
  }
  engine_->fail_all(failed_ ? "the engine has stopped; the server's log says why" : "the server has stopped");
  if (!failed_) return;
  // Of an engine with nothing to do: who keeps records writes out those of the steps before, which are lost if
  // the device is so ill that a destructor hangs.
  if (config_.on_step) config_.on_step({});
  on_fatal_();
}

// All that the log says about it, in one line.
void EngineLoop::fail(const std::string& what, const std::string& advice) {
  failed_ = true;  // before the line: who reads it finds /health as it says
  log_error(fmt::format("{}. The engine stops: {} sequences end with an error, new requests get 503. {}", what,
                        num_in_flight(), advice));
}

// The queue is what does not fit beside those that run. While the last step left somebody waiting, the batch is
// as full as memory allows, whatever its nominal width.
Status EngineLoop::room_for(size_t num_requests) const {
  if (failed_) return Error{Error::unavailable, "the engine has stopped; this server is going down", {}};
  if (!accepting_) return Error{Error::unavailable, "this server is shutting down", {}};
  if (config_.max_queued == 0) return std::nullopt;
  const int width = engine_->config().scheduler.max_step_seqs;
  if (int64_t(num_requests) > int64_t(width) + config_.max_queued)
    return Error{Error::invalid_argument,
                 fmt::format("the request has {} sequences; this server runs {} and queues {}", num_requests,
                             width, config_.max_queued),
                 "n"};
  const int places = num_waiting_ > 0 ? num_running_.load() : width;
  const int queued = int(readers_.size() + num_requests) - places;
  if (queued <= config_.max_queued) return std::nullopt;
  return Error{Error::unavailable,
               fmt::format("the queue of this server is full ({} requests wait); try again later",
                           std::max(0, int(readers_.size()) - places)),
               {}};
}

Result<std::shared_ptr<Generation>> EngineLoop::submit(std::vector<Request> requests, int per_prompt) {
  std::shared_ptr<Generation> generation(new Generation(*this, requests.size()));
  // Held over engine submit and registration: an event cannot come before its reader is known.
  const std::lock_guard lock(mutex_);
  if (Status full = room_for(requests.size())) return *std::move(full);
  metrics_.on_request(per_prompt);
  for (size_t i = 0; i < requests.size(); ++i) {
    Generation::Choice& choice = generation->choices_[i];
    choice.max_tokens = requests[i].sampling.max_tokens;
    choice.counts_prompt = int(i) % per_prompt == 0;
    Result<SeqId> id = engine_->submit(std::move(requests[i]));
    if (!id) return id.error();  // the generation's destructor cancels those before
    choice.id = *id;
    readers_.emplace(*id, Reader{generation, int(i)});
  }
  return generation;
}

void EngineLoop::on_event(SeqEvent event) {
  std::shared_ptr<Generation> generation;
  int choice = 0;
  {
    const std::lock_guard lock(mutex_);
    const auto it = readers_.find(event.id);
    if (it == readers_.end()) return;
    generation = it->second.generation.lock();
    choice = it->second.choice;
    if (event.finish != FinishReason::none) readers_.erase(it);
  }
  if (generation) generation->push(choice, std::move(event));
}

void EngineLoop::on_step(const StepRecord& record) {
  num_running_ = record.num_running;
  num_waiting_ = record.num_waiting;
  metrics_.on_step(record);
  if (config_.on_step) config_.on_step(record);
}

void EngineLoop::cancel_all() {
  const std::lock_guard lock(mutex_);
  for (const auto& [id, reader] : readers_) engine_->cancel(id);
}

bool EngineLoop::healthy() const { return !failed_ && clock_.now_us() - last_turn_us_ < config_.hang_us; }

int EngineLoop::num_in_flight() const {
  const std::lock_guard lock(mutex_);
  return int(readers_.size());
}

}  // namespace ekv
