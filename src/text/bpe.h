#pragma once
// bpe.h -- byte pair encoding of one word: the lowest rank merges first, the leftmost of equal ones before.
//
// Source: the BPE model of the Hugging Face `tokenizers` package, whose treatment of unknown characters is
// kept.

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "elastickv/base.h"

namespace ekv {

struct StringHash {
  using is_transparent = void;
  size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
};
using VocabMap = std::unordered_map<std::string, TokenId, StringHash, std::equal_to<>>;

// (left, right) -> what they merge into. Open addressing: a lookup is one or two cache lines, and a megabyte
// without spaces needs millions of them.
class MergeTable {
 public:
  struct Merge {
    uint32_t rank = UINT32_MAX;  // UINT32_MAX: the two do not merge
    TokenId result = -1;
  };
  explicit MergeTable(size_t num_merges = 0);
  void set(TokenId left, TokenId right, Merge merge);  // at most `num_merges` different pairs
  Merge find(TokenId left, TokenId right) const;
  size_t size() const { return size_; }

 private:
  struct Slot {
    uint64_t pair = UINT64_MAX;
    Merge merge;
  };
  Slot& slot_of(uint64_t pair);
  std::vector<Slot> slots_;  // a power of two, at most half full
  int shift_;
  size_t size_ = 0;
};

// Buffers of one encode call, and the answers it has had: words repeat within a text.
struct BpeScratch {
  explicit BpeScratch(size_t text_bytes);

  struct Symbol {
    TokenId id;
    int32_t previous, next;   // -1: none
    MergeTable::Merge merge;  // with the next symbol
  };
  struct Candidate {
    uint64_t order;  // rank, then position
    TokenId result;
  };
  // Direct-mapped, so bounded: a new word takes the place of the old one. The text must outlive the call.
  struct CachedWord {
    std::string_view word;
    uint32_t first = 0, count = 0;  // in the tokens of this call
  };
  std::vector<Symbol> symbols;
  std::vector<Candidate> heap;
  std::vector<CachedWord> cache;
};

class Bpe {
 public:
  struct Config {
    VocabMap vocab;
    MergeTable merges;
    bool byte_level = false;     // words are bytes, written in GPT-2's alphabet in the vocabulary
    bool ignore_merges = false;  // a word of the vocabulary is taken whole
    bool byte_fallback = false;  // a character that is not in the vocabulary becomes <0xNN> tokens
    bool fuse_unknown = false;
    std::optional<TokenId> unknown;  // absent: an unknown character gives nothing
  };
  explicit Bpe(Config config);
  const VocabMap& vocab() const { return config_.vocab; }

  // Appends the tokens of `word`, which is not empty. Words must stay where they are until the last call with
  // the same scratch; `out` must only grow.
  void encode(std::string_view word, BpeScratch* scratch, std::vector<TokenId>* out) const;

 private:
  struct Unknown;
  void start_symbols(std::string_view word, BpeScratch* scratch) const;
  void start_unknown(std::string_view character, BpeScratch* scratch, Unknown* state) const;
  void merge_short(BpeScratch* scratch, std::vector<TokenId>* out) const;
  void merge_long(BpeScratch* scratch, std::vector<TokenId>* out) const;

  Config config_;
  std::array<TokenId, 256> byte_ids_;      // byte level: the token of each byte, or -1
  std::array<TokenId, 256> fallback_ids_;  // <0xNN>, or -1
  VocabMap words_;                         // ignore_merges: raw text of each token
};

// The bytes that a byte-level token stands for; nullopt when a character is not of the alphabet.
std::optional<std::string> alphabet_bytes(std::string_view token);

}  // namespace ekv
