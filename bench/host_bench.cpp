// host_bench.cpp -- what a step costs on the host before and after the device runs: views, plan_step, commit
// and pack_step at 1 to 1,000 running decodes, publishing, and prefix lookup; whole steps of the engine with
// what it delivers. Budget: DESIGN.md section 9.

#include <benchmark/benchmark.h>

#include <chrono>

#include "elastickv/engine.h"
#include "elastickv/kv_manager.h"
#include "elastickv/scheduler.h"
#include "sched/step_planner.h"
#include "support/planned_serving.h"

namespace ekv {
namespace {

constexpr int kPrompt = 2048, kOutput = 1024;  // lengths of a sequence; a run sees 2,048 to 3,072 tokens

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// `num_shared` leading tokens are the same for all.
Request request(int id, int num_shared) {
  Request r{.prompt = {}, .sampling = {.max_tokens = kOutput}, .cache_salt = {}, .arrival_us = id};
  for (int i = 0; i < kPrompt + id % kPairTokens; ++i) r.prompt.push_back(i < num_shared ? i : id * 7919 + i);
  return r;
}

EngineConfig config_for(KvPolicy policy, int num_seqs) {
  EngineConfig config;
  config.scheduler = {.max_step_tokens = 1 << 20, .max_step_seqs = num_seqs};
  config.fidelity.policy = policy;
  config.max_model_len = 1 << 20;
  return config;
}

// `percent` of the pages that the sequences need at their longest as TARGET: below 100 some pairs become BASE,
// or some sequences are preempted.
class Steps {
 public:
  Steps(KvPolicy policy, int num_seqs, int num_shared, int percent)
      : num_seqs_(num_seqs),
        num_shared_(num_shared),
        serving_(config_for(policy, num_seqs),
                 num_seqs * ceil_div(kPrompt + kPairTokens + kOutput, kBlockTokens) * percent / 100, 1 << 16) {
    refill();
  }

  // One step; returns the seconds of views, plan, commit and pack, and of publishing.
  std::pair<double, double> run() {
    if (serving_.sequences.running()[0]->num_remaining() == 1) refill();
    const auto start = std::chrono::steady_clock::now();
    serving_.prepare();
    const double prepared = seconds_since(start);
    const auto after = std::chrono::steady_clock::now();
    serving_.finish_step();
    return {prepared, seconds_since(after)};
  }

 private:
  void refill() {
    SequenceTable& sequences = serving_.sequences;
    while (!sequences.running().empty()) serving_.end(*sequences.running().back());
    while (!sequences.waiting().empty()) serving_.end(*sequences.waiting().back());
    for (int i = 0; i < num_seqs_; ++i) serving_.add(request(i, num_shared_));
    while (!sequences.waiting().empty()) serving_.step();
  }

  int num_seqs_, num_shared_;
  test::PlannedServing serving_;
};

template <KvPolicy policy>
void plan_commit_pack(benchmark::State& state) {
  Steps steps(policy, int(state.range(0)), int(state.range(1)), int(state.range(2)));
  double publishing = 0, worst = 0;
  for (auto _ : state) {
    const auto [prepared, published] = steps.run();
    state.SetIterationTime(prepared);
    publishing += published;
    worst = std::max(worst, prepared);
  }
  state.counters["worst_us"] = worst * 1e6;
  state.counters["publish_us"] = benchmark::Counter(publishing * 1e6, benchmark::Counter::kAvgIterations);
}
BENCHMARK(plan_commit_pack<KvPolicy::elastic>)
    ->ArgNames({"seqs", "shared", "pages_percent"})
    ->ArgsProduct({{1, 16, 64, 256, 1000}, {0, 1024}, {100, 85}})
    ->UseManualTime()
    ->Unit(benchmark::kMicrosecond);
BENCHMARK(plan_commit_pack<KvPolicy::exact_offload>)
    ->ArgNames({"seqs", "shared", "pages_percent"})
    ->ArgsProduct({{64, 256}, {0, 1024}, {100, 85}})
    ->UseManualTime()
    ->Unit(benchmark::kMicrosecond);

// A device that costs nothing: what is left of a step is the host's.
class Nothing : public Backend {
 public:
  explicit Nothing(int num_pages)
      : info_{.name = "nothing", .num_pages = num_pages, .max_steps_in_flight = 2} {}
  const BackendInfo& info() const override { return info_; }
  void submit(const StepInput& input) override {
    outputs_[num_submitted_++ % 2].rows.assign(input.sample_rows.size(), {.token = 7});
  }
  const StepOutput& collect() override { return outputs_[num_collected_++ % 2]; }

 private:
  BackendInfo info_;
  StepOutput outputs_[2];
  size_t num_submitted_ = 0, num_collected_ = 0;
};

struct Counts : EngineListener {
  void on_event(SeqEvent) override { ++events; }
  void on_step(const StepRecord& record) override { planned_us += record.plan_us; }
  int64_t events = 0, planned_us = 0;
};

// A step as the engine runs it, with its accounts and events: planned_us of it before the device runs, the rest
// is delivery. With two steps in flight the device works meanwhile.
void whole_step(benchmark::State& state) {
  const int num_seqs = int(state.range(0));
  EngineConfig config = config_for(KvPolicy::elastic, num_seqs);
  config.async_scheduling = state.range(1) == 2;
  const int pages = num_seqs * ceil_div(kPrompt + kPairTokens + kOutput, kBlockTokens);
  SteadyClock clock;
  Counts counts;
  Engine engine(config, std::make_unique<Nothing>(pages), clock, counts);
  int64_t steps = 0;
  for (auto _ : state) {
    if (engine.idle()) {
      state.PauseTiming();
      for (int i = 0; i < num_seqs; ++i) benchmark::DoNotOptimize(engine.submit(request(i, 0)));
      const Counts before = counts;
      for (int i = 0; i < 4; ++i) engine.step();  // prefill
      counts = before;
      state.ResumeTiming();
    }
    engine.step();
    ++steps;
  }
  state.counters["planned_us"] = double(counts.planned_us) / double(steps);
}
BENCHMARK(whole_step)
    ->ArgNames({"seqs", "in_flight"})
    ->ArgsProduct({{1, 16, 64, 256, 1000}, {1, 2}})
    ->Unit(benchmark::kMicrosecond);

void plan_only(benchmark::State& state) {
  std::vector<SeqView> running, waiting;
  for (int i = 0; i < state.range(0); ++i)
    running.push_back({.id = SeqId(uint64_t(i)),
                       .num_tokens = 2000 + i,
                       .num_computed = 1999 + i,
                       .num_blocks = ceil_div(1999 + i, kBlockTokens),
                       .num_freeable = 100,
                       .num_cached = 0,
                       .num_cached_free = 0});
  StepPlan plan;
  for (auto _ : state) {
    plan_step({.max_step_tokens = 8192, .max_step_seqs = 1024}, running, waiting, {1000, 100000}, plan);
    benchmark::DoNotOptimize(plan);
  }
}
BENCHMARK(plan_only)->ArgName("seqs")->Arg(1)->Arg(16)->Arg(64)->Arg(256)->Arg(1000)->Unit(
    benchmark::kMicrosecond);

// What a step's plan costs while a sequence waits for pages whose first `tokens` are cached: one that runs has
// the same ones, and the pool to itself.
void plan_while_waiting(benchmark::State& state) {
  const int length = int(state.range(0));
  const EngineConfig config = config_for(KvPolicy::target_only, 4);
  KvManager kv({}, length / kBlockTokens + 4);
  SequenceTable sequences(SchedulingPolicy::fcfs);
  StepPlanner planner(config);
  StepPlan plan;
  for (const int own : {1, 1024}) {
    Request r{.prompt = {}, .sampling = {.max_tokens = kOutput}, .cache_salt = {}};
    for (int t = 0; t < length + own; ++t) r.prompt.push_back(t < length ? t : t + own);
    Sequence& s = sequences.add(SeqId(uint64_t(own)), std::move(r));
    planner.plan(kv, sequences, plan);
    if (plan.admitted.empty()) continue;
    kv.commit(plan, sequences);
    sequences.admit(s.id);
    s.num_computed = length + own;
    kv.publish(s);
    s.tokens.push_back(7);
  }
  EKV_CHECK(sequences.waiting().size() == 1, "the second one waits");
  for (auto _ : state) {
    planner.plan(kv, sequences, plan);
    benchmark::DoNotOptimize(plan);
  }
}
BENCHMARK(plan_while_waiting)
    ->ArgName("tokens")
    ->Arg(1024)
    ->Arg(8192)
    ->Arg(65536)
    ->Unit(benchmark::kMicrosecond);

// A prompt whose every pair is cached, in a cache with other content, looked up for the first time.
void prefix_lookup(benchmark::State& state) {
  const int length = int(state.range(0));
  KvManager kv({}, 1 << 16);
  SequenceTable sequences(SchedulingPolicy::fcfs);
  StepPlan plan;
  for (int i = 0; i < 200; ++i) {
    Request r{.prompt = {}, .sampling = {}, .cache_salt = {}};
    for (int t = 0; t < (i == 100 ? length : 2000); ++t) r.prompt.push_back(i * 100003 + t);
    Sequence& s = sequences.add(SeqId(uint64_t(i)), std::move(r));
    plan = {{{s.id, 0, s.num_tokens(), true}}, {s.id}, {}};
    kv.commit(plan, sequences);
    sequences.admit(s.id);
    s.num_computed = s.num_tokens();
    kv.publish(s);
  }
  const Sequence& s = sequences[SeqId{100}];
  for (auto _ : state) {
    s.known_cached = {};
    benchmark::DoNotOptimize(kv.lookup(s));
  }
  state.counters["pairs_per_s"] =
      benchmark::Counter(double((length - 1) / kPairTokens), benchmark::Counter::kIsIterationInvariantRate);
}
BENCHMARK(prefix_lookup)
    ->ArgName("tokens")
    ->Arg(128)
    ->Arg(1024)
    ->Arg(8192)
    ->Arg(65536)
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace ekv

BENCHMARK_MAIN();
