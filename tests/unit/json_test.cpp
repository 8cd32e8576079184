// Hostile JSON text: the bounds that json.h promises.

#include "util/json.h"

#include <gtest/gtest.h>

namespace ekv {
namespace {

std::string object_of(int members) {
  std::string text = "{";
  for (int i = 0; i < members; ++i)
    text += (i ? ",\"k" : "\"k") + std::to_string(i) + "\":" + std::to_string(i);
  return text + "}";
}

TEST(Json, KeepsTheOrderOfMembers) {
  const auto value = parse_json(R"({"b":1,"a":{"z":2,"y":3}})");
  ASSERT_TRUE(bool(value));
  EXPECT_EQ(dump_json(*value), R"({"b":1,"a":{"z":2,"y":3}})");
}

TEST(Json, RefusesTooManyMembersOfOneObjectOnly) {
  EXPECT_TRUE(bool(parse_json(object_of(kMaxJsonMembers))));
  for (const std::string& text :
       {object_of(kMaxJsonMembers + 1), "[[" + object_of(kMaxJsonMembers + 1) + "]]"}) {
    const auto refused = parse_json(text);
    ASSERT_FALSE(bool(refused));
    EXPECT_EQ(refused.error().code, Error::invalid_argument);
  }
  const std::string many = "[" + object_of(1000) + "," + object_of(1000) + R"(,{"x":)" + object_of(1000) + "}]";
  EXPECT_TRUE(bool(parse_json(many)));
  EXPECT_TRUE(bool(parse_sorted_json(object_of(100000))));
}

TEST(Json, RefusesDepthBeforeParsing) {
  EXPECT_TRUE(bool(parse_json(std::string(128, '[') + std::string(128, ']'))));
  EXPECT_FALSE(bool(parse_json(std::string(129, '[') + std::string(129, ']'))));
  EXPECT_FALSE(bool(parse_json(std::string(10'000'000, '['))));
  EXPECT_TRUE(bool(parse_json("\"" + std::string(1000, '[') + "\"")));
}

TEST(Json, RefusesWhatIsNotUnicodeInWordsThatAre) {
  for (const std::string text : {"\"\xff\xfe\"", "\"\xc0\x80\"", "\"\xed\xa0\xbd\"", "\"\xe4\xbd\"",
                                 R"("\ud83d")", R"("\ude00\ud83d")", "{} x", "", "nul", "{\"a\":1,}"}) {
    const auto refused = parse_json(text);
    ASSERT_FALSE(bool(refused)) << text;
    EXPECT_TRUE(bool(parse_json(dump_json(Json(refused.error().message)))));
  }
  EXPECT_TRUE(bool(parse_json("\xef\xbb\xbf{}")));
}

TEST(Json, TypedMembersNameTheFieldAtFault) {
  const Json object = *parse_json(R"({"n":3,"x":1.5,"s":"t","b":true,"null":null,"big":18446744073709551615})");
  EXPECT_EQ(*int_member(object, "n", 0), 3);
  EXPECT_EQ(*int_member(object, "null", 7), 7);
  EXPECT_EQ(*int_member(object, "absent", 7), 7);
  EXPECT_EQ(int_member(object, "x", 0).error().param, "x");
  EXPECT_EQ(int_member(object, "big", 0).error().param, "big");
  EXPECT_EQ(*number_member(object, "n", 0), 3.0);
  EXPECT_EQ(number_member(object, "s", 0).error().param, "s");
  EXPECT_EQ(bool_member(object, "n", false).error().param, "n");
  EXPECT_EQ(string_member(object, "b", "").error().param, "b");
}

}  // namespace
}  // namespace ekv
