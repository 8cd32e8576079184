// What the CUDA backend takes at its start and not in a step: the code of all kernels; and what a step leaves
// out. On the host's stand-in for the device, whose launchers note what they take.

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <iterator>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "backend/cuda/cuda_forward.h"
#include "backend/cuda/pinned_pool.h"
#include "elastickv/backend.h"
#include "elastickv/engine.h"
#include "support/backend_driver.h"
#include "support/golden_model.h"
#include "support/host_cuda.h"

namespace ekv::test {
namespace {

struct Counts : EngineListener {
  void on_event(SeqEvent event) override { ended += event.finish == FinishReason::length; }
  void on_step(const StepRecord& r) override {
    demoted += r.demoted_pairs, promoted += r.promoted_pairs;
    backups += r.backups_begun, loads += r.loads_begun;
    widest = std::max(widest, r.num_prefill_tokens + r.num_decode_tokens);
    general |= r.path == KvPath::general;
  }
  int ended = 0, widest = 0;
  int64_t demoted = 0, promoted = 0, backups = 0, loads = 0;
  bool general = false;
};

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

Request request(int num_prompt, int max_tokens) {
  Request made{.prompt = std::vector<TokenId>(size_t(num_prompt), 1)};
  made.sampling.max_tokens = max_tokens;
  return made;
}

// Prompts of all lengths, so that the products of a step have many numbers of rows.
std::vector<Request> mixed_load(int vocab) {
  std::mt19937 rng(7);
  std::vector<Request> load;
  for (int i = 0; i < 24; ++i) {
    Request& next = load.emplace_back(request(1 + int(rng() % 250), 40 + i));
    for (TokenId& token : next.prompt) token = TokenId(rng() % unsigned(vocab));
    next.sampling.temperature = i % 2 ? 1.0f : 0.0f;
    next.sampling.top_k = i % 3 ? 0 : 5;
    next.sampling.repetition_penalty = i % 4 ? 1.0f : 1.2f;
    next.sampling.logprobs = i % 5 ? -1 : 3;
  }
  return load;
}

Counts serve(const EngineConfig& config, std::unique_ptr<Backend> backend, const std::vector<Request>& load) {
  Counts counts;
  SteadyClock clock;
  Engine engine(config, std::move(backend), clock, counts);
  for (const Request& next : load) EXPECT_TRUE(bool(engine.submit(next)));
  for (int step = 0; !engine.idle() && step < 20000; ++step) engine.step();
  EXPECT_EQ(counts.ended, int(load.size()));
  return counts;
}

// Makes a backend and serves `load` with it: the kernels that the steps take and the start did not.
std::vector<std::string> late_code(const Model& model, const EngineConfig& config, const CudaLaunch& launch,
                                   int slots, const std::vector<Request>& load, Counts& counts) {
  const Status wrong = validate(config);
  EXPECT_FALSE(wrong) << wrong->message;
  forget_code();
  auto backend = make_cuda_backend(
      model, config,
      {.num_host_slots = slots, .host_content = host_content(config.fidelity.policy), .launch = launch});
  EXPECT_TRUE(backend) << backend.error().message;
  const std::set<std::string> at_start = loaded_code();
  EXPECT_FALSE(at_start.empty());
  counts = serve(config, *std::move(backend), load);
  std::vector<std::string> late;
  std::ranges::set_difference(loaded_code(), at_start, std::back_inserter(late));
  return late;
}

using Nothing = std::vector<std::string>;

TEST(CudaStart, NoStepLoadsCode) {
  const auto model = load_golden("tiny-llama");
  ASSERT_TRUE(model);
  const std::vector<Request> load = mixed_load(model->config().vocab);
  Counts counts;
  const auto late = [&](const EngineConfig& config, int slots) {
    return late_code(*model, config, {}, slots, load, counts);
  };
  EXPECT_EQ(late(pressed(KvPolicy::target_only), 0), Nothing{});
  EXPECT_GE(counts.widest, 512);
  EXPECT_GT(loaded_code().size(), 100u) << "products of every number of rows";
  EXPECT_FALSE(loaded_code().contains("demote")) << "of no use to this policy";
  EXPECT_EQ(late(pressed(KvPolicy::static8), 0), Nothing{});
  EXPECT_GT(counts.demoted, 0);
  EXPECT_EQ(late(pressed(KvPolicy::elastic), 100), Nothing{});
  EXPECT_GT(counts.demoted, 0);
  EXPECT_GT(counts.promoted, 0);
  EngineConfig backed = pressed(KvPolicy::elastic);
  backed.fidelity.backing = BackingMode::writethrough;
  backed.fidelity.attention_path = AttentionPath::general;
  EXPECT_EQ(late(backed, 100), Nothing{});
  EXPECT_GT(counts.backups, 0);
  EXPECT_TRUE(counts.general);
}

TEST(CudaStart, WhatABackendTookIsGivenBackWithIt) {
  const auto model = load_golden("tiny-llama");
  ASSERT_TRUE(model);
  const size_t before = held_bytes();
  for (const auto& [policy, slots] :
       {std::pair{KvPolicy::target_only, 0}, {KvPolicy::exact_offload, 100}, {KvPolicy::elastic, 100}}) {
    SCOPED_TRACE(std::string(name_of(policy)));
    const EngineConfig config = pressed(policy);
    auto backend =
        make_cuda_backend(*model, config, {.num_host_slots = slots, .host_content = host_content(policy)});
    ASSERT_TRUE(backend) << backend.error().message;
    EXPECT_GT(held_bytes(), before);
    serve(config, *std::move(backend), {request(100, 1), request(300, 2)});
    EXPECT_EQ(held_bytes(), before);
  }
}

// Low bytes and loaded pairs come up beside a step, never ahead of what it waits for.
TEST(CudaStep, NoCopyToTheDeviceOvertakesWhatAStepUploads) {
  const auto model = load_golden("tiny-llama");
  ASSERT_TRUE(model);
  for (const KvPolicy policy : {KvPolicy::elastic, KvPolicy::exact_offload}) {
    SCOPED_TRACE(std::string(name_of(policy)));
    Counts counts;
    late_code(*model, pressed(policy), {}, 100, mixed_load(model->config().vocab), counts);
    EXPECT_GT(counts.promoted + counts.loads, 0);
  }
  EXPECT_EQ(overtaken_uploads(), 0);
}

TEST(CudaStart, HostMemoryThatCannotBeLockedIsAnErrorWithTheFlag) {
  const auto model = load_golden("tiny-llama");
  ASSERT_TRUE(model);
  const auto make = [&] {
    return make_cuda_backend(*model, pressed(KvPolicy::elastic), {.num_host_slots = 100});
  };
  refuse_to_lock(true);
  const auto refused = make();
  refuse_to_lock(false);
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message.find("--kv-host-bytes"), std::string::npos) << refused.error().message;
  EXPECT_TRUE(make()) << "nothing of the first one is left";
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

// Decodes are padded: to 512 rows here, from which on K and V are written by another kernel, though no step has
// so many tokens and no prefill comes before.
TEST(CudaStart, PaddingMayGiveDecodesMoreRowsThanAStepHasTokens) {
  const auto model = load_golden("tiny-llama");
  ASSERT_TRUE(model);
  constexpr int kMost = 500;
  EngineConfig config = pressed(KvPolicy::target_only);
  config.max_model_len = 32;
  config.scheduler.max_step_tokens = config.scheduler.max_step_seqs = kMost;
  config.kv.num_pages = kMost;
  for (const bool eager : {false, true}) {
    SCOPED_TRACE(eager ? "eager" : "graphs");
    Counts counts;
    EXPECT_EQ(late_code(*model, config, {.enforce_eager = eager}, 0, std::vector<Request>(kMost, request(1, 2)),
                        counts),
              Nothing{});
    EXPECT_EQ(counts.widest, kMost);
    EXPECT_TRUE(loaded_code().contains("kv_write of many rows"));
  }
}

// Products and attention of a step of 64 rows with a model of one layer, whose rest is for the sample rows
// alone.
TEST(CudaStep, TheLastLayerComputesNoMoreThanItsSamplesNeed) {
  Result<ModelConfig> config = builtin_model_config("tiny");
  ASSERT_TRUE(config);
  config->layers = 1;
  const EngineConfig engine = pressed(KvPolicy::target_only);
  auto backend = make_cuda_backend(Model::dummy(*config), engine, {});
  ASSERT_TRUE(backend) << backend.error().message;
  std::vector<int32_t> pages = all_pages(engine.kv.num_pages);
  const auto taken = [&](int samples) {
    DrivenSequence s = driven(std::vector<TokenId>(65, 1));
    DrivenStep step(pages);
    step.add(s, 64);
    for (int i = 0; i < samples; ++i) step.want_target(s, i, 2, 0);
    forget_code();
    EXPECT_EQ(step.run(**backend).rows.size(), size_t(samples));
    give_back(s, pages);
    std::set<std::string> code = loaded_code();
    std::erase_if(
        code, [](const std::string& kernel) { return !kernel.starts_with("product") && kernel != "prefill"; });
    return code;
  };
  const auto products = [](int rows, int head_rows) {
    const std::string of_rows = " of " + std::to_string(rows) + " rows";
    return std::set<std::string>{"prefill",
                                 "product 0 of 64 rows",
                                 "product 1" + of_rows,
                                 "product 2" + of_rows,
                                 "product 3" + of_rows,
                                 "product 4 of " + std::to_string(head_rows) + " rows"};
  };
  EXPECT_EQ(taken(0), std::set<std::string>{"product 0 of 64 rows"});
  EXPECT_EQ(taken(1), products(1, 1));
  EXPECT_EQ(taken(16), products(16, 16)) << "as many as there is room for";
  const std::set<std::string> more = taken(17);
  EXPECT_TRUE(more.contains("product 1 of 64 rows") && !more.contains("product 1 of 32 rows"));
}

// The beginning of a matrix, in whole 16 bytes; with so few rows that it does not pay, and so many, none of it.
TEST(CudaStep, ANormOf16To128RowsAsksForTheBeginningOfAMatrix) {
  constexpr size_t kMost = size_t(4) << 20;
  alignas(16) static const char matrix[16] = {};
  for (const int rows : {1, 15, 129, 8192}) EXPECT_EQ(read_ahead(matrix, kMost, rows).bytes, 0u) << rows;
  for (const int rows : {16, 17, 128})
    for (const auto& [bytes, asked] : {std::pair{size_t(0), size_t(0)},
                                       {15, 0},
                                       {16, 16},
                                       {1000, 992},
                                       {kMost - 1, kMost - 16},
                                       {kMost, kMost},
                                       {kMost + 8, kMost},
                                       {(size_t(1) << 32) + 16, kMost}}) {
      SCOPED_TRACE(testing::Message() << rows << " rows, " << bytes << " bytes");
      const ReadNext next = read_ahead(matrix, bytes, rows);
      EXPECT_EQ(next.data, matrix);
      EXPECT_EQ(next.bytes, asked);
      check_read_next(next);
    }
}

// The start's own steps fit the smallest limits, with each policy and each number format.
struct Limits {
  const char* name;
  int num_pages = 40, max_model_len = 96, max_step_tokens = 64, max_step_seqs = 8;
  Request only = request(40, 30);
};

class CudaStartLimits : public testing::TestWithParam<Limits> {};

TEST_P(CudaStartLimits, TheFirstRequestIsServedAndLoadsNoCode) {
  const Limits& limits = GetParam();
  const auto model = load_golden("tiny-llama");
  ASSERT_TRUE(model);
  for (const KvPolicy policy :
       {KvPolicy::target_only, KvPolicy::static8, KvPolicy::elastic, KvPolicy::exact_offload})
    for (const BaseFormat format : {BaseFormat::fixed8, BaseFormat::e5m2})
      for (const bool eager : {false, true}) {
        SCOPED_TRACE(std::string(name_of(policy)) + (format == BaseFormat::e5m2 ? ", e5m2" : ", fixed8") +
                     (eager ? ", eager" : ""));
        EngineConfig config = pressed(policy);
        config.max_model_len = limits.max_model_len;
        config.scheduler.max_step_tokens = limits.max_step_tokens;
        config.scheduler.max_step_seqs = limits.max_step_seqs;
        config.kv.num_pages = limits.num_pages;
        config.kv.base_format = format;
        const int slots = policy == KvPolicy::elastic || policy == KvPolicy::exact_offload ? 4 : 0;
        Counts counts;
        EXPECT_EQ(late_code(*model, config, {.enforce_eager = eager}, slots, {limits.only}, counts), Nothing{});
        EXPECT_EQ(counts.widest, std::min(int(limits.only.prompt.size()), limits.max_step_tokens));
      }
}

INSTANTIATE_TEST_SUITE_P(
    All, CudaStartLimits,
    testing::Values(Limits{.name = "Comfortable"},
                    Limits{.name = "TwoPages", .num_pages = 2, .max_model_len = 32, .only = request(20, 12)},
                    Limits{.name = "OneTokenAStep", .max_step_tokens = 1, .max_step_seqs = 1},
                    Limits{.name = "OneSequence", .max_step_seqs = 1},
                    Limits{.name = "ModelLengthOfAPair", .max_model_len = 32, .only = request(20, 12)},
                    Limits{.name = "ModelLengthOfTwo", .max_model_len = 2, .only = request(1, 1)},
                    Limits{.name = "AllOfThem",
                           .num_pages = 2,
                           .max_model_len = 2,
                           .max_step_tokens = 1,
                           .max_step_seqs = 1,
                           .only = request(1, 1)}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace ekv::test
