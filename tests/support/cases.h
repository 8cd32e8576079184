#pragma once
// cases.h -- attention inputs: named cases, and the builder that puts values into shuffled pages of either
// fidelity.

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "tests/support/half.h"
#include "tests/support/run_attention.h"

namespace ekv::test {

struct SeqCase {
  int rows, kv_len;
  std::vector<int> base_pairs = {};  // pairs that are BASE; each is complete
};

enum class Values { normal, outlier_keys, one_hot, flat, tiny, huge, rising, zero };

struct AttnCase {
  std::string name;
  int head_dim, heads, kv_heads;
  std::vector<SeqCase> seqs;
  Values values = Values::normal;
  BaseFormat format = BaseFormat::fixed8;
  int layers = 2, layer = 1;
  int spare_pages = 3;               // pages of the pool that nobody uses; they stay poison
  int min_pages = 0, min_pairs = 0;  // of the pool and of a row of the tables, for cases that share buffers
};

inline std::vector<int> pair_range(int first, int count) {
  std::vector<int> pairs(count);
  std::iota(pairs.begin(), pairs.end(), first);
  return pairs;
}

inline std::vector<int> every_third(int pairs) {
  std::vector<int> chosen;
  for (int p = 1; p < pairs; p += 3) chosen.push_back(p);
  return chosen;
}

// The boundaries that decode and prefill have. bench/kernels_bench.cpp times larger shapes of the same form.
inline std::vector<AttnCase> named_cases() {
  return {
      {"decode_one_token", 128, 8, 2, {{1, 1}}},
      {"decode_block_boundary", 128, 8, 2, {{1, 64}}},
      {"decode_one_past_boundary", 128, 8, 2, {{1, 65}}},
      {"decode_one_before_boundary", 128, 8, 2, {{1, 63}}},
      {"decode_odd_block_missing", 128, 8, 2, {{1, 40}}},
      {"decode_mha", 128, 3, 3, {{1, 77}}},
      {"decode_mqa_group16", 128, 16, 1, {{1, 300}}},
      {"decode_group7", 128, 14, 2, {{1, 129}, {1, 31}}},
      {"decode_long", 128, 32, 4, {{1, 2049}}},
      {"decode_ragged", 128, 8, 2, {{1, 1}, {1, 500}, {1, 16}, {1, 17}, {1, 1000}, {1, 33}}},
      {"decode_d64", 64, 8, 2, {{1, 333}, {1, 20}}},
      {"decode_d80", 80, 4, 2, {{1, 333}, {1, 20}}},
      {"decode_d96", 96, 4, 2, {{1, 333}, {1, 20}}},
      {"decode_d256", 256, 4, 2, {{1, 333}, {1, 20}}},
      {"decode_d256_group16", 256, 16, 1, {{1, 150}}},
      {"decode_d80_group12", 80, 12, 1, {{1, 150, {0, 1, 3}}}},
      {"base_all", 128, 8, 2, {{1, 128, {0, 1, 2, 3}}}},
      {"base_all_but_tail", 128, 8, 2, {{1, 135, {0, 1, 2, 3}}}},
      {"base_middle", 128, 8, 2, {{1, 500, pair_range(2, 9)}, {1, 40}, {1, 200, {1}}}},
      {"base_alternating", 128, 8, 2, {{1, 600, {0, 2, 4, 6, 8, 10, 12, 14, 16}}}},
      {"base_d64", 64, 8, 2, {{1, 333, pair_range(1, 8)}}},
      {"base_d80", 80, 4, 2, {{1, 333, pair_range(1, 8)}}},
      {"base_d96", 96, 4, 2, {{1, 333, pair_range(1, 8)}}},
      {"base_d256", 256, 4, 2, {{1, 333, pair_range(1, 8)}}},
      {"base_group16", 128, 16, 1, {{1, 333, pair_range(1, 8)}}},
      {"e5m2_middle", 128, 8, 2, {{1, 500, pair_range(2, 9)}, {1, 40}}, Values::normal, BaseFormat::e5m2},
      {"e5m2_alternating", 64, 8, 2, {{1, 300, {0, 2, 4, 6}}}, Values::normal, BaseFormat::e5m2},
      {"values_outlier_keys", 128, 8, 2, {{1, 400, pair_range(1, 6)}}, Values::outlier_keys},
      {"values_one_hot", 128, 8, 2, {{1, 400, pair_range(1, 6)}}, Values::one_hot},
      {"values_flat", 128, 8, 2, {{1, 400, pair_range(1, 6)}}, Values::flat},
      {"values_tiny", 128, 8, 2, {{1, 400, pair_range(1, 6)}}, Values::tiny},
      {"values_huge", 128, 8, 2, {{1, 400, pair_range(1, 6)}}, Values::huge},
      {"values_one_hot_native", 128, 8, 2, {{1, 400}, {1, 700}}, Values::one_hot},
      {"values_rising", 128, 8, 2, {{1, 400}}, Values::rising},
      {"values_zero", 128, 8, 2, {{1, 400}}, Values::zero},
      {"values_zero_base", 128, 8, 2, {{1, 400, {0, 1, 2}}}, Values::zero},
      {"values_rising_base", 128, 8, 2, {{1, 400, pair_range(1, 6)}}, Values::rising},
      {"prefill_rising", 128, 8, 2, {{40, 700}}, Values::rising},
      {"base_long_mixed", 64, 4, 2, {{1, 3000, every_third(93)}}},
      // The planner reads tables of this width with more than one CTA.
      {"base_wide_tables",
       64,
       4,
       2,
       {{1, 700, every_third(20)}, {1, 500, pair_range(3, 7)}, {1, 90}},
       Values::normal,
       BaseFormat::fixed8,
       2,
       1,
       3,
       0,
       9000},
      {"padded_sequences", 128, 8, 2, {{1, 0}, {1, 100}, {0, 0}, {1, 50}, {1, 0}, {0, 64}}},
      {"prefill_whole", 128, 8, 2, {{48, 48}}},
      {"prefill_one_block", 128, 4, 1, {{16, 16}}},
      {"prefill_long", 128, 8, 2, {{300, 300}}},
      {"prefill_chunk_mid_block", 128, 8, 1, {{33, 100}}},
      {"prefill_chunk_of_two", 128, 8, 2, {{2, 259}}},
      {"prefill_past_long", 128, 8, 2, {{70, 900}}},
      {"prefill_d64", 64, 8, 2, {{130, 300}}},
      {"prefill_d80", 80, 4, 2, {{130, 300}}},
      {"prefill_d96", 96, 4, 2, {{130, 300}}},
      {"prefill_d256", 256, 4, 2, {{130, 300}}},
      {"prefill_mha", 128, 2, 2, {{130, 200}}},
      {"prefill_group7", 128, 7, 1, {{130, 200}}},
      {"prefill_group16", 128, 16, 1, {{60, 200}}},
      {"prefill_base_past", 128, 8, 2, {{40, 500, pair_range(1, 12)}, {64, 64}, {20, 100, {0}}}},
      {"prefill_base_d64", 64, 8, 2, {{40, 300, {0, 2, 5}}}},
      {"prefill_base_d80", 80, 4, 2, {{40, 300, {0, 2, 5}}}},
      {"prefill_base_e5m2", 128, 8, 2, {{40, 300, {0, 2, 5}}}, Values::normal, BaseFormat::e5m2},
      {"mixed_batch", 128, 8, 2, {{1, 200, {1, 2}}, {50, 130}, {1, 33}, {0, 10}, {17, 400, {3, 4, 5}}, {1, 0}}},
  };
}

// A case in pages, and the numbers it stands for.
struct BuiltCase {
  AttnInput in;
  std::vector<double> q;               // [rows][heads][head_dim]
  std::vector<std::vector<double>> k;  // per sequence [kv_len][kv_heads][head_dim], as attention must read them
  std::vector<std::vector<double>> v;
};

class CaseBuilder {
 public:
  CaseBuilder(const AttnCase& c, unsigned seed) : case_(c), rng_(seed) {}

  BuiltCase build() {
    BuiltCase b;
    AttnInput& in = b.in;
    int pages = case_.spare_pages, rows = 0;
    for (const SeqCase& s : case_.seqs) {
      pages += (s.kv_len + kBlockTokens - 1) / kBlockTokens;
      in.max_pairs = std::max(in.max_pairs, (s.kv_len + kPairTokens - 1) / kPairTokens);
    }
    in.max_pairs = std::max(in.max_pairs + 2, case_.min_pairs);  // entries that no kernel may follow
    pages = std::max(pages, case_.min_pages);
    in.shape = {case_.layers, pages, case_.kv_heads, case_.head_dim};
    in.layer = case_.layer;
    in.heads = case_.heads;
    in.scale = float(1 / std::sqrt(double(case_.head_dim)));
    in.format = case_.format;
    free_.resize(pages);
    std::iota(free_.begin(), free_.end(), 0);
    std::shuffle(free_.begin(), free_.end(), rng_);
    in.q_start.push_back(0);
    for (const SeqCase& s : case_.seqs) {
      in.q_start.push_back(rows += s.rows);
      in.kv_len.push_back(s.kv_len);
      add_sequence(b, s);
    }
    for (size_t i = 0; i < size_t(rows) * case_.heads * case_.head_dim; ++i) {
      in.q.push_back(half_bits(query()));
      b.q.push_back(half_value(in.q.back()));
    }
    return b;
  }

 private:
  double normal() { return std::normal_distribution<double>()(rng_); }
  double query() {
    switch (case_.values) {
      case Values::one_hot:
        return 40 * normal();  // score gaps far above 50
      case Values::huge:
        return 1e-4 * normal();
      default:
        return normal();
    }
  }
  double value(int part, int dim) {
    switch (case_.values) {
      // Scores grow along the sequence far beyond what went before: every rescaling of sums matters.
      case Values::rising:
        return normal() * (part == kKey ? 1 + rise_ * 0.02 : 1);
      case Values::zero:  // no word of a result may be taken for one that is not there yet
        return part == kKey ? normal() : 0;
      case Values::outlier_keys:
        return normal() * (part == kKey && dim % 37 == 3 ? 80 : 1);
      case Values::flat:
        return part == kKey ? 1e-3 * normal() : normal();
      case Values::tiny:
        return 1e-5 * normal();
      case Values::huge:
        return std::clamp(12000 * normal(), -32000.0, 32000.0);
      default:
        return normal();
    }
  }

  // One vector as the KV write stores it.
  std::vector<uint16_t> store(int part) {
    std::vector<double> x(case_.head_dim);
    for (int d = 0; d < case_.head_dim; ++d) x[d] = value(part, d);
    double top = 0;
    for (double y : x) top = std::max(top, std::fabs(y));
    const int k = fixed8::exponent(float(top));
    std::vector<uint16_t> bits;
    for (double y : x) {
      const double t = std::clamp(std::nearbyint(std::ldexp(y, 15 - k)), -32624.0, 32624.0);
      bits.push_back(case_.format == BaseFormat::e5m2 ? half_bits(y)
                                                      : half_bits(std::ldexp(round_to_half(t), k - 15) + 0.0));
    }
    return bits;
  }

  int take_page(AttnInput& in) {
    const int page = free_.back();
    free_.pop_back();
    in.pages[page].assign(in.shape.slot_bytes() * case_.kv_heads, kPoison);
    return page;
  }

  void add_sequence(BuiltCase& b, const SeqCase& s) {
    AttnInput& in = b.in;
    b.k.emplace_back();
    b.v.emplace_back();
    const int blocks = (s.kv_len + kBlockTokens - 1) / kBlockTokens;
    for (int pair = 0; pair < in.max_pairs; ++pair) {
      if (2 * pair >= blocks) {
        in.tables.push_back({2147480000, 2147480000});
        continue;
      }
      const bool base = std::count(s.base_pairs.begin(), s.base_pairs.end(), pair) > 0;
      PairEntry entry{take_page(in), -1};
      if (!base && 2 * pair + 1 < blocks) entry.odd = take_page(in);
      for (int t = 0; t < kPairTokens && pair * kPairTokens + t < s.kv_len; ++t)
        for (int head = 0; head < case_.kv_heads; ++head)
          for (int part : {kKey, kValue}) {
            uint8_t* slots = in.pages[t < kBlockTokens || base ? entry.even : entry.odd].data();
            write(b, slots + head * in.shape.slot_bytes(), part, t, base);
          }
      if (base) entry.even = int(unsigned(entry.even) | kBasePair);
      in.tables.push_back(entry);
    }
  }

  void write(BuiltCase& b, uint8_t* slot, int part, int token, bool base) {
    rise_ += part == kKey;
    const KvShape& s = b.in.shape;
    const std::vector<uint16_t> bits = store(part);
    std::vector<double>& values = (part == kKey ? b.k : b.v).back();
    double top = 0;
    for (uint16_t x : bits) top = std::max(top, std::fabs(half_value(x)));
    const int k = fixed8::exponent(float(top));
    if (base && case_.format == BaseFormat::fixed8) slot[s.exponent_at(part, token)] = uint8_t(int8_t(k));
    for (int d = 0; d < s.head_dim; ++d) {
      if (!base) {
        const size_t at = s.target_at(part, token % kBlockTokens, d);
        slot[at] = uint8_t(bits[d]);
        slot[at + 1] = uint8_t(bits[d] >> 8);
        values.push_back(half_value(bits[d]));
      } else if (case_.format == BaseFormat::fixed8) {
        const int high = (int(std::ldexp(half_value(bits[d]), 15 - k)) + 128) >> 8;
        slot[s.base_at(part, token, d)] = uint8_t(int8_t(high));
        values.push_back(std::ldexp(high, k - 7));
      } else {
        slot[s.base_at(part, token, d)] = uint8_t(bits[d] >> 8);
        values.push_back(half_value(uint16_t((bits[d] & 0xff00) | e5m2::kFill)));
      }
    }
  }

  const AttnCase& case_;
  std::mt19937 rng_;
  std::vector<int> free_;
  int rise_ = 0;  // keys written so far
};

inline BuiltCase build_case(const AttnCase& c, unsigned seed) { return CaseBuilder(c, seed).build(); }

}  // namespace ekv::test
