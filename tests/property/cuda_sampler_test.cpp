// The same rows to the samplers of both backends: the same tokens, but where sampling_rule.h says that rounding
// decides.

#include "backend/cuda/cuda_sampler.h"

#include <cstdio>

#include "backend/cpu/cpu_sampler.h"
#include "support/seed.h"
#include "tests/support/sampling_rows.h"

namespace ekv::test {
namespace {

constexpr int kRows = 16;

// A CudaSampler with the memory that it has in a backend.
class Device {
 public:
  explicit Device(int vocab)
      : sizes_(sizes_of(vocab)),
        stream_(make_stream()),
        step_(sizes_.step_bytes),
        results_(sizes_.result_bytes),
        sampler_(sizes_, vocab, results_.at_device<int32_t>(0)),
        logits_(size_t(kRows) * size_t(sizes_.logit_stride)),
        pinned_(logits_.size()) {}

  // The tokens of kRows rows; -1: no answer.
  std::vector<TokenId> sample(const std::vector<Row>& rows) {
    std::vector<SampleRow> asked;
    for (size_t r = 0; r < rows.size(); ++r) {
      asked.push_back(rows[r].request());
      std::copy(rows[r].logits.begin(), rows[r].logits.end(), pinned_.data() + r * size_t(sizes_.logit_stride));
    }
    cuda_check(cudaMemcpyAsync(logits_.data(), pinned_.data(), logits_.bytes(), cudaMemcpyHostToDevice,
                               stream_.get()));
    step_.begin_step(), results_.begin_step();
    SampleResults answers;
    sampler_.pack(asked, step_, results_, answers, stream_);
    step_.upload(stream_);
    sampler_.sample(logits_.data(), 0, int(rows.size()), answers, stream_);
    results_.download(stream_);
    cuda_check(cudaStreamSynchronize(stream_.get()));
    std::vector<SampledRow> out;
    std::vector<int> failed;
    sampler_.read(answers, out, failed);
    std::vector<TokenId> tokens;
    for (const SampledRow& row : out) tokens.push_back(row.token);
    return tokens;
  }

  // Packs the rows of a step as large as steps get: `sampled` of each sequence, the others report `target`.
  void pack_full(const SampleRow& sampled, const SampleRow& target) {
    std::vector<SampleRow> asked(size_t(sizes_.max_samples), target);
    std::fill_n(asked.begin(), sizes_.max_seqs, sampled);
    step_.begin_step(), results_.begin_step();
    SampleResults answers;
    sampler_.pack(asked, step_, results_, answers, stream_);
  }

 private:
  static CudaSizes sizes_of(int vocab) {
    ModelConfig model = *builtin_model_config("tiny");
    model.vocab = vocab;
    EngineConfig config;
    config.max_model_len = 256;
    config.scheduler.max_step_seqs = kRows;
    return cuda_sizes(model, config, 1, 16);
  }

  CudaSizes sizes_;
  Stream stream_;
  StepMemory step_, results_;
  CudaSampler sampler_;
  DeviceBuffer<float> logits_;
  PinnedBuffer<float> pinned_;
};

// As a model makes them: at temperature 1 a few hundred tokens can come.
Row plain_row(std::mt19937& rng, int vocab) {
  Row row(random_logits(rng(), vocab, 2));
  for (int i = 0; i < 20; ++i) row.logits[rng() % unsigned(vocab)] += float(rng() % 1000) / 100;
  row.params.seed = uint64_t(rng()) << 32 | rng();
  row.output_index = int(rng() % 10000);
  return row;
}

// Counts rows whose tokens differ and asks the definition whether both may be right.
void compare(int vocab, int steps, unsigned seed, Row (*make)(std::mt19937&, int)) {
  std::mt19937 rng(seed);
  Device device(vocab);
  CpuSampler cpu(best_cpu_kernels(), vocab);
  int differ = 0;
  for (int step = 0; step < steps; ++step) {
    std::vector<Row> rows;
    for (int r = 0; r < kRows; ++r) rows.push_back(make(rng, vocab));
    const std::vector<TokenId> tokens = device.sample(rows);
    for (int r = 0; r < kRows; ++r) {
      const Row& row = rows[size_t(r)];
      std::vector<float> logits = row.logits;
      const TokenId here = cpu.sample(row.request(), logits)->token, there = tokens[size_t(r)];
      if (here == there) continue;
      ++differ;
      ASSERT_FALSE(settings_of(row).greedy()) << "seed " << seed << ", step " << step << ", row " << r;
      const std::vector<double> z = z_by_definition(row);
      for (const TokenId token : {here, there})
        ASSERT_TRUE(right_token(z, settings_of(row), token, false))
            << "cpu " << here << ", cuda " << there << ", seed " << seed << ", step " << step << ", row " << r;
    }
  }
  const int draws = steps * kRows;
  std::printf("vocab %d, seed %u: %d of %d rows differ\n", vocab, seed, differ, draws);
  EXPECT_LE(differ, 2 + draws / 5000);
}

TEST(CudaSampler, DrawsTheTokensOfTheCpuSampler) {
  const unsigned seed = drawn_seed();
  compare(1000, 250, seed, plain_row);
  compare(32003, 30, seed, plain_row);
}

TEST(CudaSampler, EverySettingActsAsOnTheCpu) {
  const unsigned seed = drawn_seed();
  compare(1000, 150, seed, random_row);
  compare(32003, 20, seed, random_row);
}

Row full_row(std::mt19937& rng, int vocab) {
  Row row = plain_row(rng, vocab);
  for (size_t i = 0; i < kMaxLogitBias; ++i) row.params.logit_bias.emplace_back(TokenId(3 * i), 0.125f);
  for (size_t i = 0; i < kMaxStopTokenIds + kMaxEosIds; ++i)
    row.params.stop_token_ids.push_back(TokenId(5 * i + 1));
  row.params.min_tokens = 20000;
  return row;
}

// All sequences of a step with lists as long as requests may have them, and prompts that report logprobs.
TEST(CudaSampler, EveryListAtItsLimitFits) {
  compare(8192, 2, 3, full_row);
  std::mt19937 rng(4);
  const Row full = full_row(rng, 8192);
  SampleRow target = full.request();
  target.target = 7;
  Device(8192).pack_full(full.request(), target);
}

TEST(CudaSampler, KnownDraws) { EXPECT_EQ(Device(32).sample(known_rows()), known_draws()); }

}  // namespace
}  // namespace ekv::test
