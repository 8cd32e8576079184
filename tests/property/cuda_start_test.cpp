// What the CUDA backend takes at its start and not in a step: the code of all kernels. On the host's stand-in
// for the device, whose launchers note what they take.

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <iterator>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "backend/cuda/pinned_pool.h"
#include "elastickv/engine.h"
#include "support/backend_target.h"
#include "support/golden_model.h"
#include "support/host_cuda.h"

namespace ekv::test {
namespace {

struct Counts : EngineListener {
  void on_event(SeqEvent event) override { ended += event.finish == FinishReason::length; }
  void on_step(const StepRecord& r) override {
    demoted += r.demoted_pairs, promoted += r.promoted_pairs, backups += r.backups_begun;
    widest = std::max(widest, r.num_prefill_tokens + r.num_decode_tokens);
    general |= r.path == KvPath::general;
  }
  int ended = 0, widest = 0;
  int64_t demoted = 0, promoted = 0, backups = 0;
  bool general = false;
};

constexpr int kRequests = 24;

EngineConfig pressed(KvPolicy policy) {
  EngineConfig config;
  apply_preset_modern(config);
  config.max_model_len = 448;
  config.scheduler.max_step_tokens = 1024;
  config.scheduler.max_step_seqs = 12;
  config.kv.num_pages = 110;
  config.fidelity.policy = policy;
  config.fidelity.min_demote_pairs = 1;
  config.fidelity.min_remaining_tokens = 0;
  return config;
}

// Prompts of all lengths, so that the products of a step have many numbers of rows.
Counts serve(const Model& model, const EngineConfig& config, std::unique_ptr<Backend> backend) {
  std::mt19937 rng(7);
  Counts counts;
  SteadyClock clock;
  Engine engine(config, std::move(backend), clock, counts);
  for (int i = 0; i < kRequests; ++i) {
    Request request;
    const int length = 1 + int(rng() % 250);
    for (int t = 0; t < length; ++t) request.prompt.push_back(TokenId(rng() % unsigned(model.config().vocab)));
    request.sampling = {.temperature = i % 2 ? 1.0f : 0.0f, .top_k = i % 3 ? 0 : 5, .max_tokens = 40 + i};
    request.sampling.repetition_penalty = i % 4 ? 1.0f : 1.2f;
    request.sampling.logprobs = i % 5 ? -1 : 3;
    EXPECT_TRUE(bool(engine.submit(std::move(request))));
  }
  for (int step = 0; !engine.idle() && step < 20000; ++step) engine.step();
  EXPECT_EQ(counts.ended, kRequests);
  return counts;
}

// The kernels that the steps of a load take and the start did not.
std::vector<std::string> late_code(const Model& model, const EngineConfig& config, int slots, Counts& counts) {
  forget_code();
  auto backend = make_target(model, config, slots, host_content(config.fidelity.policy));
  EXPECT_TRUE(backend) << backend.error().message;
  const std::set<std::string> at_start = loaded_code();
  EXPECT_GT(at_start.size(), 100u);  // products of every number of rows
  counts = serve(model, config, *std::move(backend));
  std::vector<std::string> late;
  std::ranges::set_difference(loaded_code(), at_start, std::back_inserter(late));
  return late;
}

TEST(CudaStart, NoStepLoadsCode) {
  const auto model = load_golden("tiny-llama");
  ASSERT_TRUE(model);
  Counts counts;
  EXPECT_EQ(late_code(*model, pressed(KvPolicy::target_only), 0, counts), std::vector<std::string>{});
  EXPECT_GE(counts.widest, 512);
  EXPECT_FALSE(loaded_code().contains("demote")) << "of no use to this policy";
  EXPECT_EQ(late_code(*model, pressed(KvPolicy::static8), 0, counts), std::vector<std::string>{});
  EXPECT_GT(counts.demoted, 0);
  EXPECT_EQ(late_code(*model, pressed(KvPolicy::elastic), 100, counts), std::vector<std::string>{});
  EXPECT_GT(counts.demoted, 0);
  EXPECT_GT(counts.promoted, 0);
  EngineConfig backed = pressed(KvPolicy::elastic);
  backed.fidelity.backing = BackingMode::writethrough;
  backed.fidelity.attention_path = AttentionPath::general;
  EXPECT_EQ(late_code(*model, backed, 100, counts), std::vector<std::string>{});
  EXPECT_GT(counts.backups, 0);
  EXPECT_TRUE(counts.general);
}

TEST(CudaStart, HostMemoryThatCannotBeLockedIsAnErrorWithTheFlag) {
  const auto model = load_golden("tiny-llama");
  ASSERT_TRUE(model);
  refuse_to_lock(true);
  const auto refused = make_target(*model, pressed(KvPolicy::elastic), 100);
  refuse_to_lock(false);
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message.find("--kv-host-bytes"), std::string::npos) << refused.error().message;
  EXPECT_TRUE(make_target(*model, pressed(KvPolicy::elastic), 100)) << "nothing of the first one is left";
}

// Several threads take pieces of 64 MiB; what they took is there and 0, and can be locked, moved and given
// back.
TEST(CudaStart, PagesOfTheHostAreTakenWholeAndCleared) {
  constexpr size_t kBytes = (size_t(200) << 20) + 12345;
  HostPages pages(kBytes);
  pages.populate(kBytes);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(pages.data()) % (2 << 20), 0u);
  std::vector<unsigned char> resident(kBytes / 4096 + 1);
  ASSERT_EQ(mincore(pages.data(), kBytes, resident.data()), 0);
  EXPECT_TRUE(std::ranges::all_of(resident, [](unsigned char page) { return page & 1; }));
  EXPECT_TRUE(std::all_of(pages.data(), pages.data() + kBytes, [](uint8_t byte) { return byte == 0; }));
  HostPages moved = std::move(pages);
  EXPECT_EQ(pages.data(), nullptr);
  moved.data()[kBytes - 1] = 7;
  moved = HostPages();
  EXPECT_THROW(HostPages(size_t(1) << 60), CudaError);
}

}  // namespace
}  // namespace ekv::test
