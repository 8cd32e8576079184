#pragma once
// sequence.h -- requests being served: their tokens, their KV, and the two queues they stand in.

#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "elastickv/block_table.h"
#include "elastickv/config.h"
#include "elastickv/request.h"
#include "elastickv/step.h"

namespace ekv {

enum class SeqState : uint8_t { waiting, running };
constexpr int kClean = INT32_MAX;

struct Sequence {
  SeqId id{};
  Request request;
  // Prompt, then output. The last two may be pending: the next-to-last until the older of two steps in flight
  // is delivered, which happens before the step after the younger one is planned.
  std::vector<TokenId> tokens;
  int num_computed = 0;       // positions whose KV is valid for the next step: written by steps that may be in
                              // flight, or on its way while blocks.num_loading > 0. One less than tokens.size()
                              // for a decode; equal to it when a step in flight yields the last token
  int num_ever_computed = 0;  // the most that num_computed has been
  BlockTable blocks;
  // What lookups while it waits have found; saves their time, and no result depends on it.
  mutable KnownChain<CachedPair> known_cached;
  mutable KnownChain<StoredPair> known_stored;
  int tainted_from = kClean;  // first position whose KV was computed from BASE, or from KV that was
  SeqState state = SeqState::waiting;
  SeqStats stats;
  std::vector<TokenLogprobs> prompt_logprobs;  // collected while the prompt is computed

  int num_tokens() const { return int(tokens.size()); }
  int num_prompt() const { return int(request.prompt.size()); }
  int num_output() const { return num_tokens() - num_prompt(); }
  int num_remaining() const { return request.sampling.max_tokens - num_output(); }
  // The largest share of its pairs that may be BASE.
  double base_cap() const { return request.tier == KvTier::exact ? 0.0 : request.max_base_fraction; }
  // Prompt logprobs need the logits of every prompt position, which cached KV does not hold.
  bool may_use_prefix_cache() const { return request.sampling.prompt_logprobs < 0; }
};

// Owns every sequence, at stable addresses. Both queues stand in order of (priority if the policy says so,
// arrival, id): the first waiting is admitted first, the last running is preempted first. A preempted sequence
// therefore waits in front of everybody who came, or ranks, after it. Finding a place costs O(log n).
class SequenceTable {
 public:
  explicit SequenceTable(SchedulingPolicy policy) : policy_(policy) {}

  Sequence& add(SeqId id, Request request);  // waiting; the prompt has at least one token, the id is new
  Sequence* find(SeqId id);                  // null: unknown, or already gone
  Sequence& operator[](SeqId id);
  void erase(SeqId id);               // the caller has released its pages
  void admit(SeqId id);               // waiting -> running
  void preempt(SeqId id);             // running -> waiting; the caller has released its pages
  void follow(const StepPlan& plan);  // both, for those whom a committed plan moves

  std::span<Sequence* const> running() { return running_; }
  std::span<Sequence* const> waiting() { return waiting_; }
  std::span<const Sequence* const> running() const { return running_; }
  std::span<const Sequence* const> waiting() const { return waiting_; }
  bool empty() const { return by_id_.empty(); }

 private:
  using Queue = std::vector<Sequence*>;
  bool before(const Sequence& a, const Sequence& b) const;
  Queue::iterator place(Queue& queue, const Sequence& sequence) const;
  void insert(Queue& queue, Sequence& sequence);
  void remove(Queue& queue, const Sequence& sequence);

  SchedulingPolicy policy_;
  std::unordered_map<SeqId, std::unique_ptr<Sequence>> by_id_;
  Queue running_, waiting_;
};

}  // namespace ekv
