#include "util/files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace ekv {
namespace {

Error io_error(const std::filesystem::path& path) {
  return {errno == ENOENT ? Error::not_found : Error::io,
          fmt::format("{}: {}", path.string(), std::strerror(errno)),
          {}};
}

class FileDescriptor {
 public:
  explicit FileDescriptor(const std::filesystem::path& path)
      : fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {}
  FileDescriptor(const FileDescriptor&) = delete;
  ~FileDescriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

// The size of a regular file; directories and pipes are refused.
Result<size_t> file_size(const FileDescriptor& file, const std::filesystem::path& path) {
  struct stat info {};
  if (file.get() < 0 || ::fstat(file.get(), &info) != 0) return io_error(path);
  if (!S_ISREG(info.st_mode)) return Error{Error::io, path.string() + ": not a regular file", {}};
  return size_t(info.st_size);
}

}  // namespace

Result<MappedFile> MappedFile::open(const std::filesystem::path& path) {
  const FileDescriptor file(path);
  const Result<size_t> size = file_size(file, path);
  if (!size) return size.error();
  if (*size == 0) return MappedFile({});
  void* address = ::mmap(nullptr, *size, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (address == MAP_FAILED) return io_error(path);
  return MappedFile({static_cast<const std::byte*>(address), *size});
}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  return *this;
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

Result<std::string> read_file(const std::filesystem::path& path, size_t max_bytes) {
  const FileDescriptor file(path);
  const Result<size_t> size = file_size(file, path);
  if (!size) return size.error();
  if (*size > max_bytes)
    return Error{
        Error::too_large, fmt::format("{}: {} bytes, more than {}", path.string(), *size, max_bytes), {}};
  std::string text(*size, '\0');
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t n = ::read(file.get(), text.data() + done, text.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return io_error(path);
    if (n == 0) break;
    done += size_t(n);
  }
  text.resize(done);
  return text;
}

}  // namespace ekv
