#pragma once
// step_log.h -- a line of a file for each step of an engine, and a hash of all lines. Whoever drives the engine
// may add lines of other kinds, as replay does for each request that ended.
//
// Lines are JSON objects of integers. {"kind": "step", ...} has the members of StepRecord; `path` is a KvPath.

#include <cstdio>
#include <memory>
#include <span>
#include <string>

#include "elastickv/engine.h"

namespace ekv {

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
};

}  // namespace ekv
