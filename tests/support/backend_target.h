#pragma once
// backend_target.h -- the backend that a test is linked to: target_cpu.cpp, or target_cuda.cpp with the GPU or
// with the host's stand-in for it.

#include <memory>

#include "elastickv/backend.h"
#include "elastickv/model.h"

namespace ekv::test {

struct BackendTarget {
  const char* name;
  int max_logprobs;  // alternatives that a row may ask for
  // Bounds on the difference of logprobs from float32, as multiples of those of the CPU backend: 16-bit
  // activations round, at 2^-11 in fp16, three times in each of the two blocks of a layer.
  double error_factor;
};
BackendTarget backend_target();

// `slots`: host slots for low planes, or for whole pairs.
Result<std::unique_ptr<Backend>> make_target(const Model& model, const EngineConfig& config, int slots = 0,
                                             HostContent content = HostContent::low_planes);

}  // namespace ekv::test
