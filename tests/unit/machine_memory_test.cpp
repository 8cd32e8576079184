// What a process may have, on machines and in containers of both kinds.

#include "util/machine_memory.h"

#include <gtest/gtest.h>

#include <fstream>

#include "tests/support/temp_dir.h"

namespace ekv {
namespace {

namespace fs = std::filesystem;

class MachineMemory : public ::testing::Test {
 protected:
  void put(const std::string& path, const std::string& text) {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  void put_machine() {
    put("proc/meminfo", "MemFree:          1 kB\nMemTotal:       24683652 kB\nHugePages_Total:  0\n");
  }
  const test::TempDir folder_;
  const fs::path& root_ = folder_.path();
  static constexpr uint64_t kInstalled = uint64_t(24683652) << 10;
};

TEST_F(MachineMemory, NothingIsKnownWithoutTheFiles) { EXPECT_FALSE(usable_memory(root_)); }

TEST_F(MachineMemory, IsThatOfTheMachineWithoutAGroup) {
  put_machine();
  EXPECT_EQ(usable_memory(root_), kInstalled);
  put("proc/self/cgroup", "0::/\n");
  EXPECT_EQ(usable_memory(root_), kInstalled);
  put("sys/fs/cgroup/memory.max", "max\n");
  EXPECT_EQ(usable_memory(root_), kInstalled);
}

TEST_F(MachineMemory, TheLeastOfAGroupAndThoseAboveItHolds) {
  put_machine();
  put("proc/self/cgroup", "0::/a/b\n");
  put("sys/fs/cgroup/a/b/memory.max", "max\n");
  put("sys/fs/cgroup/a/memory.max", "4096000\n");
  EXPECT_EQ(usable_memory(root_), 4096000u);
  put("sys/fs/cgroup/a/b/memory.max", "2048000\n");
  EXPECT_EQ(usable_memory(root_), 2048000u);
  put("sys/fs/cgroup/a/b/memory.max", "99999999999999\n");
  put("sys/fs/cgroup/a/memory.max", "max\n");
  EXPECT_EQ(usable_memory(root_), kInstalled);
}

TEST_F(MachineMemory, VersionOneToo) {
  put_machine();
  put("proc/self/cgroup", "5:devices:/x\n4:cpu,memory:/docker/1234\n0::/\n");
  put("sys/fs/cgroup/memory/memory.limit_in_bytes",
      "1234567\n");  // the container sees its own group as the root
  EXPECT_EQ(usable_memory(root_), 1234567u);
  put("sys/fs/cgroup/memory/docker/1234/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(usable_memory(root_), 1234567u);
}

TEST_F(MachineMemory, ThisMachineHasSome) {
  const std::optional<uint64_t> bytes = usable_memory();
  ASSERT_TRUE(bytes);
  EXPECT_GT(*bytes, uint64_t(64) << 20);
  EXPECT_LT(*bytes, uint64_t(1) << 50);
}

}  // namespace
}  // namespace ekv
