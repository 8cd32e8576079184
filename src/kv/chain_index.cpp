#include "elastickv/chain_index.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace ekv {

uint64_t hash_pair(uint64_t seed, std::span<const TokenId> tokens) {
  return XXH3_64bits_withSeed(tokens.data(), tokens.size_bytes(), seed);
}

uint64_t hash_salt(std::string_view salt) { return XXH3_64bits(salt.data(), salt.size()); }

}  // namespace ekv
