#pragma once
// sequence.h -- requests being served: their tokens, their KV, and the two queues they stand in.

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

struct Sequence {
  SeqId id{};
  Request request;
  std::vector<TokenId> tokens;  // prompt, then output
  int num_computed = 0;         // positions whose KV is valid; done with prefill when it equals tokens.size()
  BlockTable blocks;
  SeqState state = SeqState::waiting;
  SeqStats stats;
  std::vector<TokenLogprobs> prompt_logprobs;  // collected while the prompt is computed

  int num_tokens() const { return int(tokens.size()); }
  int num_prompt() const { return int(request.prompt.size()); }
  int num_output() const { return num_tokens() - num_prompt(); }
  // Prompt logprobs need the logits of every prompt position, which cached KV does not hold.
  bool may_use_prefix_cache() const { return request.sampling.prompt_logprobs < 0; }
};

// What the scheduler sees of a sequence: counts only.
struct SeqView {
  SeqId id{};
  int num_tokens = 0;
  int num_computed = 0;     // of a waiting sequence: 0
  int num_pages = 0;        // held now
  int num_cached = 0;       // waiting: leading tokens found in the prefix cache, whole pairs
  int num_cached_free = 0;  // waiting: pages of that hit which nobody uses, so taking them spends free pages
};

// Owns every sequence. Waiting ones stand in order of (priority if the policy says so, arrival, id); running
// ones in the order in which they may keep their pages: the last is preempted first.
class SequenceTable {
 public:
  explicit SequenceTable(SchedulingPolicy policy) : policy_(policy) {}

  Sequence& add(SeqId id, Request request);
  Sequence* find(SeqId id);  // null: unknown, or already gone
  Sequence& operator[](SeqId id);
  void erase(SeqId id);
  void admit(SeqId id);    // waiting -> running
  void preempt(SeqId id);  // running -> waiting; the caller has released its pages

  std::span<Sequence* const> running() const { return running_; }
  std::span<Sequence* const> waiting() const { return waiting_; }
  bool empty() const { return by_id_.empty(); }

 private:
  bool before(const Sequence& a, const Sequence& b) const;
  void insert_sorted(std::vector<Sequence*>& queue, Sequence& sequence);

  SchedulingPolicy policy_;
  std::unordered_map<SeqId, std::unique_ptr<Sequence>> by_id_;
  std::vector<Sequence*> running_, waiting_;
};

}  // namespace ekv
