#include "text/bpe.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>

#include "text/tokenizer_utf8.h"

namespace ekv {
namespace {

// Up to here the scan for the lowest rank over all symbols beats the heap (measured on English and code); far
// beyond, it would be quadratic.
constexpr size_t kScanLimit = 32;
constexpr size_t kMaxCachedWords = 4096;
constexpr size_t kMaxCachedLength = 64;  // bytes; longer words hardly repeat

uint64_t pair_key(TokenId left, TokenId right) { return uint64_t(uint32_t(left)) << 32 | uint32_t(right); }

bool later(const BpeScratch::Candidate& a, const BpeScratch::Candidate& b) { return a.order > b.order; }

}  // namespace

MergeTable::MergeTable(size_t num_merges)
    : slots_(std::bit_ceil(std::max<size_t>(2, num_merges * 2))),
      shift_(64 - std::countr_zero(slots_.size())) {}

MergeTable::Slot& MergeTable::slot_of(uint64_t pair) {
  size_t at = size_t(pair * 0x9E3779B97F4A7C15u >> shift_);  // Fibonacci hashing: the top bits are mixed best
  while (slots_[at].pair != pair && slots_[at].pair != UINT64_MAX) at = (at + 1) & (slots_.size() - 1);
  return slots_[at];
}

void MergeTable::set(TokenId left, TokenId right, Merge merge) {
  Slot& slot = slot_of(pair_key(left, right));
  if (slot.pair == UINT64_MAX) ++size_;
  EKV_CHECK(size_ * 2 <= slots_.size(), "more pairs than the table was made for");
  slot = {pair_key(left, right), merge};
}

MergeTable::Merge MergeTable::find(TokenId left, TokenId right) const {
  return const_cast<MergeTable*>(this)->slot_of(pair_key(left, right)).merge;
}

BpeScratch::BpeScratch(size_t text_bytes)
    : cache(std::bit_ceil(std::clamp<size_t>(text_bytes / 4, 16, kMaxCachedWords))) {}

std::optional<std::string> alphabet_bytes(std::string_view token) {
  std::string bytes;
  for (size_t at = 0; at < token.size(); at += size_t(utf8_length(token[at]))) {
    const int byte = alphabet_to_byte(utf8_at(token, at));
    if (byte < 0) return {};
    bytes.push_back(char(byte));
  }
  return bytes;
}

Bpe::Bpe(Config config) : config_(std::move(config)) {
  const auto id_of = [&](const std::string& text) {
    const auto found = config_.vocab.find(text);
    return found == config_.vocab.end() ? TokenId(-1) : found->second;
  };
  for (int byte = 0; byte < 256; ++byte) {
    std::string character;
    append_utf8(&character, byte_to_alphabet(uint8_t(byte)));
    byte_ids_[size_t(byte)] = id_of(character);
    fallback_ids_[size_t(byte)] = id_of(fmt::format("<0x{:02X}>", byte));
  }
  if (!config_.ignore_merges) return;
  for (const auto& [text, id] : config_.vocab) {
    if (!config_.byte_level)
      words_.emplace(text, id);
    else if (std::optional<std::string> bytes = alphabet_bytes(text))
      words_.emplace(std::move(*bytes), id);
  }
}

void Bpe::encode(std::string_view word, BpeScratch* scratch, std::vector<TokenId>* out) const {
  if (config_.ignore_merges) {
    if (const auto whole = words_.find(word); whole != words_.end()) return out->push_back(whole->second);
  }
  const bool cacheable = word.size() <= kMaxCachedLength;
  BpeScratch::CachedWord& cached = scratch->cache[StringHash()(word) & (scratch->cache.size() - 1)];
  if (cacheable && cached.word == word) {
    for (uint32_t i = 0; i < cached.count; ++i) {
      const TokenId id = (*out)[cached.first + i];  // by value: appending may move the source
      out->push_back(id);
    }
    return;
  }
  const size_t first = out->size();
  start_symbols(word, scratch);
  if (scratch->symbols.size() <= kScanLimit)
    merge_short(scratch, out);
  else
    merge_long(scratch, out);
  if (cacheable) cached = {word, uint32_t(first), uint32_t(out->size() - first)};
}

// An unknown token that has been met and not yet written: the next one may be fused with it.
struct Bpe::Unknown {
  bool pending = false;
};

void Bpe::start_symbols(std::string_view word, BpeScratch* scratch) const {
  scratch->symbols.clear();
  Unknown unknown;
  std::string spelled;
  for (size_t at = 0; at < word.size();) {
    const size_t length = config_.byte_level ? 1 : size_t(utf8_length(word[at]));
    const std::string_view character = word.substr(at, length);
    at += length;
    TokenId id = -1;
    if (config_.byte_level) {
      id = byte_ids_[uint8_t(character[0])];
    } else if (const auto found = config_.vocab.find(character); found != config_.vocab.end()) {
      id = found->second;
    }
    if (id >= 0) {
      if (unknown.pending) scratch->symbols.push_back({*config_.unknown, 0, 0, {}});
      unknown.pending = false;
      scratch->symbols.push_back({id, 0, 0, {}});
      continue;
    }
    spelled.clear();
    if (config_.byte_level)
      append_utf8(&spelled, byte_to_alphabet(uint8_t(character[0])));
    else
      spelled = character;
    start_unknown(spelled, scratch, &unknown);
  }
  if (unknown.pending) scratch->symbols.push_back({*config_.unknown, 0, 0, {}});
}

void Bpe::start_unknown(std::string_view character, BpeScratch* scratch, Unknown* unknown) const {
  const auto known = [&](char c) { return fallback_ids_[uint8_t(c)] >= 0; };
  if (config_.byte_fallback && std::all_of(character.begin(), character.end(), known)) {
    for (const char c : character) scratch->symbols.push_back({fallback_ids_[uint8_t(c)], 0, 0, {}});
    return;
  }
  if (!config_.unknown) return;
  if (unknown->pending && !config_.fuse_unknown) scratch->symbols.push_back({*config_.unknown, 0, 0, {}});
  unknown->pending = true;
}

void Bpe::merge_short(BpeScratch* scratch, std::vector<TokenId>* out) const {
  std::vector<BpeScratch::Symbol>& symbols = scratch->symbols;
  const auto rank_pair = [&](size_t i) {
    symbols[i].merge =
        i + 1 < symbols.size() ? config_.merges.find(symbols[i].id, symbols[i + 1].id) : MergeTable::Merge{};
  };
  for (size_t i = 0; i < symbols.size(); ++i) rank_pair(i);
  while (symbols.size() > 1) {
    size_t best = 0;
    for (size_t i = 1; i < symbols.size(); ++i)
      if (symbols[i].merge.rank < symbols[best].merge.rank) best = i;
    if (symbols[best].merge.result < 0) break;
    symbols[best].id = symbols[best].merge.result;
    symbols.erase(symbols.begin() + ptrdiff_t(best) + 1);
    rank_pair(best);
    if (best > 0) rank_pair(best - 1);
  }
  for (const BpeScratch::Symbol& symbol : symbols) out->push_back(symbol.id);
}

// A list of symbols and a heap of candidates. Merging makes at most two new candidates and never removes old
// ones: a candidate is stale when its pair is no longer there, which its result tells, because the text of a
// pair only ever grows.
void Bpe::merge_long(BpeScratch* scratch, std::vector<TokenId>* out) const {
  std::vector<BpeScratch::Symbol>& symbols = scratch->symbols;
  std::vector<BpeScratch::Candidate>& heap = scratch->heap;
  EKV_CHECK(symbols.size() < size_t(INT32_MAX), "positions are 32-bit");
  heap.clear();
  const auto rank_pair = [&](int32_t i) {
    BpeScratch::Symbol& left = symbols[size_t(i)];
    left.merge =
        left.next < 0 ? MergeTable::Merge{} : config_.merges.find(left.id, symbols[size_t(left.next)].id);
    if (left.merge.result < 0) return false;
    heap.push_back({uint64_t(left.merge.rank) << 32 | uint32_t(i), left.merge.result});
    return true;
  };
  const auto last = int32_t(symbols.size()) - 1;
  for (int32_t i = 0; i <= last; ++i) {
    symbols[size_t(i)].previous = i - 1;
    symbols[size_t(i)].next = i == last ? -1 : i + 1;
    rank_pair(i);
  }
  std::make_heap(heap.begin(), heap.end(), later);
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), later);
    const BpeScratch::Candidate top = heap.back();
    heap.pop_back();
    const auto at = int32_t(uint32_t(top.order));
    BpeScratch::Symbol& left = symbols[size_t(at)];
    if (left.merge.result != top.result) continue;
    BpeScratch::Symbol& right = symbols[size_t(left.next)];
    left.id = top.result;
    left.next = right.next;
    right.merge = {};
    if (left.next >= 0) symbols[size_t(left.next)].previous = at;
    if (rank_pair(at)) std::push_heap(heap.begin(), heap.end(), later);
    if (left.previous >= 0 && rank_pair(left.previous)) std::push_heap(heap.begin(), heap.end(), later);
  }
  for (int32_t i = symbols.empty() ? -1 : 0; i >= 0; i = symbols[size_t(i)].next)
    out->push_back(symbols[size_t(i)].id);
}

}  // namespace ekv
