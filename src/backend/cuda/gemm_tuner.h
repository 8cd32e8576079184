#pragma once
// gemm_tuner.h -- which of several ways to compute the same thing is the fastest, from timings that are noisy.

#include <cstddef>
#include <functional>

namespace ekv {

// How long candidate i takes, in microseconds; infinity: it does not work. `exact`: take more samples.
using TimeCandidate = std::function<double(size_t i, bool exact)>;

// Candidate 0 is what would be used without tuning. Another one replaces it only if it is faster by kWinMargin
// in each of two rounds in which both are timed one after the other, so that a change of the clock, or one
// lucky sample, decides nothing.
constexpr double kWinMargin = 0.02;
size_t choose_candidate(size_t count, const TimeCandidate& time_us);

}  // namespace ekv
