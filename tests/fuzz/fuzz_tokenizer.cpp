// tokenizer.json and a text from the same input. Odd first byte: the input is a file, to be refused or used.
// Even: a text for a fixed tokenizer, which must come back from decoding.

#include <cstdint>
#include <cstdlib>
#include <filesystem>

#include "elastickv/tokenizer.h"
#include "text/tokenizer_utf8.h"
#include "util/files.h"

namespace {

using namespace ekv;

void stop_unless(bool holds) {
  if (!holds) std::abort();
}

const Tokenizer& fixed(const char* name) {
  const Result<std::string> text = read_file(std::filesystem::path(EKV_TEST_DATA) / "tokenizer" / name);
  stop_unless(bool(text));
  static std::vector<Tokenizer> kept;
  Result<Tokenizer> made = Tokenizer::from_text(*text, "{}");
  stop_unless(bool(made));
  kept.reserve(8);
  kept.push_back(*made);
  return kept.back();
}

// The stream of any tokens is the one-shot decode, and valid.
std::string both_decodes(const Tokenizer& tokenizer, const std::vector<TokenId>& ids) {
  Detokenizer stream(tokenizer, false);
  std::string joined;
  for (const TokenId id : ids) joined += stream.push(id);
  joined += stream.flush();
  stop_unless(joined == tokenizer.decode(ids, false) && is_utf8(joined));
  return joined;
}

void use(const Tokenizer& tokenizer, std::string_view text) {
  const Result<std::vector<TokenId>> ids = tokenizer.encode(text, true);
  if (ids) both_decodes(tokenizer, *ids);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Tokenizer& gpt2 = fixed("gpt2.json");
  static const Tokenizer& qwen = fixed("qwen.json");
  static const Tokenizer& spm = fixed("spm.json");
  if (size == 0) return 0;
  const std::string_view input(reinterpret_cast<const char*>(data) + 1, size - 1);
  if (data[0] % 2 == 1) {
    const Result<Tokenizer> made = Tokenizer::from_text(input, "{}");
    if (made) use(*made, "Hi <s> a\xCC\x81 \xE4\xBD\xA0 12\n");
    const Result<Tokenizer> config = Tokenizer::from_text(R"({"model":{"vocab":{"a":0},"merges":[]}})", input);
    return 0;
  }
  const Result<std::vector<TokenId>> ids = gpt2.encode(input, false);
  stop_unless(bool(ids) == is_utf8(input));
  if (ids) stop_unless(both_decodes(gpt2, *ids) == input);  // GPT-2 loses nothing
  use(qwen, input);
  use(spm, input);
  std::vector<TokenId> soup;
  for (const char c : input) soup.push_back(TokenId(uint8_t(c)) * 5 % 1300);
  both_decodes(spm, soup);
  both_decodes(gpt2, soup);
  return 0;
}
