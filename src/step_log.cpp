#include "elastickv/step_log.h"

#include <fmt/format.h>

#include <bit>
#include <cerrno>
#include <cstring>
#include <iterator>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace ekv {

static_assert(std::endian::native == std::endian::little, "the hash is over little-endian integers");

struct StepLog::Hasher {
  XXH3_state_t state;
};

StepLog::StepLog() : hasher_(std::make_unique<Hasher>()) { XXH3_64bits_reset(&hasher_->state); }

StepLog::~StepLog() {
  if (file_) std::fclose(file_);
}

Result<std::unique_ptr<StepLog>> StepLog::open(const std::string& path) {
  std::unique_ptr<StepLog> log(new StepLog);
  log->path_ = path;
  if (path.empty()) return log;
  log->file_ = std::fopen(path.c_str(), "w");
  if (!log->file_)
    return Error{Error::io, fmt::format("cannot write the step log {}: {}", path, std::strerror(errno)),
                 "step-log"};
  return log;
}

void StepLog::hash_values(std::span<const int64_t> values) {
  XXH3_64bits_update(&hasher_->state, values.data(), values.size_bytes());
}

void StepLog::write(int64_t step, int replica, const StepRecord& r) {
  const LogField fields[] = {{"step", step},
                             {"replica", replica},
                             {"start_us", r.start_us},
                             {"end_us", r.end_us},
                             {"plan_us", r.plan_us},
                             {"device_us", r.device_us},
                             {"wait_us", r.wait_us},
                             {"host_gap_us", r.host_gap_us},
                             {"prefill_tokens", r.num_prefill_tokens},
                             {"decode_tokens", r.num_decode_tokens},
                             {"running", r.num_running},
                             {"waiting", r.num_waiting},
                             {"admitted", r.num_admitted},
                             {"preempted", r.num_preempted},
                             {"preemptions_avoided", r.num_preemptions_avoided},
                             {"recomputed_tokens", r.num_recomputed},
                             {"prefix_query_tokens", r.prefix_query_tokens},
                             {"prefix_hit_tokens", r.prefix_hit_tokens},
                             {"free_pages", r.free_pages},
                             {"cached_pages", r.cached_pages},
                             {"locked_pages", r.locked_pages},
                             {"total_pages", r.total_pages},
                             {"resident_pairs", r.resident_pairs},
                             {"resident_base_pairs", r.resident_base_pairs},
                             {"host_slots_used", r.host_slots_used},
                             {"demoted_pairs", r.demoted_pairs},
                             {"promoted_pairs", r.promoted_pairs},
                             {"restores_begun", r.restores_begun},
                             {"backups_begun", r.backups_begun},
                             {"transfers_done", r.transfers_done},
                             {"stores_begun", r.stores_begun},
                             {"loads_begun", r.loads_begun},
                             {"stores_skipped", r.stores_skipped},
                             {"loading", r.num_loading},
                             {"to_host_bytes", r.to_host_bytes},
                             {"from_host_bytes", r.from_host_bytes},
                             {"shortage", r.shortage},
                             {"reserve", r.reserve},
                             {"pairs_seen", r.pairs_seen},
                             {"base_pairs_seen", r.base_pairs_seen},
                             {"query_pairs_seen", r.query_pairs_seen},
                             {"query_base_pairs_seen", r.query_base_pairs_seen},
                             {"prefill_chunks", r.num_prefill_chunks},
                             {"prefill_keys", r.prefill_keys},
                             {"decode_keys", r.decode_keys},
                             {"decode_base_pairs", r.decode_base_pairs},
                             {"path", int64_t(r.path)}};
  write("step", fields);
}

void StepLog::write(const char* kind, std::span<const LogField> fields, const char* list_name,
                    std::span<const int64_t> list) {
  const int64_t head[] = {int64_t(kind[0]), int64_t(fields.size()), int64_t(list.size())};
  hash_values(head);
  for (const LogField& field : fields) hash_values({&field.value, 1});
  hash_values(list);
  if (!file_) return;

  fmt::memory_buffer line;
  const auto out = std::back_inserter(line);
  fmt::format_to(out, "{{\"kind\":\"{}\"", kind);
  for (const LogField& field : fields) fmt::format_to(out, ",\"{}\":{}", field.name, field.value);
  if (list_name) {
    fmt::format_to(out, ",\"{}\":[", list_name);
    for (size_t i = 0; i < list.size(); ++i) fmt::format_to(out, "{}{}", i ? "," : "", list[i]);
    fmt::format_to(out, "]");
  }
  fmt::format_to(out, "}}\n");
  if (std::fwrite(line.data(), 1, line.size(), file_) != line.size()) failed_ = true;
}

void StepLog::flush() {
  if (file_ && std::fflush(file_) != 0) failed_ = true;
}

uint64_t StepLog::hash() const { return XXH3_64bits_digest(&hasher_->state); }

Status StepLog::close() {
  if (file_ && std::fclose(std::exchange(file_, nullptr)) != 0) failed_ = true;
  if (!failed_) return std::nullopt;
  return Error{Error::io, fmt::format("the step log {} is incomplete: is the disk full?", path_), "step-log"};
}

}  // namespace ekv
