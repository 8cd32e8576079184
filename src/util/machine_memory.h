#pragma once
// machine_memory.h -- how much memory this process may ever have. Pages that are only mapped cost nothing, so a
// pool larger than the machine starts well and is killed in the middle of serving: it is refused by this
// figure.

#include <cstdint>
#include <filesystem>
#include <optional>

namespace ekv {

// Bytes: of the machine, or of the control group (version 1 or 2) where that or one above it allows less.
// nullopt: the system does not say. `root`: another place than / for tests.
std::optional<uint64_t> usable_memory(const std::filesystem::path& root = "/");

}  // namespace ekv
