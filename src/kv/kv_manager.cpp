#include "elastickv/kv_manager.h"

#include <algorithm>
#include <unordered_map>

namespace ekv {
namespace {

std::span<const TokenId> pair_tokens(const Sequence& sequence, int pair) {
  return std::span(sequence.tokens).subspan(size_t(pair) * kPairTokens, size_t(kPairTokens));
}

// Pages that become free or evictable when the sequence alone gives them up. Users never grow from parent to
// child (prefix_cache.h), so the pairs it shares are the first ones of its table.
int freeable_pages(const BlockTable& blocks) {
  const auto cached = std::span(blocks.pairs).first(size_t(blocks.num_cached));
  const auto own = std::ranges::partition_point(cached, [](const PairRef& p) { return p.cached->users > 1; });
  return blocks.num_blocks() - 2 * int(own - cached.begin());
}

}  // namespace

KvManager::KvManager(const KvConfig& config, int num_pages)
    : config_(config), pool_(num_pages), cache_(pool_) {}

KvBudget KvManager::budget() const {
  return {.free_pages = pool_.num_free() + cache_.num_idle_pages(), .total_pages = pool_.num_pages()};
}

PrefixHit KvManager::lookup(const Sequence& sequence) const {
  PrefixHit hit;
  if (!config_.prefix_cache || !sequence.may_use_prefix_cache()) return hit;
  const int most = (sequence.num_tokens() - 1) / kPairTokens;  // the last token's logits must be computed
  const CachedPair* entry = nullptr;
  for (int pair = 0; pair < most; ++pair) {
    entry = cache_.find(entry, pair_tokens(sequence, pair), sequence.request.cache_salt);
    if (!entry) break;
    hit.num_tokens += kPairTokens;
    if (entry->users == 0) hit.num_free_pages += 2;
  }
  return hit;
}

SeqView KvManager::view(const Sequence& sequence) const {
  SeqView view{.id = sequence.id,
               .num_tokens = sequence.num_tokens(),
               .num_computed = sequence.num_computed,
               .num_blocks = sequence.blocks.num_blocks()};
  if (sequence.state == SeqState::running) {
    view.num_freeable = freeable_pages(sequence.blocks);
  } else {
    const PrefixHit hit = lookup(sequence);
    view.num_cached = hit.num_tokens;
    view.num_cached_free = hit.num_free_pages;
  }
  return view;
}

void KvManager::commit(const StepPlan& plan, SequenceTable& sequences) {
  for (SeqId id : plan.preempted) release(sequences[id]);

  EKV_CHECK(plan.chunks.size() >= plan.admitted.size(), "each admitted sequence has a chunk");
  const auto chunks_of_admitted = std::span(plan.chunks).last(plan.admitted.size());
  for (size_t i = 0; i < plan.admitted.size(); ++i) {
    EKV_CHECK(chunks_of_admitted[i].seq == plan.admitted[i], "the last chunks are those of the admitted");
    attach_prefix(sequences[plan.admitted[i]], chunks_of_admitted[i].first_pos);
  }

  for (const ChunkPlan& chunk : plan.chunks) {
    Sequence& sequence = sequences[chunk.seq];
    EKV_CHECK(chunk.first_pos == sequence.num_computed, "a chunk starts where valid KV ends");
    extend(sequence.blocks, chunk.first_pos + chunk.num_tokens);
  }
}

void KvManager::attach_prefix(Sequence& sequence, int num_tokens) {
  EKV_CHECK(sequence.blocks.pairs.empty(), "a waiting sequence holds no pages");
  CachedPair* entry = nullptr;
  for (int pair = 0; pair < num_tokens / kPairTokens; ++pair) {
    entry = cache_.find(entry, pair_tokens(sequence, pair), sequence.request.cache_salt);
    EKV_CHECK(entry != nullptr, "the planned prefix is in the cache");
    use_cached(sequence.blocks.pairs.emplace_back(), *entry);
  }
  sequence.blocks.num_cached = num_tokens / kPairTokens;
  sequence.num_computed = num_tokens;
}

void KvManager::use_cached(PairRef& pair, CachedPair& entry) {
  cache_.pin(entry);
  pool_.retain(entry.even), pool_.retain(entry.odd);
  pair = {.even = entry.even, .odd = entry.odd, .cached = &entry};
}

void KvManager::extend(BlockTable& blocks, int num_tokens) {
  const int needed = ceil_div(num_tokens, kBlockTokens);
  for (int block = blocks.num_blocks(); block < needed; ++block) {
    const PageId page = take_page();
    if (block % 2 == 0)
      blocks.pairs.push_back({.even = page});
    else
      blocks.pairs.back().odd = page;
  }
}

PageId KvManager::take_page() {
  std::optional<PageId> page = pool_.acquire();
  if (!page && cache_.evict_one()) page = pool_.acquire();
  EKV_CHECK(page.has_value(), "a committed plan fits the budget");
  return *page;
}

void KvManager::publish(Sequence& sequence) {
  if (!config_.prefix_cache) return;
  BlockTable& blocks = sequence.blocks;
  CachedPair* parent = blocks.num_cached ? blocks.pairs[size_t(blocks.num_cached) - 1].cached : nullptr;
  while ((blocks.num_cached + 1) * kPairTokens <= sequence.num_computed) {
    PairRef& pair = blocks.pairs[size_t(blocks.num_cached)];
    const std::span<const TokenId> tokens = pair_tokens(sequence, blocks.num_cached);
    const std::string& salt = sequence.request.cache_salt;
    if (CachedPair* same = cache_.find(parent, tokens, salt)) {
      const PairRef own = pair;
      use_cached(pair, *same);
      pool_.release(own.odd), pool_.release(own.even);
    } else {
      pair.cached = &cache_.insert(parent, tokens, salt, pair.even, pair.odd);
      cache_.pin(*pair.cached);
    }
    parent = pair.cached;
    ++blocks.num_cached;
  }
}

void KvManager::release(Sequence& sequence) {
  auto& pairs = sequence.blocks.pairs;
  for (auto pair = pairs.rbegin(); pair != pairs.rend(); ++pair) {
    if (pair->odd != kNoPage) pool_.release(pair->odd);
    pool_.release(pair->even);
    if (pair->cached) cache_.unpin(*pair->cached);
  }
  pairs.clear();
  sequence.blocks.num_cached = 0;
  sequence.num_computed = 0;
}

void KvManager::check_integrity(std::span<Sequence* const> running) const {
  pool_.check_integrity();
  cache_.check_integrity();
  std::unordered_map<const CachedPair*, int> users;
  std::unordered_map<PageId, int> holders;  // tables, and one for the cache
  for (const Sequence* sequence : running) {
    const BlockTable& blocks = sequence->blocks;
    EKV_CHECK(sequence->num_computed <= blocks.num_blocks() * kBlockTokens, "valid KV lies in pages");
    for (size_t i = 0; i < blocks.pairs.size(); ++i) {
      const PairRef& pair = blocks.pairs[i];
      EKV_CHECK(pair.even != kNoPage, "a pair has at least its even page");
      EKV_CHECK(pair.odd != kNoPage || i + 1 == blocks.pairs.size(),
                "only the last pair may lack its odd page");
      EKV_CHECK((pair.cached != nullptr) == (int(i) < blocks.num_cached), "cached pairs come first");
      ++holders[pair.even];
      if (pair.odd != kNoPage) ++holders[pair.odd];
      if (!pair.cached) continue;
      EKV_CHECK(pair.cached->even == pair.even && pair.cached->odd == pair.odd, "a hit uses the cached pages");
      EKV_CHECK(std::ranges::equal(pair.cached->tokens, pair_tokens(*sequence, int(i))),
                "a hit has the content");
      if (++users[pair.cached] == 1) ++holders[pair.even], ++holders[pair.odd];
    }
  }
  for (const auto& [entry, count] : users) EKV_CHECK(entry->users == count, "an entry counts its users");
  EKV_CHECK(2 * int(users.size()) + cache_.num_idle_pages() == 2 * cache_.num_entries(),
            "an entry in use is in somebody's table");
  for (const auto& [page, count] : holders)
    EKV_CHECK(pool_.references(page) == count, "a page has one reference per holder");
  EKV_CHECK(pool_.num_free() + cache_.num_idle_pages() + int(holders.size()) == pool_.num_pages(),
            "free + cached + held = all pages");
}

}  // namespace ekv
