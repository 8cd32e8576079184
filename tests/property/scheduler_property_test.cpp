// Hundreds of random configurations run to completion on a device that checks every KV cell it reads. Each
// sentence of scheduler.h is an assertion here, stated without the scheduler's own code. Failures name the
// seed.

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <tuple>

#include "support/fake_serving.h"

namespace ekv {
namespace {

constexpr int kVocab = 5;  // small, so that outputs meet and prefixes are shared by chance

int blocks_of(int num_tokens) { return ceil_div(num_tokens, kBlockTokens); }

// Reads one plan against what it was made from.
class PlanCheck {
 public:
  PlanCheck(const SchedulerConfig& config, const std::vector<SeqView>& running,
            const std::vector<SeqView>& waiting, KvBudget budget, const StepPlan& plan)
      : config_(config), running_(running), waiting_(waiting), budget_(budget), plan_(plan) {
    for (const ChunkPlan& chunk : plan.chunks) tokens_ += chunk.num_tokens, chunk_of_[chunk.seq] = &chunk;
    num_kept_ = running.size() - std::min(running.size(), plan.preempted.size());
    free_ = budget.free_pages;
    for (size_t i = num_kept_; i < running.size(); ++i) free_ += running[i].num_freeable;
    for (const SeqView& s : running)
      if (const ChunkPlan* c = chunk(s)) free_ -= new_pages(s, *c);
  }

  void run() {
    check_limits();
    check_order();
    check_chunks();
    check_tokens_are_used();
    check_preemption();
    check_left_out();
    check_admission();
    EXPECT_TRUE(!plan_.empty() || (running_.empty() && waiting_.empty())) << "no progress";
  }

 private:
  const ChunkPlan* chunk(const SeqView& s) const {
    const auto it = chunk_of_.find(s.id);
    return it == chunk_of_.end() ? nullptr : it->second;
  }
  static int new_pages(const SeqView& s, const ChunkPlan& c) {
    return std::max(0, blocks_of(c.first_pos + c.num_tokens) - s.num_blocks);
  }
  static int to_compute(const SeqView& s) { return s.num_tokens - s.num_computed; }
  std::span<const SeqView> kept() const { return std::span(running_).first(num_kept_); }
  int longest_chunk() const {
    return config_.max_chunk_tokens > 0 ? config_.max_chunk_tokens : config_.max_step_tokens;
  }
  bool tokens_are_spent() const { return tokens_ == config_.max_step_tokens; }

  void check_limits() {
    EXPECT_LE(tokens_, config_.max_step_tokens);
    EXPECT_LE(int(num_kept_ + plan_.admitted.size()), config_.max_step_seqs);
    EXPECT_EQ(chunk_of_.size(), plan_.chunks.size()) << "one chunk per sequence";
    for (const ChunkPlan& c : plan_.chunks) {
      EXPECT_GE(c.num_tokens, 1);
      EXPECT_LE(c.num_tokens, longest_chunk());
    }
    EXPECT_GE(free_, 0) << "running chunks take pages that nobody has";
  }

  // Decodes in running order, prefills in running order, admitted in waiting order.
  void check_order() {
    std::vector<SeqId> expected;
    for (bool decode : {true, false})
      for (const SeqView& s : running_)
        if ((to_compute(s) == 1) == decode && chunk(s)) expected.push_back(s.id);
    expected.insert(expected.end(), plan_.admitted.begin(), plan_.admitted.end());
    std::vector<SeqId> order;
    for (const ChunkPlan& c : plan_.chunks) order.push_back(c.seq);
    EXPECT_EQ(order, expected);
  }

  void check_chunks() {
    for (const auto* queue : {&running_, &waiting_})
      for (const SeqView& s : *queue)
        if (const ChunkPlan* c = chunk(s)) {
          EXPECT_EQ(c->first_pos, queue == &running_ ? s.num_computed : s.num_cached);
          EXPECT_LE(c->first_pos + c->num_tokens, s.num_tokens);
          EXPECT_EQ(c->sample, c->first_pos + c->num_tokens == s.num_tokens);
        }
  }

  // Tokens are left over only when every chunk is as long as it may be.
  void check_tokens_are_used() {
    if (tokens_are_spent() || !plan_.preempted.empty() || left_out_any()) return;
    for (const auto* queue : {&running_, &waiting_})
      for (const SeqView& s : *queue)
        if (const ChunkPlan* c = chunk(s)) {
          EXPECT_EQ(c->num_tokens, std::min(longest_chunk(), s.num_tokens - c->first_pos));
        }
  }

  // The victims are the last of the running ones, from the back; one fewer would not have done.
  void check_preemption() {
    for (size_t i = 0; i < plan_.preempted.size(); ++i) {
      ASSERT_LT(i, running_.size());
      EXPECT_EQ(plan_.preempted[i], running_[running_.size() - 1 - i].id);
      EXPECT_FALSE(chunk_of_.contains(plan_.preempted[i]));
    }
    if (plan_.preempted.empty()) return;
    EXPECT_TRUE(plan_.admitted.empty());
    EXPECT_TRUE(free_ - running_[num_kept_].num_freeable < 0 || sharing())
        << "the last victim gave up its pages in vain";
  }

  // Who runs and has no chunk found no token (prefills only, when all are spent) or no pages, and then not even
  // with all of those after it.
  void check_left_out() {
    for (size_t i = 0; i < num_kept_; ++i) {
      const SeqView& s = running_[i];
      if (chunk(s)) continue;
      const bool decode = to_compute(s) == 1;
      if (!decode && tokens_are_spent()) continue;
      EXPECT_TRUE(plan_.admitted.empty()) << "somebody running was left out";
      const int longest = std::min(longest_chunk(), to_compute(s));
      int reachable = free_;
      for (const SeqView& later : kept().subspan(i + 1)) reachable += later.num_blocks;
      EXPECT_TRUE(blocks_of(s.num_computed + longest) - s.num_blocks > reachable ||
                  (sharing() && !plan_.preempted.empty()))
          << "left out, but its pages were there";
    }
  }

  // Then victims may free less than they hold, and what they free together comes one step later.
  bool sharing() const {
    return std::ranges::any_of(running_, [](const SeqView& s) { return s.num_freeable < s.num_blocks; });
  }

  bool left_out_any() const {
    return std::ranges::any_of(kept(), [&](const SeqView& s) { return !chunk(s); });
  }

  // Admitted: a prefix of the queue, and the longest that fits.
  void check_admission() {
    ASSERT_LE(plan_.admitted.size(), waiting_.size());
    int free = free_, promised = 0;
    for (const SeqView& s : kept())
      if (const ChunkPlan* c = chunk(s))
        promised += std::max(
            0, blocks_of(s.num_tokens) - std::max(s.num_blocks, blocks_of(c->first_pos + c->num_tokens)));
    for (size_t i = 0; i < plan_.admitted.size(); ++i) {
      const SeqView& s = waiting_[i];
      ASSERT_EQ(plan_.admitted[i], s.id) << "somebody was overtaken";
      ASSERT_TRUE(chunk(s));
      EXPECT_TRUE(fits(s, i, chunk(s)->num_tokens, free, promised)) << "admitted without room";
      const int end = chunk(s)->first_pos + chunk(s)->num_tokens;
      free -= blocks_of(end) - blocks_of(s.num_cached) + s.num_cached_free;
      promised += blocks_of(s.num_tokens) - blocks_of(end);
    }
    EXPECT_GE(free, 0);
    const bool closed = !plan_.preempted.empty() || left_out_any() || tokens_are_spent();
    const size_t next = plan_.admitted.size();
    if (closed || next == waiting_.size() || int(num_kept_ + next) == config_.max_step_seqs) return;
    const SeqView& first = waiting_[next];
    const int n =
        std::min({first.num_tokens - first.num_cached, config_.max_step_tokens - tokens_, longest_chunk()});
    EXPECT_FALSE(fits(first, next, n, free, promised)) << "the first in line was kept waiting";
  }

  bool fits(const SeqView& s, size_t num_before, int num_tokens, int free, int promised) const {
    const int end = config_.reserve_full_prompt ? s.num_tokens : s.num_cached + num_tokens;
    const int pages = blocks_of(end) - blocks_of(s.num_cached) + s.num_cached_free;
    const bool idle = num_kept_ + num_before == 0;
    return pages + (config_.reserve_full_prompt ? promised : 0) +
               (idle ? 0 : int(config_.watermark * budget_.total_pages)) <=
           free;
  }

  const SchedulerConfig& config_;
  const std::vector<SeqView>&running_, &waiting_;
  KvBudget budget_;
  const StepPlan& plan_;
  int tokens_ = 0, free_ = 0;
  size_t num_kept_ = 0;
  std::map<SeqId, const ChunkPlan*> chunk_of_;
};

struct Totals {
  int steps = 0, preempted = 0, hit_tokens = 0, left_out_steps = 0, token_starved_steps = 0,
      chunkless_steps = 0, cancelled = 0;
};

// One random configuration with its requests.
class RandomRun {
 public:
  RandomRun(unsigned seed, Totals& totals, bool full_prompts = false)
      : rng_(seed), totals_(totals), num_pages_(4 + below(60)) {
    SchedulerConfig config;
    config.max_step_seqs = 1 + below(12);
    config.max_step_tokens = config.max_step_seqs + below(below(2) ? 16 : 300);
    config.max_chunk_tokens = below(2) ? 0 : 1 + below(64);
    config.reserve_full_prompt = full_prompts || below(2);
    config.watermark = below(3) ? 0 : 0.01 * below(60);
    config.policy = below(2) ? SchedulingPolicy::fcfs : SchedulingPolicy::priority;
    serving_ = std::make_unique<testing::FakeServing>(config, KvConfig{.prefix_cache = below(3) > 0},
                                                      num_pages_, kVocab);
  }

  // Requests arrive while others run. `only_prompts`: one output token each, so nothing grows after its
  // prefill.
  void complete(int num_requests, bool only_prompts = false) {
    int arrived = 0;
    for (int step = 0; arrived < num_requests || !serving_->done(); ++step) {
      ASSERT_LT(step, 200000) << "a request does not end";
      for (; arrived < num_requests && (serving_->done() || below(4) == 0); ++arrived) add(only_prompts);
      if (below(40) == 0) cancel_one();
      if (below(200) == 0) serving_->kv.reset_prefix_cache();
      advance();
      if (::testing::Test::HasFailure()) return;
    }
    EXPECT_EQ(serving_->kv.budget().free_pages, num_pages_) << "pages are lost";
    serving_->kv.reset_prefix_cache();
    EXPECT_EQ(serving_->kv.num_free_pages(), num_pages_);
  }

 private:
  int below(int n) { return int(rng_() % unsigned(n)); }

  // Fits the pool when alone: what does not is refused before it comes here. The last output token has no KV.
  void add(bool only_prompts) {
    const int most = num_pages_ * kBlockTokens + 1;
    const int total = 2 + below(below(3) ? std::min(most, 120) - 1 : most - 1);
    const int output = only_prompts ? 1 : 1 + below(total - 1);
    Request r{.prompt = {},
              .sampling = {.max_tokens = output},
              .priority = below(3),
              .cache_salt = below(6) ? "" : "s",
              .arrival_us = now_us_ - below(3)};
    const int split = below(4) ? total : below(total);
    for (int i = 0; i < total - output; ++i) r.prompt.push_back(i < split ? i % kVocab : below(kVocab));
    if (below(10) == 0) r.sampling.prompt_logprobs = 0;
    Sequence& s = serving_->add(std::move(r));
    expected_[s.id] = testing::solo_run(s.request, kVocab);
  }

  void cancel_one() {
    const auto queue = below(2) ? serving_->sequences.running() : serving_->sequences.waiting();
    if (queue.empty()) return;
    Sequence& s = *queue[size_t(below(int(queue.size())))];
    expected_.erase(s.id);
    serving_->end(s);
    ++totals_.cancelled;
  }

  void advance() {
    ++now_us_;
    serving_->plan_next();
    const StepPlan& plan = serving_->plan;
    PlanCheck(serving_->config, serving_->running, serving_->waiting, serving_->kv.budget(), plan).run();
    check_purity();
    count();
    serving_->commit();
    serving_->kv.check_integrity(serving_->sequences.running());
    for (auto& [id, tokens] : serving_->execute()) {
      EXPECT_EQ(tokens, expected_.at(id)) << "sequence " << uint64_t(id) << " differs from its solo run";
      expected_.erase(id);
    }
    serving_->kv.check_integrity(serving_->sequences.running());
  }

  void check_purity() {
    StepPlan again = serving_->plan;
    plan_step(serving_->config, serving_->running, serving_->waiting, serving_->kv.budget(), again);
    EXPECT_EQ(again, serving_->plan);
  }

  void count() {
    const StepPlan& plan = serving_->plan;
    ++totals_.steps;
    totals_.preempted += int(plan.preempted.size());
    totals_.chunkless_steps += plan.chunks.empty() && !plan.preempted.empty();
    int tokens = 0;
    for (const ChunkPlan& c : plan.chunks) tokens += c.num_tokens;
    const bool left_out = plan.chunks.size() + plan.preempted.size() < serving_->running.size();
    totals_.left_out_steps += left_out;
    totals_.token_starved_steps += left_out && tokens == serving_->config.max_step_tokens;
    for (const ChunkPlan& c : plan.chunks)
      if (std::ranges::find(plan.admitted, c.seq) != plan.admitted.end()) totals_.hit_tokens += c.first_pos;
  }

  std::mt19937 rng_;
  Totals& totals_;
  int num_pages_;
  int64_t now_us_ = 1000;
  std::unique_ptr<testing::FakeServing> serving_;
  std::map<SeqId, std::vector<TokenId>> expected_;
};

TEST(Scheduler, EveryConfigurationRunsToTheEndAndKeepsItsPromises) {
  Totals totals;
  for (unsigned seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE(seed);
    RandomRun run(seed, totals);
    run.complete(40);
    if (HasFailure()) return;
  }
  EXPECT_GT(totals.preempted, 1000);
  EXPECT_GT(totals.hit_tokens, 10000);
  EXPECT_GT(totals.left_out_steps - totals.token_starved_steps, 100);
  EXPECT_GT(totals.cancelled, 100);
  RecordProperty("steps", totals.steps);
  RecordProperty("preempted", totals.preempted);
  RecordProperty("left_out_steps", totals.left_out_steps - totals.token_starved_steps);
  RecordProperty("chunkless_steps", totals.chunkless_steps);
  RecordProperty("hit_tokens", totals.hit_tokens);
}

// Prompts admitted whole have the pages they need: with nothing else growing, nobody is ever preempted, however
// small the chunks are and however many prompts are under way.
TEST(Scheduler, FullPromptAdmissionAloneNeverPreempts) {
  Totals totals;
  for (unsigned seed = 1000; seed < 1100; ++seed) {
    SCOPED_TRACE(seed);
    RandomRun run(seed, totals, true);
    run.complete(40, true);
    if (HasFailure()) return;
  }
  EXPECT_EQ(totals.preempted, 0);
  EXPECT_EQ(totals.left_out_steps - totals.token_starved_steps, 0);
}

Request request(int num_prompt, int max_tokens, TokenId first, int64_t arrival_us) {
  Request r{.prompt = {}, .sampling = {.max_tokens = max_tokens}, .cache_salt = {}, .arrival_us = arrival_us};
  for (int i = 0; i < num_prompt; ++i) r.prompt.push_back((first + i) % 1000);
  return r;
}

// Preemption and recomputing are invisible in what comes out.
TEST(Scheduler, PreemptedSequencesEndWithTheTokensOfTheirSoloRuns) {
  for (bool full_prompts : {true, false}) {
    SCOPED_TRACE(full_prompts);
    const SchedulerConfig config{
        .max_step_tokens = 128, .max_step_seqs = 8, .reserve_full_prompt = full_prompts};
    testing::FakeServing serving(config, {}, 110, 1000);
    std::map<SeqId, std::vector<TokenId>> expected;
    for (int i = 0; i < 8; ++i) {
      const Sequence& s = serving.add(request(200, 200, 50 * i, i));
      expected[s.id] = testing::solo_run(s.request, 1000);
    }
    int preempted = 0;
    for (int step = 0; !serving.done() && step < 10000; ++step) {
      serving.plan_next();
      preempted += int(serving.plan.preempted.size());
      serving.commit();
      for (const auto& [id, tokens] : serving.execute()) {
        EXPECT_EQ(tokens, expected.at(id));
        expected.erase(id);
      }
    }
    EXPECT_TRUE(expected.empty());
    EXPECT_GT(preempted, 0);
  }
}

// One long prompt among short ones on a pool that is always nearly full: the stream beside it gets a token in
// every step, the short one behind it does not wait for the end of the prompt, and the long one ends although
// short ones keep coming.
TEST(Scheduler, ALongPromptNeitherBlocksNorStarves) {
  const SchedulerConfig config{.max_step_tokens = 64, .max_step_seqs = 16, .max_chunk_tokens = 32};
  testing::FakeServing serving(config, {.prefix_cache = false}, 120, 1000);
  const SeqId stream = serving.add(request(10, 300, 0, 0)).id;
  const auto step = [&] {
    serving.plan_next();
    serving.commit();
    std::set<SeqId> ended;
    for (const auto& [id, tokens] : serving.execute()) ended.insert(id);
    return ended;
  };
  step();
  const SeqId long_one = serving.add(request(1500, 20, 7, 1)).id;
  const SeqId behind = serving.add(request(100, 5, 3, 2)).id;
  int long_done = 0, behind_done = 0, short_done = 0;
  for (int i = 1; i < 1000 && !(long_done && behind_done); ++i) {
    if (i % 8 == 0) serving.add(request(60, 10, i, 10 + i));
    const bool streams = serving.sequences.find(stream) != nullptr;
    for (SeqId id : step()) {
      if (id == long_one) long_done = i;
      if (id == behind) behind_done = i;
      short_done += id > behind;
    }
    ASSERT_TRUE(!streams || serving.plan.chunks[0].seq == stream) << "the stream waited in step " << i;
  }
  EXPECT_GT(long_done, 0);
  EXPECT_GT(behind_done, 0);
  EXPECT_LT(behind_done, 20);  // 100 tokens in chunks of 32 beside the long prompt, which takes 47 steps
  EXPECT_LT(long_done, 100);
  EXPECT_GT(short_done, 0);
}

// Two victims share all but one page each. Giving up both frees the shared pages as well, which the plan cannot
// count on; the step has no chunks then, and the next one has the pages.
TEST(Scheduler, VictimsThatShareFreeTheirPagesTogether) {
  const SchedulerConfig config{.max_step_tokens = 150, .max_step_seqs = 4, .reserve_full_prompt = false};
  testing::FakeServing serving(config, {}, 17, 1000);
  const auto step = [&] {
    serving.plan_next();
    serving.commit();
    const auto ended = serving.execute();
    serving.kv.check_integrity(serving.sequences.running());
    return ended;
  };
  serving.add(request(129, 1, 0, 5));
  step();
  const SeqId a = serving.add(request(260, 2, 500, 0)).id;
  const SeqId b = serving.add(request(129, 12, 0, 1)).id, c = serving.add(request(129, 12, 0, 2)).id;
  serving.config.max_chunk_tokens = 16;
  step(), step();
  ASSERT_EQ(serving.sequences.running().size(), 3u);
  ASSERT_EQ(serving.kv.budget().free_pages, 17 - 2 - 8 - 2);
  serving.config.max_chunk_tokens = 0;
  step();  // `a` needs 10 pages, and the twins alone give one each
  EXPECT_EQ(serving.plan.preempted, (std::vector<SeqId>{c, b}));
  EXPECT_TRUE(serving.plan.chunks.empty());
  step();
  ASSERT_FALSE(serving.plan.chunks.empty());
  EXPECT_EQ(serving.plan.chunks[0].seq, a);
  size_t num_ended = 0;
  for (int i = 0; i < 100; ++i) num_ended += step().size();
  EXPECT_EQ(num_ended, 3u);
}

}  // namespace
}  // namespace ekv
