#include "model/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "support/seed.h"

namespace ekv {
namespace {

std::string with_length(uint64_t length, std::string_view rest) {
  std::string file(sizeof length, '\0');
  std::memcpy(file.data(), &length, sizeof length);
  return file.append(rest);
}

std::string file_of(std::string_view header, size_t data_bytes = 0) {
  return with_length(header.size(), header) + std::string(data_bytes, '\1');
}

Result<StoredTensors> parse(std::string_view file) {
  // A heap copy of exactly this size, so that the address sanitizer sees every byte read beyond it.
  const std::vector<char> exact(file.begin(), file.end());
  return parse_safetensors(std::as_bytes(std::span(exact)), "weights.st");
}

// The file is refused, and the message names the file and contains `words`.
void expect_refused(std::string_view file, std::string_view words) {
  const Result<StoredTensors> result = parse(file);
  ASSERT_FALSE(result) << "accepted, expected: " << words;
  EXPECT_EQ(result.error().message.find("weights.st: "), 0u) << result.error().message;
  EXPECT_NE(result.error().message.find(words), std::string::npos)
      << result.error().message << "\n  lacks: " << words;
}

TEST(Safetensors, ReadsNamesShapesAndBytes) {
  const std::string header =
      R"({"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]},)"
      R"("a":{"dtype":"BF16","shape":[1,2],"data_offsets":[0,4]},"empty":{"dtype":"F16","shape":[0,7],"data_offsets":[12,12]},)"
      R"("scalar":{"dtype":"U8","shape":[],"data_offsets":[12,13]}}   )";
  const std::string file = with_length(header.size(), header + "abcdefghijklm");
  const Result<StoredTensors> result = parse_safetensors(std::as_bytes(std::span(file)), "weights.st");
  ASSERT_TRUE(result) << result.error().message;
  ASSERT_EQ(result->size(), 4u);
  const StoredTensor& a = result->at("a");
  EXPECT_EQ(a.dtype, "BF16");
  EXPECT_EQ(a.shape, (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(std::memcmp(a.data.data(), "abcd", 4), 0);
  EXPECT_EQ(std::memcmp(result->at("b").data.data(), "efghijkl", 8), 0);
  EXPECT_EQ(result->at("empty").data.size(), 0u);
  EXPECT_EQ(result->at("scalar").data.size(), 1u);
}

TEST(Safetensors, AnEmptyHeaderHoldsNothing) {
  const Result<StoredTensors> result = parse(file_of("{}"));
  ASSERT_TRUE(result) << result.error().message;
  EXPECT_TRUE(result->empty());
}

TEST(Safetensors, RefusesBadLengths) {
  expect_refused("", "too short");
  expect_refused("1234567", "too short");
  const std::string body = "{}";
  expect_refused(with_length(~uint64_t(0), body), "18446744073709551615");
  expect_refused(with_length(uint64_t(1) << 63, body), "9223372036854775808");
  expect_refused(with_length(body.size() + 8 + 1, body), "does not fit");
  expect_refused(with_length(body.size() + 1, body), "does not fit");
  expect_refused(with_length(200'000'000, body), "200000000");
  expect_refused(with_length(0, body), "does not start with '{'");
}

TEST(Safetensors, RefusesAHeaderAboveTheLimitThatIsReallyThere) {
  const std::string header = "{}" + std::string(kMaxSafetensorsHeader - 1, ' ');
  expect_refused(file_of(header), "at most 100000000");
}

TEST(Safetensors, RefusesHeadersThatAreNotObjects) {
  expect_refused(file_of("[]"), "does not start with '{'");
  expect_refused(file_of(" {}"), "does not start with '{'");
  expect_refused(file_of("{"), "not valid JSON");
  expect_refused(file_of("{}x"), "not valid JSON");
  expect_refused(file_of("{\"a\xff\":1}"), "not valid JSON");
  expect_refused(file_of("{\"a\":" + std::string(100000, '[')), "nested deeper");
  expect_refused(file_of(R"({"__metadata__":[]})"), "__metadata__");
  expect_refused(file_of(R"({"__metadata__":{"n":1}})"), "__metadata__");
}

TEST(Safetensors, RefusesBadEntriesByName) {
  struct Case {
    const char *entry, *words;
  };
  const Case cases[] = {
      {R"([])", "is not an object"},
      {R"({"dtype":"F16","shape":[2]})", "lacks 'data_offsets'"},
      {R"({"dtype":"F16","data_offsets":[0,4]})", "lacks 'shape'"},
      {R"({"shape":[2],"data_offsets":[0,4]})", "lacks 'dtype'"},
      {R"({"dtype":"F16","shape":[2],"data_offsets":[0,4],"more":1})", "other than"},
      {R"({"dtype":"F17","shape":[2],"data_offsets":[0,4]})", "unknown dtype \"F17\""},
      {R"({"dtype":16,"shape":[2],"data_offsets":[0,4]})", "dtype"},
      {R"({"dtype":"F16","shape":[2],"data_offsets":[4]})", "data_offsets"},
      {R"({"dtype":"F16","shape":[2],"data_offsets":[0,4,8]})", "data_offsets"},
      {R"({"dtype":"F16","shape":[2],"data_offsets":[4,0]})", "wrong order"},
      {R"({"dtype":"F16","shape":[2],"data_offsets":[-4,0]})", "data_offsets"},
      {R"({"dtype":"F16","shape":[2],"data_offsets":[0,1e30]})", "data_offsets"},
      {R"({"dtype":"F16","shape":[2],"data_offsets":[0,18446744073709551615]})", "data_offsets"},
      {R"({"dtype":"F16","shape":[4],"data_offsets":[0,8]})", "cut off"},
      {R"({"dtype":"F16","shape":[2],"data_offsets":[0,2]})", "needs 4 bytes"},
      {R"({"dtype":"F16","shape":[8589934592,8589934592],"data_offsets":[0,4]})", "not a 64-bit number"},
      {R"({"dtype":"F16","shape":[4294967296,4294967296,4294967296],"data_offsets":[0,4]})",
       "not a 64-bit number"},
      {R"({"dtype":"F4","shape":[1],"data_offsets":[0,4]})", "not a 64-bit number"},
      {R"({"dtype":"F16","shape":[-1],"data_offsets":[0,4]})", "has a shape"},
      {R"({"dtype":"F16","shape":[1.5],"data_offsets":[0,4]})", "has a shape"},
      {R"({"dtype":"F16","shape":[2e0],"data_offsets":[0,4]})", "has a shape"},
      {R"({"dtype":"F16","shape":"2","data_offsets":[0,4]})", "has a shape"},
      {R"({"dtype":"F16","shape":[true],"data_offsets":[0,4]})", "has a shape"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.entry);
    expect_refused(file_of(std::string(R"({"layer.q":)") + c.entry + "}", 4), "tensor \"layer.q\"");
    expect_refused(file_of(std::string(R"({"layer.q":)") + c.entry + "}", 4), c.words);
  }
}

TEST(Safetensors, RefusesNamesGivenTwice) {
  const std::string entry = R"({"dtype":"F16","shape":[2],"data_offsets":[0,4]})";
  expect_refused(file_of("{\"q\":" + entry + ",\"q\":" + entry + "}", 4), "the name \"q\" is given twice");
  // The same name spelt with an escape, and a repeated member inside of an entry.
  expect_refused(file_of("{\"q\":" + entry + ",\"\\u0071\":" + entry + "}", 4),
                 "the name \"q\" is given twice");
  expect_refused(file_of(R"({"q":{"dtype":"F16","dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4),
                 "\"dtype\"");
  // Colons and quotes in names are not members.
  EXPECT_TRUE(parse(file_of("{\"q:\\\":\":" + entry + "}", 4)));
}

TEST(Safetensors, RefusesOverlapsGapsAndTrailingBytes) {
  const auto two = [](int b0, int e0, int b1, int e1) {
    const auto entry = [](int begin, int end) {
      return R"({"dtype":"U8","shape":[)" + std::to_string(end - begin) + R"(],"data_offsets":[)" +
             std::to_string(begin) + "," + std::to_string(end) + "]}";
    };
    return R"({"first":)" + entry(b0, e0) + R"(,"second":)" + entry(b1, e1) + "}";
  };
  EXPECT_TRUE(parse(file_of(two(0, 4, 4, 8), 8)));
  EXPECT_TRUE(parse(file_of(two(4, 8, 0, 4), 8)));
  expect_refused(file_of(two(0, 4, 2, 8), 8), "\"second\" overlaps");
  expect_refused(file_of(two(0, 8, 0, 8), 8), "overlaps");
  expect_refused(file_of(two(0, 4, 5, 8), 8), "\"second\" comes after a gap");
  expect_refused(file_of(two(1, 4, 4, 8), 8), "\"first\" comes after a gap");
  expect_refused(file_of(two(0, 4, 4, 8), 9), "1 bytes after the last tensor");
  expect_refused(file_of("{}", 1), "1 bytes after the last tensor");
}

// Whatever a flipped byte does, parsing ends with tensors inside of the file or with a message that names it.
TEST(Safetensors, SurvivesRandomDamage) {
  const unsigned seed = test::drawn_seed();
  SCOPED_TRACE(seed);
  std::mt19937 rng(seed);
  const std::string good = file_of(
      R"({"a":{"dtype":"BF16","shape":[1,2],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})",
      12);
  ASSERT_TRUE(parse(good));
  int refused = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string bad = good;
    for (unsigned flips = 1 + rng() % 3; flips > 0; --flips) bad[rng() % bad.size()] = char(rng());
    if (rng() % 4 == 0) bad.resize(rng() % bad.size());
    const std::vector<char> exact(bad.begin(), bad.end());
    const auto bytes = std::as_bytes(std::span(exact));
    const Result<StoredTensors> result = parse_safetensors(bytes, "weights.st");
    if (!result) {
      ++refused;
      ASSERT_EQ(result.error().message.find("weights.st: "), 0u);
      continue;
    }
    for (const auto& [name, tensor] : *result) {
      ASSERT_GE(tensor.data.data(), bytes.data());
      ASSERT_LE(tensor.data.data() + tensor.data.size(), bytes.data() + bytes.size());
    }
  }
  EXPECT_GT(refused, 10000);  // the least of 1,000 drawn seeds: 19,363
}

}  // namespace
}  // namespace ekv
