// Two steps in flight in virtual time: when steps and copies begin and end, against a machine that lives
// through every microsecond; the answers of whole engines, against one step in flight and their definition;
// memory.

#include <gtest/gtest.h>

#include <deque>
#include <map>
#include <random>

#include "backend/sim/sim_backend.h"
#include "elastickv/engine.h"
#include "support/allocation_counter.h"
#include "support/seed.h"

namespace ekv {
namespace {

// Copies and steps of a few whole microseconds, so that every order of ends and begins occurs.
CostModel quick_model() {
  return {.name = "quick",
          .target_bytes_per_token = 2,
          .base_bytes_per_token = 1,
          .step_fixed_us = 2.4,
          .forward = {{1, 3}, {64, 12}},
          .decode_bytes_per_us = 50,
          .demotion_per_pair_us = 1.3,
          .promotion_per_pair_us = 2.1,
          .to_host = {.bytes_per_us = 8, .latency_us = 3},
          .from_host = {.bytes_per_us = 16, .latency_us = 1}};
}

struct Step {
  std::vector<int32_t> q_start{0}, kv_len;
  std::vector<PairEntry> table;
  std::vector<DemoteJob> demotes;
  std::vector<PromoteJob> promotes;
  std::vector<TransferJob> copies;
  std::vector<SampleRow> rows;

  static constexpr int kMaxPairs = 4;
  StepInput input() const {
    return {.demotes = demotes,
            .promotes = promotes,
            .transfers = copies,
            .q_start = q_start,
            .kv_len = kv_len,
            .block_table = {.entries = table, .max_pairs = kMaxPairs},
            .sample_rows = rows};
  }
};

// `number`: what the device answers in each row, so that outputs of different steps are told apart.
Step draw_step(std::mt19937& rng, TokenId number, uint32_t& ticket) {
  const auto below = [&](int n) { return int(rng() % unsigned(n)); };
  Step step;
  if (below(6) == 0) return step;
  for (int chunk = below(4); chunk > 0; --chunk) {
    const int tokens = below(2) ? 1 : 1 + below(40);
    step.q_start.push_back(step.q_start.back() + tokens);
    step.kv_len.push_back(tokens + below(Step::kMaxPairs * kPairTokens - tokens));
    step.table.insert(step.table.end(), Step::kMaxPairs, PairEntry{0, 1});
    step.rows.push_back({.row = step.q_start.back() - 1, .target = number, .num_logprobs = 0});
  }
  for (int i = below(3); i > 0; --i) step.demotes.push_back({0, 1, below(3) ? 0 : -1, ++ticket});
  for (int i = below(2); i > 0; --i) step.promotes.push_back({0, 1, 0});
  for (int i = below(4); i > 0; --i) step.copies.push_back({TransferKind(below(4)), 0, 1, 0, ++ticket});
  return step;
}

// One compute engine and two links that live through every microsecond.
class Machine {
 public:
  void submit(const Step& step, int64_t now_us) {
    while (now_us_ < now_us) tick();
    StepWork work;
    measure_work(step.input(), work);
    steps_.push_back({.left_us = std::llround(step_us(quick_model(), work)), .idle = step.input().empty()});
    for (const DemoteJob& job : step.demotes)
      if (job.low >= 0) steps_.back().with.push_back({.ticket = job.ticket, .left_us = 3 + 32 / 8});
    for (const TransferJob& job : step.copies)
      (job.kind == TransferKind::load_pair ? steps_.back().with : steps_.back().after).push_back(copy_of(job));
    settle();
  }

  // Returns the tickets to report; now_us() is the time at which the host gets on.
  std::vector<uint32_t> collect(int64_t now_us) {
    while (now_us_ < now_us || !steps_.front().ended) tick();
    const bool idle = steps_.front().idle;
    steps_.pop_front();
    while (idle && done_.empty() && copies_are_to_come()) tick();
    return std::exchange(done_, {});
  }
  int64_t now_us() const { return now_us_; }

 private:
  struct Copy {
    uint32_t ticket = 0;
    int64_t left_us = 0;
    bool from_host = false;
  };
  struct Running {
    int64_t left_us = 0;
    bool idle = false, begun = false, ended = false;
    std::vector<Copy> with, after;
  };

  static Copy copy_of(const TransferJob& job) {
    const int bytes = is_whole_pair(job.kind) ? 64 : 32;
    if (is_to_host(job.kind)) return {job.ticket, 3 + bytes / 8};
    return {job.ticket, 1 + bytes / 16, true};
  }
  bool copies_are_to_come() const {
    bool any = !links_[0].empty() || !links_[1].empty();
    for (const Running& step : steps_) any |= !step.ended && !(step.with.empty() && step.after.empty());
    return any;
  }
  void start(const std::vector<Copy>& copies) {
    for (const Copy& copy : copies) links_[copy.from_host].push_back(copy);
  }
  // All that happens at this very time.
  void settle() {
    for (auto& link : links_)
      if (!link.empty() && link.front().left_us == 0) done_.push_back(link.front().ticket), link.pop_front();
    for (Running& step : steps_) {
      if (step.ended) continue;
      if (!std::exchange(step.begun, true)) start(step.with);
      if (step.left_us > 0) return;
      step.ended = true;
      start(step.after);
    }
  }
  void tick() {
    ++now_us_;
    for (auto& link : links_)
      if (!link.empty()) --link.front().left_us;
    for (Running& step : steps_)
      if (!step.ended) {
        --step.left_us;
        break;
      }
    settle();
  }

  std::deque<Running> steps_;   // not collected yet
  std::deque<Copy> links_[2];   // to the host, from it
  std::vector<uint32_t> done_;  // and not reported
  int64_t now_us_ = 0;
};

TEST(SimInFlight, StepsAndCopiesBeginAndEndAsOnAMachineThatLivesThroughEveryMicrosecond) {
  for (const unsigned seed : test::seeds(20)) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 rng(seed);
    VirtualClock clock;
    SimBackend backend(quick_model(), 16, clock, 4);
    ASSERT_EQ(backend.info().max_steps_in_flight, 2);
    Machine machine;
    std::deque<Step> in_flight;
    uint32_t ticket = 0;
    const StepOutput* valid = nullptr;  // what the last collect gave, until the next one
    TokenId answered = 0;
    size_t num_rows = 0;
    for (int i = 0; i < 600; ++i) {
      if (rng() % 3 == 0) clock.advance_us(int64_t(rng() % 25));
      if (in_flight.size() < 2 && (in_flight.empty() || rng() % 4)) {
        in_flight.push_back(draw_step(rng, i, ticket));
        const int64_t now_us = clock.now_us();
        machine.submit(in_flight.back(), now_us);
        backend.submit(in_flight.back().input());
        ASSERT_EQ(clock.now_us(), now_us) << "the host does not wait in submit()";
      } else {
        const std::vector<uint32_t> done = machine.collect(clock.now_us());
        valid = &backend.collect();
        ASSERT_EQ(clock.now_us(), machine.now_us());
        ASSERT_EQ(valid->transfers_done, done);
        num_rows = in_flight.front().rows.size();
        answered = num_rows ? in_flight.front().rows[0].target : 0;
        in_flight.pop_front();
      }
      if (!valid) continue;
      ASSERT_EQ(valid->rows.size(), num_rows);
      for (const SampledRow& row : valid->rows) ASSERT_EQ(row.token, answered);
    }
  }
}

TEST(SimInFlight, AStepAllocatesNothing) {
  std::mt19937 rng(1);
  uint32_t ticket = 0;
  std::vector<Step> steps;
  for (int i = 0; i < 64; ++i) {
    steps.push_back(draw_step(rng, i, ticket));
    for (SampleRow& row : steps.back().rows) row.num_logprobs = -1;
  }
  VirtualClock clock;
  SimBackend backend(quick_model(), 16, clock, 4);
  const auto run = [&](int rounds) {
    const long before = testing::num_allocations;
    for (int i = 0; i < rounds * 64; ++i) {
      backend.submit(steps[size_t(i % 64)].input());
      if (i > 0) backend.collect();
      clock.advance_us(20);  // the links keep up
    }
    backend.collect();
    return testing::num_allocations - before;
  };
  EXPECT_GT(run(20), 0);
  EXPECT_EQ(run(100), 0);
}

struct Asked {
  Request request;
  int64_t arrival_us = 0;
  int cancel_after = -1;  // output tokens

  int num_output() const {
    return cancel_after > 0 ? std::min(cancel_after, request.sampling.max_tokens) : request.sampling.max_tokens;
  }
};

struct Answer {
  std::vector<TokenId> tokens, prompt;
  FinishReason finish = FinishReason::none;
  int64_t first_scheduled_us = 0, first_token_us = 0;
  bool operator==(const Answer& other) const {
    return tokens == other.tokens && prompt == other.prompt && finish == other.finish;
  }
};

// The engine's backend and its listener: the order of events, and the times of steps by their definition.
struct Watch : EngineListener {
  struct Device : Backend {
    Device(Watch& watch_, std::unique_ptr<SimBackend> sim_) : watch(watch_), sim(std::move(sim_)) {}
    const BackendInfo& info() const override { return sim->info(); }
    void submit(const StepInput& input) override {
      StepWork work;
      measure_work(input, work);
      free_us = std::max(free_us, watch.clock.now_us()) + std::llround(step_us(sim->model(), work));
      ends.push_back({free_us, input.empty()});
      watch.most_in_flight = std::max(watch.most_in_flight, ends.size());
      sim->submit(input);
    }
    const StepOutput& collect() override {
      const auto [end_us, idle] = ends.front();
      ends.pop_front();
      const int64_t expected_us = std::max(watch.clock.now_us(), end_us);
      const StepOutput& output = sim->collect();
      EXPECT_GE(watch.clock.now_us(), expected_us);
      EXPECT_TRUE(idle || watch.clock.now_us() == expected_us);
      return output;
    }
    Watch& watch;
    std::unique_ptr<SimBackend> sim;
    std::deque<std::pair<int64_t, bool>> ends;
    int64_t free_us = 0;
  };

  void on_event(SeqEvent event) override {
    Answer& answer = answers[event.id];
    ASSERT_EQ(answer.finish, FinishReason::none) << "an event after the last one";
    ASSERT_GE(clock.now_us(), last_us) << "time runs backwards";
    last_us = clock.now_us();
    for (const TokenLogprobs& row : event.prompt_logprobs) answer.prompt.push_back(row.chosen.token);
    if (event.token) answer.tokens.push_back(*event.token);
    if (event.token && answer.tokens.size() == 1) answer.first_token_us = clock.now_us();
    answer.finish = event.finish;
    answer.first_scheduled_us = event.stats.first_scheduled_us;
    const Asked& asked = *asked_by.at(event.id);
    if (event.token && int(answer.tokens.size()) == asked.cancel_after) engine->cancel(event.id);
  }
  void on_step(const StepRecord& r) override {
    EXPECT_GE(r.start_us, last_start_us);
    EXPECT_GE(r.end_us, last_end_us);
    EXPECT_GE(r.end_us, r.start_us);
    EXPECT_EQ(r.host_gap_us, 0) << "the host takes no time";
    last_start_us = r.start_us, last_end_us = r.end_us;
    preempted += r.num_preempted, demoted += r.demoted_pairs, promoted += r.promoted_pairs,
        loads += r.loads_begun;
  }

  VirtualClock clock;
  Engine* engine = nullptr;
  std::map<SeqId, const Asked*> asked_by;
  std::map<SeqId, Answer> answers;
  size_t most_in_flight = 0;
  int64_t last_us = 0, last_start_us = 0, last_end_us = 0;
  int64_t preempted = 0, demoted = 0, promoted = 0, loads = 0;
};

// In the order of `asked`.
std::vector<Answer> serve(const EngineConfig& config, const std::vector<Asked>& asked, Watch& watch) {
  const CostModel model = *load_cost_model("vllm-h200-llama-3.1-8b");
  auto sim = std::make_unique<SimBackend>(model, config.kv.num_pages, watch.clock, 60);
  Engine engine(config, std::make_unique<Watch::Device>(watch, std::move(sim)), watch.clock, watch);
  watch.engine = &engine;
  std::vector<SeqId> ids;
  for (int steps = 0; ids.size() < asked.size() || !engine.idle(); ++steps) {
    EXPECT_LT(steps, 100'000) << "requests that never end";
    if (steps == 100'000) break;
    for (; ids.size() < asked.size() && asked[ids.size()].arrival_us <= watch.clock.now_us();) {
      const Asked& next = asked[ids.size()];
      ids.push_back(*engine.submit(next.request));
      watch.asked_by[ids.back()] = &next;
    }
    const bool busy = engine.step();
    engine.check_integrity();
    if (!busy && ids.size() < asked.size()) watch.clock.advance_to(asked[ids.size()].arrival_us);
  }
  EXPECT_EQ(engine.kv().num_free_pages() + engine.kv().num_cached_pages(), engine.kv().num_pages());
  std::vector<Answer> answers;
  for (SeqId id : ids) answers.push_back(watch.answers[id]);
  return answers;
}

std::vector<Asked> draw_requests(std::mt19937& rng, int count) {
  std::vector<Asked> asked(static_cast<size_t>(count));
  int64_t time_us = 0;
  for (Asked& a : asked) {
    a.arrival_us = time_us += int64_t(rng() % 60'000);
    const int shared = int(rng() % 3) * 64;
    for (int t = 0; t < shared; ++t) a.request.prompt.push_back(t);
    for (int t = 1 + int(rng() % 120); t > 0; --t) a.request.prompt.push_back(TokenId(rng() % 1000));
    a.request.sampling = {.temperature = 0, .max_tokens = 1 + int(rng() % 150)};
    if (rng() % 4 == 0) a.request.sampling.stop_token_ids = {0, 1};
    if (rng() % 4 == 0) a.request.sampling.prompt_logprobs = 0;
    if (rng() % 5 == 0) a.cancel_after = 1 + int(rng() % 100);
  }
  return asked;
}

EngineConfig draw_config(std::mt19937& rng, KvPolicy policy) {
  EngineConfig c;
  c.max_model_len = 512;
  c.scheduler.max_step_seqs = 4 + int(rng() % 12);
  c.scheduler.max_step_tokens = 32 + int(rng() % 300);
  c.kv.num_pages = 32 + int(rng() % 16);
  c.kv.prefix_cache = rng() % 2;
  c.fidelity.policy = policy;
  c.fidelity.sink_pairs = 1, c.fidelity.recent_pairs = int(rng() % 2);
  c.fidelity.min_demote_pairs = 1 + int(rng() % 4);
  c.fidelity.promotion = rng() % 2 ? PromotionMode::eager : PromotionMode::reserve;
  return c;
}

void expect_as_asked(const Asked& asked, const Answer& got) {
  const bool cancelled = asked.num_output() < asked.request.sampling.max_tokens;
  EXPECT_EQ(got.finish, cancelled ? FinishReason::cancelled : FinishReason::length);
  const TokenId token = asked.request.sampling.stop_token_ids.empty() ? 0 : 2;
  EXPECT_EQ(got.tokens, std::vector<TokenId>(size_t(asked.num_output()), token));
  const bool reports = asked.request.sampling.prompt_logprobs >= 0;
  const auto& prompt = asked.request.prompt;
  EXPECT_EQ(got.prompt, reports ? std::vector(prompt.begin() + 1, prompt.end()) : std::vector<TokenId>{});
  EXPECT_GT(got.first_token_us, got.first_scheduled_us);
  EXPECT_GE(got.first_scheduled_us, asked.arrival_us);
}

TEST(SimInFlight, AnswersAreThoseOfOneStepInFlightUnderEveryPolicy) {
  std::map<KvPolicy, int64_t> preempted, demoted, loads;
  int64_t promoted = 0;
  for (const unsigned seed : test::seeds(8))
    for (const KvPolicy policy :
         {KvPolicy::target_only, KvPolicy::exact_offload, KvPolicy::elastic, KvPolicy::static8}) {
      SCOPED_TRACE("seed " + std::to_string(seed) + ", " + std::string(name_of(policy)));
      std::mt19937 rng(seed);
      const std::vector<Asked> asked = draw_requests(rng, 30);
      EngineConfig config = draw_config(rng, policy);
      ASSERT_FALSE(validate(config).has_value());
      Watch one, two, again;
      const std::vector<Answer> plain = serve(config, asked, one);
      config.async_scheduling = true;
      const std::vector<Answer> ahead = serve(config, asked, two);
      ASSERT_EQ(one.most_in_flight, 1u);
      ASSERT_EQ(two.most_in_flight, 2u);
      for (size_t i = 0; i < asked.size(); ++i) {
        SCOPED_TRACE("request " + std::to_string(i));
        expect_as_asked(asked[i], ahead[i]);
        EXPECT_EQ(plain[i], ahead[i]);
      }
      serve(config, asked, again);
      EXPECT_EQ(again.clock.now_us(), two.clock.now_us()) << "the same again";
      if (!test::is_fixed(seed)) continue;
      preempted[policy] += two.preempted, demoted[policy] += two.demoted, loads[policy] += two.loads;
      promoted += two.promoted;
    }
  EXPECT_GT(preempted[KvPolicy::target_only], 5);
  EXPECT_GT(loads[KvPolicy::exact_offload], 5);
  EXPECT_GT(demoted[KvPolicy::elastic], 5);
  EXPECT_GT(demoted[KvPolicy::static8], 5);
  EXPECT_GT(promoted, 0);
}

}  // namespace
}  // namespace ekv
