#include "sched/plan_fidelity.h"

#include <algorithm>
#include <tuple>

namespace ekv {
namespace {

auto class_of(const FidelitySource& s) {
  return std::tuple(s.nearly_done, s.tier != KvTier::best_effort, s.in_prefill, s.num_sharers);
}

// Spreads at most `wanted` pairs over sources of one class: always the one with the smallest share of BASE
// next.
int fill_evenly(std::span<const FidelitySource> sources, std::span<const int> members, int wanted,
                FidelityShares& shares) {
  const auto later = [&](int a, int b) {  // a is taken after b
    const FidelitySource &x = sources[size_t(a)], &y = sources[size_t(b)];
    const int64_t left = int64_t(x.num_base + shares.takes[size_t(a)]) * y.num_pairs;
    const int64_t right = int64_t(y.num_base + shares.takes[size_t(b)]) * x.num_pairs;
    return std::tuple(left, a) > std::tuple(right, b);
  };
  shares.heap.assign(members.begin(), members.end());
  std::ranges::make_heap(shares.heap, later);
  int taken = 0;
  while (taken < wanted && !shares.heap.empty()) {
    std::ranges::pop_heap(shares.heap, later);
    const size_t next = size_t(shares.heap.back());
    if (shares.takes[next] == sources[next].num_candidates) {
      shares.heap.pop_back();
      continue;
    }
    ++shares.takes[next], ++taken;
    std::ranges::push_heap(shares.heap, later);
  }
  return taken;
}

}  // namespace

void plan_fidelity(std::span<const FidelitySource> sources, int shortage, int wanted, FidelityShares& shares) {
  shares.takes.assign(sources.size(), 0);
  shares.total = 0;
  shares.order.resize(sources.size());
  for (size_t i = 0; i < sources.size(); ++i) shares.order[i] = int(i);
  const auto key = [&](int i) { return std::tuple_cat(class_of(sources[size_t(i)]), std::tuple(i)); };
  std::ranges::sort(shares.order, {}, key);
  for (size_t first = 0; first < shares.order.size();) {
    const FidelitySource& source = sources[size_t(shares.order[first])];
    size_t end = first;
    while (end < shares.order.size() && class_of(sources[size_t(shares.order[end])]) == class_of(source)) ++end;
    const int most = (source.nearly_done ? shortage : wanted) - shares.total;
    const auto members = std::span<const int>(shares.order).subspan(first, end - first);
    if (most > 0) shares.total += fill_evenly(sources, members, most, shares);
    first = end;
  }
}

}  // namespace ekv
