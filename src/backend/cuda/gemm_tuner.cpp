#include "backend/cuda/gemm_tuner.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <iterator>
#include <limits>
#include <vector>

#include "backend/cuda/row_buckets.h"
#include "elastickv/base.h"

namespace ekv {
namespace {

struct Timed {
  size_t candidate = 0;
  double us = 0;
  std::vector<double> shares{};  // of the time of candidate 0, a round each

  // What three quarters of the rounds do not exceed. Infinity: it failed in one.
  double share() const {
    std::vector<double> sorted = shares;
    std::ranges::sort(sorted);
    return std::isfinite(sorted.back()) ? sorted[(sorted.size() * 3 + 3) / 4 - 1] : sorted.back();
  }
};

double share_of(double us, double first) {
  return std::isfinite(us) ? us / first : std::numeric_limits<double>::infinity();
}

}  // namespace

int TuningEffort::replays(double us) const {
  return std::max(least_replays, int(std::min(sample_us / us, double(kMostReplays))));
}

size_t choose_candidate(size_t count, const TuningEffort& effort, const TimeCandidate& time_us) {
  EKV_CHECK(effort.rounds > 0, "nothing is timed exactly");
  std::vector<Timed> others;
  for (size_t i = 1; i < count; ++i)
    if (const double us = time_us(i, false); std::isfinite(us)) others.push_back({i, us});
  std::ranges::sort(others, {}, &Timed::us);
  others.resize(std::min(others.size(), effort.finalists));
  for (int round = 0; round < effort.rounds; ++round) {
    const double first = time_us(0, true);
    for (Timed& other : others) other.shares.push_back(share_of(time_us(other.candidate, true), first));
  }
  const auto best = std::ranges::min_element(others, {}, &Timed::share);
  return best != others.end() && best->share() < 1 - kWinMargin ? best->candidate : 0;
}

std::vector<size_t> tile_like_neighbours(std::span<const TileForm> forms) {
  std::vector<size_t> like;
  for (auto form = forms.begin(); form != forms.end(); ++form) {
    if (form->timed || !form->has_tile) continue;
    const auto below =
        std::find_if(std::make_reverse_iterator(form), forms.rend(), std::mem_fn(&TileForm::timed));
    const auto above = std::find_if(form, forms.end(), std::mem_fn(&TileForm::timed));
    const bool tile_above = above == forms.end() || above->tile;
    if (below != forms.rend() && below->tile && tile_above) like.push_back(size_t(form - forms.begin()));
  }
  return like;
}

int tuning_turn(int rows, int max_rows) {
  constexpr std::array kFirst{1, 8, 16, 32, 64, 2, 4, 24, 48, 128, 256, 2048, 512, 1024, 4096, 8192};
  if (rows == row_bucket(max_rows)) return 0;
  const auto at = std::ranges::find(kFirst, rows);
  if (at != kFirst.end()) return int(at - kFirst.begin());
  return rows <= kFewTuningRows && decode_bucket(rows) == rows ? rows + int(kFirst.size()) : -1;
}

}  // namespace ekv
