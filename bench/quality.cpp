#include "bench/quality.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <random>

#include "backend/cpu/cpu_backend.h"

namespace ekv {
namespace {

constexpr int kSinkPairs = 1, kRecentPairs = 4;
constexpr int kFirstScored =
    (kSinkPairs + 1 + kRecentPairs) * kPairTokens;  // the first token that can see BASE

struct Format {
  const char* name;
  BaseFormat base;
  BaseFill fill;
};
constexpr Format kFormats[] = {{"fixed8", BaseFormat::fixed8, BaseFill::mid},
                               {"e5m2-zero", BaseFormat::e5m2, BaseFill::zero},
                               {"e5m2-mid", BaseFormat::e5m2, BaseFill::mid}};
constexpr Format kExact = kFormats[1];  // all TARGET: plain fp16

enum class Shape { none, all, run, random, text };
struct Pattern {
  std::string name;
  Shape shape = Shape::none;
  int percent = 0;
};

Result<Format> find_format(const std::string& name) {
  for (const Format& format : kFormats) {
    if (name == format.name) return format;
  }
  return Error{Error::invalid_argument,
               fmt::format("no number format '{}'; there are fixed8, e5m2-zero and e5m2-mid", name), "format"};
}

Result<Pattern> find_pattern(const std::string& name) {
  if (name == "text-base") return Pattern{name, Shape::text, 100};
  if (name == "all-base") return Pattern{name, Shape::all, 100};
  for (const auto& [prefix, shape] : {std::pair{std::string("tbt-"), Shape::run}, {"random-", Shape::random}}) {
    if (!name.starts_with(prefix)) continue;
    int percent = 0;
    const char* end = name.data() + name.size();
    const auto [stop, error] = std::from_chars(name.data() + prefix.size(), end, percent);
    if (error == std::errc{} && stop == end && percent >= 1 && percent <= 100)
      return Pattern{name, shape, percent};
  }
  return Error{
      Error::invalid_argument,
      fmt::format("no pattern '{}'; there are all-base, text-base, tbt-N and random-N with N from 1 to 100",
                  name),
      "pattern"};
}

// The text under one pattern: its pages, which of its pairs are BASE, what came out after each token.
struct Forced {
  Pattern pattern;
  std::mt19937 rng;
  std::vector<PairEntry> pairs;
  std::vector<int> waiting;  // pairs that may become BASE, in the order in which they will
  int num_base = 0;
  double base_seen = 0, pairs_seen = 0;
  std::vector<double> kl, nll;  // [scored tokens], as is the next
  std::vector<uint8_t> same_top;
};

double log_sum_exp(std::span<const float> logits) {
  const float max = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (float x : logits) sum += std::exp(double(x - max));
  return double(max) + std::log(sum);
}
int best(std::span<const float> logits) {
  return int(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

// The exact run's logits after each token.
struct Exact {
  int vocab = 0;
  std::vector<float> logits;  // [scored tokens][vocab]
  std::vector<double> norm;   // log of the sum of their exponentials
  std::vector<int> top;
  double mean_nll = 0;
  std::span<const float> at(size_t scored) const {
    return {logits.data() + scored * size_t(vocab), size_t(vocab)};
  }
};

// Normalised in double from the raw logits: the difference of two logprobs in float would drown a KL of 1e-6.
double kl_divergence(std::span<const float> exact, double exact_norm, std::span<const float> got, double norm) {
  double sum = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    sum += std::exp(double(exact[i]) - exact_norm) * (double(exact[i]) - double(got[i]));
  }
  return sum - exact_norm + norm;
}

size_t num_scored(std::span<const TokenId> text) { return text.size() - 1 - kFirstScored; }
TokenId next_token(std::span<const TokenId> text, size_t scored) { return text[kFirstScored + scored + 1]; }

// Feeds the text to one backend under several patterns at once.
class TeacherForcing {
 public:
  using Take = std::function<void(Forced& forced, size_t scored, std::span<const float> logits)>;

  TeacherForcing(const Model& model, std::span<const TokenId> text, const Format& format,
                 const std::vector<Pattern>& patterns, const QualityFlags& flags)
      : text_(text) {
    const ModelConfig& m = model.config();
    const int blocks = ceil_div(int(text.size()), kBlockTokens) + 1;
    KvShape shape{m.layers, blocks * int(patterns.size()), m.kv_heads, m.head_dim};
    for (int page = shape.pages - 1; page >= 0; --page) free_pages_.push_back(page);
    for (const Pattern& pattern : patterns) {
      Forced& forced = forced_.emplace_back();
      forced.pattern = pattern;
      forced.rng.seed(flags.seed);
      forced.kl.resize(num_scored(text));
      forced.nll.resize(num_scored(text));
      forced.same_top.resize(num_scored(text));
    }
    backend_ = std::make_unique<CpuBackend>(
        model, shape, format.base,
        CpuOptions{.threads = flags.threads, .base_fill = format.fill, .read_mask = true});
  }

  // nullopt, or what went wrong in the forward pass.
  Status run(const Take& take, const std::function<void()>& after_chunk) {
    const SamplingParams params;
    for (int pair = 0; pair * kPairTokens < int(text_.size()); ++pair) {
      if (Status bad = step(pair, params, take)) return bad;
      after_chunk();
    }
    return std::nullopt;
  }

  std::vector<Forced>& forced() { return forced_; }

 private:
  Status step(int pair, const SamplingParams& params, const Take& take) {
    const int begin = pair * kPairTokens, end = std::min(begin + kPairTokens, int(text_.size()));
    // Scored positions have a next token to compare; a pair is scored from its first one on or not at all.
    const int scored = begin < kFirstScored ? 0 : std::min(end, int(text_.size()) - 1) - begin;
    std::vector<DemoteJob> demotes;
    std::vector<TokenId> tokens;
    std::vector<int32_t> positions, q_start{0}, kv_len;
    std::vector<Slot> slots;
    std::vector<PairEntry> table;
    std::vector<SampleRow> samples;
    for (Forced& f : forced_) {
      choose_base(f, pair, demotes);
      f.pairs_seen += double(pair + 1) * scored;
      f.pairs.push_back({take_page(), end - begin > kBlockTokens ? take_page() : -1});
      for (int p = begin; p < end; ++p) {
        const int page = p - begin < kBlockTokens ? f.pairs.back().even : f.pairs.back().odd;
        if (p < begin + scored)
          samples.push_back({.row = int32_t(tokens.size()), .target = text_[p + 1], .params = &params});
        tokens.push_back(text_[p]);
        positions.push_back(p);
        slots.push_back(Slot(page) * kBlockTokens + p % kBlockTokens);
      }
      if (f.pattern.shape == Shape::text) mask_in_place(f, pair);
      f.base_seen += double(f.num_base) * scored;
      q_start.push_back(int32_t(tokens.size()));
      kv_len.push_back(end);
      table.insert(table.end(), f.pairs.begin(), f.pairs.end());
    }
    backend_->read_logits([&](int row, std::span<const float> logits) {
      take(forced_[size_t(row / scored)], size_t(begin - kFirstScored + row % scored), logits);
    });
    backend_->submit({.demotes = demotes,
                      .tokens = tokens,
                      .positions = positions,
                      .slot_mapping = slots,
                      .q_start = q_start,
                      .kv_len = kv_len,
                      .block_table = {table, pair + 1},
                      .sample_rows = samples});
    if (backend_->collect().invalid_chunks.empty()) return std::nullopt;
    return Error{Error::invalid_argument, fmt::format("logits at token {} and after are not finite", begin),
                 "model"};
  }

  // The BASE pairs that the tokens of pair `writing` see; the pages of new ones are packed in this step.
  void choose_base(Forced& f, int writing, std::vector<DemoteJob>& demotes) {
    const int eligible = writing - kRecentPairs;  // pairs [kSinkPairs, eligible)
    const int most = std::max(0, eligible - kSinkPairs);
    if (most > 0) f.waiting.push_back(eligible - 1);
    if (f.pattern.shape == Shape::none || f.pattern.shape == Shape::text) return;
    const int wanted =
        f.pattern.shape == Shape::all ? most : std::min(most, f.pattern.percent * (writing + 1) / 100);
    for (; f.num_base < wanted; ++f.num_base) {
      const size_t at = f.pattern.shape == Shape::random ? f.rng() % f.waiting.size() : 0;
      PairEntry& entry = f.pairs[size_t(f.waiting[at])];
      f.waiting.erase(f.waiting.begin() + long(at));
      demotes.push_back({entry.even, entry.odd});
      free_pages_.push_back(entry.odd);
      entry = {int32_t(uint32_t(entry.even) | kBasePair), -1};
    }
  }

  // Pair `writing` reads as BASE to the very tokens that write it. Its pages stay: a read mask.
  void mask_in_place(Forced& f, int writing) {
    if (writing < kSinkPairs || writing >= int(text_.size()) / kPairTokens - kRecentPairs) return;
    f.pairs.back().even = int32_t(uint32_t(f.pairs.back().even) | kBasePair);
    ++f.num_base;
  }

  int32_t take_page() {
    const int32_t page = free_pages_.back();
    free_pages_.pop_back();
    return page;
  }

  std::span<const TokenId> text_;
  std::vector<Forced> forced_;
  std::vector<int32_t> free_pages_;
  std::unique_ptr<CpuBackend> backend_;
};

double mean(const std::vector<double>& x) {
  double sum = 0;
  for (double v : x) sum += v;
  return sum / double(x.size());
}

QualityRow summary(const Forced& f, const Format& format, double exact_nll) {
  QualityRow row{.format = format.name, .pattern = f.pattern.name};
  row.exposure = f.base_seen / f.pairs_seen;
  row.kl = mean(f.kl);
  row.ppl_ratio = std::exp(mean(f.nll) - exact_nll);
  row.top1 = double(std::count(f.same_top.begin(), f.same_top.end(), 1)) / double(f.same_top.size());
  const auto worst = std::max_element(f.kl.begin(), f.kl.end());
  row.worst_kl = *worst;
  row.worst_position = kFirstScored + int(worst - f.kl.begin());
  return row;
}

Result<Exact> run_exact(const Model& model, std::span<const TokenId> text, const QualityFlags& flags,
                        const std::function<void()>& after_chunk) {
  Exact exact;
  exact.vocab = model.config().vocab;
  exact.logits.resize(num_scored(text) * size_t(exact.vocab));
  exact.norm.resize(num_scored(text));
  exact.top.resize(num_scored(text));
  TeacherForcing run(model, text, kExact, {{"exact"}}, flags);
  const auto keep = [&](Forced& f, size_t at, std::span<const float> logits) {
    std::copy(logits.begin(), logits.end(), exact.logits.begin() + long(at) * exact.vocab);
    exact.norm[at] = log_sum_exp(logits);
    exact.top[at] = best(logits);
    f.nll[at] = exact.norm[at] - double(logits[size_t(next_token(text, at))]);
  };
  if (Status bad = run.run(keep, after_chunk)) return *bad;
  exact.mean_nll = mean(run.forced().front().nll);
  return exact;
}

template <class T, class Find>
Result<std::vector<T>> find_all(std::vector<std::string> names, std::initializer_list<const char*> defaults,
                                const Find& find) {
  if (names.empty()) names.assign(defaults.begin(), defaults.end());
  std::vector<T> found;
  for (const std::string& name : names) {
    Result<T> one = find(name);
    if (!one) return one.error();
    found.push_back(*one);
  }
  return found;
}

}  // namespace

Result<QualityReport> measure_quality(const Model& model, std::span<const TokenId> text,
                                      const QualityFlags& flags,
                                      const std::function<void(int done, int all)>& progress) {
  auto formats = find_all<Format>(flags.formats, {"fixed8", "e5m2-zero", "e5m2-mid"}, find_format);
  if (!formats) return formats.error();
  auto patterns = find_all<Pattern>(
      flags.patterns, {"all-base", "tbt-5", "tbt-10", "tbt-20", "tbt-50", "random-20"}, find_pattern);
  if (!patterns) return patterns.error();
  if (text.size() < kFirstScored + 2) {
    return Error{
        Error::invalid_argument,
        fmt::format("the text has {} tokens; the first that can see BASE is number {}, and the one after it "
                    "is needed too",
                    text.size(), kFirstScored + 1),
        "text"};
  }

  // With e5m2 a run without BASE is the exact run again.
  const auto patterns_of = [&](const Format& format) {
    std::vector<Pattern> all = *patterns;
    if (format.base == BaseFormat::fixed8) all.push_back({"all-target"});
    return all;
  };
  int sequences = 1;
  for (const Format& format : *formats) sequences += int(patterns_of(format).size());
  const int all = sequences * ceil_div(int(text.size()), kPairTokens);
  int done = 0;
  Result<Exact> exact = run_exact(model, text, flags, [&] { progress(++done, all); });
  if (!exact) return exact.error();

  QualityReport report{.tokens = int(text.size()), .exact_ppl = std::exp(exact->mean_nll)};
  const auto compare = [&](Forced& f, size_t at, std::span<const float> logits) {
    const double norm = log_sum_exp(logits);
    f.kl[at] = kl_divergence(exact->at(at), exact->norm[at], logits, norm);
    f.nll[at] = norm - double(logits[size_t(next_token(text, at))]);
    f.same_top[at] = best(logits) == exact->top[at];
  };
  for (const Format& format : *formats) {
    TeacherForcing run(model, text, format, patterns_of(format), flags);
    if (Status bad = run.run(compare, [&] { progress(done += int(run.forced().size()), all); })) return *bad;
    for (const Forced& f : run.forced()) {
      (f.pattern.shape == Shape::none ? report.targets : report.rows)
          .push_back(summary(f, format, exact->mean_nll));
    }
  }
  return report;
}

}  // namespace ekv
