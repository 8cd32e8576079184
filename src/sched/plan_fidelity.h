#pragma once
// plan_fidelity.h -- who gives up precision when pages are short. Pure: counts in, counts out.

#include <span>
#include <vector>

#include "elastickv/request.h"

namespace ekv {

// Some pairs that may be demoted now, all alike: pairs that one sequence alone uses, or that it shares with the
// same number of others.
struct FidelitySource {
  SeqId seq{};
  KvTier tier = KvTier::elastic;  // never exact
  bool nearly_done = false;       // its pages come back soon by themselves
  bool in_prefill = false;        // its KV feeds the rest of its prompt
  int num_sharers = 1;
  int num_pairs = 0, num_base = 0;  // of the sequence
  int num_candidates = 0;
};

struct FidelityShares {
  std::vector<int> takes;  // [sources] pairs to demote, from the first candidate on
  int total = 0;
  std::vector<int> order, heap;  // scratch
};

// Takes `wanted` pairs, or all there are. Sources are used up in this order: best effort before elastic, those
// beyond prefill before those in it, fewest sharers first; among equals always the one with the smallest share
// of BASE pairs, so that the harm, which grows faster than the share, is spread. Nearly done sequences come
// last and only for the `shortage` itself. Ties: the earlier source.
void plan_fidelity(std::span<const FidelitySource> sources, int shortage, int wanted, FidelityShares& shares);

}  // namespace ekv
