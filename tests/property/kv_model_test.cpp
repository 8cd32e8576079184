// The pair table against a naive one, and the KV manager with its prefix cache against a naive
// model made of ordered maps, under random operations. Failures name the seed that reproduces them.

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>
#include <vector>

#include "elastickv/kv_manager.h"
#include "support/fake_serving.h"

namespace ekv {
namespace {

// What a pair table must do, with no care for speed.
struct NaivePair {
  int refs = 1, pages = 1;
  bool base = false, slot = false;
  Transition transition = Transition::none;
  uint32_t ticket = 0;
  bool holds_pages() const { return transition != Transition::none && transition != Transition::draining; }
};

class PairTwin {
 public:
  explicit PairTwin(unsigned seed)
      : rng_(seed), num_pages_(1 + below(14)), num_slots_(below(5)), table_(num_pages_, num_slots_) {}

  void operate() {
    switch (below(11)) {
      case 0:
      case 1:
        create();
        break;
      case 2:
        if (any([](const NaivePair& p) { return p.refs > 0; })) table_.retain(id_), ++pair().refs;
        break;
      case 3:
        release();
        break;
      case 4:
      case 5:
        demote();
        break;
      case 6:
        back_up();
        break;
      case 7:
        restore();
        break;
      case 8:
        end_transfer();
        break;
      case 9:
        copy();
        break;
      default:
        promote();
        break;
    }
    compare();
  }
  int num_promoted() const { return num_promoted_; }

 private:
  int below(int n) { return int(rng_() % unsigned(n)); }
  NaivePair& pair() { return model_.at(id_); }
  int used_pages() const {
    int pages = 0;
    for (const auto& [id, p] : model_) pages += p.pages;
    return pages;
  }
  int used_slots() const {
    int slots = int(orphans_.size());
    for (const auto& [id, p] : model_) slots += p.slot;
    return slots;
  }
  // Makes id_ one of those pairs; false: there is none.
  template <class Fits>
  bool any(Fits fits) {
    std::vector<PairId> found;
    for (const auto& [id, p] : model_)
      if (fits(p)) found.push_back(id);
    if (found.empty()) return false;
    id_ = found[size_t(below(int(found.size())))];
    return true;
  }
  static bool is_idle_target(const NaivePair& p) {
    return p.refs > 0 && !p.base && p.pages == 2 && p.transition == Transition::none;
  }

  void create() {
    const std::optional<PageId> even = table_.acquire_page();
    ASSERT_EQ(even.has_value(), used_pages() < num_pages_);
    if (!even) return;
    id_ = table_.create(*even);
    ASSERT_TRUE(model_.emplace(id_, NaivePair{}).second) << "the id of a live pair";
    if (below(4) == 0) return;
    if (const std::optional<PageId> odd = table_.acquire_page()) table_.set_odd(id_, *odd), pair().pages = 2;
  }
  void release() {
    if (!any([](const NaivePair& p) { return p.refs > 0; })) return;
    table_.release(id_);
    NaivePair& p = pair();
    if (--p.refs > 0 || p.holds_pages()) return;
    if (p.transition == Transition::draining) orphans_.insert(p.ticket);
    model_.erase(id_);
  }
  void demote() {
    if (!any(is_idle_target)) return;
    const bool keep = below(4) && (pair().slot || used_slots() < num_slots_);
    const DemoteJob job = table_.demote(id_, keep);
    NaivePair& p = pair();
    p.base = true, p.pages = 1;
    ASSERT_EQ(job.low >= 0, keep && !p.slot);
    if (job.low >= 0) p.slot = true, p.transition = Transition::draining, p.ticket = job.ticket;
  }
  void back_up() {
    if (used_slots() == num_slots_ || !any([](const NaivePair& p) { return is_idle_target(p) && !p.slot; }))
      return;
    pair().ticket = table_.back_up(id_).ticket;
    pair().slot = true, pair().transition = Transition::backing_up;
  }
  // To or from a slot that is not the pair's: 100 + its id.
  void copy() {
    if (!any(is_idle_target)) return;
    const HostSlot slot{100 + int(id_)};
    const bool stores = below(2) != 0;
    const TransferJob job = stores ? table_.store(id_, slot) : table_.load(id_, slot);
    ASSERT_EQ(job.host, int(slot));
    pair().ticket = job.ticket;
    pair().transition = stores ? Transition::storing : Transition::loading;
  }
  void restore() {
    if (!any([](const NaivePair& p) {
          return p.refs > 0 && p.base && p.slot && p.transition == Transition::none;
        }))
      return;
    const std::optional<PageId> odd = table_.acquire_page();
    ASSERT_EQ(odd.has_value(), used_pages() < num_pages_);
    if (!odd) return;
    pair().ticket = table_.restore(id_, *odd).ticket;
    pair().pages = 2, pair().transition = Transition::restoring;
  }
  void end_transfer() {
    if (!orphans_.empty() && below(3) == 0) {
      EXPECT_EQ(table_.transfer_done(*orphans_.begin()).pair, kNoPair);
      orphans_.erase(orphans_.begin());
    } else if (any([](const NaivePair& p) { return p.ticket != 0; })) {
      NaivePair& p = pair();
      const bool restored = p.transition == Transition::restoring, gone = p.refs == 0 && !restored;
      const bool copied = p.transition == Transition::storing || p.transition == Transition::loading;
      const PairTable::Done done = table_.transfer_done(std::exchange(p.ticket, 0));
      EXPECT_EQ(done.pair, gone ? kNoPair : id_);
      EXPECT_EQ(done.slot, copied ? HostSlot(100 + int(id_)) : kNoHostSlot) << "whose copy has ended";
      p.transition = restored ? Transition::restored : Transition::none;
      if (gone) model_.erase(id_);
    }
  }
  void promote() {
    if (!any([](const NaivePair& p) { return p.transition == Transition::restored; })) return;
    const bool keep = below(2);
    table_.promote(id_, keep);
    table_.free_promoted_slots();
    ++num_promoted_;
    NaivePair& p = pair();
    p.base = false, p.transition = Transition::none, p.slot = p.slot && keep;
    if (p.refs == 0) model_.erase(id_);
  }

  void compare() {
    table_.check_integrity();
    int alive = 0, base = 0, locked = 0;
    for (const auto& [id, p] : model_) {
      const bool reserved = p.transition == Transition::restoring || p.transition == Transition::restored;
      locked += p.refs == 0 ? p.pages : reserved;
      if (p.refs == 0) continue;
      ++alive, base += p.base;
      ASSERT_EQ(table_[id].refs, p.refs);
      ASSERT_EQ(table_[id].transition, p.transition);
      ASSERT_EQ(table_.is_base(id), p.base);
      ASSERT_EQ(table_[id].slot != kNoHostSlot, p.slot);
      ASSERT_EQ(table_.num_releasable_pages(id), p.holds_pages() ? 0 : p.pages);
    }
    ASSERT_EQ(table_.num_free_pages(), num_pages_ - used_pages());
    ASSERT_EQ(table_.num_free_host_slots(), num_slots_ - used_slots());
    ASSERT_EQ(table_.num_locked_pages(), locked);
    ASSERT_EQ(table_.num_pairs(), alive);
    ASSERT_EQ(table_.num_base(), base);
  }

  std::mt19937 rng_;
  int num_pages_, num_slots_;
  PairTable table_;
  std::map<PairId, NaivePair> model_;  // with those that only their transfer keeps
  std::set<uint32_t> orphans_;         // transfers whose pair has gone
  PairId id_ = kNoPair;
  int num_promoted_ = 0;
};

TEST(PairTable, BehavesLikeANaiveModel) {
  int promoted = 0;
  for (unsigned seed = 0; seed < 250; ++seed) {
    SCOPED_TRACE(seed);
    PairTwin twin(seed);
    for (int op = 0; op < 1000; ++op) {
      twin.operate();
      if (HasFailure()) return;
    }
    promoted += twin.num_promoted();
  }
  EXPECT_GT(promoted, 1000);
}

// What the manager and the cache must do, with no care for speed: an entry of the cache is named by all that
// its KV depends on, a salt and a whole prefix of tokens.
class NaiveKv {
 public:
  using Name = std::pair<std::string, std::vector<TokenId>>;  // salt, tokens 0 to the end of the pair
  struct Entry {
    std::set<SeqId> users;
    long idle_since = 0;  // order of becoming idle
    bool base = false;
    bool restored = false;  // its low bytes have arrived: a page more is taken, and eviction frees nothing yet
    int pages() const { return base && !restored ? 1 : 2; }
    int releasable() const { return restored ? 0 : pages(); }
  };

  explicit NaiveKv(int num_pages) : num_pages_(num_pages) {}

  int free_pages() const {
    int used = 2 * num_leftovers_;
    for (const auto& [name, entry] : cache_) used += entry.pages();
    for (const auto& [id, pages] : own_pages_) used += pages;
    return num_pages_ - used;
  }
  int idle_pages() const {
    int pages = 0;
    for (const auto& [name, entry] : cache_) pages += entry.users.empty() ? entry.releasable() : 0;
    return pages;
  }
  int budget() const { return free_pages() + idle_pages(); }
  int num_entries() const { return int(cache_.size()); }

  PrefixHit lookup(const Sequence& s) const {
    PrefixHit hit;
    if (!s.may_use_prefix_cache()) return hit;
    for (int pair = 0; (pair + 1) * kPairTokens < s.num_tokens(); ++pair) {
      const auto entry = cache_.find(name_of(s, pair));
      if (entry == cache_.end()) break;
      const bool recent = pair >= s.num_tokens() / kPairTokens - FidelityConfig().recent_pairs;
      if (recent && entry->second.base) break;
      hit.num_tokens += kPairTokens;
      hit.num_free_pages += entry->second.users.empty() ? entry->second.releasable() : 0;
    }
    return hit;
  }

  int freeable(const Sequence& s) const {
    const auto own = own_pages_.find(s.id);
    int pages = own == own_pages_.end() ? 0 : own->second;
    for (const auto& [name, entry] : cache_) pages += entry.users == std::set<SeqId>{s.id} ? entry.pages() : 0;
    return pages;
  }

  void attach(const Sequence& s, int num_tokens) {
    for (int pair = 0; pair < num_tokens / kPairTokens; ++pair) cache_.at(name_of(s, pair)).users.insert(s.id);
  }

  void extend(const Sequence& s, int num_tokens) {
    for (int held = 2 * num_cached(s.id) + own_pages_[s.id]; held < ceil_div(num_tokens, kBlockTokens);
         ++held) {
      if (free_pages() == 0) evict();
      ++own_pages_[s.id];
    }
  }

  void publish(const Sequence& s, int num_computed) {
    for (int pair = num_cached(s.id); (pair + 1) * kPairTokens <= num_computed; ++pair) {
      Entry& entry = cache_[name_of(s, pair)];
      if (entry.base) return;
      entry.users.insert(s.id);
      own_pages_[s.id] -= 2;
    }
  }

  void release(SeqId id) {
    std::vector<std::pair<size_t, Name>> mine;  // longest first: the tail is let go before the head
    for (const auto& [name, entry] : cache_)
      if (entry.users.contains(id)) mine.push_back({name.second.size(), name});
    std::sort(mine.rbegin(), mine.rend());
    for (const auto& [size, name] : mine) {
      Entry& entry = cache_.at(name);
      entry.users.erase(id);
      entry.idle_since = ++now_;
    }
    own_pages_.erase(id);
  }

  void reset() {
    std::erase_if(cache_, [&](const auto& item) {
      const bool idle = item.second.users.empty();
      num_leftovers_ += idle && item.second.restored;
      return idle;
    });
  }

  // The cached pair that a sequence uses at this place.
  Entry& entry(const Sequence& s, int pair) { return cache_.at(name_of(s, pair)); }
  void restore(Entry& entry) {
    if (free_pages() == 0) evict();
    entry.restored = true;
  }
  // What was restored becomes TARGET, what of it nobody knows any more comes free.
  void promote() {
    num_leftovers_ = 0;
    for (auto& [name, entry] : cache_)
      if (std::exchange(entry.restored, false)) entry.base = false;
  }

 private:
  static Name name_of(const Sequence& s, int pair) {
    return {s.request.cache_salt, {s.tokens.begin(), s.tokens.begin() + (pair + 1) * kPairTokens}};
  }
  int num_cached(SeqId id) const {
    int n = 0;
    for (const auto& [name, entry] : cache_) n += entry.users.contains(id);
    return n;
  }
  void evict() {
    auto oldest = cache_.end();
    for (auto it = cache_.begin(); it != cache_.end(); ++it)
      if (it->second.users.empty() &&
          (oldest == cache_.end() || it->second.idle_since < oldest->second.idle_since))
        oldest = it;
    ASSERT_NE(oldest, cache_.end()) << "the model has nothing to evict";
    for (const auto& [name, entry] : cache_)
      ASSERT_FALSE(name.first == oldest->first.first && name.second.size() > oldest->first.second.size() &&
                   std::equal(oldest->first.second.begin(), oldest->first.second.end(), name.second.begin()))
          << "the oldest idle entry is no leaf";
    cache_.erase(oldest);
  }

  int num_pages_;
  long now_ = 0;
  int num_leftovers_ = 0;           // restored pairs that were forgotten
  std::map<SeqId, int> own_pages_;  // not in the cache
  std::map<Name, Entry> cache_;
};

// Drives both with the same random operations. Plans are drawn at random, not by the scheduler: the manager
// must take every plan that fits its budget.
class Twin {
 public:
  explicit Twin(unsigned seed)
      : rng_(seed),
        serving_({}, {}, 12 + int(rng_() % 60), 4, 6),
        model_(serving_.kv.num_pages()),
        num_salts_(1 + int(rng_() % 3)) {}

  void operate() {
    const unsigned op = rng_() % 16;
    if (op < 3) {
      add();
    } else if (op < 12) {
      step();
    } else if (op < 14) {
      leave();  // finished, cancelled or failed: the same to the KV
    } else if (op == 14 && rng_() % 8 == 0) {
      serving_.kv.reset_prefix_cache();
      model_.reset();
    } else {
      turn();
    }
    compare();
  }

  int num_preempted() const { return num_preempted_; }
  int num_hit_tokens() const { return num_hit_tokens_; }
  int num_evicting_steps() const { return num_evicting_steps_; }
  int num_demoted() const { return num_demoted_; }

 private:
  inline static const SamplingParams kEndless{.max_tokens = 1 << 20};  // sequences end by leave() only

  int below(int n) { return int(rng_() % unsigned(n)); }

  // Prompts are a few families that differ from some position on, so that prefixes meet, split and end
  // anywhere.
  Request draw_request() {
    const int length = 1 + below(8 * serving_.kv.num_pages());
    const int split = below(length + 1), family = below(3);
    Request r{.prompt = {}, .sampling = kEndless, .cache_salt = std::string(size_t(below(num_salts_)), 's')};
    for (int i = 0; i < length; ++i) r.prompt.push_back(i < split ? i % 5 : 100 * (1 + family) + i % 5);
    if (below(8) == 0) r.sampling.prompt_logprobs = 0;
    return r;
  }

  void add() {
    if (serving_.sequences.waiting().size() < 6) serving_.add(draw_request());
  }

  // A new request that starts with all tokens of a running one: the next turn of a conversation, or a fork.
  void turn() {
    const auto running = serving_.sequences.running();
    if (running.empty() || serving_.sequences.waiting().size() >= 6) return;
    const Sequence& s = *running[size_t(below(int(running.size())))];
    Request r{.prompt = s.tokens, .sampling = kEndless, .cache_salt = s.request.cache_salt};
    r.prompt.resize(size_t(1 + below(s.num_tokens() + 20)), 7);
    serving_.add(std::move(r));
  }

  void leave() {
    const auto queue = below(3) ? serving_.sequences.running() : serving_.sequences.waiting();
    if (queue.empty()) return;
    Sequence& s = *queue[size_t(below(int(queue.size())))];
    model_.release(s.id);
    serving_.end(s);
  }

  void step() {
    StepPlan& plan = serving_.plan;
    plan.clear();
    int budget = model_.budget();
    plan.promotes.assign(serving_.kv.restored().begin(), serving_.kv.restored().end());
    plan_preemptions(budget);
    plan_demotions(budget);
    for (const Sequence* s : serving_.sequences.running()) plan_chunk(*s, budget);
    if (plan.preempted.empty())
      for (const Sequence* s : serving_.sequences.waiting()) plan_admission(*s, budget);
    plan_restores(budget);
    apply_to_model();
    serving_.commit();
    for (const ChunkPlan& chunk : plan.chunks)
      model_.publish(serving_.sequences[chunk.seq], chunk.first_pos + chunk.num_tokens);
    serving_.execute();  // samples where the plan says so
    for (const DemoteJob& job : serving_.kv.jobs().demotes) serving_.kv.transfer_done(job.ticket);
    for (const TransferJob& job : serving_.kv.jobs().transfers) serving_.kv.transfer_done(job.ticket);
  }

  // The cached pairs of those who keep their pages, each once.
  template <class Visit>
  void for_each_kept_pair(Visit visit) {
    std::set<PairId> seen;
    for (const Sequence* s : serving_.sequences.running()) {
      const auto& gone = serving_.plan.preempted;
      if (std::find(gone.begin(), gone.end(), s->id) != gone.end()) continue;
      for (int i = 0; i < s->blocks.num_cached; ++i)
        if (seen.insert(s->blocks.pairs[size_t(i)]).second) visit(*s, i, s->blocks.pairs[size_t(i)]);
    }
  }

  void plan_demotions(int& budget) {
    const PairTable& pairs = serving_.kv.pairs();
    demoted_.clear();
    for_each_kept_pair([&](const Sequence& s, int i, PairId pair) {
      if (below(30) || !pairs.may_demote(pair, false) || int(demoted_.size()) >= pairs.num_free_host_slots())
        return;
      serving_.plan.demotes.push_back(pair);
      demoted_.push_back(&model_.entry(s, i));
      ++budget, ++num_demoted_;
    });
  }

  void plan_restores(int& budget) {
    const PairTable& pairs = serving_.kv.pairs();
    restored_.clear();
    for_each_kept_pair([&](const Sequence& s, int i, PairId pair) {
      if (below(4) || budget == 0 || !pairs.is_base(pair) || pairs[pair].transition != Transition::none) return;
      serving_.plan.restores.push_back(pair);
      restored_.push_back(&model_.entry(s, i));
      --budget;
    });
  }

  void plan_preemptions(int& budget) {
    const auto running = serving_.sequences.running();
    for (size_t n = running.size(); n > 0 && below(12) == 0; --n) {
      serving_.plan.preempted.push_back(running[n - 1]->id);
      budget += model_.freeable(*running[n - 1]);
      ++num_preempted_;
    }
  }

  void plan_chunk(const Sequence& s, int& budget) {
    const auto& gone = serving_.plan.preempted;
    if (std::find(gone.begin(), gone.end(), s.id) != gone.end() || below(4) == 0) return;
    const int n = 1 + below(std::min(s.num_tokens() - s.num_computed, 100));
    const int pages = ceil_div(s.num_computed + n, kBlockTokens) - s.blocks.num_blocks;
    if (pages > budget) return;
    budget -= std::max(pages, 0);
    serving_.plan.chunks.push_back({s.id, s.num_computed, n, s.num_computed + n == s.num_tokens()});
  }

  void plan_admission(const Sequence& s, int& budget) {
    if (below(2)) return;
    const PrefixHit hit = model_.lookup(s);
    const int n = 1 + below(std::min(s.num_tokens() - hit.num_tokens, 100));
    const int end = hit.num_tokens + n;
    const int pages = ceil_div(end, kBlockTokens) - hit.num_tokens / kBlockTokens + hit.num_free_pages;
    if (pages > budget) return;
    budget -= pages;
    num_hit_tokens_ += hit.num_tokens;
    serving_.plan.admitted.push_back(s.id);
    serving_.plan.chunks.push_back({s.id, hit.num_tokens, n, end == s.num_tokens()});
  }

  void apply_to_model() {
    const StepPlan& plan = serving_.plan;
    model_.promote();
    for (SeqId id : plan.preempted) model_.release(id);
    for (size_t i = 0; i < plan.admitted.size(); ++i)
      model_.attach(serving_.sequences[plan.admitted[i]],
                    plan.chunks[plan.chunks.size() - plan.admitted.size() + i].first_pos);
    for (NaiveKv::Entry* entry : demoted_) entry->base = true;
    const int entries = model_.num_entries();
    for (const ChunkPlan& chunk : plan.chunks)
      model_.extend(serving_.sequences[chunk.seq], chunk.first_pos + chunk.num_tokens);
    for (NaiveKv::Entry* entry : restored_) model_.restore(*entry);
    num_evicting_steps_ += model_.num_entries() < entries;
  }

  void compare() {
    const KvManager& kv = serving_.kv;
    kv.check_integrity(serving_.sequences.running());
    ASSERT_EQ(kv.num_free_pages(), model_.free_pages());
    ASSERT_EQ(kv.num_cached_pages(), model_.idle_pages());
    ASSERT_EQ(kv.budget().free_pages, model_.budget());
    for (const Sequence* s : serving_.sequences.running()) {
      const SeqView view = kv.view(*s);
      ASSERT_EQ(view.num_freeable, model_.freeable(*s)) << uint64_t(s->id);
      ASSERT_EQ(view.num_blocks, ceil_div(s->num_computed, kBlockTokens));
    }
    for (const Sequence* s : serving_.sequences.waiting()) {
      const PrefixHit hit = model_.lookup(*s);
      const SeqView view = kv.view(*s);
      ASSERT_EQ(view.num_cached, hit.num_tokens);
      ASSERT_EQ(view.num_cached_free, hit.num_free_pages);
      ASSERT_TRUE(s->num_computed == 0 && s->blocks.pairs.empty() && s->blocks.num_cached == 0);
    }
  }

  std::mt19937 rng_;
  testing::FakeServing serving_;
  NaiveKv model_;
  int num_salts_;
  std::vector<NaiveKv::Entry*> demoted_, restored_;  // by the plan being made
  int num_preempted_ = 0, num_hit_tokens_ = 0, num_evicting_steps_ = 0, num_demoted_ = 0;
};

TEST(KvManager, BehavesLikeANaiveModel) {
  int preempted = 0, hit_tokens = 0, evicting_steps = 0, demoted = 0;
  for (unsigned seed = 0; seed < 250; ++seed) {
    SCOPED_TRACE(seed);
    Twin twin(seed);
    for (int op = 0; op < 400; ++op) {
      SCOPED_TRACE(op);
      twin.operate();
      if (HasFailure()) return;
    }
    preempted += twin.num_preempted();
    hit_tokens += twin.num_hit_tokens();
    evicting_steps += twin.num_evicting_steps();
    demoted += twin.num_demoted();
  }
  // The operations that matter did happen, often.
  EXPECT_GT(preempted, 1000);
  EXPECT_GT(hit_tokens, 100000);
  EXPECT_GT(evicting_steps, 1000);
  EXPECT_GT(demoted, 1000);
  RecordProperty("preempted", preempted);
  RecordProperty("hit_tokens", hit_tokens);
  RecordProperty("evicting_steps", evicting_steps);
}

}  // namespace
}  // namespace ekv
