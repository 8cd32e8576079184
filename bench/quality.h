#pragma once
// quality.h -- `elastickv bench quality`: what BASE pairs do to a model's predictions of a given text.
//
// The text is teacher-forced token by token, as at decode: the token at position i attends to pairs 0..w, w = i
// / 32. Protected are pair 0, the last four complete pairs w - 4..w - 1 and pair w, which is being written;
// pairs 1..w - 5 may be BASE. That set is the same for all 32 tokens of pair w, so the text is fed in chunks of
// 32 tokens, each after the demotions that its pair brings: the same bits as one token at a time, keys and
// values of later tokens included. Of the w + 1 visible pairs so many are BASE:
//
//   all-base   all that may be
//   tbt-N      floor(N % of w + 1), at most all that may be: one run from pair 1 on, TARGET before and after
//   random-N   as many, in an order drawn with the seed; a pair stays BASE once it is
//   text-base  every token reads pair 1 to the fifth complete one from the end of the text as BASE, those that
//              write them too: another reading of "all but sink and recent", harsher than any decode
//
// Scored are the tokens from position 192 on, the first that can see BASE (pair 6 sees pair 1 so), each by its
// prediction of the next one, against an exact run: plain fp16 keys and values, neither rotated nor on a grid,
// no BASE.

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "elastickv/model.h"

namespace ekv {

struct QualityFlags {
  std::string model;                  // folder with weights and tokenizer
  std::string text;                   // file
  std::string json;                   // file for the result; empty: none
  int max_tokens = 1024;              // of the text
  int threads = 0;                    // 0: all cores
  unsigned seed = 1;                  // of random-N
  std::vector<std::string> formats;   // empty: fixed8, e5m2-zero, e5m2-mid
  std::vector<std::string> patterns;  // empty: all-base, tbt-5, tbt-10, tbt-20, tbt-50, random-20
};

struct QualityRow {
  std::string format, pattern;
  double exposure = 0;   // BASE pairs visible / pairs visible, summed over the scored tokens
  double kl = 0;         // nats per scored token, KL(exact || this), mean
  double ppl_ratio = 0;  // perplexity of the text / that of the exact run
  double top1 = 0;       // share of the scored tokens after which the most likely one is the same
  double worst_kl = 0;   // of one token
  int worst_position = 0;
};

struct QualityReport {
  int tokens = 0;
  double exact_ppl = 0;
  std::vector<QualityRow> rows;
  std::vector<QualityRow> targets;  // fixed8, pattern "all-target": what its grid alone costs
};

// `progress(done, all)` is told about every chunk. Errors: an unknown format or pattern, a text too
// short to be scored.
Result<QualityReport> measure_quality(const Model& model, std::span<const TokenId> text,
                                      const QualityFlags& flags,
                                      const std::function<void(int done, int all)>& progress);

// The subcommand: table on stdout, progress on stderr. Exit codes: bench/command.h.
int bench_quality(int argc, const char* const* argv);

}  // namespace ekv
