#include "bench/sim_replay.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <queue>
#include <unordered_map>

#include "backend/sim/sim_backend.h"
#include "bench/random.h"
#include "bench/sim_log.h"

namespace ekv {
namespace {

Error invalid(std::string param, std::string message) {
  return {Error::invalid_argument, std::move(message), std::move(param)};
}

Status check(std::span<const SimRequest> requests, const SimOptions& options) {
  if (Status bad = validate(options.engine)) return bad;
  if (options.replicas < 1) return invalid("replicas", fmt::format("must be >= 1, got {}", options.replicas));
  if (options.concurrency < 0)
    return invalid("concurrency", fmt::format("must be >= 0, got {}", options.concurrency));
  int64_t before_us = 0;
  for (size_t i = 0; i < requests.size(); ++i) {
    const SimRequest& request = requests[i];
    if (request.prompt.empty() || request.num_output < 1)
      return invalid("requests", fmt::format("request {} needs at least one prompt and one output token", i));
    if (request.arrival_us < before_us)
      return invalid("requests", fmt::format("request {} arrives at {} us, before the one in front of it or "
                                             "before the start: sort by arrival",
                                             i, request.arrival_us));
    before_us = request.arrival_us;
  }
  return std::nullopt;
}

// Engines in virtual time. Whoever is behind goes first, so that no replica sees a request from its future.
class SimRun {
 public:
  SimRun(std::span<const SimRequest> requests, const SimOptions& options, SimLog& log);
  SimResult run();

 private:
  struct Replica : EngineListener {
    Replica(SimRun& run, int number);
    void on_event(SeqEvent event) override { run.token_out(*this, event); }
    void on_step(const StepRecord& record) override { run.step_done(*this, record); }

    SimRun& run;
    int number;
    VirtualClock clock;
    SimBackend* backend = nullptr;  // owned by the engine
    std::unique_ptr<Engine> engine;
    std::unordered_map<SeqId, int> requests;  // unfinished ones
    int waiting = 0;                          // after its last step,
    int64_t waiting_since_us = 0;             // which ended at this time
  };
  using Arrival = std::pair<int64_t, int>;  // time, request; equal times in the order of the list

  void arrive_next(int64_t now_us);
  Replica& replica_for_next() const;
  Replica* last_in_time() const;
  void submit(Arrival arrival);
  void refuse(int index, std::string reason);
  void advance(Replica& replica);
  void token_out(Replica& replica, const SeqEvent& event);
  void step_done(Replica& replica, const StepRecord& record);
  void ended(int index, int64_t now_us);

  std::span<const SimRequest> requests_;
  const SimOptions& options_;
  SimLog& log_;
  SimResult result_;
  std::vector<std::unique_ptr<Replica>> replicas_;
  std::priority_queue<Arrival, std::vector<Arrival>, std::greater<>> arrivals_;
  int next_request_ = 0;  // the first that has not been put in arrivals_
  int num_ended_ = 0;
  double waiting_us_ = 0;  // waiting requests x time
  std::vector<int64_t> gaps_us_;
};

SimRun::Replica::Replica(SimRun& owner, int index) : run(owner), number(index) {
  auto made = make_sim_backend(run.options_.model, run.options_.engine.kv, clock);
  backend = made.get();
  engine = std::make_unique<Engine>(run.options_.engine, std::move(made), clock, *this);
}

SimRun::SimRun(std::span<const SimRequest> requests, const SimOptions& options, SimLog& log)
    : requests_(requests), options_(options), log_(log) {
  result_.requests.resize(requests.size());
  for (int i = 0; i < options.replicas; ++i) replicas_.push_back(std::make_unique<Replica>(*this, i));
  const size_t at_once = options.concurrency > 0 ? size_t(options.concurrency) : requests.size();
  for (size_t i = 0; i < std::min(at_once, requests.size()); ++i) arrive_next(0);
}

void SimRun::arrive_next(int64_t now_us) {
  if (next_request_ == int(requests_.size())) return;
  const int index = next_request_++;
  arrivals_.push({options_.concurrency > 0 ? now_us : requests_[size_t(index)].arrival_us, index});
}

SimRun::Replica& SimRun::replica_for_next() const {
  return **std::ranges::min_element(replicas_, {}, [](const auto& r) { return r->requests.size(); });
}

SimRun::Replica* SimRun::last_in_time() const {
  Replica* last = nullptr;
  for (const auto& replica : replicas_)
    if (!replica->engine->idle() && (!last || replica->clock.now_us() < last->clock.now_us()))
      last = replica.get();
  return last;
}

SimResult SimRun::run() {
  const auto start = std::chrono::steady_clock::now();
  while (num_ended_ < int(requests_.size())) {
    Replica* behind = last_in_time();
    if (!arrivals_.empty() && (!behind || arrivals_.top().first <= behind->clock.now_us())) {
      const Arrival arrival = arrivals_.top();
      arrivals_.pop();
      submit(arrival);
    } else {
      EKV_CHECK(behind != nullptr, "a request that has not ended is on its way or in an engine");
      advance(*behind);
    }
  }
  for (const auto& replica : replicas_) replica->engine->check_integrity();
  result_.mean_waiting = result_.end_us > 0 ? waiting_us_ / double(result_.end_us) : 0;
  result_.wall_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  result_.log_hash = log_.hash();
  return std::move(result_);
}

void SimRun::submit(Arrival arrival) {
  const auto [time_us, index] = arrival;
  const SimRequest& asked = requests_[size_t(index)];
  SimRequestRecord& record = result_.requests[size_t(index)];
  record.arrival_us = time_us;
  record.num_prompt = int(asked.prompt.size());
  result_.last_arrival_us = std::max(result_.last_arrival_us, time_us);
  const int64_t length = int64_t(asked.prompt.size()) + asked.num_output;
  if (length > options_.engine.max_model_len)
    return refuse(index, fmt::format("{} prompt and output tokens are more than max_model_len = {}", length,
                                     options_.engine.max_model_len));
  Replica& replica = replica_for_next();
  Request request{.prompt = asked.prompt, .arrival_us = time_us};
  request.sampling.temperature = 0;
  request.sampling.max_tokens = asked.num_output;
  const Result<SeqId> id = replica.engine->submit(std::move(request));
  if (!id) return refuse(index, id.error().message);
  replica.clock.advance_to(time_us);
  replica.requests.emplace(*id, index);
  record.replica = replica.number;
  record.token_us.reserve(size_t(asked.num_output));
}

void SimRun::refuse(int index, std::string reason) {
  SimRequestRecord& record = result_.requests[size_t(index)];
  record.finish = FinishReason::error;
  record.error = std::move(reason);
  ended(index, record.arrival_us);
}

// A step; or, when everybody waits for a transfer, the time until one is done or somebody arrives.
void SimRun::advance(Replica& replica) {
  if (replica.engine->step() || replica.engine->idle()) return;
  std::optional<int64_t> next_us = replica.backend->transfers().next_done_us();
  if (!arrivals_.empty()) next_us = std::min(next_us.value_or(arrivals_.top().first), arrivals_.top().first);
  EKV_CHECK(next_us.has_value(), "an engine with requests runs a step or waits for a transfer");
  replica.clock.advance_to(*next_us);
}

void SimRun::token_out(Replica& replica, const SeqEvent& event) {
  const int index = replica.requests.at(event.id);
  SimRequestRecord& record = result_.requests[size_t(index)];
  if (event.token) record.token_us.push_back(replica.clock.now_us());
  if (event.finish == FinishReason::none) return;
  record.first_scheduled_us = event.stats.first_scheduled_us;
  record.num_cached = event.stats.num_cached;
  record.num_preemptions = event.stats.num_preemptions;
  record.finish = event.finish;
  record.error = event.error;
  replica.requests.erase(event.id);
  ended(index, replica.clock.now_us());
}

void SimRun::ended(int index, int64_t now_us) {
  const SimRequestRecord& record = result_.requests[size_t(index)];
  gaps_us_.clear();
  for (size_t i = 0; i < record.token_us.size(); ++i)
    gaps_us_.push_back(record.token_us[i] - (i ? record.token_us[i - 1] : record.arrival_us));
  const LogField fields[] = {{"request", index},
                             {"replica", record.replica},
                             {"arrival_us", record.arrival_us},
                             {"first_scheduled_us", record.first_scheduled_us},
                             {"end_us", now_us},
                             {"prompt_tokens", record.num_prompt},
                             {"cached_tokens", record.num_cached},
                             {"preemptions", record.num_preemptions},
                             {"finish", int64_t(record.finish)}};
  log_.write("request", fields, "gaps_us", gaps_us_);
  result_.end_us = std::max(result_.end_us, now_us);
  ++num_ended_;
  if (options_.concurrency > 0) arrive_next(now_us);
}

void SimRun::step_done(Replica& replica, const StepRecord& record) {
  waiting_us_ += double(replica.waiting) * double(record.end_us - replica.waiting_since_us);
  replica.waiting = record.num_waiting;
  replica.waiting_since_us = record.end_us;
  if (record.num_prefill_tokens + record.num_decode_tokens + record.num_preempted == 0) return;
  ++result_.steps;
  result_.preemptions += record.num_preempted;
  result_.recomputed_tokens += record.num_recomputed;
  result_.prefill_tokens += record.num_prefill_tokens;
  result_.decode_tokens += record.num_decode_tokens;
  result_.prefix_query_tokens += record.prefix_query_tokens;
  result_.prefix_hit_tokens += record.prefix_hit_tokens;
  result_.max_waiting = std::max(result_.max_waiting, record.num_waiting);
  const LogField fields[] = {{"step", result_.steps},
                             {"replica", replica.number},
                             {"start_us", record.start_us},
                             {"end_us", record.end_us},
                             {"prefill_tokens", record.num_prefill_tokens},
                             {"decode_tokens", record.num_decode_tokens},
                             {"running", record.num_running},
                             {"waiting", record.num_waiting},
                             {"admitted", record.num_admitted},
                             {"preempted", record.num_preempted},
                             {"recomputed_tokens", record.num_recomputed},
                             {"prefix_query_tokens", record.prefix_query_tokens},
                             {"prefix_hit_tokens", record.prefix_hit_tokens},
                             {"free_pages", record.free_pages},
                             {"cached_pages", record.cached_pages}};
  log_.write("step", fields);
  if (options_.on_step) options_.on_step(replica.number, record);
}

}  // namespace

Result<SimResult> run_sim(std::span<const SimRequest> requests, const SimOptions& options) {
  if (Status bad = check(requests, options)) return *bad;
  Result<std::unique_ptr<SimLog>> log = SimLog::open(options.event_log);
  if (!log) return log.error();
  SimResult result = SimRun(requests, options, **log).run();
  if (Status failed = (*log)->close()) return *failed;
  return result;
}

std::vector<SimRequest> synthetic_requests(int count, int num_prompt, int num_output, uint64_t seed) {
  std::vector<SimRequest> requests(static_cast<size_t>(count));
  for (size_t i = 0; i < requests.size(); ++i) {
    requests[i].num_output = num_output;
    for (int j = 0; j < num_prompt; ++j)
      requests[i].prompt.push_back(TokenId(splitmix64(seed, i, uint64_t(j)) % 100'000));
  }
  return requests;
}

}  // namespace ekv
