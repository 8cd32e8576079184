#include "backend/cpu/cpu_sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "elastickv/sampling_rule.h"

namespace ekv {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Tokens whose races are compared with the best of those before at once: small, so that few races must be
// worked out.
constexpr int kRaceBlock = 2048;
static_assert(kRaceBlock % sampling::kDrawTokens == 0);

TokenId argmax(std::span<const float> logits) {  // ties: the lowest id
  return TokenId(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

// Ids outside the vocabulary are refused where requests are read; here they name no logit.
bool names_one(TokenId id, std::span<const float> logits) { return id >= 0 && size_t(id) < logits.size(); }

// Doubles add these integers exactly.
double whole_mass(float probability) {
  constexpr double kRound = 0x1.8p52;  // adding and subtracting it rounds to an integer
  return (double(probability) * double(sampling::kMassOne) + kRound) - kRound;
}

}  // namespace

CpuSampler::CpuSampler(const CpuKernels& kernels, int vocab)
    : kernels_(kernels),
      kept_(size_t(vocab)),
      exps_(size_t(vocab)),
      order_(size_t(vocab)),
      counts_(size_t(vocab)),
      racers_(size_t(kRaceBlock)) {}

std::optional<SampledRow> CpuSampler::sample(const SampleRow& row, std::span<float> logits, TokenId last) {
  if (!readable(logits)) return std::nullopt;
  SampledRow out;
  if (row.target >= 0) {
    if (logits[row.target] == -kInfinity) return std::nullopt;
    out.token = row.target;
    out.logprobs = report(row.target, std::max(0, row.num_logprobs), logits);
    return out;
  }
  const bool wanted = row.num_logprobs >= 0;
  if (wanted) raw_.assign(logits.begin(), logits.end());
  out.token = choose(row, logits, last);
  if (out.token < 0) return std::nullopt;
  if (wanted) out.logprobs = report(out.token, row.num_logprobs, raw_);
  return out;
}

// No NaN and no +infinity.
bool CpuSampler::readable(std::span<const float> logits) const {
  if (std::isfinite(kernels_.max_abs(logits.data(), int(logits.size())))) return true;
  return std::ranges::all_of(logits, [](float x) { return x < kInfinity; });
}

// Natural logs of the softmax of the raw logits: what the model said, before bias, penalties and temperature.
TokenLogprobs CpuSampler::report(TokenId token, int num_top, std::span<const float> logits) {
  const float max = *std::max_element(logits.begin(), logits.end());
  const double log_sum = double(max) + std::log(kernels_.sum_exp(logits.data(), max, int(logits.size())));
  const auto logprob = [&](TokenId id) { return TokenLogprob{id, float(double(logits[id]) - log_sum)}; };
  const float own = logits[token];
  TokenLogprobs out{.chosen = logprob(token), .top = {}};
  out.rank =
      1 + int32_t(std::count_if(logits.begin(), logits.end(), [own](float other) { return other > own; }));
  const int count = std::min(num_top, int(logits.size()));
  if (count == 0) return out;
  order_first(count, logits);
  for (int i = 0; i < count; ++i) out.top.push_back(logprob(order_[i]));
  return out;
}

// Puts the `count` most likely ids in front of order_, sorted. Ties: lower id.
void CpuSampler::order_first(int count, std::span<const float> logits) {
  const auto likelier = [&](TokenId a, TokenId b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  };
  std::iota(order_.begin(), order_.end(), 0);
  std::partial_sort(order_.begin(), order_.begin() + count, order_.end(), likelier);
}

TokenId CpuSampler::choose(const SampleRow& row, std::span<float> logits, TokenId last) {
  add_biases(row, logits);
  penalise(row, logits, last);
  const float temperature = row.params->temperature;
  const bool greedy = temperature < sampling::kGreedyTemperature;
  if (const float inverse = 1.0f / temperature; !greedy)
    for (float& logit : logits) logit = sampling::scaled(logit, inverse);
  const TokenId likeliest = argmax(logits);
  if (logits[likeliest] == -kInfinity) return -1;
  return greedy || logits[likeliest] == kInfinity ? likeliest : draw(row, likeliest, logits);
}

void CpuSampler::add_biases(const SampleRow& row, std::span<float> logits) const {
  for (const auto& [id, bias] : row.params->logit_bias) {
    if (names_one(id, logits)) logits[id] = sampling::sum(logits[id], bias);
  }
  if (row.output_index >= row.params->min_tokens) return;
  for (TokenId id : row.params->stop_token_ids) {
    if (names_one(id, logits)) logits[id] = -kInfinity;
  }
}

void CpuSampler::penalise(const SampleRow& row, std::span<float> logits, TokenId last) {
  const SamplingParams& p = *row.params;
  if (!p.has_penalties()) return;
  const auto known = [last](TokenId token) { return is_pending(token) ? last : token; };
  for (size_t i = 0; i < row.tokens.size(); ++i) {
    const TokenId id = known(row.tokens[i]);
    if (!names_one(id, logits)) continue;  // of a row before that failed
    counts_[id] = uint16_t(sampling::counted(counts_[id], i < size_t(row.num_prompt)));
  }
  for (const TokenId token : row.tokens) {
    const TokenId id = known(token);
    if (!names_one(id, logits)) continue;
    const uint16_t count = std::exchange(counts_[id], 0);  // met again: 0, and nothing changes
    logits[id] =
        sampling::penalised(logits[id], count, p.repetition_penalty, p.frequency_penalty, p.presence_penalty);
  }
}

// The race of the likeliest token is a bound for the winner's; what cannot reach the best so far is left out.
TokenId CpuSampler::draw(const SampleRow& row, TokenId likeliest, std::span<const float> z) {
  const uint64_t seed = row.params->seed;
  const auto index = uint32_t(row.output_index);
  const float least = least_kept(*row.params, z[likeliest], z);
  const auto words = sampling::draw_words(seed, uint32_t(likeliest) / sampling::kDrawTokens, index);
  double best = sampling::exact_race(z[likeliest], sampling::word_of(words, likeliest));
  TokenId winner = likeliest;
  for (int begin = 0; begin < int(z.size()); begin += kRaceBlock) {
    const RaceArgs args{.z = z.data() + begin,
                        .first = begin,
                        .count = std::min(kRaceBlock, int(z.size()) - begin),
                        .seed = seed,
                        .output_index = index,
                        .best = std::nextafter(float(best), -kInfinity),
                        .least = least};
    const int count = kernels_.find_racers(args, racers_.data());
    for (const auto& [token, word] : std::span(racers_).first(size_t(count))) {
      const double race = sampling::exact_race(z[token], word);
      if (race > best || (race == best && token < winner)) best = race, winner = token;
    }
  }
  return winner;
}

// The least z that min-p, top-k and top-p leave.
float CpuSampler::least_kept(const SamplingParams& p, float z_max, std::span<const float> z) {
  const bool by_count = p.top_k > 0, by_mass = p.top_p < 1;
  if (!by_count && !by_mass && p.min_p <= 0) return -kInfinity;
  float least = sampling::difference(z_max, sampling::kReach);
  if (p.min_p > 0) least = std::max(least, sampling::sum(z_max, float(std::log(double(p.min_p)))));
  if (!by_count && !by_mass) return least;
  size_t count = 0;
  for (const float x : z) {
    kept_[count] = x;
    count += x >= least;
  }
  std::span<float> kept = std::span(kept_).first(count);
  if (by_count && size_t(p.top_k) < count) {
    const auto last = kept.begin() + (p.top_k - 1);
    std::nth_element(kept.begin(), last, kept.end(), std::greater<>());
    least = *last;
    const auto equal = std::partition(last, kept.end(), [least](float x) { return x >= least; });
    kept = kept.first(size_t(equal - kept.begin()));
  }
  return by_mass ? top_p_cut(kept, z_max, double(p.top_p)) : least;
}

// Sum of the tokens' probabilities as the rule's integers. Leaves exp(z - z_max) in exps_.
double CpuSampler::mass(std::span<const float> z, float z_max) {
  kernels_.exp_all(z.data(), z_max, exps_.data(), int(z.size()));
  double lanes[8] = {};
  size_t i = 0;
  for (; i + 8 <= z.size(); i += 8)
    for (size_t j = 0; j < 8; ++j) lanes[j] += whole_mass(exps_[i + j]);
  for (; i < z.size(); ++i) lanes[0] += whole_mass(exps_[i]);
  return std::accumulate(lanes, lanes + 8, 0.0);
}

// The largest z such that the tokens from it upwards have the share `top_p` of the mass of `kept`, which is
// reordered. Few tokens hold most of it: a front part is sorted, and doubled only when that was not enough.
float CpuSampler::top_p_cut(std::span<float> kept, float z_max, double top_p) {
  double missing = top_p * mass(kept, z_max);
  for (size_t sorted = 0; sorted < kept.size();) {
    const size_t more = std::min(kept.size(), std::max<size_t>(256, 2 * sorted));
    const auto end = kept.begin() + long(more);
    if (more < kept.size()) std::nth_element(kept.begin() + long(sorted), end, kept.end(), std::greater<>());
    const std::span<float> front = kept.subspan(sorted, more - sorted);
    if (const double part = mass(front, z_max); part < missing && more < kept.size()) {
      missing -= part, sorted = more;
      continue;
    }
    std::ranges::sort(front, std::greater<>());
    mass(front, z_max);  // exps_ in the new order
    for (size_t i = 0; i < front.size(); ++i)
      if ((missing -= whole_mass(exps_[i])) <= 0) return front[i];
    sorted = more;
  }
  return *std::ranges::min_element(kept);
}

}  // namespace ekv
