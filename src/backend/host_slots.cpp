#include "backend/host_slots.h"

#include <fmt/format.h>

#include <algorithm>

#include "elastickv/backend.h"

namespace ekv {

int host_slots(const FidelityConfig& fidelity, int num_pages, double low_bytes, double pair_bytes) {
  constexpr double kMost = 1 << 28;
  const bool whole = host_content(fidelity.policy) == HostContent::whole_pairs;
  const auto fit = int(std::min(double(fidelity.host_bytes) / (whole ? pair_bytes : low_bytes), kMost));
  if (fidelity.policy == KvPolicy::elastic) return std::min(fit, num_pages);
  return fidelity.policy == KvPolicy::exact_offload ? fit : 0;
}

void warn_of_no_host_memory(KvPolicy policy, int num_host_slots) {
  if (num_host_slots > 0 || (policy != KvPolicy::elastic && policy != KvPolicy::exact_offload)) return;
  log_warn(fmt::format("--kv-policy {} has no room on the host and will {}; raise --kv-host-bytes",
                       name_of(policy),
                       policy == KvPolicy::elastic ? "halve no pair" : "keep nothing that is evicted"));
}

}  // namespace ekv
