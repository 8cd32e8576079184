#pragma once
// host_slots.h -- how much of the KV pool the host has room for.

#include <algorithm>

#include "elastickv/config.h"

namespace ekv {

// Slots that fit in FidelityConfig::host_bytes. `low_bytes`: of the low plane of a pair, `pair_bytes`: of both
// its pages. A pair that is BASE has a page, so that more slots for low planes than pages are of no use.
inline int host_slots(const FidelityConfig& fidelity, int num_pages, double low_bytes, double pair_bytes) {
  constexpr double kMost = 1 << 28;
  const auto fit = [&](double bytes) { return int(std::min(double(fidelity.host_bytes) / bytes, kMost)); };
  if (fidelity.policy == KvPolicy::elastic) return std::min(fit(low_bytes), num_pages);
  return fidelity.policy == KvPolicy::exact_offload ? fit(pair_bytes) : 0;
}

}  // namespace ekv
