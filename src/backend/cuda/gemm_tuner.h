#pragma once
// gemm_tuner.h -- which of several ways to compute the same thing is the fastest, from timings that are noisy.

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

namespace ekv {

// How long candidate i takes, in microseconds; infinity: it does not work. `exact`: take more samples.
using TimeCandidate = std::function<double(size_t i, bool exact)>;

struct TuningEffort {
  size_t finalists = 0;          // that are timed exactly, beside candidate 0
  int rounds = 1;                // in each of which they all are, in turn
  int least_replays = 1;         // of an exact sample
  double sample_us = 0;          // that it should last, unless that takes more than kMostReplays
  int replays(double us) const;  // for launches that take so long together
};
constexpr int kMostReplays = 50;

// Candidate 0 is what would be used without tuning. Another one replaces it only if it is faster by kWinMargin
// in three quarters of the rounds, rounded up (both of two, five of six), so that a change of the clock, or one
// lucky sample, decides nothing, and only if it worked in all of them.
constexpr double kWinMargin = 0.02;
size_t choose_candidate(size_t count, const TuningEffort& effort, const TimeCandidate& time_us);

// The order in which numbers of rows are tuned while time is left: the most usual batches and the largest,
// which most steps of prefill have, then all others of steps of decodes and some of prefill. -1: not tuned; few
// steps have it.
int tuning_turn(int rows, int max_rows);

// A number of rows of one product.
struct TileForm {
  bool timed = false;     // or chosen before, by timing
  bool has_tile = false;  // the kernel for many rows can do it
  bool tile = false;      // is the fastest
};
// Which of `forms`, ascending in rows, take the kernel for many rows though they were not timed: those where it
// turned out to be the fastest for the nearest numbers that were, below and, if there is one, above.
std::vector<size_t> tile_like_neighbours(std::span<const TileForm> forms);

// With more rows power binds, not memory. Which candidate is the fastest then changes with the clock, by up to
// 10 % between the first samples and those of a hot device: many short ones in turn see the same clock, and
// most of them that of a step. Two long ones took cuBLASLt's gate-up at 8,192 rows in five starts of six, these
// the tile kernel's in both types (H200). Eight rounds come close to GemmTuning::limit_s with all forms of an
// 8B; five finalists, because a short sample tells little of who they are.
constexpr int kFewTuningRows = 512;
constexpr TuningEffort kFewRowsEffort{.finalists = 3, .rounds = 2, .least_replays = 5};
constexpr TuningEffort kUnderPowerEffort{.finalists = 5, .rounds = 6, .least_replays = 2, .sample_us = 8'000};
constexpr const TuningEffort& tuning_effort(int rows) {
  return rows <= kFewTuningRows ? kFewRowsEffort : kUnderPowerEffort;
}

// A timing less what the energy that a way saves is worth to the rest of a step. Where power binds, a kernel
// that activates its gated product keeps 4 of 5 bytes behind the product on the chip, which a sample of the
// product alone does not show: where timings preferred cuBLASLt's, steps of 8,192 rows took 0.5 and 2.3 %
// longer with it
// (`bench latency`, two prompts of 4,096; bf16, H200, two ways of cuBLASLt's).
constexpr double kPowerCredit = 0.05;
constexpr double with_power_credit(double us, int rows, bool activates_itself) {
  return rows > kFewTuningRows && activates_itself ? (1 - kPowerCredit) * us : us;
}

}  // namespace ekv
