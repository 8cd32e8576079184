#include "util/machine_memory.h"

#include <algorithm>
#include <fstream>
#include <string>

namespace ekv {
namespace {

namespace fs = std::filesystem;

std::optional<uint64_t> installed_memory(const fs::path& root) {
  std::ifstream file(root / "proc/meminfo");
  for (std::string name, unit; file >> name;) {
    uint64_t kibibytes = 0;
    if (name == "MemTotal:" && file >> kibibytes) return kibibytes << 10;
    std::getline(file, unit);
  }
  return std::nullopt;
}

// "max" in version 2 is no number; version 1 says the largest number instead.
uint64_t number_in(const fs::path& path) {
  uint64_t bytes = 0;
  return std::ifstream(path) >> bytes ? bytes : UINT64_MAX;
}

// Of `group` and all above it. Inside a container the path may be that of the host, of which only the end of
// the way up is visible.
uint64_t least_limit(const fs::path& mount, fs::path group, const char* file) {
  uint64_t least = UINT64_MAX;
  for (group = group.relative_path();; group = group.parent_path()) {
    least = std::min(least, number_in(mount / group / file));
    if (group.empty()) return least;
  }
}

// Lines of /proc/self/cgroup: "0::/path" in version 2, "4:memory:/path" in version 1.
uint64_t group_limit(const fs::path& root) {
  std::ifstream file(root / "proc/self/cgroup");
  uint64_t least = UINT64_MAX;
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string group = line.substr(second + 1);
    if (controllers == ",,") least = std::min(least, least_limit(root / "sys/fs/cgroup", group, "memory.max"));
    if (controllers.find(",memory,") != std::string::npos)
      least = std::min(least, least_limit(root / "sys/fs/cgroup/memory", group, "memory.limit_in_bytes"));
  }
  return least;
}

}  // namespace

std::optional<uint64_t> usable_memory(const fs::path& root) {
  const std::optional<uint64_t> installed = installed_memory(root);
  const uint64_t limit = group_limit(root);
  if (!installed && limit == UINT64_MAX) return std::nullopt;
  return std::min(installed.value_or(UINT64_MAX), limit);
}

}  // namespace ekv
