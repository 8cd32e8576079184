#include "bench/sim_log.h"

#include <fmt/format.h>

#include <bit>
#include <cerrno>
#include <cstring>
#include <iterator>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace ekv {

static_assert(std::endian::native == std::endian::little, "the hash is over little-endian integers");

struct SimLog::Hasher {
  XXH3_state_t state;
};

SimLog::SimLog() : hasher_(std::make_unique<Hasher>()) { XXH3_64bits_reset(&hasher_->state); }

SimLog::~SimLog() {
  if (file_) std::fclose(file_);
}

Result<std::unique_ptr<SimLog>> SimLog::open(const std::string& path) {
  std::unique_ptr<SimLog> log(new SimLog);
  log->path_ = path;
  if (path.empty()) return log;
  log->file_ = std::fopen(path.c_str(), "w");
  if (!log->file_)
    return Error{Error::io, fmt::format("cannot write the event log {}: {}", path, std::strerror(errno)),
                 "event-log"};
  return log;
}

void SimLog::hash_values(std::span<const int64_t> values) {
  XXH3_64bits_update(&hasher_->state, values.data(), values.size_bytes());
}

void SimLog::write(const char* kind, std::span<const LogField> fields, const char* list_name,
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

uint64_t SimLog::hash() const { return XXH3_64bits_digest(&hasher_->state); }

Status SimLog::close() {
  if (file_ && std::fclose(std::exchange(file_, nullptr)) != 0) failed_ = true;
  if (!failed_) return std::nullopt;
  return Error{Error::io, fmt::format("the event log {} is incomplete: is the disk full?", path_), "event-log"};
}

}  // namespace ekv
