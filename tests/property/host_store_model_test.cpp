// The host store against a naive model under random operations. Failures name the seed.

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <vector>

#include "elastickv/host_store.h"

namespace ekv {
namespace {

// What the store must do, with no care for speed: a pair is named by the salt and everything up to its end.
using Name = std::pair<std::string, std::vector<int>>;
struct Held {
  bool arriving = true;
  int loads = 0;
  long used = 0;  // the latest use of it, or of anything after it, here or gone
};

class Twin {
 public:
  explicit Twin(unsigned seed) : rng_(seed), num_slots_(below(12)), host_(num_slots_) {}

  void operate() {
    switch (below(8)) {
      case 0:
      case 1:
      case 2:
        store();
        break;
      case 3:
        if (pick([](const Held& h) { return !h.arriving; })) begin_load();
        break;
      case 4:
        if (pick([](const Held& h) { return h.loads > 0; })) host_.load_done(entry()->slot), --held().loads;
        break;
      case 5:
      case 6:
        if (pick([](const Held& h) { return h.arriving; }))
          host_.store_done(entry()->slot), held().arriving = false;
        break;
      default:
        if (below(40) == 0)
          clear();
        else if (pick([](const Held&) { return true; }))
          host_.touch(*entry()), use(name_);
    }
    compare();
  }
  int num_evicted() const { return num_evicted_; }
  int num_refused() const { return num_refused_; }

 private:
  int below(int n) { return int(rng_() % unsigned(n)); }
  Held& held() { return model_.at(name_); }
  static std::vector<TokenId> tokens_of(int content) { return std::vector<TokenId>(kPairTokens, content); }

  StoredPair* entry() const { return find(name_); }
  StoredPair* find(const Name& name) const {
    StoredPair* at = nullptr;
    for (int content : name.second)
      if (!(at = host_.find(at, tokens_of(content), name.first))) return nullptr;
    return at;
  }
  template <class Fits>
  bool pick(Fits fits) {
    std::vector<Name> found;
    for (const auto& [name, h] : model_)
      if (fits(h)) found.push_back(name);
    if (!found.empty()) name_ = found[size_t(below(int(found.size())))];
    return !found.empty();
  }
  static bool continues(const Name& longer, const Name& name) {
    return longer.first == name.first && longer.second.size() > name.second.size() &&
           std::equal(name.second.begin(), name.second.end(), longer.second.begin());
  }
  void use(const Name& name) {
    ++now_;
    for (auto& [other, h] : model_)
      if (other == name || continues(name, other)) h.used = now_;
  }
  // The one used longest ago of those that nothing continues and no copy uses; `keep` stays.
  bool evict(const Name& keep) {
    auto oldest = model_.end();
    for (auto it = model_.begin(); it != model_.end(); ++it) {
      if (it->second.arriving || it->second.loads > 0 || it->first == keep) continue;
      if (std::ranges::any_of(model_, [&](const auto& other) { return continues(other.first, it->first); }))
        continue;
      if (oldest == model_.end() || it->second.used < oldest->second.used) oldest = it;
    }
    if (oldest == model_.end()) return false;
    model_.erase(oldest);
    ++num_evicted_;
    return true;
  }

  void store() {
    if (model_.empty() || !pick([](const Held&) { return true; }) || below(3) == 0)
      name_ = {std::string(size_t(below(2)), 's'), {}};
    const Name parent = name_;
    name_.second.push_back(below(3));
    if (model_.contains(name_)) return;
    const bool full = int(model_.size()) == num_slots_;
    const bool fits = !full || evict(parent.second.empty() ? Name{"no such salt", {}} : parent);
    StoredPair* made = host_.begin_store(parent.second.empty() ? nullptr : find(parent),
                                         tokens_of(name_.second.back()), name_.first);
    ASSERT_EQ(made != nullptr, fits);
    num_refused_ += !fits;
    if (!made) return;
    model_[name_] = {};
    use(name_);
  }
  void begin_load() {
    host_.begin_load(*entry());
    ++held().loads;
    use(name_);
  }
  void clear() {
    host_.clear();
    while (evict({"no such salt", {}})) {
    }
  }

  void compare() {
    host_.check_integrity();
    ASSERT_LE(host_.num_used(), num_slots_) << "more than the budget";
    ASSERT_EQ(host_.num_used(), int(model_.size()));
    for (const auto& [name, h] : model_) {
      const StoredPair* at = find(name);
      ASSERT_TRUE(at) << "a pair is lost";
      ASSERT_EQ(at->arriving, h.arriving);
      ASSERT_EQ(at->loads, h.loads);
    }
  }

  std::mt19937 rng_;
  int num_slots_;
  HostStore host_;
  std::map<Name, Held> model_;
  Name name_;
  long now_ = 0;
  int num_evicted_ = 0, num_refused_ = 0;
};

TEST(HostStore, BehavesLikeANaiveModel) {
  int evicted = 0, refused = 0;
  for (unsigned seed = 0; seed < 150; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Twin twin(seed);
    for (int op = 0; op < 1000; ++op) {
      SCOPED_TRACE(op);
      twin.operate();
      if (HasFailure()) return;
    }
    evicted += twin.num_evicted(), refused += twin.num_refused();
  }
  EXPECT_GT(evicted, 5000);
  EXPECT_GT(refused, 1000);
}

}  // namespace
}  // namespace ekv
