#pragma once
// sampling_rule.h -- which token a row of logits gives, on every backend: the rule, and its arithmetic.
//
// For logits l and the row's settings, in this order (the semantics are vLLM's):
//
//   logprob   raw[i] = l[i] - log(sum_j exp(l[j])): of the logits as they come, before anything below
//   bias      x[i] = l[i] + every bias of token i, one after the other; -INFINITY bans a token
//   penalties if the row has any: n = times generated (32767 at most), seen = in the prompt or generated
//             seen: x[i] = x[i] > 0 ? x[i] / repetition : x[i] * repetition
//             x[i] -= frequency * n + (n > 0 ? presence : 0)
//   greedy    temperature < 1e-5: the token is the first largest x
//   sampled   z = x * (1 / temperature), then three cuts, each on what the one before left:
//             min-p   keep z[i] >= max z + log(min_p)
//             top-k   keep z[i] >= the k-th largest
//             top-p   keep i if the probability of all tokens with a larger z is less than top_p
//             the token is the first largest race z[i] - log(E[i]) of the kept: a draw with probability
//             softmax(z)
//   E[i]      = -log(1 - v), v = min(fp32(fp32(w) + 0.5) / 2^32, 1 - 2^-24), w = word i % 4 of Philox4x32-10
//             with key (seed, seed >> 32), counter (i / 4, output_index, 0, 0)
//
// Equal z stand or fall together, so a cut may keep more tokens than k. Nothing depends on other rows, on what
// was drawn before or on how the work is split: the seed, the index of the token in the output and the row's
// own logits and settings fix it, so n choices need n seeds, and a sequence that was preempted goes on as if it
// had not been.
//
// Error:  every step up to z is one fp32 operation, rounded to nearest, so all backends have the same bits of
//         z, the same greedy token and the same top-k. Logarithms and exponentials differ in their last bits.
//         From the same l two backends take different tokens only where
//           two races differ by less than 4e-6 + 2^-21 |z|, which is so in less than that share of all draws,
//           the top-p cut is as close to a token as the sums of probabilities may be wrong: by 2^-22 of
//           themselves and 2^-31 of the largest, or the min-p cut by one step of fp32.
// Range:  a NaN or +INFINITY among l, or no token left (all banned): the row has no token and its request
//         fails. -INFINITY in l means probability 0. Settings and biases are not NaN. What overflows fp32 is
//         infinite: -INFINITY as a ban, and of several +INFINITY the first wins.
// Source: Gumbel-max: Gumbel 1954; Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.

#include <cmath>
#include <cstdint>

#include "elastickv/host_device.h"

namespace ekv::sampling {

constexpr float kGreedyTemperature = 1e-5f;  // below it a row is greedy
constexpr int kDrawTokens = 4;               // tokens that share one Philox block

// A token so far below the largest z cannot win the race, whose second term lies between -log(16.64) = -2.82
// and 22.88, and its mass is 0: cuts may leave it out at once.
constexpr float kReach = 26;
// Probabilities in the top-p cut are integers, rint(exp(z[i] - max z) * kMassOne), so that they add exactly.
constexpr float kMassOne = 2147483648.0f;

// How often a token occurred: this bit if in the prompt, and in the others how often it was generated.
constexpr uint32_t kInPrompt = 0x8000, kMostGenerated = 0x7fff;
EKV_HOST_DEVICE inline uint32_t counted(uint32_t count, bool in_prompt) {
  return in_prompt ? count | kInPrompt : (count & kMostGenerated) < kMostGenerated ? count + 1 : count;
}

// ---- logits to z. Rounded one by one: a fused operation would have other bits. On the host that takes
// -ffp-contract=off where the compiler's target has fused operations.

#if defined(__CUDA_ARCH__)
__device__ inline float product(float a, float b) { return __fmul_rn(a, b); }
__device__ inline float quotient(float a, float b) { return __fdiv_rn(a, b); }
__device__ inline float sum(float a, float b) { return __fadd_rn(a, b); }
__device__ inline float difference(float a, float b) { return __fsub_rn(a, b); }
__device__ inline uint32_t high_product(uint32_t a, uint32_t b) { return __umulhi(a, b); }
#else
EKV_HOST_DEVICE inline float product(float a, float b) { return a * b; }
EKV_HOST_DEVICE inline float quotient(float a, float b) { return a / b; }
EKV_HOST_DEVICE inline float sum(float a, float b) { return a + b; }
EKV_HOST_DEVICE inline float difference(float a, float b) { return a - b; }
EKV_HOST_DEVICE inline uint32_t high_product(uint32_t a, uint32_t b) { return uint32_t(uint64_t(a) * b >> 32); }
#endif

EKV_HOST_DEVICE inline float penalised(float x, uint32_t count, float repetition, float frequency,
                                       float presence) {
  if (count == 0) return x;
  const uint32_t times = count & kMostGenerated;
  x = x > 0 ? quotient(x, repetition) : product(x, repetition);
  return difference(x, sum(product(frequency, float(times)), times ? presence : 0.0f));
}

// `inverse`: 1 / temperature. -0 becomes +0, so that equal values are equal bits.
EKV_HOST_DEVICE inline float scaled(float x, float inverse) { return sum(product(x, inverse), 0.0f); }

// ---- random numbers

struct Words {
  uint32_t x, y, z, w;
};

// Philox4x32-10: the factors of a round, and what is added to the two words of the key after each.
constexpr int kPhiloxRounds = 10;
constexpr uint32_t kPhiloxFactor0 = 0xD2511F53u, kPhiloxFactor1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxStep0 = 0x9E3779B9u, kPhiloxStep1 = 0xBB67AE85u;
EKV_HOST_DEVICE inline Words philox(uint64_t key, Words c) {
  uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint32_t h0 = high_product(kPhiloxFactor0, c.x), l0 = kPhiloxFactor0 * c.x;
    const uint32_t h1 = high_product(kPhiloxFactor1, c.z), l1 = kPhiloxFactor1 * c.z;
    c = Words{h1 ^ c.y ^ k0, l1, h0 ^ c.w ^ k1, l0};
    k0 += kPhiloxStep0, k1 += kPhiloxStep1;
  }
  return c;
}

// The words of tokens 4 `group` to 4 `group` + 3.
EKV_HOST_DEVICE inline Words draw_words(uint64_t seed, uint32_t group, uint32_t output_index) {
  return philox(seed, Words{group, output_index, 0, 0});
}
EKV_HOST_DEVICE inline uint32_t word_of(const Words& words, int token) {
  return token % 4 == 0 ? words.x : token % 4 == 1 ? words.y : token % 4 == 2 ? words.z : words.w;
}

// In (0, 1).
EKV_HOST_DEVICE inline float uniform(uint32_t word) {
  return fminf((float(word) + 0.5f) * 0x1p-32f, 1.0f - 0x1p-24f);
}

// z - log(E) for the word of one token: in fp32 as kernels compute it, or in fp64.
EKV_HOST_DEVICE inline float race(float z, uint32_t word) { return z - logf(-log1pf(-uniform(word))); }
EKV_HOST_DEVICE inline double exact_race(float z, uint32_t word) {
  return double(z) - log(-log1p(-double(uniform(word))));
}

}  // namespace ekv::sampling
