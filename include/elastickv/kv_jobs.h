#pragma once
// kv_jobs.h -- what a device does to pairs of KV blocks besides computing: plain data.

#include <cstdint>

namespace ekv {

// Changes of fidelity, done in place before the chunks of the step, demotions first. Demotion packs the TARGET
// pages `even` and `odd` into BASE in `even`; `odd` is free for this very step's writes. The low bytes go to
// host slot `low`, or nowhere when it is -1 (they are there already, or the policy keeps none); `ticket` is
// reported when they arrived.
struct DemoteJob {
  int32_t even = -1, odd = -1, low = -1;
  uint32_t ticket = 0;
  bool operator==(const DemoteJob&) const = default;
};
// Joins BASE in `even` with the low bytes that a finished restore of host slot `low` staged: TARGET in `even`,
// `odd`.
struct PromoteJob {
  int32_t even = -1, odd = -1, low = -1;
  bool operator==(const PromoteJob&) const = default;
};

enum class HostContent : uint8_t { low_planes, whole_pairs };  // what a host slot has room for

// Copies between the pool and host slots. They start after the chunks of the step that carries them (a load may
// start with that step), those of one direction run in order, all overlap with later steps, and each ends when
// a StepOutput reports its ticket; until then source and target must stay as they are.
enum class TransferKind : uint8_t {
  backup_low,   // low bytes of a TARGET pair -> host slot; the pair stays TARGET
  restore_low,  // host slot -> staging of the device, for a PromoteJob of a later step; the pair stays readable
                // as BASE
  store_pair,   // both TARGET pages -> host slot
  load_pair,    // host slot -> both pages, which nobody reads before the ticket is reported
};
constexpr bool is_to_host(TransferKind kind) {
  return kind == TransferKind::backup_low || kind == TransferKind::store_pair;
}
constexpr bool is_whole_pair(TransferKind kind) {
  return kind == TransferKind::store_pair || kind == TransferKind::load_pair;
}
struct TransferJob {
  TransferKind kind{};
  int32_t even = -1, odd = -1;  // pages
  int32_t host = -1;            // host slot
  uint32_t ticket = 0;
  bool operator==(const TransferJob&) const = default;
};

}  // namespace ekv
