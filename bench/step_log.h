#pragma once
// step_log.h -- the log of a replay: a line per step and per ended request, from which every figure of the
// result can be computed again, and a hash of all of it.
//
// Lines are JSON objects of integers. {"kind": "step", ...} has the members of StepRecord; {"kind": "request",
// ...} has the arrival, the sums of the request, and "gaps_us": arrival to first token, then from token to
// token. `finish` is a FinishReason, `path` a KvPath.

#include <cstdio>
#include <memory>
#include <span>
#include <string>

#include "elastickv/engine.h"

namespace ekv {

struct ReplayRecord;

// A named figure of a line.
struct LogField {
  const char* name;
  int64_t value;
};

class StepLog {
 public:
  // An empty path writes no file; the hash is the same.
  static Result<std::unique_ptr<StepLog>> open(const std::string& path);
  ~StepLog();
  StepLog(const StepLog&) = delete;
  StepLog& operator=(const StepLog&) = delete;

  void write(int64_t step, int replica, const StepRecord& record);
  void write(int64_t request, const ReplayRecord& record);
  // The hash covers kind, values and list, not the names.
  void write(const char* kind, std::span<const LogField> fields, const char* list_name = nullptr,
             std::span<const int64_t> list = {});
  void flush();  // what was written is in the file for others to read
  uint64_t hash() const;
  Status close();  // io errors of all writes; the hash stays readable

 private:
  StepLog();
  void hash_values(std::span<const int64_t> values);

  struct Hasher;
  std::unique_ptr<Hasher> hasher_;
  std::string path_;
  std::FILE* file_ = nullptr;
  bool failed_ = false;
  std::vector<int64_t> gaps_us_;
};

}  // namespace ekv
