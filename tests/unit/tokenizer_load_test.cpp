// Loading a tokenizer: every malformed file is an Error that names the place, and what is not supported is
// refused.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>

#include "elastickv/tokenizer.h"
#include "tests/support/temp_dir.h"
#include "tests/support/test_data.h"
#include "text/pretokenizer_regex.h"
#include "util/files.h"
#include "util/json.h"

namespace ekv {
namespace {

using Ids = std::vector<TokenId>;

const char* kGood = R"({
  "added_tokens": [{"id": 5, "content": "<s>", "special": true}],
  "normalizer": {"type": "NFC"},
  "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "\\s+|b"}, "behavior": "Isolated", "invert": false},
  "post_processor": {"type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [5], "tokens": ["<s>"]}}},
  "decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"}]},
  "model": {"type": "BPE", "unk_token": null, "byte_fallback": false, "fuse_unk": false, "ignore_merges": false,
    "vocab": {"a": 0, "b": 1, "c": 2, "ab": 3, "ac": 4}, "merges": ["a b", ["a", "c"]]}
})";

Result<Tokenizer> load(const Json& file, std::string_view config = "{}") {
  return Tokenizer::from_text(file.dump(), config);
}

TEST(Load, TheFixtureIsGood) {
  const Result<Tokenizer> made = load(Json::parse(kGood));
  ASSERT_TRUE(made) << made.error().message;
  EXPECT_EQ(*made->encode("acab", true), (Ids{5, 4, 0, 1}));  // the split keeps b from merging
  EXPECT_EQ(made->decode(Ids{5, 4, 0, 1}, true), "acab");
  EXPECT_EQ(made->vocab_size(), 6);
}

// One change of the good file, and a part of the message that must come.
struct Mistake {
  const char* at;     // JSON pointer
  const char* value;  // JSON
  const char* says;
};

TEST(Load, EveryMistakeNamesItsPlace) {
  const Mistake mistakes[] = {
      {"", "[]", "must hold a JSON object"},
      {"/model", "null", "'model.vocab' must be an object"},
      {"/model", "3", "'model' must be an object"},
      {"/model/type", "\"WordPiece\"", "the model 'WordPiece' is not supported"},
      {"/model/type", "7", "'model.type' must be a string"},
      {"/model/vocab", "[]", "'model.vocab' must be an object"},
      {"/model/vocab/a", "\"x\"", "'model.vocab.a' must be an integer"},
      {"/model/vocab/a", "1.5", "'model.vocab.a' must be an integer"},
      {"/model/vocab/a", "-1", "'model.vocab.a' has the id -1"},
      {"/model/vocab/a", "4000000000", "'model.vocab.a' has the id 4000000000"},
      {"/model/vocab/a", "18446744073709551615", "'model.vocab.a'"},
      {"/model/vocab/a", "1", "which 'a' has too"},
      {"/model/merges", "null", "'model.merges' must be an array"},
      {"/model/merges/0", "\"a  b\"", "'model.merges[0]' must be two tokens"},
      {"/model/merges/0", "\"ab\"", "'model.merges[0]' must be two tokens"},
      {"/model/merges/1", "[\"a\"]", "'model.merges[1]' must be"},
      {"/model/merges/1", "[\"a\", 3]", "'model.merges[1]' must be"},
      {"/model/merges/1", "[\"a\", \"z\"]", "'model.merges[1]' names the token 'z'"},
      {"/model/merges/1", "[\"c\", \"a\"]", "'model.merges[1]' names the token 'ca'"},
      {"/model/dropout", "0.1", "'model.dropout': the value 0.1 is not supported"},
      {"/model/continuing_subword_prefix", "\"##\"", "'model.continuing_subword_prefix'"},
      {"/model/end_of_word_suffix", "\"</w>\"", "'model.end_of_word_suffix'"},
      {"/model/byte_fallback", "\"yes\"", "'model.byte_fallback' must be true or false"},
      {"/model/unk_token", "\"<unk>\"", "'model.unk_token' names a token that is not in the vocabulary"},
      {"/added_tokens", "{}", "'added_tokens' must be an array"},
      {"/added_tokens/0", "5", "'added_tokens[0]' must be an object"},
      {"/added_tokens/0/content", "\"\"", "'added_tokens[0].content' must not be empty"},
      {"/added_tokens/0/content", "null", "'added_tokens[0].content' must be a string"},
      {"/added_tokens/0/id", "null", "'added_tokens[0].id' must be an integer"},
      {"/added_tokens/0/id", "2", "'added_tokens[0]' has the id 2, which 'c' has too"},
      {"/added_tokens/0/id", "99999999", "'added_tokens[0]' has the id 99999999"},
      {"/added_tokens/0/lstrip", "1", "'added_tokens[0].lstrip' must be true or false"},
      {"/added_tokens/1", R"({"id": 4, "content": "a"})", "'added_tokens[1].id' is 4, but 'a' has the id 0"},
      {"/normalizer/type", "\"BertNormalizer\"", "the normalizer 'BertNormalizer' is not supported"},
      {"/normalizer", "\"NFC\"", "'normalizer' must be an object"},
      {"/normalizer", R"({"type": "Sequence", "normalizers": [{"type": "Odd"}]})",
       "'normalizer.normalizers[0]'"},
      {"/normalizer", R"({"type": "Replace", "pattern": {"String": ""}, "content": "x"})",
       "must be a string that is"},
      {"/normalizer", R"({"type": "Replace", "pattern": "x", "content": "x"})", "'normalizer.pattern' must be"},
      {"/pre_tokenizer/type", "\"Whitespace\"", "the pre-tokenizer 'Whitespace' is not supported"},
      {"/pre_tokenizer/pattern/Regex", "\"(a\"", "'pre_tokenizer.pattern.Regex'"},
      {"/pre_tokenizer/pattern/Regex", "\"\\\\bx\"", "uses the escape '\\b'"},
      {"/pre_tokenizer/behavior", "\"Odd\"", "the behavior 'Odd' is not supported"},
      {"/pre_tokenizer/behavior", "null", "'pre_tokenizer.behavior' must be a string"},
      {"/pre_tokenizer", R"({"type": "Metaspace", "replacement": "ab"})", "must be one character"},
      {"/pre_tokenizer",
       R"({"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}, {"type": "Digits"}]})",
       "a pre-tokenizer after ByteLevel"},
      {"/post_processor/type", "\"BertProcessing\"", "the post-processor 'BertProcessing' is not supported"},
      {"/post_processor/single", "[]", "a template without exactly one text"},
      {"/post_processor/single/0", "{}", "'post_processor.single[0]' must be"},
      {"/post_processor/special_tokens/<s>/ids/0", "77", "is 77, which is not a token"},
      {"/post_processor/special_tokens", "null", "must be an array"},
      {"/decoder/type", "\"WordPiece\"", "the decoder 'WordPiece' in this place is not supported"},
      {"/decoder/decoders/1", R"({"type": "Strip", "content": " ", "start": 1, "stop": 1})",
       "stripping at the end"},
      {"/decoder/decoders/1", R"({"type": "ByteFallback"})", "the decoder 'ByteFallback' in this place"},
  };
  for (const Mistake& mistake : mistakes) {
    Json file = Json::parse(kGood);
    const std::string at = mistake.at;
    if (at.ends_with("/decoders/1") || at.ends_with("/added_tokens/1"))
      file[Json::json_pointer(at.substr(0, at.size() - 2))].push_back(Json::parse(mistake.value));
    else
      file[Json::json_pointer(at)] = Json::parse(mistake.value);
    const Result<Tokenizer> made = load(file);
    ASSERT_FALSE(made) << mistake.at << " = " << mistake.value;
    EXPECT_NE(made.error().message.find(mistake.says), std::string::npos)
        << mistake.at << " = " << mistake.value << ": " << made.error().message;
  }
}

TEST(Load, AVocabularyMayHoldTheCharacterNul) {
  const std::string nul(1, '\0');
  Json file = Json::parse(kGood);
  file["model"]["vocab"][nul] = 7;
  file["model"]["vocab"]["a" + nul] = 8;
  file["model"]["merges"].push_back(Json::array({"a", nul}));
  const Result<Tokenizer> made = load(file);
  ASSERT_TRUE(made) << made.error().message;
  EXPECT_EQ(*made->encode("a" + nul + nul, false), (Ids{8, 7}));
}

TEST(Load, DeepNestingIsRefused) {
  std::string normalizer = R"({"type":"NFC"})";
  for (int i = 0; i < 40; ++i) normalizer = R"({"type":"Sequence","normalizers":[)" + normalizer + "]}";
  Json file = Json::parse(kGood);
  file["normalizer"] = Json::parse(normalizer);
  const Result<Tokenizer> made = load(file);
  ASSERT_FALSE(made);
  EXPECT_NE(made.error().message.find("a deeper Sequence"), std::string::npos) << made.error().message;
}

// Random damage to a real file: never a crash, and a file that still loads encodes and decodes.
TEST(Load, SurvivesRandomDamage) {
  const Result<std::string> text = read_file(test::test_data() / "tokenizer" / "spm.json");
  ASSERT_TRUE(text);
  const Json whole = Json::parse(*text);
  const Json values[] = {
      nullptr, 0, -1, 1e300, "x", "", true, Json::array(), Json::object(), Json::array({1, "a"})};
  int loaded = 0;
  for (unsigned seed = 0; seed < 150; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    std::mt19937 rng(seed);
    const auto pick = [&](size_t n) { return ptrdiff_t(rng() % n); };
    Json file = whole;
    Json* at = &file;
    while (at->is_structured() && !at->empty() && rng() % 4 != 0)
      at = &*std::next(at->begin(), pick(at->size()));
    *at = values[pick(std::size(values))];
    const Result<Tokenizer> made = load(file);
    if (!made) {
      EXPECT_FALSE(made.error().message.empty());
      continue;
    }
    ++loaded;
    const Result<Ids> ids = made->encode("Hello <s> wörld 你 \n", true);
    if (ids) made->decode(*ids, false);
  }
  EXPECT_GT(loaded, 0);
  EXPECT_LT(loaded, 150);
}

TEST(Load, ReadsNamesAndTemplateFromTheConfig) {
  const Json file = Json::parse(kGood);
  Result<Tokenizer> made = load(file, R"({"bos_token": "<s>", "eos_token": {"content": "ab", "special": true},
                                          "chat_template": "{{ messages }}"})");
  ASSERT_TRUE(made) << made.error().message;
  EXPECT_EQ(made->bos_id(), 5);
  EXPECT_EQ(made->bos_text(), "<s>");
  EXPECT_EQ(made->eos_id(), 3);
  EXPECT_EQ(made->eos_text(), "ab");
  EXPECT_FALSE(made->pad_id().has_value());
  EXPECT_EQ(made->chat_template(), "{{ messages }}");

  made = load(
      file,
      R"({"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]})");
  ASSERT_TRUE(made);
  EXPECT_EQ(made->chat_template(), "d");

  made = load(file, R"({"eos_token": "</s>"})");
  ASSERT_FALSE(made);
  EXPECT_NE(made.error().message.find("'eos_token' names '</s>'"), std::string::npos) << made.error().message;
  made = load(file, R"({"bos_token": 3})");
  ASSERT_FALSE(made);
  made = load(file, "[");
  ASSERT_FALSE(made);
}

TEST(Load, FolderWithAndWithoutItsOptionalFiles) {
  const test::TempDir temp;
  const std::filesystem::path& folder = temp.path();
  Result<Tokenizer> made = Tokenizer::load(folder);
  ASSERT_FALSE(made);
  EXPECT_NE(made.error().message.find("tokenizer.json"), std::string::npos);
  std::ofstream(folder / "tokenizer.json") << kGood;
  made = Tokenizer::load(folder);
  ASSERT_TRUE(made) << made.error().message;
  EXPECT_EQ(made->chat_template(), "");
  std::ofstream(folder / "tokenizer_config.json") << R"({"chat_template": "from the config"})";
  EXPECT_EQ(Tokenizer::load(folder)->chat_template(), "from the config");
  std::ofstream(folder / "chat_template.jinja") << "from its file";
  EXPECT_EQ(Tokenizer::load(folder)->chat_template(), "from its file");
  std::ofstream(folder / "chat_template.jinja") << "";
  EXPECT_EQ(Tokenizer::load(folder)->chat_template(), "") << "who renders chats says that it is empty";
  std::ofstream(folder / "chat_template.jinja") << "from its file";
  std::ofstream(folder / "tokenizer_config.json") << "";
  EXPECT_FALSE(Tokenizer::load(folder));
  std::ofstream(folder / "tokenizer_config.json") << "{";
  made = Tokenizer::load(folder);
  ASSERT_FALSE(made);
  EXPECT_NE(made.error().message.find("tokenizer_config.json"), std::string::npos) << made.error().message;
}

// ---- patterns

TEST(Pattern, TranslatesWhatDiffers) {
  EXPECT_EQ(*translate_pattern(R"(\s+(?!\S)|\p{L}[^\s\p{N}]?)"),
            R"([\t-\r\x{85}\p{Z}]+(?![^\t-\r\x{85}\p{Z}])|\p{L}[^\t-\r\x{85}\p{Z}\p{N}]?)");
  EXPECT_EQ(*translate_pattern(R"(\p{Han}|\P{^Lu}|\v|\u4E00)"), R"(\p{sc:Han}|\P{^Lu}|\x0B|\x{4E00})");
}

TEST(Pattern, RefusesWhatWouldMeanSomethingElse) {
  for (const char* pattern : {R"(\w+)",       R"(\bx)",     R"(\h)",         R"(\R)",
                              R"((a)\1)",     R"(^a)",      R"(a$)",         R"(a{,3})",
                              R"(a{2}+)",     R"(a{2,3}?)", R"([a-z&&b])",   R"([[:alpha:]])",
                              R"([\S])",      R"((?i)a)",   R"((?<name>a))", R"((*VERB)a)",
                              R"(\p{Alpha})", R"(\pL)",     R"(\xff)",       "a\\",
                              "[a",           "(a",         R"(\p{L)",       R"(\u12)"})
    EXPECT_FALSE(Regex::compile(pattern)) << pattern;
}

TEST(Pattern, ExponentialBacktrackingIsAnErrorAndNotAWrongSplit) {
  const Result<Regex> regex = Regex::compile("(?:a+)+[bd]");
  ASSERT_TRUE(regex);
  RegexScratch scratch;
  std::vector<Span> matches;
  const Status status = regex->find_all(std::string(200, 'a') + "c", &scratch, &matches);
  ASSERT_TRUE(status.has_value());
  EXPECT_EQ(status->code, Error::too_large);
}

TEST(Pattern, DeepGroupsAreMatchedWhole) {
  const Result<Regex> regex = Regex::compile("(?:a|b)+c");
  ASSERT_TRUE(regex);
  RegexScratch scratch;
  std::vector<Span> matches;
  const std::string text = std::string(300'000, 'a') + "c";  // more than the JIT's own stack holds
  ASSERT_FALSE(regex->find_all(text, &scratch, &matches).has_value());
  ASSERT_EQ(matches.size(), 1u);
  EXPECT_EQ(matches[0].end, text.size());
}

}  // namespace
}  // namespace ekv
