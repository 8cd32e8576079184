// The step log: what its hash covers, and what its file says.

#include "elastickv/step_log.h"

#include <gtest/gtest.h>

#include "tests/support/temp_dir.h"
#include "util/files.h"

namespace ekv {
namespace {

uint64_t hash_of(const char* kind, std::vector<LogField> fields, std::vector<int64_t> list) {
  Result<std::unique_ptr<StepLog>> log = StepLog::open("");
  EXPECT_TRUE(bool(log));
  (*log)->write(kind, fields, "list", list);
  return (*log)->hash();
}

TEST(StepLog, TheHashSeesEveryValue) {
  const uint64_t plain = hash_of("step", {{"a", 1}, {"b", 2}}, {3, 4});
  EXPECT_EQ(hash_of("step", {{"a", 1}, {"b", 2}}, {3, 4}), plain);
  EXPECT_NE(hash_of("request", {{"a", 1}, {"b", 2}}, {3, 4}), plain);
  EXPECT_NE(hash_of("step", {{"a", 1}, {"b", 3}}, {3, 4}), plain);
  EXPECT_NE(hash_of("step", {{"a", 2}, {"b", 2}}, {3, 4}), plain);
  EXPECT_NE(hash_of("step", {{"a", 1}, {"b", 2}}, {3, 5}), plain);
  EXPECT_NE(hash_of("step", {{"a", 1}, {"b", 2}, {"c", 3}}, {4}), plain) << "fields and list are told apart";
}

TEST(StepLog, LinesAreJsonAndTheFileChangesNoHash) {
  const test::TempDir folder;
  const std::string path = folder.file("step_log.jsonl");
  const Result<std::unique_ptr<StepLog>> log = StepLog::open(path), unwritten = StepLog::open("");
  ASSERT_TRUE(bool(log) && bool(unwritten));
  const int64_t list[] = {3, -4};
  for (const auto* to : {&log, &unwritten}) {
    (**to)->write("thing", std::vector<LogField>{{"a", 1}, {"b", -2}}, "list", list);
    (**to)->write("other", std::vector<LogField>{{"c", 5}});
  }
  EXPECT_EQ((*log)->hash(), (*unwritten)->hash());
  EXPECT_EQ((*log)->close(), std::nullopt);
  const Result<std::string> text = read_file(path);
  ASSERT_TRUE(bool(text));
  EXPECT_EQ(*text,
            "{\"kind\":\"thing\",\"a\":1,\"b\":-2,\"list\":[3,-4]}\n"
            "{\"kind\":\"other\",\"c\":5}\n");
}

TEST(StepLog, AFileThatCannotBeWrittenIsAnErrorWithItsName) {
  const Result<std::unique_ptr<StepLog>> log = StepLog::open("/nonexistent/log.jsonl");
  ASSERT_FALSE(bool(log));
  EXPECT_NE(log.error().message.find("/nonexistent/log.jsonl"), std::string::npos);
  const Result<std::unique_ptr<StepLog>> full = StepLog::open("/dev/full");
  ASSERT_TRUE(bool(full));
  (*full)->write("step", std::vector<LogField>{{"a", 1}});
  const Status incomplete = (*full)->close();
  ASSERT_TRUE(incomplete.has_value());
  EXPECT_NE(incomplete->message.find("/dev/full"), std::string::npos);
}

}  // namespace
}  // namespace ekv
