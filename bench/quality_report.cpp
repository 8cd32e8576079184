// The subcommand around measure_quality: files in, table and JSON out.

#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "bench/command.h"
#include "bench/quality.h"
#include "elastickv/tokenizer.h"
#include "util/files.h"
#include "util/json.h"

namespace ekv {
namespace {

struct Loaded {
  Model model;
  Tokenizer tokenizer;
  std::vector<TokenId> tokens;
};

Result<Loaded> load(const QualityFlags& flags) {
  Result<ModelConfig> config = load_model_config(flags.model);
  if (!config) return config.error();
  Result<Model> model = Model::load(flags.model, *config);
  if (!model) return model.error();
  Result<Tokenizer> tokenizer = Tokenizer::load(flags.model);
  if (!tokenizer) return tokenizer.error();
  Result<std::string> text = read_file(flags.text);
  if (!text) return text.error();
  Result<std::vector<TokenId>> tokens = tokenizer->encode(*text, true);
  if (!tokens) return tokens.error();
  if (int(tokens->size()) < flags.max_tokens) {
    log_warn(fmt::format("the text has {} tokens only, less than --max-tokens", tokens->size()));
  }
  tokens->resize(std::min(tokens->size(), size_t(flags.max_tokens)));
  return Loaded{*std::move(model), *std::move(tokenizer), *std::move(tokens)};
}

void print_row(const QualityRow& row, const Loaded& loaded) {
  const std::string token = loaded.tokenizer.decode({&loaded.tokens[size_t(row.worst_position) + 1], 1}, false);
  fmt::print(
      "| {:<9} | {:<10} | {:>6.1f} % | {:>8.1e} | x{:<7.4f} | {:>6.2f} % | {:>8.1e} before token {:>4}, {:?} "
      "|\n",
      row.format, row.pattern, 100 * row.exposure, row.kl, row.ppl_ratio, 100 * row.top1, row.worst_kl,
      row.worst_position + 1, token);
}

void print_table(const QualityReport& report, const Loaded& loaded, const QualityFlags& flags) {
  fmt::print("{}: {} tokens of {}, perplexity {:.3f} with exact fp16 keys and values\n\n", flags.model,
             report.tokens, flags.text, report.exact_ppl);
  fmt::print("| format    | pattern    | exposure | KL/token | ppl ratio | top-1    | worst token |\n");
  fmt::print("|-----------|------------|----------|----------|----------|----------|-------------|\n");
  for (const QualityRow& row : report.rows) print_row(row, loaded);
  for (const QualityRow& row : report.targets) print_row(row, loaded);
  fmt::print(
      "\nKL in nats. Tokens from position 192 on, the first that can see BASE. all-target: the grid of\nfixed8 "
      "without BASE. random-N drawn with seed {}.\n",
      flags.seed);
}

Json row_json(const QualityRow& row) {
  return {{"format", row.format},       {"pattern", row.pattern},
          {"exposure", row.exposure},   {"kl", row.kl},
          {"ppl_ratio", row.ppl_ratio}, {"top1", row.top1},
          {"worst_kl", row.worst_kl},   {"worst_position", row.worst_position}};
}

Json report_json(const QualityReport& report, const QualityFlags& flags) {
  Json out = {{"model", flags.model},       {"text", flags.text},
              {"tokens", report.tokens},    {"exact_perplexity", report.exact_ppl},
              {"seed", flags.seed},         {"rows", Json::array()},
              {"all_target", Json::array()}};
  for (const QualityRow& row : report.rows) out["rows"].push_back(row_json(row));
  for (const QualityRow& row : report.targets) out["all_target"].push_back(row_json(row));
  return out;
}

std::optional<int> parse(int argc, const char* const* argv, QualityFlags& flags) {
  CLI::App app{"What BASE pairs do to the predictions of a text: KL, perplexity, top-1, on the CPU backend.",
               "elastickv bench quality"};
  app.add_option("--model", flags.model, "Hugging Face folder")->required()->check(CLI::ExistingDirectory);
  app.add_option("--text", flags.text, "file with the text")->required()->check(CLI::ExistingFile);
  app.add_option("--max-tokens", flags.max_tokens, "tokens of the text to use")
      ->check(CLI::Range(2, 1 << 20))
      ->capture_default_str();
  app.add_option("--format", flags.formats,
                 "fixed8, e5m2-zero, e5m2-mid; may be given several times (default: all)");
  app.add_option("--pattern", flags.patterns,
                 "all-base, text-base, tbt-N, random-N; may be given several times (default: all-base, tbt-5, "
                 "tbt-10, tbt-20, tbt-50, random-20)");
  app.add_option("--json", flags.json, "file for the result as JSON");
  app.add_option("--seed", flags.seed, "of random-N")->capture_default_str();
  app.add_option("--threads", flags.threads, "threads of the CPU backend; 0: all cores")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
  return parse_flags(app, argc, argv);
}

}  // namespace

int bench_quality(int argc, const char* const* argv) {
  QualityFlags flags;
  if (const auto code = parse(argc, argv, flags)) return *code;
  Result<Loaded> loaded = load(flags);
  if (!loaded) return fail(loaded.error());
  Progress bar;
  const auto progress = [&bar](int done, int all) { bar.show(done, all, [] { return "chunks"; }); };
  Result<QualityReport> report = measure_quality(loaded->model, loaded->tokens, flags, progress);
  if (!report) return fail(report.error());
  print_table(*report, *loaded, flags);
  if (const Status failed = write_json(flags.json, report_json(*report, flags))) return fail(*failed);
  return 0;
}

}  // namespace ekv
