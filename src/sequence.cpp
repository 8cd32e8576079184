#include "elastickv/sequence.h"

#include <algorithm>
#include <tuple>

namespace ekv {
namespace {

// Output tokens for which admission makes room, so that appending a token or a page allocates nothing. Longer
// outputs double their arrays now and then: a limit nobody reaches must not cost memory for everybody.
constexpr int kReservedOutput = 4096;

void reserve_for_output(Sequence& sequence) {
  const int output = std::clamp(sequence.request.sampling.max_tokens, 1, kReservedOutput);
  const int tokens = std::max(sequence.num_tokens(), sequence.num_prompt() + output);
  sequence.tokens.reserve(size_t(tokens));
  sequence.blocks.pairs.reserve(size_t(ceil_div(tokens, kPairTokens)));
}

}  // namespace

Sequence& SequenceTable::add(SeqId id, Request request) {
  EKV_CHECK(!request.prompt.empty(), "a sequence starts with at least one token");
  auto owner = std::make_unique<Sequence>();
  Sequence& sequence = *owner;
  sequence.id = id;
  sequence.request = std::move(request);
  sequence.tokens = sequence.request.prompt;
  sequence.stats.num_prompt = sequence.num_prompt();
  sequence.stats.arrival_us = sequence.request.arrival_us;
  EKV_CHECK(by_id_.emplace(id, std::move(owner)).second, "sequence ids are used once");
  insert(waiting_, sequence);
  return sequence;
}

Sequence* SequenceTable::find(SeqId id) {
  const auto it = by_id_.find(id);
  return it == by_id_.end() ? nullptr : it->second.get();
}

Sequence& SequenceTable::operator[](SeqId id) {
  Sequence* sequence = find(id);
  EKV_CHECK(sequence != nullptr, "no sequence has this id");
  return *sequence;
}

void SequenceTable::erase(SeqId id) {
  Sequence& sequence = (*this)[id];
  EKV_CHECK(sequence.blocks.pairs.empty(), "a sequence that leaves has released its pages");
  remove(sequence.state == SeqState::running ? running_ : waiting_, sequence);
  by_id_.erase(id);
}

void SequenceTable::admit(SeqId id) {
  Sequence& sequence = (*this)[id];
  EKV_CHECK(sequence.state == SeqState::waiting, "only a waiting sequence can be admitted");
  remove(waiting_, sequence);
  sequence.state = SeqState::running;
  reserve_for_output(sequence);
  insert(running_, sequence);
}

void SequenceTable::preempt(SeqId id) {
  Sequence& sequence = (*this)[id];
  EKV_CHECK(sequence.state == SeqState::running, "only a running sequence can be preempted");
  EKV_CHECK(sequence.blocks.pairs.empty(), "a preempted sequence has released its pages");
  remove(running_, sequence);
  sequence.state = SeqState::waiting;
  insert(waiting_, sequence);
}

void SequenceTable::follow(const StepPlan& plan) {
  for (SeqId id : plan.preempted) preempt(id);
  for (SeqId id : plan.admitted) admit(id);
  for (const LoadPlan& load : plan.loads) admit(load.seq);
}

bool SequenceTable::before(const Sequence& a, const Sequence& b) const {
  const auto key = [this](const Sequence& s) {
    const int64_t priority = policy_ == SchedulingPolicy::priority ? s.request.priority : 0;
    return std::tuple(priority, s.request.arrival_us, s.id);
  };
  return key(a) < key(b);
}

SequenceTable::Queue::iterator SequenceTable::place(Queue& queue, const Sequence& sequence) const {
  return std::lower_bound(queue.begin(), queue.end(), &sequence,
                          [this](const Sequence* a, const Sequence* b) { return before(*a, *b); });
}

void SequenceTable::insert(Queue& queue, Sequence& sequence) {
  queue.insert(place(queue, sequence), &sequence);
}

void SequenceTable::remove(Queue& queue, const Sequence& sequence) {
  const auto it = place(queue, sequence);
  EKV_CHECK(it != queue.end() && *it == &sequence, "a sequence stands where its rank says");
  queue.erase(it);
}

}  // namespace ekv
