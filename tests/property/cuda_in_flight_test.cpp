// Two steps in flight with tokens that the host does not know, and decodes replayed as graphs: the same bits as
// one step at a time, launched kernel by kernel. Linked to the GPU, or to plain C++ with streams that run late.

#include <gtest/gtest.h>

#include <bit>
#include <cstdio>
#include <random>

#include "elastickv/model.h"
#include "support/backend_driver.h"
#include "support/golden_model.h"
#include "support/seed.h"

namespace ekv::test {
namespace {

constexpr int kPages = 400, kSequences = 22, kSteps = 60;

struct Way {
  bool eager = false;
  int in_flight = 1;
  KvPath path = KvPath::native;
};

// What one schedule gives.
struct Texts {
  std::vector<std::vector<TokenId>> tokens;     // [sequences]
  std::vector<std::vector<uint32_t>> logprobs;  // bits
  bool operator==(const Texts&) const = default;
};

// Drives a random schedule of chunks: whoever is drawn decodes one token, or begins with its whole prompt.
class Schedule {
 public:
  Schedule(Backend& device, const Way& way, unsigned seed, int vocab) : device_(device), way_(way), rng_(seed) {
    for (int i = 0; i < kSequences; ++i) {
      std::vector<TokenId> prompt;
      for (int t = 0; t < 3 + int(rng_() % 40); ++t) prompt.push_back(TokenId(rng_() % unsigned(vocab)));
      DrivenSequence& s = sequences_.emplace_back(driven(std::move(prompt)));
      s.seq = SeqId(uint64_t(i) + 1);
      if (i % 3 == 0) s.sampling.frequency_penalty = 1.5f, s.sampling.repetition_penalty = 1.3f;
      if (i % 4 == 1) s.sampling.temperature = 0.8f, s.sampling.top_k = 20, s.sampling.seed = uint64_t(i);
      if (i % 5 == 2) s.sampling.logit_bias = {{TokenId(i), 3.0f}};
    }
    texts_.logprobs.resize(kSequences);
  }

  Texts run() {
    for (int step = 0; step < kSteps; ++step) {
      submit();
      if (int(flights_.size()) == way_.in_flight) collect();
    }
    while (!flights_.empty()) collect();
    for (const DrivenSequence& s : sequences_) texts_.tokens.push_back(s.tokens);
    return texts_;
  }
  int num_pending() const { return num_pending_; }

 private:
  using Flight = std::vector<size_t>;  // the sequence of each sample row

  void submit() {
    Flight order(kSequences);
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), rng_);
    order.resize(1 + rng_() % (rng_() % 2 ? 4 : kSequences));
    {
      DrivenStep step(pages_);
      step.path = way_.path;
      for (const size_t i : order) {
        DrivenSequence& s = sequences_[i];
        num_pending_ += is_pending(s.tokens.back());
        step.add(s, int(s.tokens.size()) - s.num_computed, i % 2 ? 2 : -1);
      }
      step.submit(device_);
    }
    for (size_t row = 0; row < order.size(); ++row)
      sequences_[order[row]].tokens.push_back(pending_token(int32_t(row)));
    flights_.push_back(std::move(order));
  }

  // A pending token stands behind those of the steps before, so it is the first one that is pending.
  void collect() {
    const StepOutput& out = device_.collect();
    EXPECT_TRUE(out.invalid_chunks.empty());
    const Flight flight = std::move(flights_.front());
    flights_.erase(flights_.begin());
    ASSERT_EQ(out.rows.size(), flight.size());
    for (size_t row = 0; row < flight.size(); ++row) {
      std::vector<TokenId>& tokens = sequences_[flight[row]].tokens;
      const auto at = std::ranges::find_if(tokens, is_pending);
      ASSERT_NE(at, tokens.end());
      ASSERT_EQ(*at, pending_token(int32_t(row)));
      *at = out.rows[row].token;
      if (!out.rows[row].logprobs) continue;
      std::vector<uint32_t>& bits = texts_.logprobs[flight[row]];
      bits.push_back(std::bit_cast<uint32_t>(out.rows[row].logprobs->chosen.logprob));
      for (const TokenLogprob& top : out.rows[row].logprobs->top)
        bits.push_back(std::bit_cast<uint32_t>(top.logprob));
    }
  }

  Backend& device_;
  Way way_;
  std::mt19937 rng_;
  std::vector<int32_t> pages_ = all_pages(kPages);
  std::vector<DrivenSequence> sequences_;
  std::vector<Flight> flights_;
  Texts texts_;
  int num_pending_ = 0;
};

class CudaInFlight : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    model_ = load_golden(GetParam());
    ASSERT_TRUE(model_);
  }

  Texts run(const Way& way, unsigned seed) {
    EngineConfig config;
    config.kv.num_pages = kPages;
    config.max_model_len = 1024;
    config.scheduler.max_step_seqs = kSequences;
    config.fidelity.policy = KvPolicy::elastic;  // whose paths are all there
    auto made =
        make_cuda_backend(*model_, config, {.num_host_slots = 1, .launch = {.enforce_eager = way.eager}});
    EXPECT_TRUE(made) << made.error().message;
    EXPECT_EQ((*made)->info().max_steps_in_flight, 2);
    Schedule schedule(**made, way, seed, model_->config().vocab);
    const Texts texts = schedule.run();
    EXPECT_EQ(schedule.num_pending() > 0, way.in_flight > 1);
    return texts;
  }

  std::unique_ptr<Model> model_;
};

TEST_P(CudaInFlight, GraphsAndStepsInFlightChangeNoBit) {
  const unsigned seed = drawn_seed();
  SCOPED_TRACE(seed);
  const Texts want = run({.eager = true}, seed);
  EXPECT_EQ(run({.eager = false}, seed), want) << "graphs";
  EXPECT_EQ(run({.eager = true, .in_flight = 2}, seed), want) << "two steps in flight";
  EXPECT_EQ(run({.eager = false, .in_flight = 2}, seed), want) << "two steps in flight and graphs";
  // A path without a graph at the start: captured while a step is in flight.
  EXPECT_EQ(run({.eager = false, .in_flight = 2, .path = KvPath::general}, seed), want) << "general";
}

// Three sequences decode as a batch of four. The fourth has the slot 0 of nobody: who has page 0 keeps its
// keys.
TEST_P(CudaInFlight, PaddingTouchesNoPage) {
  EngineConfig config;
  config.kv.num_pages = kPages;
  config.max_model_len = 1024;
  config.scheduler.max_step_seqs = 8;
  std::vector<uint32_t> bits;
  for (const bool company : {false, true}) {
    auto made = make_cuda_backend(*model_, config, {});
    ASSERT_TRUE(made) << made.error().message;
    Backend& device = **made;
    std::vector<int32_t> pages = all_pages(kPages);
    DrivenSequence first = driven({5, 6, 7, 8, 9, 10});
    std::vector<DrivenSequence> others{driven({1, 2}), driven({3}), driven({4, 4, 4})};
    const auto run = [&](std::span<DrivenSequence> all, int count) {
      DrivenStep step(pages);
      for (DrivenSequence& s : all) step.add(s, count > 0 ? count : int(s.tokens.size()) - s.num_computed, 0);
      StepOutput out = step.run(device);
      for (size_t i = 0; i < out.rows.size(); ++i) all[i].tokens.push_back(out.rows[i].token);
      return out;
    };
    DrivenStep prefill(pages);
    prefill.add(first, 5);
    prefill.run(device);
    ASSERT_EQ(first.pairs[0].even, 0);
    for (int step = 0; company && step < 4; ++step) run(others, 0);
    bits.push_back(std::bit_cast<uint32_t>(run({&first, 1}, 1).rows.at(0).logprobs->chosen.logprob));
  }
  EXPECT_EQ(bits[0], bits[1]);
}

// The step in flight decodes a sequence that has ended meanwhile; the next one loads pairs into its pages.
TEST_P(CudaInFlight, CopiesIntoPagesWaitForTheStepThatReadsThem) {
  constexpr int kPairs = 4;
  EngineConfig config;
  config.kv.num_pages = kPages;
  config.max_model_len = 1024;
  config.scheduler.max_step_seqs = 8;
  config.fidelity.policy = KvPolicy::exact_offload;
  auto made =
      make_cuda_backend(*model_, config, {.num_host_slots = kPairs, .host_content = HostContent::whole_pairs});
  ASSERT_TRUE(made) << made.error().message;
  Backend& device = **made;
  std::mt19937 rng(3);
  const auto tokens = [&] {
    std::vector<TokenId> all;
    for (int i = 0; i < kPairs * kPairTokens + 5; ++i)
      all.push_back(TokenId(rng() % unsigned(model_->config().vocab)));
    return all;
  };
  std::vector<int32_t> pages = all_pages(kPages);
  const auto transfer = [&](TransferKind kind, const DrivenSequence& s) {
    std::vector<TransferJob> jobs;
    for (int pair = 0; pair < kPairs; ++pair) {
      const PairEntry& entry = s.pairs[size_t(pair)];
      jobs.push_back({kind, entry.even, entry.odd, pair, uint32_t(pair + 1)});
    }
    return jobs;
  };
  const auto prefill = [&](DrivenSequence& s) {
    DrivenStep step(pages);
    step.add(s, int(s.tokens.size()) - 1);
    step.run(device);
  };
  const auto wait_for = [&](size_t done) {
    for (; done < kPairs; done += device.collect().transfers_done.size()) device.submit({});
  };
  DrivenSequence stored = driven(tokens());
  prefill(stored);
  const std::vector<TransferJob> out = transfer(TransferKind::store_pair, stored);
  device.submit({.transfers = out});
  wait_for(device.collect().transfers_done.size());

  const std::vector<TokenId> text = tokens();
  std::vector<uint32_t> bits;
  for (int round = 0; round < 40; ++round) {
    DrivenSequence s = driven(text);
    prefill(s);
    DrivenStep step(pages);
    step.add(s, 1, 0);
    step.submit(device);
    const std::vector<TransferJob> in = transfer(TransferKind::load_pair, s);
    if (round > 0) device.submit({.transfers = in});  // the first round is undisturbed
    const StepOutput& decoded = device.collect();
    bits.push_back(std::bit_cast<uint32_t>(decoded.rows.at(0).logprobs->chosen.logprob));
    const size_t done = decoded.transfers_done.size();  // a copy of the younger step may have ended by now
    if (round > 0) wait_for(done + device.collect().transfers_done.size());
    give_back(s, pages);
  }
  EXPECT_EQ(bits, std::vector<uint32_t>(bits.size(), bits[0]));
}

INSTANTIATE_TEST_SUITE_P(Models, CudaInFlight, testing::Values("tiny-llama", "tiny-qwen3"));

}  // namespace
}  // namespace ekv::test
