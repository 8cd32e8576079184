#pragma once
// random_serving.h -- engines on a PagedBackend with random requests that arrive, end and are cancelled at
// random times, while copies end late. What holds for every policy is checked here, what else must hold by who
// derives.

#include <gtest/gtest.h>

#include <csignal>
#include <cstdio>
#include <map>
#include <random>

#include "elastickv/engine.h"
#include "support/paged_backend.h"

namespace ekv::test {

constexpr int kServingLen = 448;  // max_model_len

// An invariant of the engine that breaks ends the process, and the trace with it.
inline volatile unsigned current_seed = 0;
inline void print_seed_on_abort() {
  std::signal(SIGABRT, [](int) { std::fprintf(stderr, "in seed %u\n", current_seed); });
}

struct TokenListener : EngineListener {
  void on_event(SeqEvent event) override {
    if (event.token) tokens[event.id].push_back(*event.token);
    if (event.finish == FinishReason::none) return;
    ASSERT_TRUE(last.emplace(event.id, event).second) << "an event after the last one";
    preemptions += event.stats.num_preemptions;
    pairs_seen += event.stats.pairs_seen, base_pairs_seen += event.stats.base_pairs_seen;
  }
  void on_step(const StepRecord& r) override { record = r; }

  std::map<SeqId, std::vector<TokenId>> tokens;
  std::map<SeqId, SeqEvent> last;
  StepRecord record;
  int64_t preemptions = 0, pairs_seen = 0, base_pairs_seen = 0;
};

class RandomServing {
 public:
  RandomServing(unsigned seed, TokenListener& listener) : rng_(seed), listener_(listener) {}
  virtual ~RandomServing() = default;

  int below(int n) { return int(rng_() % unsigned(n)); }

  // Serves until every request has ended.
  void run(const EngineConfig& config, int num_pages, int num_slots) {
    ASSERT_FALSE(validate(config).has_value()) << validate(config)->message;
    auto made = std::make_unique<PagedBackend>(num_pages, num_slots);
    PagedBackend& device = *made;
    const int slowest = below(6);
    device.draw_delay = [&, slowest] { return slowest ? below(slowest + 1) : 0; };
    Engine engine(config, std::move(made), clock_, listener_);
    serve(engine, num_slots);
    if (::testing::Test::HasFailure()) return;
    ASSERT_TRUE(config.async_scheduling ? device.resolved > 0 : device.most_in_flight == 1);
    ASSERT_EQ(engine.kv().num_free_pages() + engine.kv().num_cached_pages(), engine.kv().num_pages());
    ASSERT_FALSE(device.in_flight());
    ASSERT_TRUE(config.scheduler.admission == AdmissionMode::native || listener_.preemptions == 0);
    for (const auto& [id, request] : jobs_) {
      SCOPED_TRACE("request " + std::to_string(uint64_t(id)));
      check_tokens(listener_.tokens[id], request, listener_.last.at(id).finish);
      check_request(request, listener_.last.at(id).stats);
    }
    check_end(device);
  }

 protected:
  virtual Request draw_request() = 0;
  virtual void check_step(const StepRecord& record) const = 0;
  virtual void check_request(const Request& request, const SeqStats& stats) {}
  virtual void check_end(const PagedBackend& device) = 0;

  // A prefix that others may have, some tokens of its own, a length.
  Request draw_tokens() {
    Request r;
    const int family = below(3), shared = below(3) ? below(250) : 0, own = 1 + below(60);
    for (int t = 0; t < shared; ++t) r.prompt.push_back((family * 100 + t) % 900);
    for (int t = 0; t < own; ++t) r.prompt.push_back(below(900));
    r.sampling.max_tokens = 1 + below(130);
    return r;
  }

  int64_t num_cancelled_ = 0;

 private:
  void serve(Engine& engine, int num_slots) {
    const int num_requests = 8 + below(16);
    for (int step = 0; int(jobs_.size()) < num_requests || !engine.idle(); ++step) {
      ASSERT_LT(step, 20000) << "requests that never end";
      if (int(jobs_.size()) < num_requests && (engine.idle() || below(5) == 0)) submit(engine);
      // Nobody is cancelled after the last arrival: that would hide a request that never ends by itself.
      const bool cancels = int(jobs_.size()) < num_requests && !jobs_.empty() && below(20) == 0;
      const SeqId gone = cancels ? std::next(jobs_.begin(), below(int(jobs_.size())))->first : SeqId{0};
      engine.cancel(gone);
      if (below(300) == 0) engine.reset_prefix_cache();
      engine.step();
      engine.check_integrity();
      ASSERT_TRUE(gone == SeqId{0} || listener_.last.contains(gone)) << "a cancelled request lives on";
      const StepRecord& r = listener_.record;
      ASSERT_LE(r.free_pages + r.cached_pages + r.locked_pages, r.total_pages);
      ASSERT_LE(r.host_slots_used, num_slots) << "more than the budget of the host";
      check_step(r);
      if (::testing::Test::HasFailure()) return;
    }
  }

  void submit(Engine& engine) {
    Request request = draw_request();
    Result<SeqId> id = engine.submit(request);
    ASSERT_TRUE(bool(id)) << id.error().message;
    jobs_.emplace(*id, std::move(request));
  }

  void check_tokens(const std::vector<TokenId>& got, const Request& request, FinishReason finish) {
    const std::vector<TokenId> want = expected_tokens(request, kServingLen);
    if (finish == FinishReason::cancelled) {
      ASSERT_LE(got.size(), want.size());
      ASSERT_TRUE(std::equal(got.begin(), got.end(), want.begin()));
      ++num_cancelled_;
    } else {
      ASSERT_EQ(finish, FinishReason::length);
      ASSERT_EQ(got, want);
    }
  }

  std::mt19937 rng_;
  SteadyClock clock_;
  TokenListener& listener_;
  std::map<SeqId, Request> jobs_;
};

}  // namespace ekv::test
