#include "bench/replay_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <queue>
#include <unordered_map>

#include "elastickv/step_log.h"

namespace ekv {
namespace {

// Two steps at the bounds of a cost model still fit in 64 bits after it; a trace ends by half of it.
constexpr int64_t kMostRunUs = 2'000'000'000'000'000'000;
constexpr size_t kMostPoints = 1'000'000;  // of a series: 70 bytes each in memory, as many in its file

Error invalid(std::string param, std::string message) {
  return {Error::invalid_argument, std::move(message), std::move(param)};
}

Status check(const ReplayLoad& load, const ReplayOptions& options, size_t num_devices) {
  if (Status bad = validate(options.engine)) return bad;
  if (num_devices < 1) return invalid("replicas", "replicas must be >= 1");
  if (options.concurrency < 0)
    return invalid("concurrency", fmt::format("concurrency must be >= 0, got {}", options.concurrency));
  int64_t before_us = 0;
  for (size_t i = 0; i < load.requests.size(); ++i) {
    const ReplayRequest& request = load.requests[i];
    if (request.num_prompt < 1 || request.num_output < 1)
      return invalid("requests", fmt::format("request {} needs at least one prompt and one output token", i));
    if (request.arrival_us < before_us)
      return invalid("requests", fmt::format("request {} arrives at {} us, before the one in front of it or "
                                             "before the start: sort by arrival",
                                             i, request.arrival_us));
    before_us = request.arrival_us;
  }
  return std::nullopt;
}

// Those whose KV is on its way from the host wait too: nothing of them can run.
int num_waiting(const StepRecord& record) { return record.num_waiting + record.num_loading; }

// The state of one replica at each multiple of the period. Between two steps it is what the first one left.
class Sampler {
 public:
  explicit Sampler(int64_t period_us) : period_us_(period_us) {}

  void step(const StepRecord& record) {
    hold_until(record.end_us);
    state_ = {.running = record.num_running,
              .waiting = num_waiting(record),
              .free_pages = record.free_pages,
              .base_pairs = record.resident_base_pairs,
              .live_pairs = record.resident_pairs};
  }
  // Notes the present state for every point before `time_us`.
  void hold_until(int64_t time_us) {
    if (period_us_ == 0 || too_late_us_ > 0) return;
    if (time_us / period_us_ >= int64_t(kMostPoints)) {
      too_late_us_ = time_us;
      return;
    }
    for (; int64_t(points_.size()) * period_us_ < time_us; points_.push_back(state_))
      state_.time_us = int64_t(points_.size()) * period_us_;
  }
  const std::vector<SeriesPoint>& points() const { return points_; }
  // The series would have more than kMostPoints points, because the run has got this far; 0: it has not.
  int64_t too_late_us() const { return too_late_us_; }

 private:
  int64_t period_us_;
  int64_t too_late_us_ = 0;
  SeriesPoint state_;
  std::vector<SeriesPoint> points_;
};

bool did_something(const StepRecord& r) {
  const int tokens = r.num_prefill_tokens + r.num_decode_tokens + r.num_preempted;
  const int copies = r.restores_begun + r.backups_begun + r.stores_begun + r.loads_begun + r.transfers_done;
  return tokens + copies + r.demoted_pairs + r.promoted_pairs > 0;
}

void write_line(StepLog& log, int64_t request, const ReplayRecord& r) {
  std::vector<int64_t> gaps_us;
  for (size_t i = 0; i < r.token_us.size(); ++i)
    gaps_us.push_back(r.token_us[i] - (i ? r.token_us[i - 1] : r.arrival_us));
  const LogField fields[] = {{"request", request},
                             {"replica", r.replica},
                             {"arrival_us", r.arrival_us},
                             {"first_scheduled_us", r.first_scheduled_us},
                             {"end_us", r.end_us},
                             {"prompt_tokens", r.num_prompt},
                             {"cached_tokens", r.num_cached},
                             {"preemptions", r.num_preemptions},
                             {"pairs_seen", r.pairs_seen},
                             {"base_pairs_seen", r.base_pairs_seen},
                             {"finish", int64_t(r.finish)}};
  log.write("request", fields, "gaps_us", gaps_us);
}

// Whoever is behind in time goes first, so that no replica sees a request from its future.
class EngineRun {
 public:
  EngineRun(const ReplayLoad& load, std::vector<ReplayDevice> devices, const ReplayOptions& options,
            StepLog& log);
  Result<ReplayResult> run();

 private:
  struct Replica : EngineListener {
    Replica(EngineRun& run, int number, ReplayDevice device);
    void on_event(SeqEvent event) override { run.token_out(*this, event); }
    void on_step(const StepRecord& record) override { run.step_done(*this, record); }

    EngineRun& run;
    int number;
    std::unique_ptr<ReplayClock> clock;
    Engine engine;
    std::unordered_map<SeqId, int> requests;  // unfinished ones
    int waiting = 0;                          // after its last step,
    int64_t waiting_since_us = 0;             // which ended at this time
    Sampler sampler;
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
  void add_up(const StepRecord& record);
  void ended(int index, int64_t now_us);
  Status too_long(const Replica& replica) const;
  Status finish_series();

  const ReplayLoad& load_;
  const ReplayOptions& options_;
  StepLog& log_;
  ReplayResult result_;
  std::vector<std::unique_ptr<Replica>> replicas_;
  std::priority_queue<Arrival, std::vector<Arrival>, std::greater<>> arrivals_;
  int next_request_ = 0;  // the first that has not been put in arrivals_
  int num_ended_ = 0;
  double waiting_us_ = 0;  // waiting requests x time
};

EngineRun::Replica::Replica(EngineRun& owner, int index, ReplayDevice device)
    : run(owner),
      number(index),
      clock(std::move(device.clock)),
      engine(owner.options_.engine, std::move(device.backend), *clock, *this),
      sampler(owner.options_.series_period_us) {}

EngineRun::EngineRun(const ReplayLoad& load, std::vector<ReplayDevice> devices, const ReplayOptions& options,
                     StepLog& log)
    : load_(load), options_(options), log_(log) {
  const size_t count = load.requests.size();
  result_.requests.resize(count);
  for (size_t i = 0; i < devices.size(); ++i)
    replicas_.push_back(std::make_unique<Replica>(*this, int(i), std::move(devices[i])));
  const size_t at_once = options.concurrency > 0 ? size_t(options.concurrency) : count;
  for (size_t i = 0; i < std::min(at_once, count); ++i) arrive_next(0);
}

void EngineRun::arrive_next(int64_t now_us) {
  if (next_request_ == int(load_.requests.size())) return;
  const int index = next_request_++;
  arrivals_.push({options_.concurrency > 0 ? now_us : load_.requests[size_t(index)].arrival_us, index});
}

EngineRun::Replica& EngineRun::replica_for_next() const {
  return **std::ranges::min_element(replicas_, {}, [](const auto& r) { return r->requests.size(); });
}

EngineRun::Replica* EngineRun::last_in_time() const {
  Replica* last = nullptr;
  for (const auto& replica : replicas_)
    if (!replica->engine.idle() && (!last || replica->clock->now_us() < last->clock->now_us()))
      last = replica.get();
  return last;
}

Result<ReplayResult> EngineRun::run() {
  const SteadyClock wall;
  const int64_t start_us = wall.now_us();
  while (num_ended_ < int(load_.requests.size())) {
    Replica* behind = last_in_time();
    if (!arrivals_.empty() && (!behind || arrivals_.top().first <= behind->clock->now_us())) {
      const Arrival arrival = arrivals_.top();
      arrivals_.pop();
      submit(arrival);
    } else {
      EKV_CHECK(behind != nullptr, "a request that has not ended is on its way or in an engine");
      advance(*behind);
      if (Status bad = too_long(*behind)) return *std::move(bad);
    }
  }
  for (const auto& replica : replicas_) replica->engine.check_integrity();
  if (Status bad = finish_series()) return *std::move(bad);
  result_.mean_waiting = result_.end_us > 0 ? waiting_us_ / double(result_.end_us) : 0;
  result_.wall_s = double(wall.now_us() - start_us) * 1e-6;
  result_.log_hash = log_.hash();
  return std::move(result_);
}

void EngineRun::submit(Arrival arrival) {
  const auto [time_us, index] = arrival;
  const ReplayRequest& asked = load_.requests[size_t(index)];
  ReplayRecord& record = result_.requests[size_t(index)];
  record.arrival_us = time_us;
  record.num_prompt = asked.num_prompt;
  result_.last_arrival_us = std::max(result_.last_arrival_us, time_us);
  const int64_t length = int64_t(asked.num_prompt) + asked.num_output;
  if (length > options_.engine.max_model_len)
    return refuse(index, fmt::format("{} prompt and output tokens are more than max_model_len = {}", length,
                                     options_.engine.max_model_len));
  Replica& replica = replica_for_next();
  replica.clock->wait_until(time_us);
  Request request{.prompt = load_.prompt(size_t(index)), .arrival_us = time_us};
  request.sampling.temperature = 0;
  request.sampling.max_tokens = asked.num_output;
  const Result<SeqId> id = replica.engine.submit(std::move(request));
  if (!id) return refuse(index, id.error().message);
  replica.requests.emplace(*id, index);
  record.replica = replica.number;
  record.token_us.reserve(size_t(asked.num_output));
}

void EngineRun::refuse(int index, std::string reason) {
  ReplayRecord& record = result_.requests[size_t(index)];
  record.finish = FinishReason::error;
  record.error = std::move(reason);
  ended(index, record.arrival_us);
}

// A step. A step that finds nothing to run ends sequences, or waits for a transfer inside the backend.
void EngineRun::advance(Replica& replica) {
  if (replica.engine.step() || replica.engine.idle()) return;
  EKV_CHECK(!arrivals_.empty(), "an engine with requests runs a step or waits for a transfer");
  replica.clock->wait_until(arrivals_.top().first);
}

void EngineRun::token_out(Replica& replica, const SeqEvent& event) {
  const int index = replica.requests.at(event.id);
  ReplayRecord& record = result_.requests[size_t(index)];
  if (event.token) record.token_us.push_back(replica.clock->now_us());
  if (event.finish == FinishReason::none) return;
  record.first_scheduled_us = event.stats.first_scheduled_us;
  record.num_cached = event.stats.num_cached;
  record.num_preemptions = event.stats.num_preemptions;
  record.pairs_seen = event.stats.pairs_seen, record.base_pairs_seen = event.stats.base_pairs_seen;
  record.finish = event.finish;
  record.error = event.error;
  replica.requests.erase(event.id);
  ended(index, replica.clock->now_us());
}

void EngineRun::ended(int index, int64_t now_us) {
  ReplayRecord& record = result_.requests[size_t(index)];
  record.end_us = now_us;
  write_line(log_, index, record);
  result_.end_us = std::max(result_.end_us, now_us);
  ++num_ended_;
  if (options_.concurrency > 0) arrive_next(now_us);
}

void EngineRun::step_done(Replica& replica, const StepRecord& record) {
  const bool counts = did_something(record) || num_waiting(record) != replica.waiting;
  waiting_us_ += double(replica.waiting) * double(record.end_us - replica.waiting_since_us);
  replica.waiting = num_waiting(record);
  replica.waiting_since_us = record.end_us;
  replica.sampler.step(record);
  if (!counts) return;
  add_up(record);
  log_.write(result_.steps, replica.number, record);
  if (options_.on_step) options_.on_step(replica.number, record);
  if (options_.on_progress) options_.on_progress(num_ended_, record.end_us);
}

void EngineRun::add_up(const StepRecord& record) {
  ++result_.steps;
  result_.preemptions += record.num_preempted;
  result_.recomputed_tokens += record.num_recomputed;
  result_.prefill_tokens += record.num_prefill_tokens;
  result_.decode_tokens += record.num_decode_tokens;
  result_.prefix_query_tokens += record.prefix_query_tokens;
  result_.prefix_hit_tokens += record.prefix_hit_tokens;
  result_.preemptions_avoided += record.num_preemptions_avoided;
  result_.to_host_bytes += record.to_host_bytes;
  result_.from_host_bytes += record.from_host_bytes;
  result_.demoted_pairs += record.demoted_pairs;
  result_.promoted_pairs += record.promoted_pairs;
  result_.demotion_steps += record.demoted_pairs > 0;
  result_.promotion_steps += record.restores_begun > 0;
  result_.pairs_seen += record.pairs_seen;
  result_.base_pairs_seen += record.base_pairs_seen;
  result_.query_pairs_seen += record.query_pairs_seen;
  result_.query_base_pairs_seen += record.query_base_pairs_seen;
  result_.max_waiting = std::max(result_.max_waiting, num_waiting(record));
}

Status EngineRun::too_long(const Replica& replica) const {
  if (const int64_t late_us = replica.sampler.too_late_us())
    return invalid("time-series",
                   fmt::format("after {:.0f} s of the replay --time-series would have more than {} rows with "
                               "--series-period {:g}: give a longer one, or a part of the trace with --window",
                               double(late_us) * 1e-6, kMostPoints, double(options_.series_period_us) * 1e-6));
  if (replica.clock->now_us() > kMostRunUs)
    return invalid("",
                   fmt::format("the replay has got to {:g} s, and there is work left: the times of the cost "
                               "model or of the trace cannot be meant",
                               double(replica.clock->now_us()) * 1e-6));
  return std::nullopt;
}

Status EngineRun::finish_series() {
  if (options_.series_period_us == 0) return std::nullopt;
  for (const auto& replica : replicas_) {
    replica->sampler.hold_until(result_.end_us + options_.series_period_us);
    if (Status bad = too_long(*replica)) return bad;
    const auto& points = replica->sampler.points();
    if (result_.series.size() < points.size()) result_.series.resize(points.size());
    for (size_t i = 0; i < points.size(); ++i) result_.series[i] += points[i];
  }
  std::vector<std::pair<int64_t, int64_t>> offered;  // time, prompt tokens
  for (const ReplayRecord& record : result_.requests) offered.push_back({record.arrival_us, record.num_prompt});
  std::ranges::sort(offered);
  size_t next = 0;
  int64_t tokens = 0;
  for (SeriesPoint& point : result_.series) {
    for (; next < offered.size() && offered[next].first <= point.time_us; ++next)
      tokens += offered[next].second;
    point.offered_tokens = tokens;
  }
  return std::nullopt;
}

}  // namespace

Result<ReplayResult> run_replay(const ReplayLoad& load, std::vector<ReplayDevice> devices,
                                const ReplayOptions& options) {
  if (Status bad = check(load, options, devices.size())) return *bad;
  Result<std::unique_ptr<StepLog>> log = StepLog::open(options.step_log);
  if (!log) return log.error();
  Result<ReplayResult> result = EngineRun(load, std::move(devices), options, **log).run();
  if (!result) return result.error();
  if (Status failed = (*log)->close()) return *failed;
  return result;
}

std::vector<RequestRecord> request_records(const ReplayResult& result) {
  std::vector<RequestRecord> records;
  for (const ReplayRecord& r : result.requests) {
    RequestRecord record{.start_us = r.arrival_us,
                         .end_us = r.end_us,
                         .input_tokens = r.num_prompt,
                         .output_tokens = int(r.token_us.size()),
                         .error = r.error,
                         .preemptions = r.num_preemptions,
                         .base_pairs_seen = r.base_pairs_seen,
                         .pairs_seen = r.pairs_seen};
    for (const int64_t time_us : r.token_us) record.times.add(time_us);
    records.push_back(std::move(record));
  }
  return records;
}

EngineTotals engine_totals(const ReplayResult& r) {
  const auto share = [](int64_t part, int64_t whole) {
    return whole > 0 ? std::optional(double(part) / double(whole)) : std::nullopt;
  };
  return {.preemptions = r.preemptions,
          .recomputed_tokens = r.recomputed_tokens,
          .steps = r.steps,
          .max_waiting = r.max_waiting,
          .prefix_hit_tokens = r.prefix_hit_tokens,
          .preemptions_avoided = r.preemptions_avoided,
          .to_host_bytes = r.to_host_bytes,
          .from_host_bytes = r.from_host_bytes,
          .demoted_pairs = r.demoted_pairs,
          .promoted_pairs = r.promoted_pairs,
          .demotion_steps = r.demotion_steps,
          .promotion_steps = r.promotion_steps,
          .mean_waiting = r.mean_waiting,
          .base_exposure = share(r.base_pairs_seen, r.pairs_seen),
          .base_exposure_query_weighted = share(r.query_base_pairs_seen, r.query_pairs_seen),
          .simulated_s = r.duration_s(),
          .wall_s = r.wall_s,
          .log_hash = r.log_hash};
}

}  // namespace ekv
