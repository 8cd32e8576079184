#pragma once
// tokenizer_data.h -- everything that a loaded tokenizer knows. Filled by tokenizer_load.cpp, then never
// changed.

#include <optional>
#include <string>
#include <vector>

#include "text/bpe.h"
#include "text/detokenizer.h"
#include "text/pretokenizer.h"
#include "text/tokenizer_added.h"
#include "text/tokenizer_normalizer.h"

namespace ekv {

struct TokenEntry {
  std::string text;   // as the vocabulary writes it
  std::string bytes;  // what it stands for
  bool known = false;
  bool special = false;
};

struct NamedToken {
  std::optional<TokenId> id;
  std::string text;
};

struct TokenizerData {
  const TokenEntry* find(TokenId id) const {
    if (id < 0 || size_t(id) >= tokens.size() || !tokens[size_t(id)].known) return nullptr;
    return &tokens[size_t(id)];
  }

  Normalizer normalizer;
  PreTokenizer pre_tokenizer;
  Decoder decoder;
  AddedTokenFinder raw_added, normalized_added;  // looked for before and after normalizing
  Bpe bpe{Bpe::Config()};
  VocabMap added_ids;
  std::vector<TokenEntry> tokens;       // by id
  std::vector<TokenId> prefix, suffix;  // what the post-processor puts around a text
  NamedToken bos, eos, pad;
  std::string chat_template;
};

// tokenizer.json and tokenizer_config.json, parsed. A chat template of its own file is the caller's business.
Result<TokenizerData> load_tokenizer_data(const SortedJson& tokenizer, const SortedJson& config);

}  // namespace ekv
