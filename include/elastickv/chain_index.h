#pragma once
// chain_index.h -- finds pairs of KV blocks by their content. The prefix cache of the device and the store of
// the host share it, so that both mean the same by "the same pair".

#include <algorithm>
#include <array>
#include <memory_resource>
#include <span>
#include <string>
#include <string_view>
#include <unordered_set>

#include "elastickv/base.h"
#include "elastickv/kv_layout.h"

namespace ekv {

// Mixes the tokens of a pair into `seed`: the parent's hash, or that of the salt.
using PairHash = uint64_t (*)(uint64_t seed, std::span<const TokenId> tokens);
uint64_t hash_pair(uint64_t seed, std::span<const TokenId> tokens);  // xxHash; the same on every machine
uint64_t hash_salt(std::string_view salt);

// What the KV of a pair depends on. The identity is exact: parent entry, the 32 token ids, the chain, and for a
// first pair the salt. A hash finds it, equality decides it, so no collision can hand over somebody else's KV.
// The tainted chain holds KV computed from BASE: it branches off the clean one and never returns to it.
template <class Entry>
struct ChainLink {
  Entry* parent = nullptr;  // the pair before it; null for the first pair of a sequence
  std::array<TokenId, kPairTokens> tokens{};
  std::string salt;      // first pairs only; the others inherit it through their parent
  bool tainted = false;  // which chain
  uint64_t hash = 0;
  uint32_t version = 0;  // grows whenever the entry leaves the index; EntryRef
};

// `Entry` derives from ChainLink<Entry> and stays at its address while it is here. Memory is taken from
// `memory`.
template <class Entry>
class ChainIndex {
 public:
  ChainIndex(PairHash hash, std::pmr::memory_resource* memory) : hash_(hash), entries_(memory) {}

  // The child of `parent` (null: a first pair with this salt) on that chain that holds the 32 `tokens`, or
  // null.
  Entry* find(const Entry* parent, std::span<const TokenId> tokens, std::string_view salt, bool tainted) const {
    const auto it = entries_.find(key_of(parent, tokens, salt, tainted));
    return it == entries_.end() ? nullptr : *it;
  }
  // Gives the entry its identity, which nobody in the index has.
  void insert(Entry& entry, Entry* parent, std::span<const TokenId> tokens, std::string_view salt,
              bool tainted) {
    entry.parent = parent;
    std::ranges::copy(tokens, entry.tokens.begin());
    entry.salt = parent ? std::string_view() : salt;
    entry.tainted = tainted;
    entry.hash = key_of(parent, tokens, salt, tainted).hash;
    entries_.insert(&entry);
  }
  void erase(Entry& entry) { entries_.erase(&entry), ++entry.version; }
  size_t size() const { return entries_.size(); }
  bool contains(const Entry* entry) const { return entries_.contains(const_cast<Entry*>(entry)); }

 private:
  struct Key {
    const Entry* parent;
    std::span<const TokenId> tokens;
    std::string_view salt;
    bool tainted;
    uint64_t hash;
  };
  struct Hash {
    using is_transparent = void;
    size_t operator()(const Entry* entry) const { return entry->hash; }
    size_t operator()(const Key& key) const { return key.hash; }
  };
  struct Equal {
    using is_transparent = void;
    bool operator()(const Entry* a, const Entry* b) const { return a == b; }
    bool operator()(const Entry* entry, const Key& key) const { return (*this)(key, entry); }
    bool operator()(const Key& key, const Entry* entry) const {
      return key.parent == entry->parent && key.tainted == entry->tainted &&
             std::ranges::equal(key.tokens, entry->tokens) &&
             (key.parent != nullptr || key.salt == entry->salt);
    }
  };
  Key key_of(const Entry* parent, std::span<const TokenId> tokens, std::string_view salt, bool tainted) const {
    EKV_CHECK(tokens.size() == size_t(kPairTokens), "only whole pairs are found by content");
    const uint64_t seed = parent ? parent->hash : hash_salt(salt);
    return {parent, tokens, salt, tainted, hash_(seed + tainted, tokens)};
  }

  PairHash hash_;
  std::pmr::unordered_set<Entry*, Hash, Equal> entries_;
};

}  // namespace ekv
