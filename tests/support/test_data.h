#pragma once
// test_data.h -- where tests find their files.

#include <filesystem>

namespace ekv::test {

// tests/data of the checkout that the test was built in, or the folder `data` beside the program, if there is
// one: so a test that was taken to another machine has its files with it (scripts/gpu_bundle.sh).
inline std::filesystem::path test_data() {
  const auto beside = std::filesystem::read_symlink("/proc/self/exe").parent_path() / "data";
  return std::filesystem::is_directory(beside) ? beside : std::filesystem::path(EKV_TEST_DATA);
}

}  // namespace ekv::test
