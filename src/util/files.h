#pragma once
// files.h -- whole files: mapped read-only, or read into a string.

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>

#include "elastickv/base.h"

namespace ekv {

// A file mapped read-only for the lifetime of the object. An empty file maps to an empty span.
class MappedFile {
 public:
  static Result<MappedFile> open(const std::filesystem::path& path);
  MappedFile(MappedFile&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();
  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  explicit MappedFile(std::span<const std::byte> bytes) : bytes_(bytes) {}
  std::span<const std::byte> bytes_;
};

// Refuses a file larger than `max_bytes`: configuration and tokenizer files are small.
Result<std::string> read_file(const std::filesystem::path& path, size_t max_bytes = size_t(256) << 20);

}  // namespace ekv
