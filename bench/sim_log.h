#pragma once
// sim_log.h -- the event log of a simulated run: a line per step and per ended request, and a hash of all of
// it.

#include <cstdio>
#include <memory>
#include <span>
#include <string>

#include "elastickv/base.h"

namespace ekv {

// A named figure of a line.
struct LogField {
  const char* name;
  int64_t value;
};

// Lines are JSON objects with integer members and at most one array. The hash covers kinds, values and array,
// not the names: it is the same whether or not a file is written.
class SimLog {
 public:
  // An empty path writes no file.
  static Result<std::unique_ptr<SimLog>> open(const std::string& path);
  ~SimLog();
  SimLog(const SimLog&) = delete;
  SimLog& operator=(const SimLog&) = delete;

  void write(const char* kind, std::span<const LogField> fields, const char* list_name = nullptr,
             std::span<const int64_t> list = {});
  uint64_t hash() const;
  Status close();  // io errors of all writes; the hash stays readable

 private:
  SimLog();
  void hash_values(std::span<const int64_t> values);

  struct Hasher;
  std::unique_ptr<Hasher> hasher_;
  std::string path_;
  std::FILE* file_ = nullptr;
  bool failed_ = false;
};

}  // namespace ekv
