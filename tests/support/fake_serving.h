#pragma once
// fake_serving.h -- the step loop around the real scheduler, KV manager and packer, with a device that computes
// no model: a KV cell holds the hash of everything it depends on (salt and all tokens up to its position). So a
// page that was lost, shared wrongly, reused too early or never written shows as a wrong hash, and the tokens
// "sampled" depend on the tokens before them alone, however they were batched.

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "elastickv/kv_manager.h"
#include "elastickv/scheduler.h"
#include "elastickv/sequence.h"
#include "sched/pack_step.h"

namespace ekv::testing {

inline uint64_t mix(uint64_t state, uint64_t value) {
  state = (state ^ value) * 0x9e3779b97f4a7c15u;
  return state ^ (state >> 29);
}

inline uint64_t initial_state(const std::string& salt) {
  uint64_t state = 1;
  for (char c : salt) state = mix(state, uint64_t(c) + 1000);
  return state;
}

inline TokenId sample(uint64_t state, int vocab) { return TokenId(mix(state, 77) % uint64_t(vocab)); }

// What a sequence that runs alone gives: prompt and output.
inline std::vector<TokenId> solo_run(const Request& request, int vocab) {
  std::vector<TokenId> tokens = request.prompt;
  uint64_t state = initial_state(request.cache_salt);
  for (TokenId token : tokens) state = mix(state, uint64_t(token));
  for (int i = 0; i < request.sampling.max_tokens; ++i) {
    tokens.push_back(sample(state, vocab));
    state = mix(state, uint64_t(tokens.back()));
  }
  return tokens;
}

class FakeDevice {
 public:
  explicit FakeDevice(int num_pages) : cells_(size_t(num_pages) * kBlockTokens, 0) {}

  // Writes the cells of the step, then reads back all that each of its chunks can see. Returns the state at the
  // last position of each chunk, in the order of the chunks.
  std::vector<uint64_t> run(const StepInput& in, const StepPlan& plan, SequenceTable& sequences) {
    for (const DemoteJob& job : in.demotes) demote(job);
    for (const PromoteJob& job : in.promotes) promote(job);
    write(in, plan, sequences);
    std::vector<uint64_t> last;
    for (size_t s = 0; s < plan.chunks.size(); ++s)
      last.push_back(read(in, int(s), sequences[plan.chunks[s].seq]));
    return last;
  }

 private:
  uint64_t& cell(int even, int odd, int i) {
    return cells_.at(size_t(i < kBlockTokens ? even : odd) * kBlockTokens + size_t(i % kBlockTokens));
  }
  // Fidelity is not this device's business: a BASE page holds the cells of both blocks as they were.
  void demote(const DemoteJob& job) {
    auto& packed = base_[job.even];
    packed.clear();
    for (int i = 0; i < kPairTokens; ++i) packed.push_back(std::exchange(cell(job.even, job.odd, i), 0));
  }
  void promote(const PromoteJob& job) {
    const auto packed = base_.extract(job.even);
    ASSERT_FALSE(packed.empty()) << "promoted what is not BASE";
    for (int i = 0; i < kPairTokens; ++i) cell(job.even, job.odd, i) = packed.mapped()[size_t(i)];
  }

  void write(const StepInput& in, const StepPlan& plan, SequenceTable& sequences) {
    for (size_t s = 0; s < plan.chunks.size(); ++s) {
      const Sequence& sequence = sequences[plan.chunks[s].seq];
      uint64_t state = initial_state(sequence.request.cache_salt);
      for (int i = 0; i < plan.chunks[s].first_pos; ++i)
        state = mix(state, uint64_t(sequence.tokens[size_t(i)]));
      for (int row = in.q_start[s]; row < in.q_start[s + 1]; ++row) {
        state = mix(state, uint64_t(in.tokens[size_t(row)]));
        cells_.at(size_t(in.slot_mapping[size_t(row)])) = state;
      }
    }
  }

  uint64_t read(const StepInput& in, int s, const Sequence& sequence) {
    uint64_t state = initial_state(sequence.request.cache_salt);
    const auto pairs = in.block_table.row(s);
    for (int i = 0; i < in.kv_len[size_t(s)]; ++i) {
      state = mix(state, uint64_t(sequence.tokens[size_t(i)]));
      const PairEntry& pair = pairs[size_t(i / kPairTokens)];
      const int in_pair = i % kPairTokens;
      EXPECT_EQ(
          pair.is_base() ? base_.at(pair.even_page()).at(size_t(in_pair)) : cell(pair.even, pair.odd, in_pair),
          state)
          << "sequence " << uint64_t(sequence.id) << ", position " << i << ", page " << pair.even_page();
    }
    return state;
  }

  std::vector<uint64_t> cells_;
  std::map<int, std::vector<uint64_t>> base_;  // by page
};

// One engine's worth of state. Usage: add(), then step() until done().
struct FakeServing {
  FakeServing(const SchedulerConfig& scheduler, const KvConfig& kv_config, int num_pages, int vocab,
              int num_host_slots = 0)
      : config(scheduler),
        vocab(vocab),
        kv(kv_config, num_pages, {}, num_host_slots),
        sequences(scheduler.policy),
        device(num_pages) {}

  Sequence& add(Request request) { return sequences.add(SeqId(next_id++), std::move(request)); }
  bool done() const { return sequences.empty(); }

  void view() {
    running.clear(), waiting.clear();
    for (const Sequence* s : sequences.running()) running.push_back(kv.view(*s));
    for (const Sequence* s : sequences.waiting()) waiting.push_back(kv.view(*s));
  }

  void plan_next() {
    view();
    plan_step(config, running, waiting, kv.budget(), plan);
  }

  void commit() {
    kv.commit(plan, sequences);
    sequences.follow(plan);
    pack_step(plan, kv.pairs(), AttentionPath::automatic, sequences, packed);
  }

  // Runs the committed plan; returns what ended, each with all its tokens.
  std::vector<std::pair<SeqId, std::vector<TokenId>>> execute() {
    std::vector<std::pair<SeqId, std::vector<TokenId>>> ended;
    const std::vector<uint64_t> states = device.run(packed.view(kv.jobs()), plan, sequences);
    for (size_t i = 0; i < plan.chunks.size(); ++i) {
      Sequence& sequence = sequences[plan.chunks[i].seq];
      sequence.num_computed += plan.chunks[i].num_tokens;
      kv.publish(sequence);
      if (!plan.chunks[i].sample) continue;
      sequence.tokens.push_back(sample(states[i], vocab));
      if (sequence.num_output() < sequence.request.sampling.max_tokens) continue;
      ended.emplace_back(sequence.id, sequence.tokens);
      end(sequence);
    }
    return ended;
  }

  void end(Sequence& sequence) {
    kv.release(sequence);
    sequences.erase(sequence.id);
  }

  SchedulerConfig config;
  int vocab;
  KvManager kv;
  SequenceTable sequences;
  FakeDevice device;
  std::vector<SeqView> running, waiting;
  StepPlan plan;
  PackedStep packed;
  uint64_t next_id = 1;
};

}  // namespace ekv::testing
