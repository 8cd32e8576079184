// The tokenizer against the reference package (answers made by scripts/make_tokenizer_cases.py) and against the
// rules that hold for every tokenizer. Faults that users of such servers reported have their case's name.

#include "elastickv/tokenizer.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <thread>

#include "tests/support/test_data.h"
#include "text/pretokenizer.h"
#include "text/tokenizer_utf8.h"
#include "util/files.h"
#include "util/json.h"

namespace ekv {
namespace {

using Ids = std::vector<TokenId>;
const std::filesystem::path kData = test::test_data() / "tokenizer";

std::string text_of(const std::filesystem::path& path) {
  Result<std::string> text = read_file(path);
  EXPECT_TRUE(text) << path;
  return text ? *text : std::string();
}

std::vector<Json> lines_of(const std::filesystem::path& path) {
  std::vector<Json> records;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    Result<Json> record = parse_json(line);
    EXPECT_TRUE(record) << path << ": " << line;
    if (record) records.push_back(*record);
  }
  EXPECT_GT(records.size(), 100u) << path;
  return records;
}

Tokenizer small_tokenizer(const std::string& name) {
  Result<Tokenizer> made = Tokenizer::from_text(text_of(kData / (name + ".json")), "{}");
  EXPECT_TRUE(made) << name << ": " << (made ? "" : made.error().message);
  EKV_CHECK(bool(made), "the test needs its tokenizer");
  return *made;
}

Ids encode(const Tokenizer& tokenizer, std::string_view text, bool special = false) {
  Result<Ids> ids = tokenizer.encode(text, special);
  EXPECT_TRUE(ids) << (ids ? "" : ids.error().message);
  return ids ? *ids : Ids();
}

std::string streamed(const Tokenizer& tokenizer, const Ids& ids, bool skip_special) {
  Detokenizer stream(tokenizer, skip_special);
  std::string joined;
  for (const TokenId id : ids) {
    const std::string delta = stream.push(id);
    EXPECT_TRUE(is_utf8(delta)) << "a delta of its own is not UTF-8";
    joined += delta;
  }
  return joined + stream.flush();
}

void check_decode(const Tokenizer& tokenizer, const Json& record) {
  const Ids ids = record["d"].get<Ids>();
  for (const bool skip : {false, true}) {
    const auto want = record[skip ? "k" : "a"].get<std::string>();
    EXPECT_EQ(tokenizer.decode(ids, skip), want) << record.dump();
    EXPECT_EQ(streamed(tokenizer, ids, skip), want) << record.dump();
  }
}

// Every record of NAME.cases.jsonl; stops after a few failures, which are enough to see the pattern.
void check_cases(const Tokenizer& tokenizer, const std::string& name) {
  static const std::vector<Json> texts = lines_of(kData / "texts.jsonl");
  int failures = 0;
  for (const Json& record : lines_of(kData / (name + ".cases.jsonl"))) {
    if (failures > 5) break;
    if (record.contains("d")) {
      check_decode(tokenizer, record);
      continue;
    }
    const bool special = record.contains("s");
    const auto text = texts.at(record["x"].get<size_t>()).get<std::string>();
    const Ids want = record[special ? "s" : "i"].get<Ids>();
    const Ids got = encode(tokenizer, text, special);
    EXPECT_EQ(got, want) << name << " text " << record["x"] << ": " << Json(text).dump(-1, ' ', true);
    failures += got != want;
  }
}

class Reference : public testing::TestWithParam<const char*> {};
TEST_P(Reference, EncodesAndDecodesAlike) { check_cases(small_tokenizer(GetParam()), GetParam()); }
INSTANTIATE_TEST_SUITE_P(Small, Reference,
                         testing::Values("gpt2", "llama3", "qwen", "smollm2", "deepseek", "spm", "metaspace",
                                         "options_removed", "options_previous", "options_next",
                                         "options_contiguous", "options_invert", "plain"),
                         [](const auto& info) { return std::string(info.param); });

class ModelReference : public testing::TestWithParam<const char*> {};
TEST_P(ModelReference, EncodesAndDecodesAlike) {
  const std::filesystem::path folder = std::filesystem::path(EKV_MODELS) / GetParam();
  if (!std::filesystem::exists(folder / "tokenizer.json")) {
    ASSERT_STRNE(GetParam(), "smollm2-135m-instruct") << folder << " is absent: run scripts/setup.sh";
    GTEST_SKIP() << folder << " is absent: scripts/fetch_model.py fetches it";
  }
  Result<Tokenizer> made = Tokenizer::load(folder);
  ASSERT_TRUE(made) << made.error().message;
  EXPECT_FALSE(made->chat_template().empty());
  EXPECT_TRUE(made->eos_id().has_value());
  check_cases(*made, std::string("model_") + GetParam());
}
INSTANTIATE_TEST_SUITE_P(Models, ModelReference,
                         testing::Values("smollm2-135m-instruct", "qwen2.5-coder-1.5b-instruct"),
                         [](const auto& info) { return std::string(info.param).substr(0, 4); });

// ---- TOK-1: the split itself, with '|' at the borders

std::string splits(const std::string& name, std::string_view text) {
  Result<SortedJson> file = parse_sorted_json(text_of(kData / (name + ".json")));
  Status status;
  const PreTokenizer pre = PreTokenizer::from(Field(*file, "", &status)["pre_tokenizer"]);
  EXPECT_FALSE(status.has_value());
  SplitScratch scratch;
  std::vector<Piece> pieces{{text, true}};
  EXPECT_FALSE(pre.split(&pieces, &scratch).has_value());
  std::string out;
  for (const Piece& piece : pieces) out += (out.empty() ? "" : "|") + std::string(piece.text);
  return out;
}

TEST(Tok1, SplitsAsTheModelDoes) {
  const std::vector<std::array<const char*, 5>> table = {
      // text, llama3, qwen, gpt2, smollm2
      {"HE'S it'll WE'VE", "HE|'S| it|'ll| WE|'VE", "HE|'S| it|'ll| WE|'VE", "HE|'|S| it|'ll| WE|'|VE",
       "HE|'|S| it|'ll| WE|'|VE"},
      {"x1234567y", "x|123|456|7|y", "x|1|2|3|4|5|6|7|y", "x|1234567|y", "x|1|2|3|4|5|6|7|y"},
      {"a   b", "a|  | b", "a|  | b", "a|  | b", "a|  | b"},
      {"(x):\n\ty", "(x|):\n|\ty", "(x|):\n|\ty", "(|x|):|\n|\t|y", "(|x|):|\n|\t|y"},
      {"don’t", "don|’t", "don|’t", "don|’|t", "don|’|t"},
      {"a 12", "a| |12", "a| |1|2", "a| 12", "a| |1|2"},
  };
  for (const auto& row : table) {
    EXPECT_EQ(splits("llama3", row[0]), row[1]);
    EXPECT_EQ(splits("qwen", row[0]), row[2]);
    EXPECT_EQ(splits("gpt2", row[0]), row[3]);
    EXPECT_EQ(splits("smollm2", row[0]), row[4]);
  }
}

// ---- TOK-3: ignore_merges, order of merges, both spellings of a merge

Tokenizer tiny_bpe(const char* vocab, const char* merges, bool ignore_merges) {
  Result<Tokenizer> made = Tokenizer::from_text(
      fmt::format(R"({{"model":{{"type":"BPE","vocab":{},"merges":{},"ignore_merges":{}}}}})", vocab, merges,
                  ignore_merges),
      "{}");
  EKV_CHECK(bool(made), "the fixture loads");
  return *made;
}

TEST(Tok3, IgnoreMergesAndMergeOrder) {
  const char* abc = R"({"a":0,"b":1,"c":2,"ab":3,"abc":4,"d":6})";
  for (const char* merges : {R"(["a b"])", R"([["a","b"]])"}) {
    EXPECT_EQ(encode(tiny_bpe(abc, merges, false), "abc"), (Ids{3, 2}));
    EXPECT_EQ(encode(tiny_bpe(abc, merges, true), "abc"), (Ids{4}));
    EXPECT_EQ(encode(tiny_bpe(abc, merges, true), "abcd"), (Ids{3, 2, 6}));
  }
  const char* bc = R"({"a":0,"b":1,"c":2,"ab":3,"bc":4})";
  for (const char* merges : {R"(["b c","a b"])", R"([["b","c"],["a","b"]])"}) {
    EXPECT_EQ(encode(tiny_bpe(bc, merges, false), "abc"), (Ids{0, 4}));
    EXPECT_EQ(encode(tiny_bpe(bc, merges, false), "abab"), (Ids{3, 3}));
  }
}

// Words beyond the scan limit take the heap, short ones the scan: both against the definition of BPE.
Ids merge_by_definition(std::string_view text, const std::vector<std::string>& left,
                        const std::vector<std::string>& right, const Tokenizer& tokenizer) {
  std::vector<std::string> parts;
  for (const char c : text) parts.emplace_back(1, c);
  for (bool merged = true; merged;) {
    merged = false;
    for (size_t rank = 0; rank < left.size() && !merged; ++rank)
      for (size_t i = 0; i + 1 < parts.size() && !merged; ++i)
        if (parts[i] == left[rank] && parts[i + 1] == right[rank]) {
          parts[i] += parts[i + 1];
          parts.erase(parts.begin() + ptrdiff_t(i) + 1);
          merged = true;
        }
  }
  Ids ids;
  for (const std::string& part : parts) ids.push_back(*tokenizer.token_id(part));
  return ids;
}

TEST(Bpe, ShortAndLongWordsFollowTheDefinition) {
  for (unsigned seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    std::mt19937 rng(seed);
    std::vector<std::string> tokens{"a", "b", "c"}, left, right;
    Json vocab{{"a", 0}, {"b", 1}, {"c", 2}}, merges = Json::array();
    for (int i = 0; i < 30; ++i) {
      const std::string a = tokens[rng() % tokens.size()], b = tokens[rng() % tokens.size()];
      const Json pair{a, b};
      if (std::find(merges.begin(), merges.end(), pair) != merges.end()) continue;
      merges.push_back(pair);
      left.push_back(a);
      right.push_back(b);
      if (vocab.contains(a + b)) continue;
      vocab[a + b] = tokens.size();
      tokens.push_back(a + b);
    }
    const Tokenizer tokenizer = tiny_bpe(vocab.dump().c_str(), merges.dump().c_str(), false);
    for (const size_t length : {2, 5, 20, 31, 32, 33, 34, 60, 200}) {
      std::string text;
      for (size_t i = 0; i < length; ++i) text += "abc"[rng() % 3];
      EXPECT_EQ(encode(tokenizer, text), merge_by_definition(text, left, right, tokenizer)) << text;
    }
  }
}

// ---- TOK-5: hostile runs. Time grows like n log n; quadratic work would make four times the text cost
// sixteen.

std::string repeated(std::string_view unit, size_t count) {
  std::string out;
  for (size_t i = 0; i < count; ++i) out += unit;
  return out;
}

std::string letters(size_t count, unsigned seed) {
  std::mt19937 rng(seed);
  std::string out;
  for (size_t i = 0; i < count; ++i) out += char('a' + rng() % 26);
  return out;
}

std::string cjk(size_t count, unsigned seed) {
  std::mt19937 rng(seed);
  std::string out;
  for (size_t i = 0; i < count; ++i) append_utf8(&out, 0x4E00 + rng() % 0x5000);
  return out;
}

// Processor time of this thread: what other processes do does not count.
double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return double(now.tv_sec) + double(now.tv_nsec) * 1e-9;
}

double seconds_to_encode(const Tokenizer& tokenizer, std::string_view text) {
  double best = 1e9;
  for (int run = 0; run < 3; ++run) {
    const double start = cpu_seconds();
    EXPECT_FALSE(encode(tokenizer, text).empty());
    best = std::min(best, cpu_seconds() - start);
  }
  return best;
}

TEST(Tok5, LongRunsWithoutABreakStayNearLinear) {
  const std::vector<std::pair<const char*, std::function<std::string(size_t)>>> kinds = {
      {"a", [](size_t n) { return repeated("a", n); }},
      {"space", [](size_t n) { return repeated(" ", n); }},
      {"space and a letter", [](size_t n) { return repeated(" ", n) + "x"; }},
      {"newline", [](size_t n) { return repeated("\n", n); }},
      {"space, newline", [](size_t n) { return repeated(" \n", n / 2); }},
      {"random letters", [](size_t n) { return letters(n, 1); }},
      {"ab", [](size_t n) { return repeated("ab", n / 2); }},
      {"digits", [](size_t n) { return repeated("7", n); }},
      {"punctuation", [](size_t n) { return repeated("!?", n / 2); }},
      {"half of a marker", [](size_t n) { return repeated("<|im_", n / 5); }},
      {"CJK", [](size_t n) { return cjk(n, 2); }},
      {"marks out of order", [](size_t n) { return "a" + repeated("\u0301\u0323", n / 2); }},
  };
  for (const char* name : {"gpt2", "llama3", "qwen", "smollm2", "spm", "metaspace"}) {
    const Tokenizer tokenizer = small_tokenizer(name);
    for (const auto& [kind, make] : kinds) {
      // What runs beside this thread can make either slower; what grows too fast does so in every try.
      double one = 0, four = 1;
      for (int i = 0; i < 5 && four >= 12 * one + 0.1; ++i) {
        one = seconds_to_encode(tokenizer, make(50'000));
        four = seconds_to_encode(tokenizer, make(200'000));
      }
      EXPECT_LT(four, 12 * one + 0.1) << name << ", " << kind << ": " << one << " s, then " << four << " s";
    }
  }
}

// ---- STR-3, STR-5, TOK-7: the stream

TEST(Str3, CharactersSplitOverTokensComeOutWhole) {
  const std::string text = "👩‍🚀 🇫🇷 é 你 한 𝄞";
  for (const char* name : {"gpt2", "llama3", "qwen", "smollm2", "spm"}) {
    const Tokenizer tokenizer = small_tokenizer(name);
    const Ids ids = encode(tokenizer, text);
    EXPECT_GT(ids.size(), 15u) << "the characters must be split for the test to say something";
    EXPECT_EQ(tokenizer.decode(ids, false), text) << name;
    EXPECT_EQ(streamed(tokenizer, ids, false), text) << name;
  }
}

TEST(Str5, UnfinishedCharacterBecomesOneReplacementInBothModes) {
  const Tokenizer tokenizer = small_tokenizer("gpt2");
  const TokenId f0 = tokenizer.token_id("ð").value(), nine_f = tokenizer.token_id("Ł").value();
  EXPECT_EQ(tokenizer.token_bytes(f0), "\xF0");
  EXPECT_EQ(tokenizer.token_bytes(nine_f), "\x9F");
  for (const Ids& ids : {Ids{f0}, Ids{f0, nine_f}}) {
    EXPECT_EQ(tokenizer.decode(ids, false), "\uFFFD");
    EXPECT_EQ(streamed(tokenizer, ids, false), "\uFFFD");
  }
  Detokenizer stream(tokenizer, false);
  EXPECT_EQ(stream.push(f0), "");
  EXPECT_EQ(stream.flush(), "\uFFFD");
  EXPECT_EQ(stream.flush(), "");
}

// The places where the reference does not give back the characters that are there: next to a broken byte token,
// and in added tokens that it normalizes (from 0.23 on) or reads in the alphabet of bytes.
TEST(Decode, KeepsCharactersThatTheReferenceLoses) {
  const Tokenizer spm = small_tokenizer("spm");
  const auto id = [&](const char* text) { return spm.token_id(text).value(); };
  const Ids broken{id("<0xE4>"), id("<0xBD>"), id("<0xA0>"), id("<0xE4>"), id("a")};
  EXPECT_EQ(spm.decode(broken, false), "你\uFFFDa");
  EXPECT_EQ(streamed(spm, broken, false), "你\uFFFDa");
  const Tokenizer options = small_tokenizer("options_previous");
  EXPECT_EQ(options.decode(Ids{options.token_id("Überall").value()}, false), "Überall");
  EXPECT_EQ(options.decode(Ids{options.token_id("[Norm]").value()}, false), "[Norm]");
}

TEST(Stream, AnyTokensJoinToTheOneShotDecode) {
  for (const char* name : {"gpt2", "llama3", "spm", "metaspace", "plain"}) {
    const Tokenizer tokenizer = small_tokenizer(name);
    for (unsigned seed = 0; seed < 300; ++seed) {
      SCOPED_TRACE(fmt::format("{}, seed {}", name, seed));
      std::mt19937 rng(seed);
      Ids ids(rng() % 40);
      // Half of them single bytes, which is where characters break; some out of range.
      for (TokenId& id : ids)
        id = TokenId(rng() % 2 ? rng() % 260 : rng() % unsigned(tokenizer.vocab_size() + 5)) - 2;
      for (const bool skip : {false, true}) {
        const std::string text = tokenizer.decode(ids, skip);
        EXPECT_TRUE(is_utf8(text));
        EXPECT_EQ(streamed(tokenizer, ids, skip), text);
      }
    }
  }
}

TEST(Tok7, SpacesAreKeptWhateverTheConfigSays) {
  const std::string file = text_of(kData / "gpt2.json");
  for (const char* config : {"{}", R"({"clean_up_tokenization_spaces":true})"}) {
    const Tokenizer tokenizer = *Tokenizer::from_text(file, config);
    for (const std::string text :
         {"hello !", "a , b .", "do n't", "    .", "\tif x:\n\t\treturn 1 ,  2 ;\n", "it 's , we 're"}) {
      const Ids ids = encode(tokenizer, text);
      EXPECT_EQ(tokenizer.decode(ids, true), text);
      EXPECT_EQ(streamed(tokenizer, ids, true), text);
    }
  }
}

// ---- TPL-6: BOS

TEST(Tpl6, BosComesFromTheTemplateOrFromTheTokenizerNeverFromBoth) {
  const Tokenizer tokenizer = small_tokenizer("llama3");
  const TokenId bos = tokenizer.token_id("<|begin_of_text|>").value();
  const auto count = [&](const Ids& ids) { return std::count(ids.begin(), ids.end(), bos); };
  const std::string chat = "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>";
  EXPECT_EQ(count(encode(tokenizer, chat, false)), 1);
  EXPECT_EQ(encode(tokenizer, chat, false).front(), bos);
  EXPECT_EQ(count(encode(tokenizer, "Hi", true)), 1);
  EXPECT_EQ(encode(tokenizer, "Hi", true).front(), bos);
  EXPECT_EQ(count(encode(tokenizer, "<|begin_of_text|>Hi", true)), 2);  // as the reference: documented
}

// ---- the interface

TEST(Tokenizer, RefusesTextThatIsNotUtf8) {
  const Tokenizer tokenizer = small_tokenizer("gpt2");
  for (const std::string_view text : {"\xFF", "a\xC3", "\xED\xA0\x80", "\xC0\x80", "\xF4\x90\x80\x80"}) {
    const Result<Ids> ids = tokenizer.encode(text, false);
    ASSERT_FALSE(ids);
    EXPECT_EQ(ids.error().code, Error::invalid_argument);
  }
}

TEST(Tokenizer, EncodesTheSameFromManyThreads) {
  const Tokenizer tokenizer = small_tokenizer("qwen");
  const std::string text = letters(3000, 7) + " it's 12 o'clock \u00e9\u0323 <|im_start|>";
  const Ids want = encode(tokenizer, text);
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) {
        const Result<Ids> ids = tokenizer.encode(text, false);
        wrong += !ids || *ids != want;
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(Tokenizer, KnowsItsTokens) {
  const Tokenizer tokenizer = small_tokenizer("qwen");
  const TokenId im_end = tokenizer.token_id("<|im_end|>").value(),
                think = tokenizer.token_id("<think>").value();
  EXPECT_TRUE(tokenizer.is_special(im_end));
  EXPECT_FALSE(tokenizer.is_special(think));
  EXPECT_EQ(tokenizer.decode(Ids{im_end, think}, true), "<think>");
  EXPECT_EQ(tokenizer.decode(Ids{im_end, think}, false), "<|im_end|><think>");
  EXPECT_EQ(tokenizer.token_text(tokenizer.token_id("Ġthe").value()), "Ġthe");
  EXPECT_EQ(tokenizer.token_bytes(tokenizer.token_id("Ġthe").value()), " the");
  EXPECT_FALSE(tokenizer.token_id("no such token").has_value());
  EXPECT_FALSE(tokenizer.is_token(-1));
  EXPECT_FALSE(tokenizer.is_token(tokenizer.vocab_size()));
  EXPECT_EQ(tokenizer.token_bytes(1 << 30), "");
}

}  // namespace
}  // namespace ekv
