// What a sequence computes depends on its own tokens only: tokens and logprobs are the same bits alone and in
// any batch, whole and in chunks, after preemption, on shared prefix pages, with any number of threads.

#include <gtest/gtest.h>

#include <bit>
#include <cstdio>
#include <map>
#include <numeric>
#include <random>

#include "elastickv/engine.h"
#include "elastickv/model.h"
#include "support/backend_driver.h"
#include "support/golden_model.h"
#include "support/seed.h"

namespace ekv::test {
namespace {

constexpr int kPages = 160, kPrefixTokens = 64;

// What the backend said about the tokens of one sequence.
struct Answer {
  std::vector<TokenId> output;
  std::vector<TokenLogprobs> logprobs;
};

testing::AssertionResult same_bits(const TokenLogprobs& a, const TokenLogprobs& b) {
  const auto equal = [](const TokenLogprob& x, const TokenLogprob& y) {
    return x.token == y.token && std::bit_cast<uint32_t>(x.logprob) == std::bit_cast<uint32_t>(y.logprob);
  };
  if (!equal(a.chosen, b.chosen)) {
    return testing::AssertionFailure() << "chosen " << a.chosen.token << " " << a.chosen.logprob << " against "
                                       << b.chosen.token << " " << b.chosen.logprob;
  }
  if (a.top.size() != b.top.size()) return testing::AssertionFailure() << "lists of different length";
  for (size_t i = 0; i < a.top.size(); ++i) {
    if (!equal(a.top[i], b.top[i])) return testing::AssertionFailure() << "alternative " << i << " differs";
  }
  return testing::AssertionSuccess();
}

struct Job {
  std::vector<TokenId> prompt;
  SamplingParams sampling;
  int num_output = 0;
  Answer alone;
};

class CpuInvariance : public testing::TestWithParam<std::tuple<const char*, BaseFormat>> {
 protected:
  void SetUp() override {
    model_ = load_golden(std::get<0>(GetParam()));
    ASSERT_TRUE(model_);
  }

  std::unique_ptr<Backend> backend(int threads) const {
    EngineConfig config;
    config.kv.num_pages = kPages;
    config.kv.base_format = std::get<1>(GetParam());
    auto made = make_cpu_backend(*model_, config, {threads});
    EXPECT_TRUE(made);
    return std::move(*made);
  }

  // All but the first few start with the same pairs; greedy and seeded, with and without penalties.
  std::vector<Job> make_jobs(std::mt19937& rng, int count) const {
    const auto token = [&] { return TokenId(rng() % unsigned(model_->config().vocab)); };
    std::vector<TokenId> prefix;
    for (int i = 0; i < kPrefixTokens; ++i) prefix.push_back(token());
    std::vector<Job> jobs(static_cast<size_t>(count));
    for (int j = 0; j < count; ++j) {
      Job& job = jobs[size_t(j)];
      if (j >= 2) job.prompt = prefix;
      for (int i = 1 + int(rng() % 70); i > 0; --i) job.prompt.push_back(token());
      job.sampling.temperature = rng() % 2 ? 0.0f : 0.8f;
      job.sampling.seed = rng();
      if (rng() % 3 == 0) job.sampling.repetition_penalty = 1.3f;
      if (rng() % 3 == 0) job.sampling.frequency_penalty = 0.5f;
      if (rng() % 3 == 0) job.sampling.top_p = 0.8f;
      job.num_output = 2 + int(rng() % 20);
    }
    return jobs;
  }

  Answer run_alone(const Job& job) const {
    const auto device = backend(1);
    std::vector<int32_t> pages = all_pages(kPages);
    DrivenSequence s = driven(job.prompt);
    s.sampling = job.sampling;
    Answer answer;
    while (int(answer.output.size()) < job.num_output) {
      DrivenStep step(pages);
      step.add(s, int(s.tokens.size()) - s.num_computed, model_->config().vocab);
      const SampledRow& row = step.run(*device).rows[0];
      s.tokens.push_back(row.token);
      answer.output.push_back(row.token);
      answer.logprobs.push_back(*row.logprobs);
    }
    return answer;
  }

  std::unique_ptr<Model> model_;
};

// Sequences at random stages; each step takes some of them, each with a chunk of random length.
class Mixer {
 public:
  Mixer(const std::vector<Job>& jobs, std::mt19937& rng, int vocab)
      : jobs_(jobs), rng_(rng), vocab_(vocab), pages_(all_pages(kPages)), prefix_(driven({})) {
    std::shuffle(pages_.begin(), pages_.end(), rng_);
    for (const Job& job : jobs_) {
      sequences_.push_back(driven(job.prompt));
      sequences_.back().sampling = job.sampling;
    }
    answers_.resize(jobs.size());
  }

  // One random step; false when every sequence is done.
  bool step(Backend& device) {
    std::vector<size_t> open;
    for (size_t i = 0; i < jobs_.size(); ++i) {
      if (int(answers_[i].output.size()) < jobs_[i].num_output) open.push_back(i);
    }
    if (open.empty()) return false;
    std::shuffle(open.begin(), open.end(), rng_);
    open.resize(1 + rng_() % open.size());
    DrivenStep step(pages_);
    std::vector<size_t> sampled;
    for (size_t i : open) {
      prepare(i);
      DrivenSequence& s = sequences_[i];
      const int left = int(s.tokens.size()) - s.num_computed;
      const int count = rng_() % 3 == 0 ? left : 1 + int(rng_() % unsigned(left));
      step.add(s, count, vocab_);
      if (count == left) sampled.push_back(i);
    }
    const StepOutput& out = step.run(device);
    EXPECT_TRUE(out.invalid_chunks.empty());
    for (size_t k = 0; k < sampled.size(); ++k) take(sampled[k], out.rows[k]);
    return true;
  }

  int num_preempted() const { return num_preempted_; }
  int num_shared() const { return num_shared_; }

 private:
  void prepare(size_t i) {
    DrivenSequence& s = sequences_[i];
    if (s.num_computed > 0 && rng_() % 12 == 0) {
      drop(s);
      ++num_preempted_;
    }
    if (s.num_computed == 0 && i >= 2 && !prefix_.pairs.empty() && rng_() % 2 == 0) {
      s.pairs = prefix_.pairs;
      s.num_computed = kPrefixTokens;
      ++num_shared_;
    }
  }

  // Pages of the shared prefix stay.
  void drop(DrivenSequence& s) {
    if (!prefix_.pairs.empty() && !s.pairs.empty() && s.pairs[0] == prefix_.pairs[0]) {
      s.pairs.erase(s.pairs.begin(), s.pairs.begin() + long(prefix_.pairs.size()));
    }
    give_back(s, pages_);
  }

  void take(size_t i, const SampledRow& row) {
    DrivenSequence& s = sequences_[i];
    const size_t n = answers_[i].output.size();
    ASSERT_EQ(row.token, jobs_[i].alone.output[n]) << "sequence " << i << ", output token " << n;
    ASSERT_TRUE(same_bits(*row.logprobs, jobs_[i].alone.logprobs[n]))
        << "sequence " << i << ", output token " << n;
    answers_[i].output.push_back(row.token);
    s.tokens.push_back(row.token);
    if (int(answers_[i].output.size()) < jobs_[i].num_output) return;
    if (i >= 2 && prefix_.pairs.empty()) {  // the first to finish leaves its prefix to the others
      prefix_.pairs.assign(s.pairs.begin(), s.pairs.begin() + kPrefixTokens / kPairTokens);
    }
    drop(s);
  }

  const std::vector<Job>& jobs_;
  std::mt19937& rng_;
  int vocab_;
  std::vector<int32_t> pages_;
  std::vector<DrivenSequence> sequences_;
  std::vector<Answer> answers_;
  DrivenSequence prefix_;
  int num_preempted_ = 0, num_shared_ = 0;
};

TEST_P(CpuInvariance, TokensAndLogprobsDoNotDependOnTheCompany) {
  int preempted = 0, shared = 0;
  for (const unsigned seed : seeds(3)) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 rng(seed);
    std::vector<Job> jobs = make_jobs(rng, 9);
    for (Job& job : jobs) job.alone = run_alone(job);
    for (int threads : {1, 2, 3}) {
      const auto device = backend(threads);
      Mixer mixer(jobs, rng, model_->config().vocab);
      while (mixer.step(*device)) ASSERT_FALSE(HasFatalFailure()) << threads << " threads";
      if (!is_fixed(seed)) continue;
      preempted += mixer.num_preempted();
      shared += mixer.num_shared();
    }
  }
  EXPECT_GT(preempted, 10);
  EXPECT_GT(shared, 5);
}

// Prompt logprobs in one chunk and in chunks of 1, 7 and 32 tokens.
TEST_P(CpuInvariance, PromptLogprobsDoNotDependOnChunks) {
  std::mt19937 rng(17);
  const Job job = make_jobs(rng, 3).back();
  std::vector<TokenLogprobs> want;
  for (int chunk : {1000, 1, 7, 32}) {
    const auto device = backend(2);
    std::vector<int32_t> pages = all_pages(kPages);
    DrivenSequence s = driven(job.prompt);
    std::vector<TokenLogprobs> got;
    while (s.num_computed < s.num_prompt - 1) {
      DrivenStep step(pages);
      const int begin = s.num_computed, count = std::min(chunk, s.num_prompt - 1 - begin);
      step.add(s, count);
      for (int p = begin; p < begin + count; ++p) step.want_target(s, p, job.prompt[size_t(p) + 1], 4);
      for (const SampledRow& row : step.run(*device).rows) got.push_back(*row.logprobs);
    }
    ASSERT_EQ(got.size(), job.prompt.size() - 1);
    if (want.empty()) want = got;
    for (size_t i = 0; i < want.size(); ++i) ASSERT_TRUE(same_bits(got[i], want[i])) << "position " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Models, CpuInvariance,
                         testing::Values(std::tuple{"tiny-llama", BaseFormat::fixed8},
                                         std::tuple{"tiny-mistral", BaseFormat::e5m2},
                                         std::tuple{"tiny-qwen2", BaseFormat::fixed8},
                                         std::tuple{"tiny-qwen3", BaseFormat::fixed8}));

// The embedding of one token becomes NaN: the sequence with that token fails, its neighbours' bits stay.
TEST(CpuPoison, StaysInItsSequence) {
  constexpr TokenId kPoison = 3;
  const Model model = Model::dummy(*builtin_model_config("tiny"), 5);
  EngineConfig config;
  config.kv.num_pages = kPages;
  auto device = make_cpu_backend(model, config, {2});
  ASSERT_TRUE(device);
  // The backend has its own copy of the tied LM head; dummy weights lie in ordinary memory.
  const std::span<const std::byte> row = model.weights().embedding.data.subspan(
      size_t(kPoison) * size_t(model.config().hidden) * 2, size_t(model.config().hidden) * 2);
  std::fill(const_cast<std::byte*>(row.data()), const_cast<std::byte*>(row.data()) + row.size(),
            std::byte{0xff});

  std::vector<TokenLogprobs> clean;
  for (bool poisoned : {false, true}) {
    std::vector<int32_t> pages = all_pages(kPages);
    std::vector<DrivenSequence> s = {driven({4, 5, 6, 7}), driven({8, poisoned ? kPoison : 9, 10}),
                                     driven(std::vector<TokenId>(40, 11)), driven({12})};
    DrivenStep step(pages);
    for (DrivenSequence& one : s) step.add(one, one.num_prompt, 5);
    const StepOutput& out = step.run(**device);
    ASSERT_EQ(out.invalid_chunks, poisoned ? std::vector<int32_t>{1} : std::vector<int32_t>{});
    for (size_t i = 0; i < s.size(); ++i) {
      if (!poisoned) clean.push_back(*out.rows[i].logprobs);
      if (!poisoned || i == 1) continue;
      EXPECT_TRUE(same_bits(*out.rows[i].logprobs, clean[i])) << i;
    }
  }
}

struct Ends : EngineListener {
  void on_event(SeqEvent event) override {
    if (event.finish != FinishReason::none) by_id[event.id] = std::move(event);
  }
  void on_step(const StepRecord&) override {}
  std::map<SeqId, SeqEvent> by_id;
};

// A request may ban every token there is: it fails with a message that says so, its neighbours do not notice.
TEST(CpuBan, OfEveryTokenFailsItsRequestOnly) {
  const Model model = Model::dummy(*builtin_model_config("tiny"), 5);
  std::vector<TokenId> all(size_t(model.config().vocab));
  std::iota(all.begin(), all.end(), 0);
  for (const bool async : {false, true}) {
    EngineConfig config;
    config.kv.num_pages = kPages;
    config.async_scheduling = async;
    auto device = make_cpu_backend(model, config, {2});
    ASSERT_TRUE(device);
    SteadyClock clock;
    Ends ends;
    Engine engine(config, *std::move(device), clock, ends);
    const auto submit = [&](SamplingParams sampling) {
      return *engine.submit({.prompt = {4, 5, 6}, .sampling = std::move(sampling)});
    };
    const SeqId banned = submit({.min_tokens = 4, .max_tokens = 8, .stop_token_ids = all});
    const SeqId free = submit({.max_tokens = 8, .stop_token_ids = all});
    const SeqId good = submit({.max_tokens = 8});
    for (int i = 0; i < 100 && engine.step(); ++i) engine.check_integrity();
    ASSERT_EQ(ends.by_id.size(), 3u);
    EXPECT_EQ(ends.by_id[banned].finish, FinishReason::error);
    EXPECT_FALSE(ends.by_id[banned].token);
    for (const char* part : {"stop tokens", "min_tokens", "no token to choose"})
      EXPECT_NE(ends.by_id[banned].error.find(part), std::string::npos) << ends.by_id[banned].error;
    EXPECT_EQ(ends.by_id[free].finish, FinishReason::stop);
    EXPECT_EQ(ends.by_id[good].finish, FinishReason::length);
    EXPECT_EQ(ends.by_id[good].stats.num_output, 8);
    EXPECT_EQ(engine.kv().num_free_pages() + engine.kv().num_cached_pages(), engine.kv().num_pages());
  }
}

}  // namespace
}  // namespace ekv::test
