#pragma once
// host_slots.h -- how much of the KV the host has room for.

#include "elastickv/config.h"

namespace ekv {

// Slots that fit in FidelityConfig::host_bytes. `low_bytes`: of the low plane of a pair, `pair_bytes`: of both
// its pages. Of low planes, a slot for each pair that the pool can hold as BASE is all that can be used.
int host_slots(const FidelityConfig& fidelity, int num_pages, double low_bytes, double pair_bytes);

// A line when the policy lives from host memory and has none: it runs and never does what it is for.
void warn_of_no_host_memory(KvPolicy policy, int num_host_slots);

}  // namespace ekv
