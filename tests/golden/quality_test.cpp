// The default model on 256 tokens: what each number format costs when everything but the protected pairs is
// BASE.

#include "bench/quality.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>

#include "elastickv/tokenizer.h"
#include "tests/support/test_data.h"
#include "util/files.h"

namespace ekv::test {
namespace {

// Few of 256 tokens see BASE, and few pairs of it: less is lost than in a long text.
constexpr double kLeastE5m2 = 5e-3;

TEST(Quality, AllButTheProtectedPairsOfTheDefaultModel) {
  const auto folder = std::filesystem::path(EKV_MODELS) / "smollm2-135m-instruct";
  ASSERT_TRUE(std::filesystem::exists(folder / "config.json")) << folder << " is absent: run scripts/setup.sh";
  const Model model = *Model::load(folder, *load_model_config(folder));
  const std::string text = *read_file(test_data() / "quality" / "conversation.txt");
  std::vector<TokenId> tokens = *Tokenizer::load(folder)->encode(text, true);
  ASSERT_GT(tokens.size(), 256u);
  tokens.resize(256);

  QualityFlags flags;
  flags.formats = {"fixed8", "e5m2-zero"};
  flags.patterns = {"all-base", "random-20"};
  int last = 0, all = 0;
  const Result<QualityReport> report =
      measure_quality(model, tokens, flags, [&](int done, int of) { last = done, all = of; });
  ASSERT_TRUE(report) << report.error().message;
  EXPECT_EQ(last, all);
  for (const QualityRow& row : report->rows) {
    std::printf("%s %s: exposure %.3f, KL %.2e, ppl x%.4f, top-1 %.4f\n", row.format.c_str(),
                row.pattern.c_str(), row.exposure, row.kl, row.ppl_ratio, row.top1);
  }
  ASSERT_EQ(report->rows.size(), 4u);
  const QualityRow &fixed8 = report->rows[0], &e5m2 = report->rows[2];
  EXPECT_EQ(fixed8.format, "fixed8");
  EXPECT_EQ(e5m2.format, "e5m2-zero");
  EXPECT_LT(fixed8.kl, 3e-4);
  EXPECT_GT(fixed8.kl, 0);
  EXPECT_GT(e5m2.kl, kLeastE5m2);
  // Scored are pair 6 and all but the last token of pair 7; they see 1 BASE pair of 7 and 2 of 8.
  EXPECT_NEAR(fixed8.exposure, (32.0 * 1 + 31.0 * 2) / (32.0 * 7 + 31.0 * 8), 1e-12);
  ASSERT_EQ(report->targets.size(), 1u);
  EXPECT_LT(report->targets[0].kl, 2e-6) << "fixed8 without BASE";
}

TEST(Quality, UnknownNamesAreRefused) {
  const Model model = Model::dummy(*builtin_model_config("tiny"));
  const std::vector<TokenId> text(240, 3);
  for (const char* bad : {"tbt-", "tbt-0", "tbt-101", "tbt-5x", "all", "random"}) {
    QualityFlags flags;
    flags.patterns = {bad};
    EXPECT_FALSE(measure_quality(model, text, flags, [](int, int) {})) << bad;
  }
  QualityFlags flags;
  flags.formats = {"fp8"};
  EXPECT_FALSE(measure_quality(model, text, flags, [](int, int) {}));
  EXPECT_FALSE(measure_quality(model, std::span(text).first(193), {}, [](int, int) {}));
}

}  // namespace
}  // namespace ekv::test
