// Two steps in flight on the CPU backend: whole models give the tokens, logprobs and finish reasons, bit for
// bit, of one step in flight and of each request alone, over random mixes of lengths, stop tokens, penalties,
// cancellations and preemptions, with every policy.

#include <gtest/gtest.h>

#include <bit>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <map>
#include <random>

#include "backend/cpu/cpu_backend.h"
#include "elastickv/engine.h"
#include "support/golden_model.h"
#include "support/seed.h"
#include "support/test_data.h"

namespace ekv {
namespace {

// An invariant of the engine that breaks ends the process, and the trace with it.
volatile unsigned current_seed = 0;
void print_seed(int) { std::fprintf(stderr, "in seed %u\n", current_seed); }

struct Answer {
  std::vector<TokenId> tokens;
  std::vector<uint32_t> bits;  // of the logprobs: of the prompt, then of the output
  FinishReason finish = FinishReason::none;
  SeqStats stats;
};

void add_bits(const TokenLogprobs& row, Answer& answer) {
  answer.bits.push_back(std::bit_cast<uint32_t>(row.chosen.logprob));
  for (const TokenLogprob& top : row.top) answer.bits.push_back(std::bit_cast<uint32_t>(top.logprob));
}

struct Answers : EngineListener {
  void on_event(SeqEvent event) override {
    Answer& answer = by_id[event.id];
    ASSERT_EQ(answer.finish, FinishReason::none) << "an event after the last one";
    for (const TokenLogprobs& row : event.prompt_logprobs) add_bits(row, answer);
    if (event.token) answer.tokens.push_back(*event.token);
    if (event.logprobs) add_bits(*event.logprobs, answer);
    ASSERT_TRUE(!event.token || event.stats.num_output == int(answer.tokens.size()));
    answer.finish = event.finish, answer.stats = event.stats;
    if (event.finish == FinishReason::none) return;
    preemptions += event.stats.num_preemptions;
    pairs_seen += event.stats.pairs_seen, base_pairs_seen += event.stats.base_pairs_seen;
  }
  void on_step(const StepRecord& r) override {
    loads += r.loads_begun, demoted += r.demoted_pairs, promoted += r.promoted_pairs;
    computed += r.num_prefill_tokens + r.num_decode_tokens;
    step_pairs_seen += r.pairs_seen, step_base_pairs_seen += r.base_pairs_seen;
    most_slots = std::max(most_slots, r.host_slots_used);
    EXPECT_GE(r.wait_us, 0);
    EXPECT_LE(r.wait_us, r.device_us);
    EXPECT_GE(r.host_gap_us, 0);
    EXPECT_GE(r.start_us, last_start_us) << "steps are reported in their order";
    last_start_us = r.start_us;
  }
  std::map<SeqId, Answer> by_id;
  int64_t preemptions = 0, loads = 0, demoted = 0, promoted = 0, computed = 0, last_start_us = 0;
  int64_t pairs_seen = 0, base_pairs_seen = 0, step_pairs_seen = 0, step_base_pairs_seen = 0;
  int most_slots = 0;
};

struct Job {
  Request request;
  int arrival_step = 0, cancel_step = -1;
  Answer alone;
};

constexpr int kMaxLen = 288, kSlots = 60;

class InFlight : public testing::TestWithParam<const char*> {
 protected:
  void load(const std::filesystem::path& folder) {
    model_ = test::load_folder(folder);
    ASSERT_TRUE(model_);
    std::signal(SIGABRT, print_seed);
  }
  void SetUp() override { load(test::test_data() / "golden" / GetParam()); }

  // The answers in the order of the jobs. `seed`: of what happens beside them.
  std::vector<Answer> serve(EngineConfig config, const std::vector<Job>& jobs, unsigned seed, Answers& seen,
                            int delay = 0) {
    std::mt19937 rng(seed);
    config.max_model_len = kMaxLen;
    EXPECT_FALSE(validate(config).has_value());
    auto backend = make_cpu_backend(*model_, config,
                                    {.threads = 2,
                                     .num_host_slots = kSlots,
                                     .host_content = host_content(config.fidelity.policy),
                                     .transfer_delay = delay});
    EXPECT_TRUE(backend);
    SteadyClock clock;
    Engine engine(config, *std::move(backend), clock, seen);
    std::vector<SeqId> ids(jobs.size());
    size_t arrived = 0;
    for (int step = 0; arrived < jobs.size() || !engine.idle(); ++step) {
      EXPECT_LT(step, 20000) << "requests that never end";
      if (step == 20000) break;
      for (size_t i = 0; i < jobs.size(); ++i) {
        if (jobs[i].arrival_step == step) ids[i] = *engine.submit(jobs[i].request), ++arrived;
        if (jobs[i].cancel_step == step) engine.cancel(ids[i]);
      }
      if (rng() % 50 == 0) engine.reset_prefix_cache();
      engine.step();
      engine.check_integrity();
    }
    EXPECT_EQ(engine.kv().num_free_pages() + engine.kv().num_cached_pages(), engine.kv().num_pages());
    EXPECT_EQ(seen.pairs_seen, seen.step_pairs_seen) << "exposure by sequence and by step";
    EXPECT_EQ(seen.base_pairs_seen, seen.step_base_pairs_seen);
    EXPECT_LE(seen.most_slots, kSlots);
    std::vector<Answer> answers;
    for (SeqId id : ids) answers.push_back(seen.by_id[id]);
    return answers;
  }

  Request draw_request(std::mt19937& rng, int longest, int most_output) const {
    const auto below = [&](int n) { return int(rng() % unsigned(n)); };
    const int vocab = model_->config().vocab;
    Request r;
    const int shared = below(3) == 0 ? 0 : below(longest * 3 / 4);
    for (int t = 0; t < shared; ++t) r.prompt.push_back(t * 7 % vocab);
    for (int t = 1 + below(longest / 4); t > 0; --t) r.prompt.push_back(below(vocab));
    SamplingParams& s = r.sampling;
    s = {.temperature = below(2) ? 0.0f : 0.9f,
         .seed = rng(),
         .max_tokens = 1 + most_output / 4 + below(most_output * 3 / 4)};
    if (below(3) == 0) s.frequency_penalty = 1.5f;
    if (below(4) == 0) s.repetition_penalty = 1.3f;
    if (below(4) == 0) s.presence_penalty = 0.7f;
    if (below(2)) s.logprobs = below(3);
    if (below(5) == 0) s.prompt_logprobs = below(2);
    if (below(4) == 0) r.tier = KvTier::exact;
    return r;
  }

  // Half of them stop at a token that they do yield, some not before min_tokens.
  std::vector<Job> draw_jobs(std::mt19937& rng, int count, int longest, int most_output) {
    std::vector<Job> jobs(static_cast<size_t>(count));
    EngineConfig roomy;
    roomy.kv.num_pages = 40;
    roomy.kv.prefix_cache = false;
    for (Job& job : jobs) {
      job.request = draw_request(rng, longest, most_output);
      for (int round = 0; round < 2; ++round) {
        Answers seen;
        job.alone = serve(roomy, {{.request = job.request}}, 1, seen)[0];
        if (round == 1 || rng() % 2) break;
        SamplingParams& s = job.request.sampling;
        s.stop_token_ids = {job.alone.tokens[rng() % job.alone.tokens.size()]};
        if (rng() % 3 == 0) s.min_tokens = int(rng() % 8);
      }
    }
    return jobs;
  }

  static void draw_life(std::mt19937& rng, std::vector<Job>& jobs) {
    for (Job& job : jobs) {
      job.arrival_step = int(rng() % 12);
      if (rng() % 8 == 0) job.cancel_step = job.arrival_step + int(rng() % 60);
    }
  }

  static void expect_answer(const Job& job, const Answer& got) {
    const auto starts = [](const auto& part, const auto& whole) {
      return part.size() <= whole.size() && std::equal(part.begin(), part.end(), whole.begin());
    };
    if (got.finish == FinishReason::cancelled) {
      ASSERT_GE(job.cancel_step, 0);
      ASSERT_TRUE(starts(got.tokens, job.alone.tokens));
      ASSERT_TRUE(starts(got.bits, job.alone.bits));
      return;
    }
    ASSERT_EQ(got.finish, job.alone.finish);
    ASSERT_EQ(got.tokens, job.alone.tokens);
    ASSERT_EQ(got.bits, job.alone.bits);
  }

  std::unique_ptr<Model> model_;
};

EngineConfig draw_config(std::mt19937& rng, KvPolicy policy) {
  const auto below = [&](int n) { return int(rng() % unsigned(n)); };
  EngineConfig c;
  c.scheduler.max_step_seqs = 4 + below(6);
  c.scheduler.max_step_tokens = c.scheduler.max_step_seqs + below(200);
  c.scheduler.max_chunk_tokens = below(2) ? 0 : 16 + below(64);
  c.scheduler.reserve_full_prompt = below(3) != 0;
  c.scheduler.preempt_self = below(4) == 0;
  c.kv.num_pages = kMaxLen / kBlockTokens + below(12);
  c.kv.prefix_cache = below(2);
  c.fidelity.policy = policy;
  c.fidelity.sink_pairs = below(2), c.fidelity.recent_pairs = below(3);
  c.fidelity.min_demote_pairs = 1 + below(4), c.fidelity.min_remaining_tokens = below(8);
  c.fidelity.headroom_pages = below(2);
  c.fidelity.promotion = below(3) ? PromotionMode::eager : PromotionMode::reserve;
  c.fidelity.backing = below(2) ? BackingMode::lazy : BackingMode::writethrough;
  c.fidelity.demotion = below(3) ? DemotionMode::shortage : DemotionMode::eager;
  return c;
}

// Tokens of whoever saw BASE depend on when it was BASE, and are not compared; whoever saw none has those of
// exact KV, whatever the others see.
TEST_P(InFlight, AnyMixGivesTheAnswersOfEachRequestAlone) {
  std::map<KvPolicy, Answers> totals;
  int64_t dropped = 0, compared = 0;
  for (const unsigned seed : test::seeds(4)) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    current_seed = seed;
    std::mt19937 rng(seed);
    std::vector<Job> jobs = draw_jobs(rng, 10, 160, 120);
    for (const KvPolicy policy :
         {KvPolicy::target_only, KvPolicy::exact_offload, KvPolicy::elastic, KvPolicy::static8}) {
      SCOPED_TRACE(name_of(policy));
      draw_life(rng, jobs);
      EngineConfig config = draw_config(rng, policy);
      const int delay = int(rng() % 4);
      for (const bool async : {false, true}) {
        SCOPED_TRACE(async ? "two steps in flight" : "one step in flight");
        config.async_scheduling = async;
        Answers seen;
        const std::vector<Answer> got = serve(config, jobs, seed, seen, delay);
        for (size_t i = 0; i < jobs.size(); ++i) {
          SCOPED_TRACE("request " + std::to_string(i));
          const bool exact = jobs[i].request.tier == KvTier::exact;
          ASSERT_TRUE(!exact || got[i].stats.base_pairs_seen + got[i].stats.num_tainted == 0);
          ASSERT_NE(got[i].finish, FinishReason::error);
          if (got[i].stats.base_pairs_seen + got[i].stats.num_tainted > 0) continue;
          expect_answer(jobs[i], got[i]);
          ++compared;
        }
        if (HasFatalFailure()) return;
        if (!async || !test::is_fixed(seed)) continue;
        Answers& total = totals[policy];
        total.preemptions += seen.preemptions, total.loads += seen.loads, total.demoted += seen.demoted;
        total.promoted += seen.promoted;
        for (const Answer& answer : got) dropped += answer.finish == FinishReason::stop;
      }
    }
  }
  EXPECT_GT(totals[KvPolicy::target_only].preemptions, 5);
  EXPECT_GT(totals[KvPolicy::exact_offload].loads, 5);
  EXPECT_GT(totals[KvPolicy::elastic].demoted, 5);
  EXPECT_GT(totals[KvPolicy::elastic].promoted, 0);
  EXPECT_GT(totals[KvPolicy::static8].demoted, 5);
  EXPECT_GT(dropped, 10);
  std::printf("compared %ld, ended by a stop token %ld, preempted %ld, loaded %ld, demoted %ld\n",
              long(compared), long(dropped), long(totals[KvPolicy::target_only].preemptions),
              long(totals[KvPolicy::exact_offload].loads), long(totals[KvPolicy::elastic].demoted));
}

void expect_same(const SeqStats& one, const SeqStats& two) {
  EXPECT_EQ(one.num_output, two.num_output);
  EXPECT_EQ(one.num_cached, two.num_cached);
  EXPECT_EQ(one.num_preemptions, two.num_preemptions);
  EXPECT_EQ(one.pairs_seen, two.pairs_seen);
  EXPECT_EQ(one.base_pairs_seen, two.base_pairs_seen);
  EXPECT_EQ(one.peak_base_fraction, two.peak_base_fraction);
  EXPECT_EQ(one.num_tainted, two.num_tainted);
}

// With room for all at once a sequence goes through the same steps in both modes. What is computed beyond a
// stop token is nobody's: neither tokens nor exposure. static8 too demotes by a sequence's own progress.
TEST_P(InFlight, WithRoomForAllStatisticsAreTheSame) {
  std::mt19937 rng(7);
  const std::vector<Job> jobs = draw_jobs(rng, 12, 160, 60);
  for (const KvPolicy policy : {KvPolicy::target_only, KvPolicy::exact_offload, KvPolicy::static8}) {
    SCOPED_TRACE(name_of(policy));
    EngineConfig config;
    config.scheduler.max_step_tokens = 12 * kMaxLen;
    config.kv.num_pages = 12 * kMaxLen / kBlockTokens;
    config.kv.prefix_cache = false;
    config.fidelity.policy = policy;
    config.fidelity.recent_pairs = 1, config.fidelity.min_remaining_tokens = 0;
    Answers seen_one, seen_two;
    const std::vector<Answer> one = serve(config, jobs, 1, seen_one);
    config.async_scheduling = true;
    const std::vector<Answer> two = serve(config, jobs, 1, seen_two);
    int64_t stopped = 0;
    for (size_t i = 0; i < jobs.size(); ++i) {
      SCOPED_TRACE("request " + std::to_string(i));
      EXPECT_EQ(one[i].tokens, two[i].tokens);
      EXPECT_EQ(one[i].bits, two[i].bits);
      EXPECT_EQ(one[i].finish, two[i].finish);
      expect_same(one[i].stats, two[i].stats);
      stopped += two[i].finish == FinishReason::stop;
    }
    EXPECT_GT(stopped, 2);
    // One token too many for each that stopped, unless the same token was its last by length.
    EXPECT_GT(seen_two.computed, seen_one.computed);
    EXPECT_LE(seen_two.computed, seen_one.computed + stopped);
    EXPECT_TRUE(policy != KvPolicy::static8 || seen_two.base_pairs_seen > 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Architectures, InFlight, testing::Values("tiny-llama", "tiny-mistral", "tiny-qwen3"));

class InFlightRealModel : public InFlight {
 protected:
  void SetUp() override { load(std::filesystem::path(EKV_MODELS) / GetParam()); }
};

TEST_P(InFlightRealModel, AnswersAreThoseOfEachRequestAlone) {
  std::mt19937 rng(3);
  current_seed = 3;
  const std::vector<Job> jobs = draw_jobs(rng, 6, 96, 40);
  for (const bool async : {false, true}) {
    EngineConfig config;
    config.scheduler.max_step_tokens = 64, config.scheduler.max_step_seqs = 8;
    config.kv.num_pages = 18, config.kv.prefix_cache = false;
    config.async_scheduling = async;
    Answers seen;
    const std::vector<Answer> got = serve(config, jobs, 3, seen);
    for (size_t i = 0; i < jobs.size(); ++i) {
      SCOPED_TRACE("request " + std::to_string(i));
      expect_answer(jobs[i], got[i]);
    }
    EXPECT_GT(seen.preemptions, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Models, InFlightRealModel, testing::Values("smollm2-135m-instruct"));

}  // namespace
}  // namespace ekv
