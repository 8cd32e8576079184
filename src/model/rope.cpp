#include <cmath>
#include <numbers>

#include "elastickv/model.h"

namespace ekv {
namespace {

// Llama 3.1: wavelengths beyond original / low_freq_factor are slowed down by `factor`, those below original /
// high_freq_factor stay, and in between the two are blended linearly in original / wavelength.
double llama3_scaled(double frequency, const RopeScaling& rope) {
  const double turns = rope.original_max_position * frequency / (2 * std::numbers::pi);
  if (turns > rope.high_freq_factor) return frequency;
  if (turns < rope.low_freq_factor) return frequency / rope.factor;
  const double keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor);
  return (1 - keep) * frequency / rope.factor + keep * frequency;
}

}  // namespace

std::vector<float> rope_inverse_frequencies(const ModelConfig& config) {
  std::vector<float> result;
  for (int i = 0; i < config.head_dim / 2; ++i) {
    double frequency = std::pow(config.rope_theta, -2.0 * i / config.head_dim);
    if (config.rope.kind == RopeScaling::linear) frequency /= config.rope.factor;
    if (config.rope.kind == RopeScaling::llama3) frequency = llama3_scaled(frequency, config.rope);
    result.push_back(float(frequency));
  }
  return result;
}

}  // namespace ekv
